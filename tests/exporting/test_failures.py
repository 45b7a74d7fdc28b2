"""What happens when things go wrong: the error's words, the exit status, and what is left behind (nothing)."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelexport.cli import main
from modelexport.errors import CheckpointError, PlanError, RankFailedError
from modelexport.exporting import audit, export
from modelexport.exporting import rank as export_rank
from modelexport.exporting.output import ShardWriter
from modelexport.exporting.plan import ExportStep, full_name
from modelexport.exporting.prepare import PreparedExport
from modelexport.exporting.rank import Quantised, Shards
from tests.distributed._failure_helpers import leaving_nothing
from tests.exporting.test_export import digests
from tests.helpers import faults
from tests.helpers.marks import few
from tests.helpers.models import make_llama

pytestmark = pytest.mark.timeout(120)


Ended = subprocess.CompletedProcess[str]


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """The command line, in this process."""

    def run(*arguments: object) -> Ended:
        words = [str(word) for word in arguments]
        return subprocess.CompletedProcess(words, main(words), *capfd.readouterr())

    return run


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A private copy of a small Llama, to be damaged."""
    return Path(shutil.copytree(make_llama(), tmp_path / "source"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], float]:
    """Hashes of an export in which nothing goes wrong, and the seconds that four ranks take for it."""
    out = tmp_path_factory.mktemp("whole")
    export(out=str(out / "alone"), quiet=True, evaluate=False)
    for name in ("first", "four"):  # the second time the fork server has everything
        began = time.monotonic()
        export(out=str(out / name), tp=4, quiet=True, evaluate=False, gather="shm")
    assert digests(out / "four") == digests(out / "alone")
    return digests(out / "alone"), time.monotonic() - began


FAILURES = [
    *((kind, tp - 1, tp, "shm") for kind in ("raise", "kill", "exit") for tp in (2, 4)),
    *(("kill", 0, 4, "shm"), ("raise", 2, 4, "direct"), ("kill", 1, 4, "nfs"), ("exit", 0, 2, "nfs")),
    *(("stop", 1, 4, "direct"), ("hang", 1, 4, "direct"), ("hang", 2, 4, "nfs")),
]


@pytest.mark.parametrize(
    ("kind", "culprit", "tp", "gather"),
    few(FAILURES, ("kill", 3, 4, "shm"), ("raise", 2, 4, "direct"), ("exit", 0, 2, "nfs")),
)
def test_a_failing_rank_is_named_and_the_rerun_resumes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole: tuple[dict[str, str], float],
    kind: str,
    culprit: int,
    tp: int,
    gather: str,
) -> None:
    """Nothing is left but what was finished: no process, no shared memory, no file in the workspace or TMPDIR."""
    expected, seconds = whole
    workspace, temporary = tmp_path / "workspace", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    settings: dict[str, Any] = {"out": str(tmp_path / "out"), "tp": tp, "gather": gather}
    settings |= {"quiet": True, "evaluate": False, **({"workspace": str(workspace)} if gather == "nfs" else {})}
    # A rank that only waits for the processor, on a machine that is busy, must not seem to hang.
    hung = {"timeout": 3.0 + 2 * seconds} if kind in ("hang", "stop") else {}
    monkeypatch.setenv("FAULT", f"{kind} {culprit} 3")
    began = time.monotonic()
    with monkeypatch.context() as patch, leaving_nothing(temporary, workspace):
        patch.setattr(export_rank, "run_rank", faults.misbehave)
        with pytest.raises(RankFailedError, match=f"rank {culprit} failed") as caught:
            export(**settings, **hung)
    assert caught.value.rank == culprit
    assert caught.value.phase == "quantising model.layers.2"
    assert time.monotonic() - began < 60 + 4 * seconds, "well before any default time-out"
    assert not (tmp_path / "out").exists()
    assert (tmp_path / ".out.modelexport" / "journal.jsonl").exists()
    export(**settings)
    assert digests(tmp_path / "out") == expected
    assert not (tmp_path / ".out.modelexport").exists()


NAMES = (
    "model.layers.1.mlp.down_proj.weight",
    "model.embed_tokens.weight",
    "model.layers.1.mlp.up_proj.weight",  # quantised together with gate_proj
)


@pytest.mark.parametrize(
    ("name", "value", "tp"),
    few(
        itertools.product(NAMES, (math.nan, math.inf), (1, 4)),
        (NAMES[0], math.nan, 4),
        (NAMES[1], math.inf, 1),
        (NAMES[2], math.nan, 1),
    ),
)
def test_nan_and_inf_are_refused_by_name(
    tmp_path: Path, cli: Callable[..., Ended], source: Path, name: str, value: float, tp: int
) -> None:
    tensors = load_file(source / "model.safetensors")
    tensors[name][3, -1] = value
    save_file(tensors, source / "model.safetensors")
    result = cli("--model", source, "--tp", tp, "--out", tmp_path / "out")
    assert result.returncode == 1
    assert name in result.stderr
    assert ("1 NaN" if value != value else "1 Inf") in result.stderr
    assert "Traceback" not in result.stderr
    assert os.listdir(tmp_path) == ["source"], "what can never be finished is not kept"


def test_target_that_exists(tmp_path: Path, cli: Callable[..., Ended]) -> None:
    (tmp_path / "out").mkdir()
    result = cli("--out", tmp_path / "out")
    assert result.returncode == 2
    assert "--overwrite" in result.stderr
    assert list((tmp_path / "out").iterdir()) == []


def test_truncated_shard(tmp_path: Path, source: Path, cli: Callable[..., Ended]) -> None:
    weights = source / "model.safetensors"
    size = weights.stat().st_size
    os.truncate(weights, size - 1000)
    result = cli("--model", source, "--tp", 2, "--out", tmp_path / "out")
    assert result.returncode == 1
    assert "model.safetensors" in result.stderr
    assert f"{size:,}" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_damaged_header(tmp_path: Path, source: Path, cli: Callable[..., Ended]) -> None:
    with open(source / "model.safetensors", "r+b") as file:
        file.write(struct.pack("<Q", 1 << 40))
    result = cli("--model", source, "--out", tmp_path / "out")
    assert result.returncode == 1
    assert "model.safetensors" in result.stderr
    assert "Traceback" not in result.stderr


def test_missing_shard_and_index_that_points_outside(tmp_path: Path, source: Path, cli: Callable[..., Ended]) -> None:
    names = list(load_file(source / "model.safetensors"))
    index = source / "model.safetensors.index.json"
    (source / "model.safetensors").rename(source / "model-00001-of-00002.safetensors")
    for target, words in [
        ("model-00002-of-00002.safetensors", "missing"),
        ("../secret.safetensors", "not the name of a file in that directory"),
    ]:
        index.write_text(json.dumps({"weight_map": dict.fromkeys(names, target)}))
        result = cli("--model", source, "--out", tmp_path / "out")
        assert result.returncode == 1
        assert target in result.stderr
        assert words in result.stderr
        assert "Traceback" not in result.stderr


def test_unknown_architecture_lists_those_that_are_known(source: Path, tmp_path: Path) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": "lama"}))
    with pytest.raises(PlanError, match="did you mean 'llama'"):
        export(model=str(source), out=str(tmp_path / "out"))


def test_a_dimension_that_groups_do_not_divide_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    source = make_llama(hidden=192, heads=4, kv_heads=4, intermediate=192)
    with pytest.raises(PlanError, match="192") as caught:
        export(model=str(source), out=str(tmp_path / "out"), quant="int4")
    assert "--group-size" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_hub_id_offline_says_so(tmp_path: Path, cli: Callable[..., Ended]) -> None:
    result = cli("--model", "nobody/nothing", "--out", tmp_path / "out")
    assert result.returncode == 1
    assert "offline" in result.stderr
    assert "--model DIR" in result.stderr
    assert "Traceback" not in result.stderr


def test_disk_full(tmp_path: Path) -> None:
    """A file-size limit stands in for a full disk: the same call fails, with the same clean-up."""
    source = make_llama()
    script = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000));"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "from modelexport.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, "--model", str(source), "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert "bytes" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_another_recipe_refuses_the_staging_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Callable[..., Ended]
) -> None:
    monkeypatch.setenv("FAULT", "raise 0 3")
    with monkeypatch.context() as patch:
        patch.setattr(export_rank, "run_rank", faults.misbehave)
        with pytest.raises(RankFailedError, match="rank 0 failed"):
            export(out=str(tmp_path / "out"), quiet=True, evaluate=False)
    result = cli("--quant", "int4", "--out", tmp_path / "out")
    assert result.returncode == 2
    assert "fp8" in result.stderr
    assert "int4" in result.stderr
    assert "rm -r" in result.stderr


@pytest.mark.parametrize("along", [True, False])
def test_a_byte_that_changes_on_disk_is_found_before_publishing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, along: bool
) -> None:
    write = ShardWriter.step
    flipped: list[str] = []

    def write_then_flip(self: ShardWriter, step: ExportStep, *args: Any) -> None:
        write(self, step, *args)
        if step.index == 1:
            info = self._layout.infos[full_name(step.layer, step.tasks[-1].path, step.tasks[-1].outputs[0].name)]
            with open(self._staging.directory / info.path, "r+b") as file:
                file.seek(info.offset)
                byte = file.read(1)
                file.seek(info.offset)
                file.write(bytes([byte[0] ^ 1]))
            flipped.append(info.name)

    monkeypatch.setattr(ShardWriter, "step", write_then_flip)
    monkeypatch.setattr(PreparedExport, "read_back_along", along)
    with pytest.raises(RankFailedError, match="differ") as caught:
        export(out=str(tmp_path / "out"), quiet=True, evaluate=False)
    assert flipped[0] in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_one_rank_has_read_back_everything_when_the_last_step_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish, run_audit, left = audit.Audit.finish, audit.run_audit, []

    def wait_then_finish(self: audit.Audit, *args: Any) -> Any:
        for ahead in self._ahead:
            ahead.result()
        return finish(self, *args)

    def noted(items: Any, *args: Any, **kwargs: Any) -> Any:
        left.append([item.name for item in items])
        return run_audit(items, *args, **kwargs)

    monkeypatch.setattr(audit.Audit, "finish", wait_then_finish)
    monkeypatch.setattr(audit, "run_audit", noted)
    export(out=str(tmp_path / "out"), quiet=True, evaluate=False)
    assert left == [[]]


class Attack:
    """An object whose pickle makes a directory when it is loaded."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.directory),)


def test_what_is_pickled_is_never_run(tmp_path: Path, source: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    torch.save({**tensors, "x": Attack(tmp_path / "made")}, source / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="'x': holds mkdir; only plain tensors"):
        export(model=str(source), out=str(tmp_path / "out"))
    assert not (tmp_path / "made").exists()


def test_a_resumed_export_does_only_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULT", "raise 0 3")
    with monkeypatch.context() as patch:
        patch.setattr(export_rank, "run_rank", faults.misbehave)
        with pytest.raises(RankFailedError, match=r"quantising model\.layers\.2"):
            export(out=str(tmp_path / "out"), quiet=True, evaluate=False)
    done = [json.loads(line) for line in (tmp_path / ".out.modelexport" / "journal.jsonl").read_text().splitlines()]
    quantised = []
    original = export_rank.RankExport.quantise

    def noting(self: export_rank.RankExport, step: ExportStep, shards: Shards) -> Quantised:
        quantised.append(step.id)
        return original(self, step, shards)

    monkeypatch.setattr(export_rank.RankExport, "quantise", noting)
    export(out=str(tmp_path / "out"), quiet=True, evaluate=False)
    every = ["model.embed_tokens", *(f"model.layers.{i}" for i in range(4)), "model.norm"]
    finished = len(done) - 1  # the first line is the fingerprint
    assert finished >= 2
    assert quantised == every[finished:]
