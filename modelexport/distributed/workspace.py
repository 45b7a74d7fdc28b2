"""Payloads through a directory that all ranks see (NFS), for ranks that do not share a host.

Layout below the workspace path, one directory for each run (and each set of ranks that gathers)::

    run-<id>/rank-00003.alive                    JSON: what the rank is doing, when, on which host, in which process
    run-<id>/rank-00003.00000007.safetensors     the payload, exactly a safetensors file
    run-<id>/rank-00003.00000007.json            its manifest, written last: only what it describes is ever read

A file appears whole: it is written under a hidden temporary name, fsynced, closed, renamed, and the directory
fsynced. The run's id keeps what another run left behind from being read, the sequence number keeps gathers apart.
The manifest gives the payload's size and CRC-32: it guards against torn writes and stale caches, not against an
enemy with write access, and costs 0.6 of what SHA-256 costs here.

NFS guarantees close-to-open consistency: every look at a file opens it anew, after listing the directory (which
makes the client ask the server again), and a file that vanishes while it is read (ESTALE) is opened again.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from modelexport.distributed.rendezvous import links as _rendezvous
from modelexport.distributed.supervision.heartbeat import Heart, last_heartbeat, remove_rank
from modelexport.distributed.transport import payload as _payload
from modelexport.distributed.transport.messages import NUMBER, OBJECT, TEXT, WHOLE, Kind, LostPeerError, read_message
from modelexport.distributed.transport.whole_files import read_payload, read_whole, write_whole
from modelexport.errors import GatherError, UsageError, quoted, shown
from modelexport.system.dtypes import torch_name
from modelexport.system.ownership import ForeignError

__all__ = ["RUN", "CorruptError", "Manifest", "NFSWorkspace", "NotYetError"]

CORRUPT_READS = 3  # a stale cache passes; a file that stays wrong is wrong
_NEEDED = {"run": TEXT, "sequence": WHOLE, "rank": WHOLE, "world_size": WHOLE, "state": TEXT}
_OPTIONAL = {"header_bytes": WHOLE, "bytes": WHOLE, "crc32": WHOLE, "tensors": OBJECT, "error": TEXT, "time": NUMBER}
_STATES = ("data", "nothing", "failed")
RUN = Kind("a run id", lambda value: isinstance(value, str) and re.fullmatch(r"[\w-]+", value) is not None)
_MANIFEST = re.compile(r"rank-(\d{5})\.(\d{8})\.json")


@dataclass(frozen=True)
class Manifest:
    """Describes the payload that one rank published.

    ``state`` is "data", "nothing" (the rank passed None) or "failed" (``error`` is the reason).
    """

    run: str
    sequence: int
    rank: int
    world_size: int
    state: str
    header_bytes: int = 0
    bytes: int = 0
    crc32: int = 0
    tensors: dict[str, Any] = field(default_factory=dict)  # name -> [dtype, shape]
    error: str = ""
    time: float = 0.0


class NotYetError(Exception):
    """The awaited payload is missing or incomplete; the message says what is there."""


class CorruptError(NotYetError):
    """The awaited payload is there and its bytes are wrong."""


class NFSWorkspace:
    """A directory through which ranks exchange configs and weights.

    It uses no collective. ``write_configs_and_weights`` publishes this rank's newest state, and
    ``read_configs_and_weights_from_rank`` reads another rank's newest; when to do which is the caller's to agree.

    Args:
        workspace_path: the shared directory, made if missing; None makes a workspace that is not initialised.
        run_id: tells this run from others in the same directory. By default the ranks of a process group agree on
            one through its store; without a group it is the environment's ``MODELEXPORT_RUN_ID``, else this
            process's own.
        rank, world_size: by default the process group's, or 0 and 1.
        timeout: seconds to wait for the run id.
    """

    def __init__(
        self,
        workspace_path: Path | str | None = None,
        *,
        run_id: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        timeout: float = 300.0,
    ) -> None:
        grouped = dist.is_initialized()
        self.rank = rank if rank is not None else dist.get_rank() if grouped else 0
        self.world_size = world_size if world_size is not None else dist.get_world_size() if grouped else 1
        self._path = Path(workspace_path) if workspace_path is not None else None
        self._sequence = 0
        self._owner = os.geteuid()
        self._heart: Heart | None = None
        if self._path is not None:
            self.run_id = run_id or _rendezvous.run_id(timeout)
            if not RUN.fits(self.run_id):
                raise UsageError(f"a run id is letters, digits, '_' and '-', got {self.run_id!r}")
            self.directory = self._path / f"run-{self.run_id}"
            try:
                self._heart = Heart(self.directory, self.rank)
                self._owner = self._heart.owner
            except ForeignError as error:
                raise UsageError(
                    f"the workspace {self._path}: {error}: what ranks exchange there could be another user's; remove "
                    "it, or name another workspace"
                ) from error
            except OSError as error:
                raise UsageError(
                    f"cannot write into the workspace {self._path}: {error}; it must be a directory that every rank "
                    "may write to"
                ) from error

    @property
    def is_initialized(self) -> bool:
        """Returns whether there is a directory behind this workspace."""
        return self._path is not None

    def write_configs_and_weights(self, config_json: dict[str, Any] | None, weights: Mapping[str, Any] | None) -> None:
        """Publishes this rank's state; it replaces what this rank published before.

        Args:
            config_json: any config tree (see :mod:`modelexport.distributed.transport.tree`).
            weights: tensors by name, as in a state_dict.

        Raises:
            GatherError: the directory is full or cannot be written, or the workspace is not initialised.
        """
        self._need_directory()
        weights = dict(weights) if weights is not None else None
        self._sequence += 1
        self.publish(self._sequence, {"config": config_json, "weights": weights})
        self.remove(self.rank, self._sequence - 1)

    def read_configs_and_weights_from_rank(
        self, target_rank: int
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """The newest state that ``target_rank`` published in this run; (None, None) where it has published nothing.

        Raises:
            GatherError: the state is damaged, or that rank published a failure.
        """
        self._need_directory()
        corrupt = 0
        while True:
            sequences = [found[1] for found in self.published() if found[0] == target_rank]
            if not sequences:
                return None, None
            try:
                manifest, state = self.fetch(target_rank, max(sequences))
                return (state["config"], state["weights"]) if manifest.state == "data" else (None, None)
            except CorruptError as error:
                corrupt += 1
                if corrupt == CORRUPT_READS:
                    raise GatherError(f"rank {target_rank}'s state in {self.directory} is {error}") from error
            except NotYetError:
                pass  # replaced by a newer one between our two looks
            time.sleep(0.01)

    def publish(self, sequence: int, config: Any) -> None:
        """Writes this rank's payload number ``sequence`` (None: "nothing"), then its manifest."""
        manifest = Manifest(self.run_id, sequence, self.rank, self.world_size, "nothing", time=time.time())
        if config is not None:
            payload = _payload.pack(config)
            self._beat(f"writing payload {sequence}", payload.nbytes)
            name = self._name(self.rank, sequence, "safetensors")
            crc = write_whole(self.directory, name, [payload.header, *payload.tensors])
            manifest = Manifest(
                self.run_id, sequence, self.rank, self.world_size, "data", len(payload.header), payload.nbytes, crc,
                {entry.name: [torch_name(entry.dtype), entry.shape] for entry in payload.entries},
                time=time.time(),
            )  # fmt: skip
        self._write_manifest(manifest)
        self._beat(f"wrote payload {sequence}", 0)

    def publish_failure(self, sequence: int, error: str) -> None:
        """Publishes ``error`` in place of payload ``sequence``: ranks that wait for it fail at once."""
        self._write_manifest(
            Manifest(self.run_id, sequence, self.rank, self.world_size, "failed", error=error, time=time.time())
        )

    def fetch(self, rank: int, sequence: int) -> tuple[Manifest, Any]:
        """Reads one payload, into buffers that are reused when their tensors go.

        Raises:
            NotYetError, CorruptError: it is not there (yet), or not whole, or wrong.
            GatherError: that rank published a failure.
        """
        manifest = self._read_manifest(rank, sequence)
        if manifest.state == "failed":
            raise LostPeerError(f"rank {rank} could not hand over its payload {sequence}: {manifest.error}", [rank])
        if manifest.state == "nothing":
            return manifest, None
        path = self.directory / self._name(rank, sequence, "safetensors")
        try:
            size, config = read_payload(path, manifest.header_bytes, manifest.bytes, manifest.crc32, self._owner)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise GatherError(f"cannot read {path}: {error}") from error
            raise NotYetError("incomplete, its manifest is there and its payload is not") from error
        except _payload.DamagedPayloadError as error:
            raise CorruptError(str(error)) from error
        if size != manifest.bytes:
            raise NotYetError(f"incomplete, {size} of {manifest.bytes} bytes are there")
        return manifest, config

    def published(self) -> list[tuple[int, int]]:
        """(rank, sequence) of every manifest of this run."""
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise GatherError(f"cannot look into the workspace {self.directory}: {error.strerror}") from error
        return [(int(m[1]), int(m[2])) for m in map(_MANIFEST.fullmatch, names) if m]

    def remove(self, rank: int, sequence: int) -> None:
        """Removes one payload: its bytes first, so that a manifest that is gone means that they are."""
        for kind in ("safetensors", "json"):
            (self.directory / self._name(rank, sequence, kind)).unlink(missing_ok=True)

    def describe_missing(self, rank: int, sequence: int) -> str:
        """Describes the state of ``rank``'s missing payload, as far as the directory shows it."""
        try:
            self.fetch(rank, sequence)
            state = "complete only now"
        except CorruptError as error:
            state = f"corrupt ({error})"
        except NotYetError as error:
            state = str(error)
        except GatherError as error:
            state = str(error)
        for other in sorted(self.directory.parent.glob(f"run-*/rank-{rank:05d}.*")):
            if other.parent != self.directory:
                state += f"; it wrote in {other.parent.name}, which is another run"
                break
        return f"rank {rank}: {state}; {self.heartbeat_of(rank)}"

    def close(self) -> None:
        """Removes this rank's own state, and the run's directory once nothing of any rank is left in it.

        Ranks that may still read this rank's newest state must have done so; agreeing on that is the caller's.
        """
        heart, self._heart = self._heart, None
        if heart is None:
            return
        if self._sequence:
            self.remove(self.rank, self._sequence)
        heart.stop()
        # Payloads that someone is still to read keep our file with them, so that it is known whose they were;
        # it says "closed" first, so that whoever removes the payloads also finds that it may go.
        if not any(rank == self.rank for rank, _ in self.published()):
            remove_rank(self.directory, self.rank)

    def __enter__(self) -> NFSWorkspace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def heartbeat_of(self, rank: int) -> str:
        """Describes the last heartbeat of ``rank`` in this run."""
        return last_heartbeat(self.directory, rank)

    def _need_directory(self) -> None:
        if self._heart is None:
            raise GatherError("this NFSWorkspace is not initialised: give it a workspace_path that all ranks see")

    def _beat(self, doing: str, nbytes: int) -> None:
        if self._heart is None:
            return
        try:
            self._heart.beat(doing, nbytes)
        except OSError as error:
            raise GatherError(f"cannot write into the workspace {self.directory}: {error}") from error

    @staticmethod
    def _name(rank: int, sequence: int, kind: str) -> str:
        return f"rank-{rank:05d}.{sequence:08d}.{kind}"

    def _write_manifest(self, manifest: Manifest) -> None:
        text = json.dumps(asdict(manifest)).encode("ascii")
        write_whole(self.directory, self._name(self.rank, manifest.sequence, "json"), [text])

    def _read_manifest(self, rank: int, sequence: int) -> Manifest:
        name = self._name(rank, sequence, "json")
        try:
            os.listdir(self.directory)  # makes an NFS client look again
            text = read_whole(self.directory / name, self._owner)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise GatherError(f"cannot read {self.directory / name}: {error}") from error
            raise NotYetError(self._unfinished(rank, sequence)) from error
        try:
            fields = read_message(text, "its manifest", _NEEDED, _OPTIONAL, blamed=[rank])
        except LostPeerError as error:
            raise CorruptError(str(error)) from error
        manifest = Manifest(**{name: value for name, value in fields.items() if name in _NEEDED or name in _OPTIONAL})
        if manifest.state not in _STATES:
            raise CorruptError(f"a manifest of the unknown state {quoted(manifest.state)}")
        if (manifest.run, manifest.sequence, manifest.rank) != (self.run_id, sequence, rank):
            raise CorruptError(
                f"a manifest of run {shown(manifest.run)}, rank {manifest.rank}, payload {manifest.sequence}"
            )
        return manifest

    def _unfinished(self, rank: int, sequence: int) -> str:
        for part in self.directory.glob(f".{self._name(rank, sequence, 'safetensors')}.*.tmp"):
            try:
                return f"incomplete, {part.stat().st_size} bytes are written"
            except FileNotFoundError:
                continue
        done = self.directory / self._name(rank, sequence, "safetensors")
        return "incomplete, its manifest is missing" if done.exists() else "missing"
