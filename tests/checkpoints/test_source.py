"""Where a model comes from, and what is said when it comes from nowhere. No test touches the network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors

from modelexport.assets import demo_model_path
from modelexport.checkpoints.source import Source, resolve_source
from modelexport.errors import CheckpointError, UsageError


def test_no_model_is_the_demo() -> None:
    source = resolve_source(None)
    assert source == Source(demo_model_path(), "modelexport demo model", is_demo=True)


def test_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    expected = Source(tmp_path / "org" / "name", "name")
    assert resolve_source(str(tmp_path / "org" / "name")) == expected
    monkeypatch.chdir(tmp_path)
    assert resolve_source("org/name") == expected, "a directory wins over a hub id of the same name"
    assert resolve_source("./org/../org/name/") == expected
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_source("~/org/name") == expected


def test_a_file_is_answered_with_its_directory(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(UsageError, match=rf"is a file.*--model {tmp_path}$"):
        resolve_source(str(path))


@pytest.mark.parametrize("model", ["missing", "./org/name", "/org/name", "a/b/c", "../name", "org/", "org/na me", "\0"])
def test_neither_directory_nor_hub_id(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"no such directory .*ORGANISATION/NAME"):
        resolve_source(model)


def test_a_revision_is_for_hub_ids(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--revision main is for hub ids"):
        resolve_source(str(tmp_path), "main")
    with pytest.raises(UsageError, match="the demo model is none"):
        resolve_source(None, "main")


def answer_with(monkeypatch: pytest.MonkeyPatch, result: Any) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Replace the hub's client: it raises or returns ``result``. Its calls are noted."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def snapshot_download(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        if isinstance(result, BaseException):
            raise result
        return result

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_a_hub_id_is_downloaded_without_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    calls = answer_with(monkeypatch, str(tmp_path))
    assert resolve_source("org/name", "v1") == Source(tmp_path, "org/name", hub_id="org/name")
    [((model,), options)] = calls
    assert model == "org/name"
    assert options["revision"] == "v1"
    assert {"*.bin", "*.pt", "*.pth", "*.gguf"} <= set(options["ignore_patterns"])
    assert "*.safetensors" not in options["ignore_patterns"]


def test_pickles_are_downloaded_where_there_is_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = answer_with(monkeypatch, str(tmp_path))
    resolve_source("org/name", "v1")
    _, (_, options) = calls
    assert options["revision"] == "v1"
    assert "pytorch_model*.bin" in options["allow_patterns"]
    assert "ignore_patterns" not in options


def refusal(kind: type[Exception], status: int) -> Exception:
    """The hub's answer with that HTTP status, as its client raises it."""

    error = kind.__new__(kind)  # their constructors differ between versions of the client
    Exception.__init__(error, f"{status} Client Error")
    error.response = SimpleNamespace(status_code=status)  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    ("kind", "status"),
    [(hub_errors.RepositoryNotFoundError, 404), (hub_errors.GatedRepoError, 403), (hub_errors.HfHubHTTPError, 500)],
)
def test_the_hubs_refusal(kind: type[Exception], status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, refusal(kind, status))
    with pytest.raises(CheckpointError, match=rf"the hub refused 'org/name' \(HTTP {status}\); check the name"):
        resolve_source("org/name")


def test_an_unknown_revision_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, refusal(hub_errors.RevisionNotFoundError, 404))
    with pytest.raises(CheckpointError, match=r"'org/name' at revision 'v9' \(HTTP 404\)"):
        resolve_source("org/name", "v9")


@pytest.mark.parametrize(
    "error",
    [
        hub_errors.LocalEntryNotFoundError("offline and not in the cache"),
        hub_errors.OfflineModeIsEnabled("HF_HUB_OFFLINE=1"),
        ConnectionResetError("reset"),
        hub_errors.HfHubHTTPError.__mro__[1]("connection lost half way"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_unreachable_hub(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, error)
    with pytest.raises(CheckpointError, match=r"org/name is no directory here.*offline.*--model DIR") as caught:
        resolve_source("org/name")
    assert caught.value.__cause__ is error


def test_a_full_disk_is_not_called_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, OSError(28, "No space left on device"))
    with pytest.raises(CheckpointError, match="could not be downloaded: No space left on device"):
        resolve_source("org/name")


@pytest.mark.extended
def test_the_real_client_offline(tmp_path: Path) -> None:
    """Words and exit status when nothing is replaced: the client refuses by itself under HF_HUB_OFFLINE."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "modelexport", "--dry-run", "--model"]
    for model, status, words in [("org/name", 1, "offline?"), ("a..b/name", 2, "no hub id either")]:
        result = subprocess.run([*command, model], env=env, capture_output=True, text=True, timeout=60, check=False)
        assert result.returncode == status
        assert words in result.stderr
        assert "Traceback" not in result.stderr
