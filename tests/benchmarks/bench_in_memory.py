"""A model in the memory of several ranks (FSDP2), exported from there, beside saving it and exporting that.

    python tests/benchmarks/bench_in_memory.py                 3 billion weights, 4 ranks on gloo, 25 GB of disk
    python tests/benchmarks/bench_in_memory.py --layers 4 --quant int4

Both ways begin with the same DTensors, and must give the same bytes. Seconds are those of the slowest rank. Memory is
the peak of a rank's anonymous pages (RssAnon, sampled) above what it had with its part of the model.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from modelexport.system.tables import size_text, table
from tests.benchmarks._measuring import add_write_option, written
from tests.benchmarks.bench_sources import Model, make

SIZES = {
    "hidden": 3072,
    "mlp": 8192,
    "heads": 24,
    "kv_heads": 8,
    "head": 128,
    "vocabulary": 128256,
}


def anonymous() -> int:
    """Bytes of anonymous pages of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


@contextmanager
def peak() -> Iterator[list[int]]:
    """The peak of :func:`anonymous` within, above what it is now."""
    found, before, ended = [0], anonymous(), threading.Event()

    def sample() -> None:
        while not ended.wait(0.02):
            found[0] = max(found[0], anonymous() - before)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def sharded(source: Path) -> Any:
    """transformers' model of a checkpoint, each rank with its part of every tensor."""
    import torch
    import transformers
    from safetensors import safe_open
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    config = transformers.AutoConfig.from_pretrained(source)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    rank, world = distributed.get_rank(), distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh)
    model.to_empty(device="cpu")
    with safe_open(source / "model.safetensors", "pt") as file, torch.no_grad():
        for name, parameter in model.named_parameters():
            stored = file.get_slice(name)
            step = -(-stored.get_shape()[0] // world)
            local = parameter.to_local()  # type: ignore[attr-defined]
            local.copy_(stored[rank * step : rank * step + local.shape[0]])
    return model


def run_rank(how: str, source: Path, out: Path, quant: str) -> None:
    """One rank's part of a way; prints a line of JSON."""
    import torch
    from torch import distributed
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    import modelexport

    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    model, tp = sharded(source), distributed.get_world_size()
    distributed.barrier()
    began = time.perf_counter()
    with peak() as most:
        if how == "memory":
            modelexport.export(model=model, quant=quant, tp=tp, out=str(out), quiet=True)
        else:
            saved = out.with_name("saved")
            whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
            if distributed.get_rank() == 0:
                model.save_pretrained(saved, state_dict=whole)
            del whole
            distributed.barrier()
            modelexport.export(model=str(saved), quant=quant, tp=tp, out=str(out), quiet=True)
    print("RANK " + json.dumps({"seconds": time.perf_counter() - began, "peak": most[0]}), flush=True)
    distributed.destroy_process_group()


def measured(how: str, source: Path, out: Path, options: argparse.Namespace) -> tuple[float, int, str]:
    """Seconds, the largest rank's peak, and a digest of the weights."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(options.ranks)]
    command = [*launcher, __file__, "--rank", how, str(source), str(out), "--quant", options.quant]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False, env=environment)
    lines = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("RANK ")]
    assert len(lines) == options.ranks, done.stderr[-3000:]
    digest = hashlib.sha256()
    for path in sorted(out.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return max(line["seconds"] for line in lines), max(line["peak"] for line in lines), digest.hexdigest()


def main() -> int:
    """Returns 0 once all is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--quant", default="fp8")
    parser.add_argument("--scratch", type=Path, help="where all is written (default: a temp dir)")
    add_write_option(parser)
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        how, source, out = options.rank
        run_rank(how, Path(source), Path(out), options.quant)
        return 0
    with tempfile.TemporaryDirectory(prefix="bench_in_memory.", dir=options.scratch) as temporary:
        root = Path(temporary)
        model = Model("Llama 3.1", {**SIZES, "layers": options.layers}, (), {}, [], ())
        make(model, root / "source")
        nbytes = (root / "source" / "model.safetensors").stat().st_size
        found = {}
        for how in ("memory", "files"):
            (root / how).mkdir()
            found[how] = measured(how, root / "source", root / how / "out", options)
            shutil.rmtree(root / how)
    rows = [
        (name, f"{found[how][0]:.1f}", size_text(found[how][1]))
        for how, name in (("memory", "export(model=MODULE)"), ("files", "save_pretrained, then export"))
    ]
    same = "the same bytes" if found["memory"][2] == found["files"][2] else "DIFFERENT bytes"
    with written(__file__, options.write):
        print(f"{size_text(nbytes)} of bf16 on {options.ranks} ranks, to {options.quant}: {same}")
        print("\n".join(table(("", "s", "peak/rank"), rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
