"""Tensors in ``.distcp`` files: looked up chunk by chunk where a checkpoint has them, or laid out before any is there.

What :mod:`modelexport.checkpoints.formats.dcp` and :mod:`modelexport.checkpoints.formats.megatron` share. Both keep
tensors under keys of a global state dict, cut into rectangular chunks; each chunk is an archive of ``torch.save`` in
one of the files. They differ in their keys, and in what of a model's tensors is in each.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modelexport.checkpoints.safetensors.arrays import Array, Share, placements
from modelexport.checkpoints.safetensors.file import Layout, LayoutFile, TensorInfo
from modelexport.checkpoints.safetensors.placement import Placement
from modelexport.checkpoints.torch_archive.dcp_metadata import Chunk, Metadata, StoredTensor
from modelexport.checkpoints.torch_archive.zip import ALIGNMENT, ArchivedTensor, envelope, find_tensor
from modelexport.errors import CheckpointError, listed, quoted
from modelexport.sharding.boxes import Box, extent, placed
from modelexport.sharding.rules import TensorRule
from modelexport.system.dtypes import tensor_nbytes
from modelexport.system.small_files import LARGEST_CONFIG, has_file, open_regular, read_json

SUFFIX = ".distcp"


def sharded_backend(directory: Path) -> str | None:
    """The back end that Megatron's ``metadata.json`` names; None where there is no such file, or another program's."""
    try:
        found = read_json(directory / "metadata.json", largest=1 << 16).get("sharded_backend")
    except CheckpointError:
        return None
    return found if isinstance(found, str) else None


@dataclass(frozen=True)
class StoredKey:
    """The part of a model's tensor that a key of a checkpoint holds.

    Attributes:
        key: without the prefix that all keys of the model may have.
        shape: of the key's global tensor.
        shares: what of the tensor is in it; each share's origin is in the global tensor.
        padded: whether dim 0 may be longer, by rows of padding.
    """

    key: str
    shape: tuple[int, ...]
    shares: tuple[Share, ...]
    padded: bool = False

    def fits(self, shape: Sequence[int]) -> bool:
        """Returns whether a global tensor of this shape can hold it."""
        longer = self.padded and len(shape) == len(self.shape) and shape[0] >= self.shape[0]
        return tuple(shape) == self.shape or (longer and tuple(shape[1:]) == self.shape[1:])


Option = tuple[StoredKey, ...]
"""One of the ways in which a checkpoint may keep a tensor: under one key, or in parts under several."""


def own_config(directory: Path, config: dict[str, Any] | None) -> dict[str, Any]:
    """The config.json to go by: the given one, else the directory's own.

    Raises:
        CheckpointError: there is neither.
    """
    if config is None and has_file(directory, "config.json"):
        config = read_json(directory / "config.json", largest=LARGEST_CONFIG)
    if config is None:
        raise CheckpointError(
            f"{directory} is a distributed checkpoint without a config.json; give --config DIR, the directory or file "
            "of the model's config.json"
        )
    return config


# ------------------------------------------------------------------ reading


_COPIES = ("optim", "exp_avg", "ema.", "shadow", "teacher", "reference")
"""Words in the prefix of a second copy of a model's tensors; the first two are an optimizer's."""


def find_prefixes(keys: Iterable[str], names: Iterable[str]) -> tuple[list[str], int]:
    """The prefixes of a model's names in a checkpoint's keys under which most are found, and their number.

    Of equally good ones only those that do not speak of an optimizer or an average. ``([], 0)``: no name is found.
    """
    wanted = set(names)
    lasts = {name.rsplit(".", 1)[-1] for name in wanted}
    counts: dict[str, int] = defaultdict(int)
    for key in keys:
        if key.rsplit(".", 1)[-1] not in lasts:
            continue
        at = 0
        while at >= 0:
            if key[at:] in wanted:
                counts[key[:at]] += 1
            at = key.find(".", at) + 1 or -1
    most = max(counts.values(), default=0)
    equal = sorted(prefix for prefix, count in counts.items() if count == most)
    return [prefix for prefix in equal if not any(word in prefix.lower() for word in _COPIES)] or equal, most


def the_prefix(directory: Path, prefixes: Sequence[str], count: int) -> str:
    """The only one of the prefixes.

    Raises:
        CheckpointError: the checkpoint holds several such models, and nothing tells which is meant.
    """
    if len(prefixes) > 1:
        raise CheckpointError(
            f"{directory}: {count:,} of the model's tensors are there {len(prefixes)} times, behind "
            f"{', '.join(map(repr, prefixes))}; save the one that is meant by itself"
        )
    return prefixes[0] if prefixes else ""


def choose(
    rules: Sequence[TensorRule], options: Callable[[TensorRule], Sequence[Option]], keys: Mapping[str, Any]
) -> dict[str, Option]:
    """For each rule the first of its options whose keys are all there; nothing for those that have none."""
    found = {}
    for rule in rules:
        for option in options(rule):
            if all(stored.key in keys for stored in option):
                found[rule.name] = option
                break
    return found


def bind(
    directory: Path,
    metadata: Metadata,
    chosen: Mapping[str, Option],
    shapes: Mapping[str, tuple[int, ...]],
    prefix: str,
) -> tuple[dict[str, TensorInfo], dict[str, tuple[Placement, ...]]]:
    """Find every chunk that holds something of the chosen tensors, and say where their rectangles are.

    Args:
        chosen: how each tensor is kept, under keys that the metadata has.
        shapes: of each tensor.
        prefix: of all keys.

    Returns:
        (the tensors' infos, their placements), in the order of ``chosen``.

    Raises:
        CheckpointError: files are missing or damaged, or do not hold what the metadata says; all problems are listed.
    """
    problems: list[str] = []
    dtypes: dict[str, str] = {}
    shares: dict[str, list[Share]] = defaultdict(list)
    for name, option in chosen.items():
        for kept in option:
            key = prefix + kept.key
            try:
                tensor = metadata.tensor(key)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            if not kept.fits(tensor.shape):
                problems.append(f"{quoted(key)}: its shape is {list(tensor.shape)}, the model's {list(kept.shape)}")
            elif dtypes.setdefault(name, tensor.dtype) != tensor.dtype:
                problems.append(f"{quoted(name)}: parts of it are {dtypes[name]}, others {tensor.dtype}")
            else:
                shares[key].extend(kept.shares)
    wanted = [metadata.tensor(key) for key in shares]
    stored = _find_all(directory, wanted, problems)
    if problems:
        raise CheckpointError(f"{directory}:{listed(dict.fromkeys(problems))}")
    places: dict[str, list[Placement]] = {name: [] for name in chosen}
    for tensor in wanted:
        for chunk, share in _within_chunks(tensor, shares[tensor.key]):
            places[share.tensor].append(_placement(directory / chunk.file, stored[chunk], share))
    infos = {
        name: TensorInfo(name, dtype, shapes[name], directory, 0, tensor_nbytes(dtype, shapes[name]))
        for name, dtype in dtypes.items()
    }
    return infos, {name: tuple(found) for name, found in places.items()}


def _find_all(directory: Path, tensors: Sequence[StoredTensor], problems: list[str]) -> dict[Chunk, ArchivedTensor]:
    """Read the envelopes of all chunks, file by file in the order of their bytes."""
    by_file: dict[str, list[tuple[Chunk, StoredTensor]]] = defaultdict(list)
    for tensor in tensors:
        for chunk in tensor.chunks:
            by_file[chunk.file].append((chunk, tensor))
    found: dict[Chunk, ArchivedTensor] = {}
    for file, chunks in sorted(by_file.items()):
        path = directory / file
        try:
            stream = open_regular(path)
        except CheckpointError as error:
            problems.append(f"{error}; it holds {len(chunks):,} chunks of the model")
            continue
        with stream:
            fd = stream.fileno()
            size = os.fstat(fd).st_size
            for chunk, tensor in sorted(chunks, key=lambda pair: pair[0].start):
                try:
                    found[chunk] = _find(fd, size, chunk, tensor)
                except (CheckpointError, OSError) as error:
                    problems.append(f"{path}: {quoted(tensor.key)} at byte {chunk.start:,}: {error}")
    return found


def _find(fd: int, size: int, chunk: Chunk, tensor: StoredTensor) -> ArchivedTensor:
    if chunk.start + chunk.length > size:
        raise CheckpointError(f"cut short: it ends at byte {chunk.start + chunk.length:,}, the file at {size:,}")
    stored = find_tensor(fd, chunk.start, chunk.length)
    if (stored.dtype, stored.shape) != (tensor.dtype, extent(chunk.box)):
        raise CheckpointError(
            f"holds {stored.dtype} {list(stored.shape)}, the metadata says {tensor.dtype} {list(extent(chunk.box))}"
        )
    return stored


def _within_chunks(tensor: StoredTensor, shares: Sequence[Share]) -> Iterable[tuple[Chunk, Share]]:
    """The parts of the shares in each chunk. Where all are of single layers of a stack, only that layer's are tried."""
    dims = len(tensor.shape)
    stacked = all(len(share.box) < dims for share in shares)
    by_layer: dict[int, list[Share]] = defaultdict(list)
    for share in shares:
        by_layer[share.origin[0] if stacked else 0].append(share)
    for chunk in tensor.chunks:
        layers = range(*chunk.box[0]) if stacked else range(1)
        for layer in layers:
            for share in by_layer.get(layer, ()):
                inside = clip(share, chunk.box)
                if inside is not None:
                    yield chunk, inside


def clip(share: Share, chunk: Box) -> Share | None:
    """The part of a share of a global array that lies in a chunk of it, with its origin in the chunk; None: nothing."""
    lead = len(chunk) - len(share.box)
    origin = [at - start for at, (start, _) in zip(share.origin, chunk, strict=True)]
    if any(not start <= at < stop for at, (start, stop) in zip(share.origin[:lead], chunk[:lead], strict=True)):
        return None
    box = []
    steps = share.steps or (1,) * len(share.box)
    for dim, ((start, stop), step) in enumerate(zip(share.box, steps, strict=True), lead):
        low = max(0, -(origin[dim] // step))  # the first that is not before the chunk
        size = chunk[dim][1] - chunk[dim][0]
        first, last = start + low, min(stop, start - (origin[dim] - size) // step)
        if first >= last:
            return None
        origin[dim] += low * step
        box.append((first, last))
    return Share(share.tensor, tuple(box), tuple(origin), share.steps)


def _placement(path: Path, stored: ArchivedTensor, share: Share) -> Placement:
    begin = stored.offset + sum(i * stride for i, stride in zip(share.origin, stored.strides, strict=True))
    inner = stored.strides[len(stored.strides) - len(share.box) :]
    steps = share.steps or (1,) * len(share.box)
    return Placement(share.box, path, begin, tuple(s * step for s, step in zip(inner, steps, strict=True)))


def grouped(metadata: Metadata, used: Iterable[str]) -> dict[str, str]:
    """The keys of the checkpoint beside the used ones, in groups: ``"optimizer.*"`` -> what it is and how many."""
    taken = set(used)
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for key in (*metadata.keys, *metadata.objects):
        if key not in taken:
            groups[key.partition(".")[0], _kind(key)].append(key)
    found = {}
    for (top, kind), keys in groups.items():
        label = keys[0] if len(keys) == 1 else f"{top}.* ({kind})" if f"{top}.*" in found else f"{top}.*"
        found[label] = kind if len(keys) == 1 else f"{kind}, {len(keys):,} entries"
    return found


_KINDS = (
    ("_extra_state", "extra state of modules"),
    ("optim", "optimizer state"),
    ("exp_avg", "optimizer state"),
    ("scheduler", "learning-rate schedule"),
    ("dataloader", "position in the training data"),
    ("rng", "random number state"),
    ("freqs_cis", "a buffer that every engine computes itself"),
    ("inv_freq", "a buffer that every engine computes itself"),
    ("step", "training progress"),
    ("train_state", "training progress"),
)


_HEADS = ("lm_head.weight", "output.weight", "output_layer.weight")


def _kind(key: str) -> str:
    lower = key.lower()
    for word, kind in _KINDS:
        if word in lower:
            return kind
    if any(word in lower for word in _COPIES[2:]):
        return "another copy of the model's tensors"
    return "a head that config.json ties to the embedding" if lower.endswith(_HEADS) else "no tensor of the model"


# ------------------------------------------------------------------ writing


def lay_out(arrays: Sequence[Array], rules: Mapping[str, TensorRule]) -> Layout:
    """Give every array, each a chunk of its key, its place in its file; the envelopes around them are inserts.

    Raises:
        CheckpointError: a dtype that torch.save cannot keep.
    """
    starts, ends = _starts(arrays)
    inserts: dict[str, list[tuple[int, bytes]]] = {file: [] for file in ends}
    where: dict[int, tuple[Path, int]] = {}
    for array, start in zip(arrays, starts, strict=True):
        around = envelope(array.dtype, array.shape)
        inserts[array.file].append((start, around.head))
        inserts[array.file].append((start + around.length - len(around.tail), around.tail))
        where[id(array)] = Path(array.file), start + len(around.head)
    files = tuple(LayoutFile(file, b"", (), size, tuple(inserts[file])) for file, size in ends.items())
    infos = {
        name: TensorInfo(name, rule.dtype, rule.shape, Path(), 0, tensor_nbytes(rule.dtype, rule.shape))
        for name, rule in rules.items()
    }
    return Layout(files, infos, placements(arrays, lambda array: where[id(array)]))


def stored_tensors(arrays: Sequence[Array]) -> list[StoredTensor]:
    """The entries of ``.metadata`` for the files that :func:`lay_out` plans."""
    starts, _ = _starts(arrays)
    found: dict[str, StoredTensor] = {}
    chunks: dict[str, list[Chunk]] = defaultdict(list)
    for array, start in zip(arrays, starts, strict=True):
        assert array.chunk is not None
        at, shape = array.chunk
        found.setdefault(array.name, StoredTensor(array.name, array.dtype, shape, ()))
        length = envelope(array.dtype, array.shape).length
        chunks[array.name].append(Chunk(placed(at, array.shape), array.file, start, length))
    return [replace(tensor, chunks=tuple(chunks[key])) for key, tensor in found.items()]


def _starts(arrays: Sequence[Array]) -> tuple[list[int], dict[str, int]]:
    """The offset of each array's archive in its file, and the size of every file."""
    starts: list[int] = []
    ends: dict[str, int] = {}
    for array in arrays:
        start = ends.get(array.file, 0)
        start += -start % ALIGNMENT
        starts.append(start)
        ends[array.file] = start + envelope(array.dtype, array.shape).length
    return starts, ends
