"""Resharding end to end: any to any and back, quantised or not, resumed, from one process or several."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from modelexport.checkpoints.safetensors.file import Writer
from modelexport.cli import main
from modelexport.errors import CheckpointError, PlanError, RankFailedError, UsageError
from modelexport.exporting import export
from modelexport.inspection.diff import diff_checkpoints
from modelexport.inspection.verify import verify_checkpoint
from modelexport.resharding import moves as reshard_moves
from modelexport.resharding import reshard
from tests.exporting.test_export import digests
from tests.helpers.marks import few
from tests.helpers.models import make_llama

pytestmark = pytest.mark.timeout(240)

# Fewer key/value heads than ranks, an odd vocabulary, layers that no number of stages divides; heads and widths that
# eight ranks can share in whole groups of 128.
LLAMA = {"hidden": 128, "heads": 8, "kv_heads": 2, "head_dim": 128, "intermediate": 1024, "vocab": 211, "layers": 3}
MODELS = {
    "llama": lambda: make_llama(**LLAMA),
    "tied-biased": lambda: make_llama(**LLAMA, tied=True, attention_bias=True, mlp_bias=True),
    **{name: functools.partial(make_llama, **LLAMA, model_type=name) for name in ("qwen2", "phi3", "mixtral")},
}
DENSE_ROUTE = [{"tp": 4, "pp": 2}, {"tp": 2, "pp": 3}, {"tp": 8}, {}]
EXPERT_ROUTE = [{"tp": 4, "ep": 2}, {"tp": 2, "pp": 2, "ep": 4}, {"tp": 8, "pp": 3}, {}]


def exported(name: str, quant: str, out: Path, **settings: Any) -> Path:
    export(model=str(MODELS[name]()), quant=quant, out=str(out), evaluate=False, quiet=True, **settings)
    return out


def resharded(checkpoint: Path, out: Path, **settings: Any) -> Path:
    reshard(checkpoint=str(checkpoint), out=str(out), quiet=True, **settings)
    return out


def along(route: list[Mapping[str, Any]], start: Path, directory: Path) -> list[Path]:
    """The checkpoints of a chain of reshardings, each made from the one before."""
    found = [start]
    for number, stop in enumerate(route):
        found.append(resharded(found[-1], directory / f"stop-{number}", **stop))
    return found


@pytest.mark.parametrize("quant", few(["none", "int4", "fp8"], "int4"))
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_round_trips_end_with_the_same_directory(name: str, quant: str, tmp_path: Path) -> None:
    start = exported(name, quant, tmp_path / "start")
    stops = along(EXPERT_ROUTE if name == "mixtral" else DENSE_ROUTE, start, tmp_path)
    assert digests(stops[-1]) == digests(start), "every file, the record and config.json among them"
    for stop in stops[1:]:
        assert diff_checkpoints(start, stop).equal
    assert verify_checkpoint(stops[1], MODELS[name]()).problems == []


@pytest.mark.parametrize("name", few(["tied-biased", "qwen2", "phi3"], "tied-biased"))
def test_round_trips_of_other_families(name: str, tmp_path: Path) -> None:
    start = exported(name, "int8", tmp_path / "start")
    assert digests(along([{"tp": 4, "pp": 3}, {"tp": 8}, {}], start, tmp_path)[-1]) == digests(start)


def test_a_checkpoint_that_transformers_wrote(tmp_path: Path) -> None:
    source = make_llama(**{**LLAMA, "tied": True})
    stops = along([{"tp": 2, "pp": 2}, {}], source, tmp_path)
    assert diff_checkpoints(source, stops[-1]).equal
    assert (stops[-1] / "config.json").read_bytes() == (source / "config.json").read_bytes()


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_an_export_for_a_parallelism_is_an_export_resharded(name: str, tmp_path: Path) -> None:
    target = {"target_tp": 4, "target_pp": 2, "target_ep": 2 if name == "mixtral" else 1}
    grid = {axis.removeprefix("target_"): size for axis, size in target.items()}
    expected = digests(resharded(exported(name, "int4", tmp_path / "whole"), tmp_path / "resharded", **grid))
    assert digests(exported(name, "int4", tmp_path / "one", **target)) == expected
    assert digests(exported(name, "int4", tmp_path / "many", tp=3, **target)) == expected


@pytest.mark.parametrize("exchange", ["direct", "auto", "p2p", "shared_memory"])
def test_several_processes_write_the_same(exchange: str, tmp_path: Path) -> None:
    start = exported("llama", "int4", tmp_path / "start", target_tp=2)
    alone = digests(resharded(start, tmp_path / "alone", tp=4))
    assert digests(resharded(start, tmp_path / "out", tp=4, ranks=3, exchange=exchange)) == alone


def test_one_process_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from modelexport.resharding import reshard\n"
        "reshard(checkpoint=sys.argv[1], out=sys.argv[2], tp=2, quiet=True)\n"
        "print([name for name in ('torch', 'transformers', 'safetensors') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(make_llama(**LLAMA)), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.extended  # fast, for an export: tests/jobs/test_hosts.py
def test_under_torchrun(tmp_path: Path) -> None:
    source = make_llama(**LLAMA)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "modelexport"),
        *("reshard", str(source), "--tp", "2", "--out", str(tmp_path / "out")),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("compared with the source: equal") == 1
    assert digests(tmp_path / "out") == digests(resharded(source, tmp_path / "alone", tp=2))


# ------------------------------------------------------------------ crashes


def test_what_was_cut_off_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_llama(**LLAMA)
    expected = digests(resharded(source, tmp_path / "whole", tp=2))
    written: list[str] = []
    original = Writer.write_box

    def write(self: Writer, name: str, box: Any, array: Any) -> int:
        if name.startswith("model.layers.2."):
            raise OSError("a fault injected by the test")
        written.append(name)
        return original(self, name, box, array)

    monkeypatch.setattr(reshard_moves.Writer, "write_box", write)
    with pytest.raises(RankFailedError, match=r"moving .*a fault injected"):
        resharded(source, tmp_path / "out", tp=2)
    assert not (tmp_path / "out").exists()
    assert any("layers.0" in name for name in written)
    written.clear()
    monkeypatch.setattr(reshard_moves.Writer, "write_box", original)

    def note(self: Writer, name: str, box: Any, array: Any) -> int:
        written.append(name)
        return original(self, name, box, array)

    monkeypatch.setattr(reshard_moves.Writer, "write_box", note)
    assert digests(resharded(source, tmp_path / "out", tp=2)) == expected
    assert not [name for name in written if "layers.0" in name], "that layer was in the journal"
    assert not list(tmp_path.glob(".*"))


def test_another_parallelism_does_not_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_llama(**LLAMA)

    def fail(self: reshard_moves.Resharding) -> None:
        raise RuntimeError("a fault injected by the test")

    monkeypatch.setattr(reshard_moves.Resharding, "finish", fail)
    with pytest.raises(RankFailedError):
        resharded(source, tmp_path / "out", tp=2)
    monkeypatch.undo()
    with pytest.raises(UsageError, match=r"\n  tp: 2 then, 4 now"):
        resharded(source, tmp_path / "out", tp=4)


def test_what_went_astray_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Writer.write_box

    def write(self: Writer, name: str, box: Any, array: Any) -> int:
        return original(self, name, box, array[::-1].copy() if "layers.1.mlp.up_proj" in name else array)

    monkeypatch.setattr(reshard_moves.Writer, "write_box", write)
    with pytest.raises(RankFailedError, match=r"layers\.1\.mlp\.up_proj\.weight .* read back differs"):
        resharded(make_llama(**LLAMA), tmp_path / "out", tp=2)
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------- errors


def test_all_that_stands_in_the_way_is_said_at_once(tmp_path: Path) -> None:
    start = exported("llama", "int4", tmp_path / "start")
    with pytest.raises(PlanError) as caught:
        resharded(start, tmp_path / "out", tp=16, pp=4)
    text = str(caught.value)
    assert "8 heads cannot be divided equally among 16 ranks" in text
    assert "pp is 4, but there are only 3 layers" in text
    assert text.endswith("The largest that does: tp 8, pp 3, ep 1")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*"))


def test_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_llama(**LLAMA)
    for arguments, text in (
        (["reshard"], "CKPT"),
        (["reshard", str(source)], "--out DIR"),
        (["reshard", str(source), "--out", str(source)], "would replace the source"),
        (["reshard", str(source), "--tp", "0", "--out", "x"], "--tp 0"),
        (["reshard", str(source), "--format", "trtlm", "--out", "x"], "did you mean 'trtllm'"),
        (["reshard", str(source), "--exchange", "p3p", "--out", "x"], "did you mean 'p2p'"),
        (["reshard", str(source), "--tpp", "2"], "did you mean --tp"),
    ):
        assert main(arguments) == 2, arguments
        assert text in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="does not exist"):
        resharded(tmp_path / "none", tmp_path / "out")


def test_a_dry_run_says_who_holds_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_llama(**LLAMA)
    assert main(["reshard", str(source), "--tp", "8", "--pp", "2", "--ranks", "2", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "16 ranks: tp 8, pp 2, ep 1" in printed
    assert "self_attn.q_proj.weight" in printed
    assert "read by process 0: " in printed
    assert main(["reshard", str(source), "--tp", "2", "--out", str(tmp_path / "out"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["tensors"], result["source_format"], len(result["files"])) == (30, "hf", 2)
