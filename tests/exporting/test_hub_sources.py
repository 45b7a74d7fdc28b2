"""A model on the hub, exported as it comes: against a hub on 127.0.0.1, with its faults."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from modelexport import cli
from modelexport.assets import demo_model_path
from modelexport.checkpoints.mirrors.fetching import CONNECTIONS
from modelexport.checkpoints.mirrors.mirror import CHUNK
from modelexport.exporting import export
from tests.helpers.hub_server import TOKEN, Hub, running_hub
from tests.helpers.marks import few
from tests.helpers.models import make_llama
from tests.helpers.tiny_models import tiny_checkpoint
from tests.helpers.warm import run_warm

pytestmark = pytest.mark.timeout(200)
NAME = "org/model"


@pytest.fixture
def server() -> Iterator[Hub]:
    with running_hub() as found:
        found.models[NAME] = make_llama()
        yield found


def environment(server: Hub, home: Path) -> dict[str, str]:
    """The client reads where the hub is as it is imported."""
    own = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    own |= {"HF_ENDPOINT": server.url, "HF_HOME": str(home / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    root = str(Path(cli.__file__).parent.parent)
    return own | {"PYTHONPATH": root, "NO_PROXY": "127.0.0.1,localhost"}


def shell(server: Hub, home: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """``modelexport --model`` of the hub's model, into ``out``."""
    quant = [] if "autoquant" in arguments else ["--quant", "int8"]
    line = ["-m", "modelexport", "--model", NAME, *quant, "--out", "out", *arguments]
    return run_warm(*line, cwd=home, env=environment(server, home) | env)


def assert_like_a_directorys(server: Hub, home: Path, **settings: object) -> None:
    """The export has the bytes that the model's directory gives, and nothing is left of what was read."""
    quant = {} if "autoquant" in settings.values() else {"quant": "int8"}
    export(**{"model": str(server.models[NAME]), "out": str(home / "expected"), "quiet": True, **quant, **settings})  # type: ignore[arg-type]
    names = sorted(path.name for path in (home / "expected").iterdir())
    assert sorted(path.name for path in (home / "out").iterdir()) == names
    for name in set(names) - {"modelexport.json", "README.md"}:  # which name the model
        assert (home / "out" / name).read_bytes() == (home / "expected" / name).read_bytes(), name
    ours, other = (json.loads((home / each / "modelexport.json").read_text()) for each in ("out", "expected"))
    assert ours["sqnr_db"] == other["sqnr_db"]
    assert [path.name for path in home.iterdir() if path.name.startswith(".")] == []


def refused(done: subprocess.CompletedProcess[str], words: str, home: Path) -> None:
    """It ended with one line that says so, and leaves nothing."""
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert words in done.stderr.splitlines()[-1], done.stderr
    assert [path.name for path in home.iterdir() if path.name != "hf"] == []


KINDS = [
    ("llama", ["--tp", "2"]),
    ("llama", ["--algorithm", "gptq", "--quant", "int4"]),
    ("llama", ["--quant", "fp8-static"]),
    ("llama", ["--algorithm", "rotation+gptq", "--quant", "int4", "--tp", "2"]),
    ("llama", ["--algorithm", "autoquant"]),
    ("gpt_oss", ["--tp", "2", "--quant", "int4", "--group-size", "32"]),
    ("deepseek_v3", ["--tp", "2", "--quant", "fp8", "--gather", "shm"]),
]


@pytest.mark.parametrize(("kind", "line"), few(KINDS, KINDS[0]))
def test_the_bytes_are_those_of_the_directory(kind: str, line: list[str], server: Hub, tmp_path: Path) -> None:
    server.models[NAME] = make_llama() if kind == "llama" else tiny_checkpoint(kind)
    text = tmp_path / "text.jsonl"
    text.write_text(
        "".join(json.dumps({"input_ids": [(7 * i + j) % 199 + 3 for j in range(24)]}) + "\n" for i in (0, 1))
    )
    given = dict(zip(line[::2], line[1::2], strict=True))
    if "--algorithm" in given or "static" in given.get("--quant", ""):
        line = [*line, "--calib", str(text), "--calib-samples", "2", "--calib-length", "16"]
    done = shell(server, tmp_path, *line)
    assert done.returncode == 0, done.stderr
    assert "reading org/model from the hub (1 files, " in done.stderr
    settings = {key[2:].replace("-", "_"): value for key, value in zip(line[::2], line[1::2], strict=True)}
    numbers = {"tp", "group_size", "calib_samples", "calib_length"}
    assert_like_a_directorys(server, tmp_path, **{k: int(v) if k in numbers else v for k, v in settings.items()})


def test_a_dry_run_reads_headers_alone(server: Hub, tmp_path: Path) -> None:
    server.models[NAME] = demo_model_path()
    done = shell(server, tmp_path, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert server.sent <= 1 << 17
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]


@pytest.mark.extended
def test_what_the_cache_has_is_not_read_again(server: Hub, tmp_path: Path) -> None:
    assert shell(server, tmp_path, "--download").returncode == 0
    sent = server.sent
    assert sent == sum(path.stat().st_size for path in make_llama().glob("*.safetensors"))
    assert shell(server, tmp_path, "--overwrite").returncode == 0
    assert server.sent == sent
    assert_like_a_directorys(server, tmp_path)


FAULTS = [
    {"cut": 50_000},
    {"limited": 3},
    {"expire": True},
]


@pytest.mark.extended
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_faults_that_pass(fault: dict[str, int], server: Hub, tmp_path: Path) -> None:
    for name, value in fault.items():
        setattr(server, name, value)
    done = shell(server, tmp_path)
    assert done.returncode == 0, done.stderr
    assert_like_a_directorys(server, tmp_path)


def test_a_server_without_ranges(server: Hub, tmp_path: Path) -> None:
    server.models[NAME] = demo_model_path()
    server.ranges = False
    refused(
        shell(server, tmp_path), "the server sends whole files only (HTTP 200 for a part): add --download", tmp_path
    )


def test_a_model_that_needs_a_token(server: Hub, tmp_path: Path) -> None:
    server.gated = True
    refused(shell(server, tmp_path), "for a gated model log in first: hf auth login", tmp_path)
    assert shell(server, tmp_path, HF_TOKEN=TOKEN).returncode == 0


@pytest.mark.extended
def test_a_rate_limit_that_does_not_pass(server: Hub, tmp_path: Path) -> None:
    server.limited = 1 << 30
    words = "the hub limits how much this address or token may ask for (HTTP 429), 9 times: when the hub answers again"
    refused(shell(server, tmp_path), words, tmp_path)


def start(server: Hub, home: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """An export in a session of its own."""
    line = [sys.executable, "-m", "modelexport", "--model", NAME, "--quant", "int8", "--out", "out", "--quiet"]
    with open(home.parent / f"{home.name}.log", "ab") as log:
        return subprocess.Popen(
            [*line, *arguments], cwd=home, env=environment(server, home), stderr=log, start_new_session=True
        )


def until_sent(server: Hub, count: float, process: subprocess.Popen[bytes]) -> None:
    """Waits until so many bytes of weights were sent, or the process has ended."""
    while server.sent < count and process.poll() is None:
        time.sleep(0.02)


@pytest.fixture(scope="module")
def large() -> Path:
    """A model of several dozens of chunks."""
    return make_llama(layers=8, hidden=1024, vocab=2003)


@pytest.mark.extended
def test_a_killed_export_reads_on_where_it_was(server: Hub, large: Path, tmp_path: Path) -> None:
    server.models[NAME], size = large, (large / "model.safetensors").stat().st_size
    server.rate = size / 6
    for _ in range(2):
        process = start(server, tmp_path, "--tp", "2")
        until_sent(server, server.sent + size / 4, process)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert (tmp_path / ".out.modelexport").is_dir()
    server.rate = 0
    assert start(server, tmp_path, "--tp", "2").wait(120) == 0
    assert_like_a_directorys(server, tmp_path)
    assert server.sent <= size + 2 * CONNECTIONS * CHUNK + (1 << 18), "nothing twice but chunks that were not whole"


@pytest.mark.extended
def test_a_file_that_changes_midway(server: Hub, large: Path, tmp_path: Path) -> None:
    model = tmp_path.parent / f"{tmp_path.name}-model"
    shutil.copytree(large, model)
    server.models[NAME], size = model, (model / "model.safetensors").stat().st_size
    server.rate, server.cut = size / 6, 1 << 20  # what was begun is sent to its end
    process = start(server, tmp_path)
    until_sent(server, size / 4, process)
    os.utime(model / "model.safetensors", ns=(5, 5))
    assert process.wait(60) == 1
    log = (tmp_path.parent / f"{tmp_path.name}.log").read_text()
    assert "org/model/model.safetensors has changed on the hub while it was read" in log
    server.rate = server.cut = 0
    assert start(server, tmp_path).wait(60) == 0, "it begins anew"
    assert_like_a_directorys(server, tmp_path)


@pytest.mark.extended
def test_ranks_of_another_launcher_share_what_is_read(server: Hub, tmp_path: Path) -> None:
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "modelexport"]
    line += ["--tp", "2", "--model", NAME, "--quant", "int8", "--out", "out", "--quiet"]
    done = subprocess.run(
        line, cwd=tmp_path, env=environment(server, tmp_path), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    size = sum(path.stat().st_size for path in make_llama().glob("*.safetensors"))
    assert server.sent <= size + (1 << 17)
    assert_like_a_directorys(server, tmp_path, tp=2)


@pytest.mark.extended
def test_quantise_reads_from_the_hub(server: Hub, tmp_path: Path) -> None:
    program = (
        "import hashlib, modelexport\n"
        f"tensors = modelexport.quantise({NAME!r}, quant='int8')\n"
        "for _ in range(2):\n"
        "    digest = hashlib.sha256()\n"
        "    for name, tensor in tensors:\n"
        "        digest.update(name.encode() + bytes(tensor.reshape(-1).view(__import__('torch').uint8).tolist()))\n"
        "    print(digest.hexdigest())\n"
    )
    done = run_warm("-c", program, cwd=tmp_path, env=environment(server, tmp_path))
    local = run_warm("-c", program.replace(NAME, str(make_llama())), cwd=tmp_path, env=environment(server, tmp_path))
    assert done.stdout == local.stdout != "", done.stderr
