"""A pipe, or an endless device, in the place of any small file: one sentence that names it, and no waiting."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from modelexport.cli import main
from tests.helpers.models import make_llama

pytestmark = pytest.mark.timeout(120)

MODEL, SOURCE, TEXT = "<the checkpoint>", "<what it was made from>", "<the file>"


def a_pipe(path: Path) -> str:
    os.mkfifo(path)
    return "is a named pipe"


def endless(path: Path) -> str:
    path.symlink_to("/dev/zero")
    return "is a link to /dev/zero, a character device"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("strange") / "ckpt"
    assert main(["--model", str(make_llama()), "--out", str(out), "--quiet", "--no-evaluate"]) == 0
    return out


@pytest.mark.parametrize("make", [a_pipe, endless])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("config.json", ["inspect", MODEL]),
        ("model.safetensors.index.json", ["inspect", MODEL]),
        ("model.safetensors", ["inspect", MODEL]),
        ("modelexport.json", ["eval", MODEL, "--save"]),
        ("hf_quant_config.json", ["inspect", MODEL]),
        (".metadata", ["inspect", MODEL]),
        ("model.gguf", ["inspect", MODEL]),
        ("LICENSE", ["--model", MODEL, "--quant", "none", "--out", "out", "--quiet", "--no-evaluate"]),
        ("tokenizer.json", ["eval", MODEL, "--windows", "1"]),
        ("text.txt", ["eval", MODEL, "--text", TEXT]),
        ("text.jsonl", ["--model", SOURCE, "--quant", "int8-static", "--calib", TEXT, "--out", "out"]),
        ("recipe.yaml", ["--recipe", TEXT]),
    ],
)
def test_it_is_named_and_neither_read_nor_waited_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    exported: Path,
    name: str,
    arguments: list[str],
    make: Callable[[Path], str],
) -> None:
    monkeypatch.chdir(tmp_path)
    model = Path(shutil.copytree(exported, tmp_path / "model"))
    if name == "hf_quant_config.json":
        shutil.copyfile(make_llama() / "config.json", model / "config.json")  # that says nothing of quantisation
    if name.endswith(".gguf"):
        (model / "model.safetensors").unlink()
    (model / name).unlink(missing_ok=True)
    kind = make(model / name)
    words = {MODEL: str(model), SOURCE: str(make_llama()), TEXT: str(model / name)}
    status = main([words.get(word, word) for word in arguments])
    error = capsys.readouterr().err
    assert (status, error.count("\n")) == (2 if TEXT in arguments else 1, 1), error
    assert f"{model / name}: {kind}; a regular file is needed in its place" in error


def test_a_page_goes_where_a_link_leads(tmp_path: Path, exported: Path) -> None:
    (tmp_path / "page.html").write_text("old")
    (tmp_path / "link.html").symlink_to("page.html")
    assert main(["report", str(exported), "--html", str(tmp_path / "link.html")]) == 0
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")


def test_a_page_replaces_no_pipe(tmp_path: Path, exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert main(["report", str(exported), "--html", str(tmp_path / "pipe")]) == 2
    assert "is a named pipe that no process reads" in capsys.readouterr().err
    assert stat.S_ISFIFO((tmp_path / "pipe").lstat().st_mode)
