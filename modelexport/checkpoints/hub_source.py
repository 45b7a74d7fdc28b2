"""A repository of the Hugging Face hub as a mirror: headers and small files at once, weights while they are read."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from modelexport.checkpoints import raw_io
from modelexport.checkpoints.mirrors.fetching import CONNECTIONS, Fetcher, Interrupted, persistent
from modelexport.checkpoints.mirrors.mirror import Mirror, RemoteFile, lock
from modelexport.checkpoints.source import (
    NOT_NEEDED,
    PICKLED,
    Source,
    explained,
    hidden_bars,
    is_hub_id,
    is_local,
    refused,
    resolve_source,
)
from modelexport.checkpoints.staging import LOCK_WAIT
from modelexport.errors import CheckpointError, UsageError, error_text
from modelexport.system.safetensors_header import MAX_HEADER_BYTES
from modelexport.system.terminal import note

__all__ = ["opened_source"]

_JOURNAL = "journal.jsonl"
_WEIGHTS = "*.safetensors"
_FIRST_BYTES = 1 << 17
"""Of each file, asked for to begin with: most headers are smaller."""
_TIMEOUT = 30.0
_LONGEST_PAUSE = 300.0
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


@contextmanager
def opened_source(
    model: str | None,
    revision: str | None = None,
    *,
    home: Path | None = None,
    download: bool = False,
    leads: bool = True,
    guess: bool = False,
    quiet: bool = True,
) -> Iterator[Source]:
    """A model as a source; of one on the hub, only what is read comes to this machine, unless it is here already.

    Args:
        model: as for :func:`~modelexport.checkpoints.source.resolve_source`.
        home: where parts of weights lie meanwhile, and stay where a run is cut off that can be resumed (its parent has
            a journal then); None: a temporary directory.
        download: whether all of it is brought to the hub's cache first.
        guess: whether to begin with the first file at once, before it is known what is read first.
        leads: whether this process fills the mirror; others of the machine call this when it has returned there.

    Raises:
        UsageError, CheckpointError: as ``resolve_source``.
    """
    if is_local(model) or download or model is None or not is_hub_id(model):
        yield resolve_source(model, revision)
        return
    if not leads:
        assert home is not None
        is_mirror = (home / "manifest.json").is_file()
        yield Source(home / "files", model, hub_id=model) if is_mirror else resolve_source(model, revision)
        return
    repository = _Repository(model, revision)
    if not repository.missing:
        yield resolve_source(model, revision)
        return
    with ExitStack() as stack:
        if home is None:
            home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="modelexport-source-")))
        else:
            stack.enter_context(_locked(home))
        mirror, kept = _mirror(home, repository)
        resumes = (home.parent / _JOURNAL).is_file()
        fetcher = Fetcher(mirror, repository.stream, kept, guess=guess and not resumes)
        stack.callback(fetcher.close)
        if not quiet:
            size = sum(file.size for file in mirror.files)
            note(f"reading {model} from the hub ({len(mirror.files)} files, {size:,} bytes) as it is needed")
        yield Source(mirror.directory, model, hub_id=model, fetcher=fetcher)


@contextmanager
def _locked(home: Path) -> Iterator[None]:
    """Holds the lock of a mirror; it is removed in the end, unless a run that can be resumed will want it."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        until = time.monotonic() + LOCK_WAIT  # processes of a killed export may be dying
        while (fd := lock(home)) is None:
            if time.monotonic() > until:
                raise UsageError(f"another export reads into {home}: wait for it, or end it and run this again")
            time.sleep(0.05)
    except OSError as error:
        raise UsageError(f"{home} cannot be made: {error.strerror or error}; choose another --out") from error
    try:
        yield
    finally:
        if not (home.parent / _JOURNAL).is_file():
            shutil.rmtree(home, ignore_errors=True)
            with suppress(OSError):
                home.parent.rmdir()
        os.close(fd)


def _mirror(home: Path, repository: _Repository) -> tuple[Mirror, dict[str, int]]:
    """The mirror of a repository with all that is read before weights, and the bytes of each file's header."""
    files = repository.remote_files()

    def fill(directory: Path) -> None:
        for path in repository.snapshot.rglob("*"):
            if path.is_file():
                link = directory / path.relative_to(repository.snapshot)
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(path.resolve())
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            list(pool.map(lambda file: repository.fetch_header(directory / file.name, file.size), files))

    try:
        mirror = Mirror.make(home, files, fill)
    except OSError as error:
        if error.errno in raw_io.DISK_FULL:
            raise raw_io.disk_full(home, sum(file.size for file in files), error) from error
        raise CheckpointError(f"{home}: cannot be written: {error_text(error)}") from error
    return mirror, {file.name: _header_end(mirror.directory / file.name) for file in files}


def _header_end(path: Path) -> int:
    with open(path, "rb") as file:
        return 8 + min(int.from_bytes(file.read(8), "little"), MAX_HEADER_BYTES)


class _Repository:
    """A model on the hub at one commit.

    Attributes:
        snapshot: its small files in the hub's cache, and those of its weights that are there, too.
        commit: the commit's hash.
        missing: names of the files of weights that are not there.
    """

    def __init__(self, model: str, revision: str | None) -> None:
        from huggingface_hub import HfApi, snapshot_download

        self.model = model
        with explained(model, revision), hidden_bars():
            self.snapshot = Path(snapshot_download(model, revision=revision, ignore_patterns=[*NOT_NEEDED, _WEIGHTS]))
        self.commit = self.snapshot.name
        self._files: dict[str, RemoteFile] = {}
        self._places: dict[str, str] = {}
        self._etags: dict[str, str] = {}
        try:
            with explained(model, revision):
                listed = HfApi().list_repo_files(model, revision=self.commit)
        except CheckpointError:
            if not any(any(self.snapshot.glob(pattern)) for pattern in (_WEIGHTS, *PICKLED)):
                raise
            listed = []  # offline, and all of it may be here
        weights = [name for name in listed if "/" not in name and name.endswith(_WEIGHTS[1:])]
        self.missing = sorted(name for name in weights if not (self.snapshot / name).is_file())

    def remote_files(self) -> list[RemoteFile]:
        """The missing files, with what the hub says of them."""
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            return list(pool.map(self._located, self.missing))

    def _located(self, name: str) -> RemoteFile:
        """Asks where a file lies, and whether it is still the one that it was.

        Raises:
            CheckpointError: it is not.
        """
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        with explained(self.model, self.commit):
            found = get_hf_file_metadata(hf_hub_url(self.model, name, revision=self.commit))
        if found.size is None or found.etag is None:
            raise CheckpointError(
                f"the hub does not say how large {self.model}/{name} is, and which version: add --download"
            )
        file = RemoteFile(name, found.size, found.etag)
        self._check(name, self._files.setdefault(name, file), file)
        self._places[name] = found.location
        return file

    def _check(self, name: str, before: RemoteFile, now: RemoteFile) -> None:
        if before != now:
            raise CheckpointError(
                f"{self.model}/{name} has changed on the hub while it was read (ETag {before.etag}, {before.size:,} "
                f"bytes; now {now.etag}, {now.size:,}): run the same command again; it begins anew"
            )

    def fetch_header(self, path: Path, size: int) -> None:
        """Puts the header of a file of weights into its mirror.

        Raises:
            CheckpointError: it cannot be had.
        """
        with open(path, "r+b") as file:
            end = min(size, _FIRST_BYTES)
            content = self._bytes(path.name, 0, end)
            length = 8 + int.from_bytes(content[:8], "little")
            if end < length <= min(size, MAX_HEADER_BYTES):
                content += self._bytes(path.name, end, length)
            file.write(content)

    def _bytes(self, name: str, start: int, stop: int) -> bytes:
        return b"".join(persistent(self.stream, name, start, stop, threading.Event()))

    def stream(self, name: str, start: int, stop: int) -> Iterator[bytes]:
        """Bytes ``[start, stop)`` of a file: see :data:`~modelexport.checkpoints.mirrors.fetching.Stream`."""
        from huggingface_hub import constants, get_session
        from huggingface_hub.errors import HfHubHTTPError
        from huggingface_hub.utils import build_hf_headers

        transport_error = HfHubHTTPError.__mro__[1]  # of the HTTP library that this version of the hub's client uses
        if name not in self._places:
            self._located(name)
        place = self._places[name]
        is_hub = urlsplit(place).netloc == urlsplit(constants.ENDPOINT).netloc
        headers = build_hf_headers() if is_hub else {}  # elsewhere the address itself is the permission
        headers |= {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        try:
            with _response(get_session(), place, headers) as (response, pieces):
                self._accept(name, response, start, stop, is_hub=is_hub)
                left = stop - start
                for piece in pieces:
                    if len(piece) > left:
                        raise CheckpointError(
                            f"{self.model}/{name}: the hub sends more than was asked for: add --download"
                        )
                    left -= len(piece)
                    yield piece
        except (transport_error, OSError) as error:
            raise Interrupted(error_text(error)) from error

    def _accept(self, name: str, response: Any, start: int, stop: int, *, is_hub: bool) -> None:
        """Looks at an answer's status and headers.

        Raises:
            Interrupted: it may be another one later.
            CheckpointError: it is of no use.
        """
        status, headers = response.status_code, response.headers
        if status in (401, 403, 410) and not is_hub:  # an address that was good for a time
            self._located(name)
            raise Interrupted(f"HTTP {status}", 0.5)
        if status == 429 or status >= 500:
            pause = _pause(headers)
            what = "the hub limits how much this address or token may ask for (HTTP 429)" if status == 429 else ""
            raise Interrupted(what or f"HTTP {status}", pause)
        if status in (401, 403, 404):
            raise refused(self.model, self.commit, status)
        size = self._files[name].size
        if status == 200 and (start, stop) != (0, size):
            raise CheckpointError(
                f"{self.model}/{name}: the server sends whole files only (HTTP 200 for a part): add --download"
            )
        said = _CONTENT_RANGE.fullmatch(headers.get("Content-Range", f"bytes {start}-{stop - 1}/{size}"))
        if status not in (200, 206) or said is None:
            raise CheckpointError(
                f"{self.model}/{name}: the server does not send the part (HTTP {status}): add --download"
            )
        etag = headers.get("ETag", "").removeprefix("W/").strip('"')
        before = replace(self._files[name], etag=self._etags.setdefault(name, etag))
        self._check(name, before, replace(before, etag=etag, size=int(said[3])))
        if (int(said[1]), int(said[2]) + 1) != (start, stop):
            raise CheckpointError(
                f"{self.model}/{name}: the server sends another part than was asked for: add --download"
            )


def _pause(headers: Mapping[str, str]) -> float | None:
    """Seconds that a server asks to wait."""
    said = headers.get("Retry-After", "")
    return min(float(said), _LONGEST_PAUSE) if said.isdecimal() else None


@contextmanager
def _response(session: Any, url: str, headers: Mapping[str, str]) -> Iterator[tuple[Any, Iterator[bytes]]]:
    """An answer and the pieces of its body, of either HTTP library that the hub's client has used."""
    if hasattr(session, "stream"):
        with session.stream("GET", url, headers=headers, timeout=_TIMEOUT, follow_redirects=True) as response:
            yield response, response.iter_raw()
    else:
        with session.get(url, headers=headers, timeout=_TIMEOUT, stream=True) as response:
            yield response, response.raw.stream(1 << 16, decode_content=False)
