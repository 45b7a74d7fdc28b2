"""The container of checkpoints that keep each rank's arrays in safetensors files of its own.

A format says which arrays there are (:mod:`modelexport.checkpoints.safetensors.arrays`); here they get their places in
files that are to be written, or are found in files that are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from modelexport.checkpoints.safetensors.arrays import Array, Share, placements
from modelexport.checkpoints.safetensors.conversions import Conversion
from modelexport.checkpoints.safetensors.header import Header, TensorInfo
from modelexport.checkpoints.safetensors.layout import Layout, SizedTensor, plan_file
from modelexport.checkpoints.safetensors.reader import Checkpoint
from modelexport.errors import CheckpointError
from modelexport.sharding.rules import TensorRule
from modelexport.system.dtypes import tensor_nbytes
from modelexport.system.small_files import open_regular

PROBLEMS_SHOWN = 12
Found = Mapping[str, Mapping[str, TensorInfo]]
"""The arrays that are there: by the file as the format names it, then by name."""


@dataclass(frozen=True)
class Widened(Array):
    """A float32 array of bfloat16 numbers, for engines that want a tensor in float32.

    A bfloat16 number is the upper half of the float32 of the same value, and numbers are stored lower half first: so
    to us it is a bfloat16 array twice as wide, with the numbers in every second column and zeros between them.
    """


@dataclass(frozen=True)
class Constant(Array):
    """An array that an engine wants to find and that says nothing of the model: its bytes are known in advance."""

    content: bytes = b""
    what: str = ""


def widened(file: str, name: str, tensor: str, shape: Sequence[int]) -> Widened:
    """A whole bfloat16 tensor as a float32 array of the same shape ``[.., n]``."""
    outer = (0,) * (len(shape) - 1)
    box = tuple((0, size) for size in shape)
    share = Share(tensor, box, (*outer, 1), (*(1 for _ in outer), 2))
    return Widened(file, name, "BF16", (*shape[:-1], 2 * shape[-1]), (share,))


def stored_form(array: Array) -> tuple[str, tuple[int, ...]]:
    """The dtype and shape by which a file's header knows an array."""
    if isinstance(array, Widened):
        return "F32", (*array.shape[:-1], array.shape[-1] // 2)
    return array.dtype, array.shape if array.stored_shape is None else array.stored_shape


def divide(
    arrays: Iterable[Array], *, max_bytes: int, name: Callable[[str, int, int], str], one_per_key: bool = False
) -> list[Array]:
    """Spread each file's arrays over several, in order.

    Args:
        max_bytes: a file is closed before the array that would make its data exceed this.
        name: of the new file, from the old one's name, its number from 0 on, and how many there are.
        one_per_key: whether arrays of one name go to different files, as safetensors wants; else there are none.
    """
    # The n-th arrays of their names share files of their own: one more file for each rank, not for each layer.
    lanes: dict[tuple[str, int], list[list[Array]]] = {}
    seen: dict[tuple[str, str], int] = {}
    filled: dict[tuple[str, int], int] = {}
    for array in arrays:
        repeated = seen.get((array.file, array.name), 0) if one_per_key else 0
        seen[array.file, array.name] = repeated + 1
        lane = (array.file, repeated)
        nbytes = tensor_nbytes(*stored_form(array))
        files = lanes.setdefault(lane, [[]])
        if files[-1] and filled[lane] + nbytes > max_bytes:
            files.append([])
            filled[lane] = 0
        filled[lane] = filled.get(lane, 0) + nbytes
        files[-1].append(array)
    by_file: dict[str, list[list[Array]]] = {}
    for (file, _), files in lanes.items():
        by_file.setdefault(file, []).extend(files)
    return [
        replace(array, file=name(file, number, len(groups)))
        for file, groups in by_file.items()
        for number, group in enumerate(groups)
        for array in group
    ]


def lay_out(
    arrays: Sequence[Array],
    rules: Iterable[TensorRule],
    *,
    file_metadata: Callable[[str, Sequence[Array]], Mapping[str, str]] | None = None,
) -> Layout:
    """Give every array its place.

    Args:
        arrays: those of one file form a group; files come in the order of their first arrays.
        rules: the tensors that the arrays hold parts of.
        file_metadata: strings for a file's ``__metadata__``, from its name and arrays; ``{"format": "pt"}``, which
            transformers wants, where None.

    Raises:
        CheckpointError: an unknown dtype, elements that fill no whole bytes.
    """
    groups: dict[str, list[Array]] = {}
    for array in arrays:
        groups.setdefault(array.file, []).append(array)
    files = []
    starts: dict[tuple[str, str], int] = {}
    for name, group in groups.items():
        metadata = {"format": "pt"} if file_metadata is None else file_metadata(name, group)
        file = plan_file(name, [_sized(array) for array in group], metadata)
        assert len(file.infos) == len({info.name for info in file.infos}), f"{name}: a name twice"
        starts.update({(name, info.name): info.offset for info in file.infos})
        inserts = [(starts[name, array.name], array.content) for array in group if isinstance(array, Constant)]
        files.append(replace(file, inserts=tuple(sorted(inserts))))
    paths, nowhere = {file: Path(file) for file in groups}, Path()
    found = placements(arrays, lambda array: (paths[array.file], starts[array.file, array.name]))
    infos = {rule.name: tensor_info(rule.name, rule.dtype, rule.shape, nowhere) for rule in rules}
    return Layout(tuple(files), infos, {name: found.get(name, ()) for name in infos})


def tensor_info(name: str, dtype: str, shape: Sequence[int], path: Path) -> TensorInfo:
    """The info of a tensor that lies in several places.

    Raises:
        CheckpointError: an unknown dtype, elements that fill no whole bytes.
    """
    return TensorInfo(name, dtype, tuple(shape), path, 0, tensor_nbytes(dtype, shape))


def _sized(array: Array) -> SizedTensor:
    dtype, shape = stored_form(array)
    return SizedTensor(array.name, dtype, shape, tensor_nbytes(dtype, shape))


def bind(
    directory: Path,
    arrays: Sequence[Array],
    found: Found,
    rules: Sequence[TensorRule],
    *,
    config: dict[str, Any],
    format_name: str,
    headers: Mapping[Path, Header],
) -> Checkpoint:
    """Find the arrays that a checkpoint must have in the files that are there.

    Args:
        arrays: what must be there; constants need not, as engines of another version have no such thing.
        found: what is there; an array may lie in any of several files that the format regards as one.
        rules: the tensors that the arrays hold parts of.

    Raises:
        CheckpointError: arrays are missing, of another shape or dtype, or unknown; all of them.
    """
    problems: list[str] = []
    left_out: dict[str, str] = {}
    wanted: dict[str, set[str]] = {}
    for array in arrays:
        wanted.setdefault(array.file, set()).add(array.name)
        info = found.get(array.file, {}).get(array.name)
        dtype, shape = stored_form(array)
        if info is None:
            if array.file in found and not isinstance(array, Constant):
                problems.append(f"{array.file}: {array.name} {dtype} {list(shape)} is missing")
        elif (info.dtype, info.shape) != (dtype, shape):
            problems.append(
                f"{info.path.name}: {array.name} is {info.dtype} {list(info.shape)}, "
                f"by config.json it is {dtype} {list(shape)}"
            )
        elif isinstance(array, Constant):
            left_out[array.name] = array.what
            if b"".join(_pieces(info)) != array.content:
                problems.append(f"{info.path.name}: {array.name} is not what every unquantised model has there")
    for file, infos in found.items():
        unknown = [name for name in infos if name not in wanted.get(file, ())]
        problems += [f"{infos[name].path.name}: {name} is no part of such a model" for name in unknown]
    raise_problems(directory, problems)
    parts = [array for array in arrays if not isinstance(array, Constant)]
    places = placements(parts, lambda array: _place(found[array.file][array.name]))
    infos = {rule.name: tensor_info(rule.name, rule.dtype, rule.shape, directory) for rule in rules}
    return Checkpoint(
        directory,
        infos,
        config,
        dict(headers),
        {name: places.get(name, ()) for name in infos},
        format_name,
        left_out,
    )


def _place(info: TensorInfo) -> tuple[Path, int]:
    return info.path, info.offset


def only_widened(info: TensorInfo) -> bool:
    """Returns whether all float32 numbers in a file are bfloat16 ones."""
    return holds(info, Conversion("BF16"))


def holds(info: TensorInfo, conversion: Conversion) -> bool:
    """Returns whether all float32 numbers of an array in a file are such as a conversion makes of its dtype's.

    Raises:
        CheckpointError: the file cannot be read.
    """
    import numpy as np

    return all(conversion.holds(np.frombuffer(text, np.float32)) for text in _pieces(info))


def _pieces(info: TensorInfo, size: int = 1 << 20) -> Iterator[bytes]:
    """An array's bytes, some at a time."""
    try:
        with open_regular(info.path) as stream:
            stream.seek(info.offset)
            for at in range(0, info.nbytes, size):
                yield stream.read(min(size, info.nbytes - at))
    except OSError as error:
        raise CheckpointError(f"{info.path}: cannot be read: {error.strerror or error}") from error


def stored_parts(arrays: Iterable[Array], found: Found) -> dict[str, TensorInfo]:
    """For each tensor of which the files hold any part, the first array that does."""
    parts: dict[str, TensorInfo] = {}
    for array in arrays:
        info = found.get(array.file, {}).get(array.name)
        if info is not None:
            for share in array.shares:
                parts.setdefault(share.tensor, info)
    return parts


def raise_problems(directory: Path, problems: Sequence[str]) -> None:
    """Raise what is wrong with a checkpoint, everything at once (of very many, the first and their number).

    Raises:
        CheckpointError: ``problems`` is not empty.
    """
    if problems:
        more = f"; and {len(problems) - PROBLEMS_SHOWN} more" if len(problems) > PROBLEMS_SHOWN else ""
        raise CheckpointError(f"{directory}: {'; '.join(problems[:PROBLEMS_SHOWN])}{more}")
