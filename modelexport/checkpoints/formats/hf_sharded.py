"""The sharded ``hf`` format: Hugging Face names and dtypes, but each rank's rectangles in files of its own.

The files are those that torch's ``HuggingFaceStorageWriter`` writes with ``save_distributed=True``, and its reader
loads ours: ordinary safetensors files whose header tells, under ``DCP_SHARDING_INFO``, where in its tensor each array
belongs. We add each tensor's whole shape there and, under ``modelexport_shard``, which of how many files it is, so that
a file that was not copied along is missed. Every number format can be stored so: nothing is renamed or fused. Each
rank's files hold everything that the rank computes with, replicas included.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from modelexport.checkpoints.safetensors.arrays import Array, Share
from modelexport.checkpoints.safetensors.header import Header, TensorInfo, header_mentions, read_header
from modelexport.checkpoints.safetensors.layout import DEFAULT_MAX_SHARD_BYTES, Layout
from modelexport.checkpoints.safetensors.placement import Placement, row_major
from modelexport.checkpoints.safetensors.reader import Checkpoint
from modelexport.checkpoints.safetensors.sharded import divide, raise_problems, tensor_info
from modelexport.checkpoints.safetensors.sharded import lay_out as lay_out_files
from modelexport.errors import CheckpointError, quoted
from modelexport.sharding.boxes import Box, extent, offset, placed, uncovered, whole
from modelexport.sharding.rules import TensorRule
from modelexport.sharding.shard_plan import ShardPlan
from modelexport.system.dtypes import dtype_bits
from modelexport.system.small_files import LARGEST_CONFIG, has_file, read_json

NAME = "hf"
DESCRIPTION = "safetensors with Hugging Face's names, compressed-tensors; sharded: a set of files for each rank"
HUB_LIBRARY = "transformers"
HUB_TAG = None  # that of its quantisation method
HOLDS_DRAFTS = True
SIDE_FILES = ()
SHARDING_KEY = "DCP_SHARDING_INFO"
SHARD_KEY = "modelexport_shard"
_AXES = ("tp", "pp", "ep")
_LISTED = 8


def arrays(plan: ShardPlan, config: dict[str, Any]) -> list[Array]:
    """The arrays in each rank's files; ``file`` is the rank's number, :func:`lay_out` names the files."""
    found = []
    for rank in range(plan.parallelism.size):
        for name in plan.names(rank):
            rule = plan.rules[name]
            boxes = [box for _, box in plan.held(name, rank)]
            found += [_array(str(rank), rule, box) for box in _joined(boxes, rule.dim)]
    return found


def _array(file: str, rule: TensorRule, box: Box) -> Array:
    shape = extent(box)
    share = Share(rule.name, box, (0,) * len(shape))
    return Array(file, rule.name, rule.dtype, shape, (share,), (offset(box), rule.shape))


def _joined(boxes: Sequence[Box], dim: int | None) -> list[Box]:
    """Rectangles of a fused tensor that touch are one: with one rank there is nothing to separate."""
    joined: list[Box] = []
    for box in boxes:
        if joined and dim is not None and joined[-1][dim][1] == box[dim][0]:
            joined[-1] = (*box[:dim], (joined[-1][dim][0], box[dim][1]), *box[dim + 1 :])
        else:
            joined.append(box)
    return joined


def lay_out(plan: ShardPlan, config: dict[str, Any], *, max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES) -> Layout:
    """Returns the layout: the files, and the place of every tensor in them.

    Raises:
        CheckpointError: elements that fill no whole bytes.
    """
    grid = plan.parallelism
    about: dict[str, dict[str, int]] = {}

    def name(rank: str, number: int, count: int) -> str:
        file = f"shard-{int(rank):05d}-model-{number + 1:05d}-of-{count:05d}.safetensors"
        about[file] = {"rank": int(rank), "ranks": grid.size, "file": number, "files": count}
        return file

    def metadata(file: str, group: Sequence[Array]) -> dict[str, str]:
        where = {array.name: _sharding(array) for array in group}
        shard = {**about[file], **{axis: getattr(grid, axis) for axis in _AXES}}
        return {"format": "pt", SHARDING_KEY: _text(where), SHARD_KEY: _text(shard)}

    divided = divide(arrays(plan, config), max_bytes=max_shard_bytes, name=name, one_per_key=True)
    return lay_out_files(divided, plan.rules.values(), file_metadata=metadata)


def _sharding(array: Array) -> dict[str, list[int]]:
    assert array.chunk is not None
    offsets, shape = array.chunk
    return {"saved_offsets": list(offsets), "global_shape": list(shape)}


def _text(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def side_files(plan: ShardPlan, config: dict[str, Any], layout: Layout) -> Mapping[str, bytes]:
    """None: config.json is the model's own, as in a checkpoint that is not sharded."""
    return {}


def recognises(directory: Path) -> bool:
    """Returns whether the first safetensors file of a directory places its arrays in their tensors."""
    names = _file_names(directory)
    if not names:
        return False
    try:
        first = directory / names[0]
        return header_mentions(first, SHARDING_KEY) and SHARDING_KEY in read_header(first).metadata
    except CheckpointError:
        return False  # whoever opens it as a plain checkpoint says what is wrong with the file


def _file_names(directory: Path) -> list[str]:
    return sorted(name for name in os.listdir(directory) if name.endswith(".safetensors"))


def open(  # the name that every format module offers
    directory: Path, config: dict[str, Any] | None, rules: Callable[..., list[TensorRule]] | None = None
) -> Checkpoint:
    """Open a checkpoint that :func:`lay_out`, or torch, laid out.

    Args:
        config: config.json's content, where the directory's own is not to be taken.
        rules: not needed; the files tell every tensor's name and shape.

    Raises:
        CheckpointError: a damaged file, files or parts of tensors that are missing, files that contradict each
            other; everything that is wrong.
    """
    if config is None and has_file(directory, "config.json"):
        config = read_json(directory / "config.json", largest=LARGEST_CONFIG)
    names = _file_names(directory)
    reading = _Reading(directory)
    headers: dict[Path, Header] = {}
    for name in names:
        try:
            headers[directory / name] = header = read_header(directory / name)
        except CheckpointError as error:
            reading.problems.append(str(error))
            continue
        reading.add(header, name)
    reading.finish()
    raise_problems(directory, reading.problems)
    infos = {
        name: tensor_info(name, info.dtype, reading.shapes[name], directory) for name, info in reading.infos.items()
    }
    places = {name: tuple(found) for name, found in reading.places.items()}
    return Checkpoint(directory, infos, config, headers, places, NAME)


class _Reading:
    """Collects what the files' headers say, and what is wrong with it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.problems: list[str] = []
        self.infos: dict[str, TensorInfo] = {}  # the first array of each tensor
        self.shapes: dict[str, tuple[int, ...]] = {}  # of the whole tensors
        self.places: dict[str, list[Placement]] = {}
        self.shards: dict[str, dict[str, int]] = {}

    def add(self, header: Header, file: str) -> None:
        """Take in one file."""
        try:
            sharding = _read_object(header.metadata, SHARDING_KEY)
            if sharding is None:
                raise CheckpointError(f"has no {SHARDING_KEY}, the other files have: what tensors is it a part of?")
            self._note_shard(file, _read_object(header.metadata, SHARD_KEY))
        except CheckpointError as error:
            self.problems.append(f"{file}: {error}")
            return
        for name, info in header.infos.items():
            try:
                self._add_array(info, sharding.get(name))
            except CheckpointError as error:
                self.problems.append(f"{file}: {name}: {error}")

    def _note_shard(self, file: str, shard: dict[str, Any] | None) -> None:
        if shard is None:
            return
        keys = ("rank", "ranks", "file", "files")
        if not all(_is_size(shard.get(key)) for key in keys):
            raise CheckpointError(f"{SHARD_KEY} must have {', '.join(keys)} as numbers, is {shard}")
        self.shards[file] = shard

    def _add_array(self, info: TensorInfo, where: Any) -> None:
        offsets, shape = _placing(info, where)
        first = self.infos.setdefault(info.name, info)
        if first.dtype != info.dtype:
            raise CheckpointError(f"is {info.dtype}, but {first.dtype} in {first.path.name}")
        if shape is not None and self.shapes.setdefault(info.name, shape) != shape:
            raise CheckpointError(f"is a part of {list(shape)}, but in another file of {list(self.shapes[info.name])}")
        box = placed(offsets, info.shape)
        if len(shape or box) != len(first.shape) or len(box) != len(first.shape):
            raise CheckpointError(f"has {len(box)} dims, but {len(first.shape)} in {first.path.name}")
        itemsize, rest = divmod(dtype_bits(info.dtype), 8)
        if rest:
            raise CheckpointError(f"{info.dtype} elements fill no whole bytes; it cannot be sharded")
        place = Placement(box, info.path, info.offset, row_major(info.shape, itemsize))
        self.places.setdefault(info.name, []).append(place)

    def finish(self) -> None:
        """Find files and parts of tensors that are not there."""
        lost = self._check_files()
        holes = []
        for name, places in self.places.items():
            # torch tells no shape: as far as the files reach
            ends = tuple(max(stops) for stops in zip(*(_stops(place.box) for place in places), strict=True))
            shape = self.shapes.setdefault(name, ends)
            for place in places:
                if any(stop > size for stop, size in zip(_stops(place.box), shape, strict=True)):
                    where = f"{list(extent(place.box))} at {list(offset(place.box))}"
                    self.problems.append(f"{place.path.name}: {name}: {where} is outside of its whole {list(shape)}")
            missing = uncovered(whole(shape), [place.box for place in places]) if 0 not in shape else []
            if missing:
                ranges = ", ".join(f"{start}:{stop}" for start, stop in missing[0])
                holes.append(f"{name} {list(shape)}: no file holds its part [{ranges}]")
        if lost and holes:  # of which the files that are missing are the reason
            holes[1:] = [f"{len(holes) - 1} more tensors are not whole"]
        self.problems += holes

    def _check_files(self) -> bool:
        """Every rank's every file must be there, once, and all of one parallelism; whether any is missing."""
        if not self.shards:
            return False
        grids = {
            json.dumps({key: shard.get(key) for key in ("ranks", *_AXES)}): file for file, shard in self.shards.items()
        }
        if len(grids) > 1:
            texts = (f"{file}: {grid}" for grid, file in list(grids.items())[:2])
            self.problems.append(f"its files are of different parallelisms ({'; '.join(texts)})")
            return False
        counts: dict[int, int] = {}
        there: dict[tuple[int, int], str] = {}
        for file, shard in self.shards.items():
            rank, number = shard["rank"], shard["file"]
            if (rank, number) in there:
                self.problems.append(f"{file} and {there[rank, number]} are both file {number + 1} of rank {rank}")
            there[rank, number] = file
            if counts.setdefault(rank, shard["files"]) != shard["files"]:
                self.problems.append(f"{file}: rank {rank} has {shard['files']} files, by others {counts[rank]}")
        # No longer a list than there are files, whatever number a stranger wrote.
        ranks = next(iter(self.shards.values()))["ranks"]
        lost = [rank for rank in range(min(ranks, len(there) + _LISTED)) if rank not in counts]
        if lost:
            self.problems.append(f"it is made of {ranks} ranks' files, those of rank {_listed(lost)} are missing")
        for rank, count in counts.items():
            gone = [number + 1 for number in range(min(count, len(there) + _LISTED)) if (rank, number) not in there]
            if gone:
                self.problems.append(f"rank {rank} has {count} files, file {_listed(gone)} is missing")
            lost += gone
        return bool(lost)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:_LISTED])) + (", ..." if len(numbers) > _LISTED else "")


def _stops(box: Box) -> tuple[int, ...]:
    return tuple(stop for _, stop in box)


def _read_object(metadata: Mapping[str, str], key: str) -> dict[str, Any] | None:
    text = metadata.get(key)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{key} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{key} must be a JSON object, is a {type(value).__name__}")
    return value


def _placing(info: TensorInfo, where: Any) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """The offset of an array in its tensor, and the tensor's shape where it is recorded."""
    known = where if isinstance(where, dict) else {}
    offsets = _sizes(known.get("saved_offsets"))
    if offsets is None or len(offsets) != len(info.shape):
        raise CheckpointError(f"{SHARDING_KEY} must tell {len(info.shape)} saved_offsets, has {quoted(where)}")
    if known.get("global_shape") is None:
        return offsets, None
    shape = _sizes(known["global_shape"])
    if shape is None:
        raise CheckpointError(f"{SHARDING_KEY}: global_shape must be a list of sizes, is {known['global_shape']!r}")
    return offsets, shape


def _sizes(value: Any) -> tuple[int, ...] | None:
    return tuple(value) if isinstance(value, list) and all(_is_size(size) for size in value) else None


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62
