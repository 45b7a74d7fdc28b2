"""Pushing to the hub: against a hub on 127.0.0.1, with huggingface_hub's own client, and what is said when it fails."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from modelexport import cli
from modelexport.cli import main
from modelexport.errors import HubError, UsageError
from modelexport.exporting import export
from modelexport.jobs import hub
from tests.helpers.hub_server import TOKEN, Hub, Repository, running_hub
from tests.helpers.models import make_llama
from tests.helpers.warm import run_warm

pytestmark = pytest.mark.timeout(200)


@pytest.fixture
def server() -> Iterator[Hub]:
    with running_hub() as found:
        yield found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, whose weights are a large file to the hub above, and its config a small one."""
    out = tmp_path_factory.mktemp("hub") / "ckpt"
    export(out=str(out), quant="fp8", quiet=True, evaluate=False)
    return out


def shell(server: Hub, home: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """``modelexport`` as a user runs it; the client reads where the hub is as it is imported."""
    root = Path(cli.__file__).parent.parent
    own = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    own |= {"HF_ENDPOINT": server.url, "HF_HOME": str(home / "hf"), "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN}
    own |= {"PYTHONPATH": str(root), "NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_TELEMETRY": "1", **env}
    return run_warm("-m", "modelexport", *arguments, cwd=home, env=own)


def assert_pushed(server: Hub, name: str, directory: Path) -> Repository:
    """The repository holds the directory, all of it and nothing else."""
    repository = server.repositories[name]
    expected: dict[str, bytes | str] = {}
    for path in directory.rglob("*"):
        content = path.read_bytes()
        large = repository.files.get(path.name) == hashlib.sha256(content).hexdigest()
        expected[path.name] = hashlib.sha256(content).hexdigest() if large else content
    assert repository.files == expected
    return repository


def test_an_export_is_pushed_once_it_stands(server: Hub, tmp_path: Path) -> None:
    model = str(make_llama(vocab=2003, hidden=256))
    line = ["--model", model, "--out", "ckpt", "--quant", "int8", "--push-to-hub", "me/model-int8", "--private"]
    done = shell(server, tmp_path, *line)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"pushed to {server.url}/me/model-int8\n")
    repository = assert_pushed(server, "me/model-int8", tmp_path / "ckpt")
    assert repository.private
    assert len(repository.commits) == 1, "all of it, or nothing"
    assert {"README.md", "modelexport.json", "model.safetensors"} <= set(repository.files)
    assert server.uploads == 1
    assert "GET /api/whoami-v2" in server.requests[0], "asked before the work begins"


def test_a_failed_push_loses_nothing_and_says_how_to_go_on(server: Hub, tmp_path: Path) -> None:
    model = str(make_llama(vocab=2003, hidden=256))
    server.refuse = ("/commit/", 503, "the hub is being repaired")
    line = ["--model", model, "--out", "my ckpt", "--quant", "int8", "--push-to-hub", "me/model-int8"]
    failed = shell(server, tmp_path, *line)
    assert failed.returncode == 1
    assert "wrote my ckpt in" in failed.stdout, "what was done is said all the same"
    assert "Traceback" not in failed.stderr
    last = failed.stderr.splitlines()[-1]
    assert "my ckpt is complete, but was not pushed to me/model-int8: the hub refused it (HTTP 503" in last
    command = last.partition("to try again: modelexport ")[2]
    assert shlex.split(command) == ["push", "my ckpt", "me/model-int8"]
    assert server.repositories["me/model-int8"].files == {}
    server.refuse = None
    again = shell(server, tmp_path, *shlex.split(command), "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout) == {"checkpoint": "my ckpt", "pushed": f"{server.url}/me/model-int8"}
    assert_pushed(server, "me/model-int8", tmp_path / "my ckpt")
    assert server.uploads == 1, "what had been sent was not sent again"


def test_a_hub_that_does_not_answer_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.utils import get_session

    if not hasattr(get_session(), "timeout"):
        pytest.skip("huggingface_hub before 1.0")
    monkeypatch.setattr(hub, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        broke_off = pytest.raises(HubError, match=r"not pushed: the hub cannot be reached, or .* broke off \(timed out")
        with broke_off, hub._explained("not pushed"), hub._answers_in_time():
            get_session().get(url)
    assert get_session().timeout.read is None


def test_weights_of_an_earlier_push_go_in_the_same_commit(server: Hub, tmp_path: Path, checkpoint: Path) -> None:
    old = {"model-00001-of-00002.safetensors": b"a", "model.safetensors.index.json": b"b", "figure.png": b"c"}
    server.repositories["me/x"] = Repository(private=False, files=dict(old))
    done = shell(server, tmp_path, "push", str(checkpoint), "me/x", "--quiet")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    repository = server.repositories["me/x"]
    assert repository.files.pop("figure.png") == b"c", "what is no weight is somebody's"
    assert_pushed(server, "me/x", checkpoint)
    assert len(repository.commits) == 1


@pytest.mark.parametrize(
    ("refuse", "env", "words"),
    [
        (None, {"HF_TOKEN": ""}, "nobody is logged in to the hub here: type hf auth login, or set HF_TOKEN"),
        (None, {"HF_TOKEN": "hf_wrong"}, "the hub does not accept the token: type hf auth login"),
        (("/api/repos/create", 403, "no"), {}, "the token has no right to write there"),
        (("/preupload/", 404, "no"), {}, "knows no such organisation or repository"),
        (("/preupload/", 400, "bad\x1b[31m front"), {}, "the hub refused it (HTTP 400: "),
        (None, {"HF_ENDPOINT": "http://127.0.0.1:9"}, "the hub cannot be reached, or the transfer broke off"),
        (None, {"HF_HUB_OFFLINE": "1"}, "the hub cannot be reached, or the transfer broke off"),
    ],
)
def test_refusals_are_one_line(
    server: Hub, tmp_path: Path, checkpoint: Path, refuse: Any, env: dict[str, str], words: str
) -> None:
    server.refuse = refuse
    done = shell(server, tmp_path, "push", str(checkpoint), "me/x", "--json", **env)
    assert (done.returncode, done.stdout) == (1, "")
    error = json.loads(done.stderr.splitlines()[-1])["error"]
    assert error["kind"] == "HubError"
    assert words in error["message"]
    assert error["message"].endswith(f"to try again: modelexport push {checkpoint} me/x")
    assert "\x1b" not in error["message"]
    assert "Traceback" not in done.stderr


def test_a_card_that_the_hub_does_not_take(server: Hub, tmp_path: Path, checkpoint: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "edited")
    (tmp_path / "edited" / "README.md").write_text("---\nlicense: !\n---\n")
    done = shell(server, tmp_path, "push", "edited", "me/x")
    assert (done.returncode, done.stdout) == (1, "")
    assert "edited is complete, but was not pushed to me/x: Invalid metadata in README.md" in done.stderr
    assert server.repositories["me/x"].files == {}


def test_nobody_logged_in_is_said_before_the_work(server: Hub, tmp_path: Path) -> None:
    done = shell(server, tmp_path, "--out", "ckpt", "--push-to-hub", "me/x", HF_TOKEN="")
    assert done.returncode == 1
    assert done.stderr.startswith("modelexport: --push-to-hub me/x: nobody is logged in to the hub here")
    assert list(tmp_path.glob("*ckpt*")) == []


# ---------------------------------------------------- with a client that is faked


class Client:
    """Stands for huggingface_hub's, in this process."""

    def __init__(self, *, private: bool = False) -> None:
        self.private = private
        self.calls: list[tuple[str, str, dict[str, Any]]] = []

    def create_repo(self, repo_id: str, **settings: Any) -> str:
        self.calls.append(("create", repo_id, settings))
        return f"https://hub.example/{repo_id}"

    def repo_info(self, repo_id: str) -> Client:
        return self

    def upload_folder(self, **settings: Any) -> SimpleNamespace:
        self.calls.append(("upload", settings["repo_id"], settings))
        return SimpleNamespace(oid="c0ffee", commit_url="https://hub.example/me/x/commit/c0ffee")


def test_a_public_repository_is_not_taken_for_a_private_one(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(private=False)
    monkeypatch.setattr(hub, "_api", lambda: client)
    with pytest.raises(HubError, match="is there already, and is public: nothing was pushed"):
        hub.push(checkpoint, "me/x", private=True)
    assert [call[0] for call in client.calls] == ["create"]
    client.private = True
    pushed = hub.push(checkpoint, "me/x", private=True)
    url = "https://hub.example/me/x"
    assert pushed == hub.PushResult(str(checkpoint), "me/x", url, "c0ffee", f"{url}/commit/c0ffee")
    assert client.calls[-1][2]["folder_path"] == str(checkpoint)


def test_a_dry_run_asks_nobody(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def ask() -> None:
        raise AssertionError("asked the hub")

    monkeypatch.setattr(hub, "_api", ask)
    assert main(["--dry-run", "--push-to-hub", "me/x", "--quiet"]) == 0
    assert main(["--dry-run", "--push-to-hub", "x"]) == 2
    assert "ORGANISATION/NAME is needed" in capsys.readouterr().err


def test_a_checkpoint_cut_short_is_not_pushed(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = Client()
    monkeypatch.setattr(hub, "_api", lambda: client)
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    assert main(["push", str(copy), "me/x", "--quiet"]) == 0
    client.calls.clear()
    with open(copy / "model.safetensors", "r+b") as file:
        file.truncate(file.seek(0, 2) - 1)
    assert main(["push", str(copy), "me/x", "--quiet"]) == 1
    assert "truncated" in capsys.readouterr().err
    assert client.calls == []


@pytest.mark.parametrize("name", ["me", "me/x/y", "/x", "me/", "me/-x", "me/x.", "m e/x", "me/" + "x" * 100])
def test_names_that_are_none(checkpoint: Path, name: str) -> None:
    with pytest.raises(UsageError, match="ORGANISATION/NAME is needed"):
        hub.push(checkpoint, name)


def test_what_is_no_checkpoint_is_not_pushed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for directory in (tmp_path, tmp_path / "nowhere"):
        assert main(["push", str(directory), "me/x"]) == 2
        assert "no checkpoint is there" in capsys.readouterr().err
