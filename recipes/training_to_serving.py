"""From a training run to an engine: what FSDP, torchtitan or Megatron-core saved, quantised for vLLM.

    python recipes/training_to_serving.py --model step-1000/ --config DIR --out ckpt/ --serve-tp 4 [--tp 4]
    vllm serve ckpt/ --tensor-parallel-size 4

    python recipes/training_to_serving.py --out ckpt/        # first trains the demo model a little, on 2 FSDP ranks

--model is the directory of a sharded checkpoint as it is: torch's DCP (.metadata and *.distcp, with Hugging Face's
names, or torchtitan's of a Llama) or Megatron-core's torch_dist. There is no merged copy on the way: ranks read their
slices from the shards, and the optimiser's state is not read at all. .metadata is a pickle, and is read as data.
--config is a directory with the model's config.json and tokenizer, which training checkpoints lack.

1. Planned: can the engine cut the model over --serve-tp ranks? Said before a weight is read.
2. Exported with the settings of training_to_serving.yaml; --set KEY=VALUE is another one (--set quant=int4).
3. Verified: structure, hashes, and every linear's error against the training checkpoint's weights.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from modelexport.assets import demo_model_path
from modelexport.cli.summary import summary
from modelexport.cli.verify import print_verification
from modelexport.errors import ModelExportError, UsageError
from modelexport.exporting import export
from modelexport.recipe import ExportRecipe
from modelexport.settings import parse_assignments

RECIPE = Path(__file__).with_suffix(".yaml")
FSDP_RUN = Path(__file__).with_name("_fsdp_run.py")
WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script; returns the exit status: 0 done, 1 failed, 2 usage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, metavar="DIR", help="the training checkpoint (default: train one)")
    parser.add_argument("--config", type=Path, metavar="DIR", help="config.json and tokenizer of the model")
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help="target directory; must not exist")
    parser.add_argument("--serve-tp", type=int, default=1, metavar="N", help="the engine's tensor-parallel size")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="rank processes of the export")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another setting")
    given = parser.parse_args(argv)
    try:
        if (given.model is None) != (given.config is None):
            raise UsageError("--model and --config belong together: give both, or none to train the demo model")
        if given.out.exists():
            raise UsageError(f"--out {given.out} exists already: choose another target")
        model, config = given.model, given.config
        for flag, directory in (("--model", model), ("--config", config)):
            if directory is not None and not directory.is_dir():
                raise UsageError(f"{flag} {directory} is no directory")
        if model is None:
            model, config = trained(given.out.with_name(f"{given.out.name}-training")), demo_model_path()
        with tempfile.TemporaryDirectory() as scratch:
            source = with_config(model, config, Path(scratch))
            serve(source, given.out, given.serve_tp, {**parse_assignments(given.set), "tp": given.tp})
            return print_verification(given.out, source, as_json=False)
    except ModelExportError as error:
        print(f"{Path(__file__).name}: {error}", file=sys.stderr)
        return error.exit_status


def trained(directory: Path) -> Path:
    """The demo model after some steps on two FSDP ranks of this machine, in ``directory``; one there is used again."""
    if not directory.exists():
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = subprocess.run([*launcher, str(FSDP_RUN), str(directory)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise ModelExportError(f"the training run failed:\n{done.stderr[-2000:]}")
        print(f"trained the demo model on 2 ranks: {directory}")
    return directory


def with_config(model: Path, config: Path, scratch: Path) -> Path:
    """The training checkpoint with the model's config and tokenizer beside it, as links.

    So an export takes them along, and what reads the checkpoint afterwards finds them, too.
    """
    view = scratch / model.resolve().name
    view.mkdir()
    for directory in (config, model):
        for path in directory.iterdir():
            place = view / path.name
            if not (directory == config and path.suffix in WEIGHTS) and not place.exists():
                place.symlink_to(path.resolve())
    return view


def serve(source: Path, out: Path, serve_tp: int, settings: dict[str, Any]) -> None:
    """Plan, check that the engine can load it, export.

    Raises:
        UsageError: it cannot, at that tensor-parallel size.
        ModelExportError: whatever export() raises.
    """
    recipe = ExportRecipe.load(RECIPE, {**settings, "model": str(source), "out": str(out)})
    plan = export(replace(recipe, dry_run=True))
    if serve_tp not in plan.tensor_parallel_sizes:
        sizes = ", ".join(map(str, plan.tensor_parallel_sizes))
        raise UsageError(f"--serve-tp {serve_tp}: an engine can load this at tensor-parallel sizes {sizes}")
    print(summary(export(recipe)))


if __name__ == "__main__":
    sys.exit(main())
