"""A mirror of files that lie elsewhere: what is read is there, and what is read no more is let go."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from modelexport.checkpoints import raw_io
from modelexport.checkpoints.mirrors import fetching, mirror
from modelexport.checkpoints.mirrors.fetching import Fetcher, Interrupted
from modelexport.checkpoints.mirrors.mirror import Mirror, RemoteFile, lock, mirror_of, stamped
from modelexport.checkpoints.safetensors.file import Reader, open_checkpoint
from modelexport.checkpoints.safetensors.reader import extents
from modelexport.errors import CheckpointError
from tests.helpers.models import make_llama

pytestmark = pytest.mark.timeout(60)
NAME = "model.safetensors"
CHUNK = 4096


class Elsewhere:
    """The content of a file, and how it is given."""

    def __init__(self, content: bytes) -> None:
        self.content, self.asked, self.cut, self.failures = content, 0, 0, 0
        self.refusal: Exception | None = None

    def stream(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        assert name == NAME
        if self.refusal is not None:
            raise self.refusal
        if self.failures:
            self.failures -= 1
            raise Interrupted("HTTP 503", 0.0)
        stop = min(stop, start + self.cut) if self.cut else stop
        for at in range(start, stop, 1000):
            piece = self.content[at : min(at + 1000, stop)]
            self.asked += len(piece)
            yield piece


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "CHUNK", CHUNK)
    monkeypatch.setattr(fetching, "CHUNK", CHUNK)
    monkeypatch.setattr(fetching, "LEAST_AHEAD", 8 * CHUNK)
    monkeypatch.setattr(fetching, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(mirror, "_CHECKED", 0.0)


@contextmanager
def mirrored(home: Path, source: Path, *, etag: str = "a") -> Iterator[tuple[Fetcher, Elsewhere]]:
    """A mirror of a model in a directory, with its headers, and what fills it."""
    content = (source / NAME).read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")

    def fill(directory: Path) -> None:
        (directory / "config.json").symlink_to(source / "config.json")
        with open(directory / NAME, "r+b") as file:
            file.write(content[:header])

    home.mkdir(exist_ok=True)
    held = lock(home)
    assert held is not None
    found = Mirror.make(home, [RemoteFile(NAME, len(content), etag)], fill)
    given = Elsewhere(content)
    fetcher = Fetcher(found, given.stream, {NAME: header}, guess=False)
    try:
        yield fetcher, given
    finally:
        fetcher.close()
        os.close(held)


def until(condition: object) -> None:
    for _ in range(2000):
        if condition():  # type: ignore[operator]
            return
        time.sleep(0.005)
    raise AssertionError("it has not come to that")


def test_what_is_read_is_fetched_and_nothing_else(tmp_path: Path) -> None:
    model = make_llama()
    with mirrored(tmp_path / "m", model) as (fetcher, given):
        checkpoint, original = open_checkpoint(fetcher.mirror.directory), open_checkpoint(model)
        assert given.asked == 0, "headers are there"
        with Reader(checkpoint) as reader, Reader(original) as expected:
            for name in ("model.layers.1.mlp.down_proj.weight", "model.norm.weight"):
                found = reader.read(checkpoint.infos[name])
                assert torch.equal(found, expected.read(original.infos[name]))
            part = checkpoint.infos["model.layers.0.mlp.up_proj.weight"]
            columns = reader.read(part, cols=(8, 24))
            assert torch.equal(columns, expected.read(original.infos[part.name], cols=(8, 24)))
        sizes = [checkpoint.infos["model.layers.1.mlp.down_proj.weight"].nbytes, part.nbytes]
        assert sum(sizes) <= given.asked <= sum(sizes) + 6 * CHUNK


def test_what_is_read_no_more_is_let_go_and_comes_again(tmp_path: Path) -> None:
    model = make_llama(hidden=256)
    original = open_checkpoint(model)
    names = [f"model.layers.{i}.mlp.{each}_proj.weight" for i in (0, 1) for each in ("down", "up")]
    with mirrored(tmp_path / "m", model) as (fetcher, given):
        source = open_checkpoint(fetcher.mirror.directory)
        steps = [list(extents(source, source.infos[name])) for name in names]
        fetcher.follow(steps, (), 1)
        path = fetcher.mirror.directory / NAME
        with Reader(source) as reader, Reader(original) as expected:
            for number, name in enumerate(names):
                fetcher.mirror.wait(steps[number])
                assert torch.equal(reader.read(source.infos[name]), expected.read(original.infos[name]))
                fetcher.mirror.passed(0, number, len(steps))
                gone = fetcher.mirror.chunks(*steps[number][0])
                inner = slice(gone.start + 1, gone.stop - 1)
                until(lambda gone=inner: (fetcher.mirror.versions[gone] == 2).all())
            until(lambda: os.stat(path).st_blocks * 512 <= 4 * CHUNK)
            once = given.asked
            assert torch.equal(reader.read(source.infos[names[0]]), expected.read(original.infos[names[0]]))
            assert given.asked > once, "it was asked for again"


def test_what_goes_while_it_is_read_is_read_again(tmp_path: Path) -> None:
    with mirrored(tmp_path / "m", make_llama()) as (fetcher, given):
        path, calls = fetcher.mirror.directory / NAME, []
        size = len(given.content)

        def read() -> int:
            calls.append(path.read_bytes())
            if len(calls) == 1:
                with fetcher._lock:
                    fetcher._empty(2)
            return len(calls)

        assert fetcher.mirror.read(path, 0, size, read) == 2
        assert calls[1] == given.content


def test_a_connection_that_breaks_off_is_taken_up_where_it_was(tmp_path: Path) -> None:
    with mirrored(tmp_path / "m", make_llama()) as (fetcher, given):
        given.cut, given.failures = 1500, 3
        fetcher.mirror.wait([(fetcher.mirror.directory / NAME, 0, len(given.content))])
        assert (fetcher.mirror.directory / NAME).read_bytes() == given.content
        assert given.asked == len(given.content), "no byte twice"


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        (Interrupted("HTTP 503", 0.0), "HTTP 503, 9 times: when the hub answers again, run the same command again"),
        (CheckpointError("the server sends whole files only"), "whole files only"),
    ],
)
def test_who_waits_is_told_why_nothing_comes(refusal: Exception, words: str, tmp_path: Path) -> None:
    with mirrored(tmp_path / "m", make_llama()) as (fetcher, given):
        given.refusal = refusal
        with pytest.raises(CheckpointError, match=words):
            fetcher.mirror.wait([(fetcher.mirror.directory / NAME, 0, 10)])


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with mirrored(tmp_path / "m", make_llama()) as (fetcher, _):
        monkeypatch.setattr(raw_io, "write_exactly", full)
        with pytest.raises(CheckpointError, match=r"no room for [\d,]+ bytes .*Free some space"):
            fetcher.mirror.wait([(fetcher.mirror.directory / NAME, 0, 10)])


def test_nobody_waits_for_a_process_that_is_gone(tmp_path: Path) -> None:
    with mirrored(tmp_path / "m", make_llama()) as (fetcher, _):
        pass
    with pytest.raises(CheckpointError, match="the process that read the model from the hub is gone"):
        fetcher.mirror.wait([(fetcher.mirror.directory / NAME, 0, 10)])


@pytest.mark.parametrize("etag", ["a", "b"])
def test_what_is_there_is_taken_up_if_the_files_are_the_same(etag: str, tmp_path: Path) -> None:
    model = make_llama()
    with mirrored(tmp_path / "m", model) as (fetcher, given):
        fetcher.mirror.wait([(fetcher.mirror.directory / NAME, 0, len(given.content))])
        before = stamped([fetcher.mirror.directory / NAME])[0].stat()
    with mirrored(tmp_path / "m", model, etag=etag) as (fetcher, given):
        now = stamped([fetcher.mirror.directory / NAME, fetcher.mirror.directory / "config.json"])
        assert [path.name for path in now] == ["manifest.json", "config.json"]
        assert (now[0].stat().st_mtime_ns == before.st_mtime_ns) == (etag == "a"), "what journals compare"
        fetcher.mirror.wait([(fetcher.mirror.directory / NAME, 0, len(given.content))])
        assert given.asked == (0 if etag == "a" else len(given.content))


def test_a_directory_like_others_is_no_mirror(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    assert mirror_of(tmp_path / "files") is None
    assert stamped([tmp_path / "files" / "a"]) == [tmp_path / "files" / "a"]
