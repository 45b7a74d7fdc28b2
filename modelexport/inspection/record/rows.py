"""Rows of modelexport.json on the tensors that were written, and the facts that decide which engine loads them.

Of the record alone: no weight is read, and torch is not imported. A record may be a stranger's: what is not of the
kind that an export writes is passed over.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from modelexport.checkpoints.safetensors.file import tensor_nbytes
from modelexport.models.engines import Linear
from modelexport.models.loading import Stored

__all__ = ["Row", "layer_modules", "linears_of", "rows_of", "stored_of"]

DEFAULT_GROUP = 128
"""Of every number format that has groups of several sizes."""
_NUMBER = re.compile(r"\.\d+(?=\.|$)")


@dataclass
class Row:
    """All modules of one name and number format taken together.

    Attributes:
        name: within a decoder layer, ``*`` for an expert's number.
        number_format: ``"int4"``, ``"int4:32"``, or the dtype of what is not quantised.
        quantised: whether it is.
        weights, nbytes: elements of the weights; bytes stored, scales and biases included.
        sqnr_db: of the worst module, and its name; None where nothing was rounded.
    """

    name: str
    number_format: str
    quantised: bool
    count: int = 0
    weights: int = 0
    nbytes: int = 0
    sqnr_db: float | None = None
    worst: str | None = None

    @property
    def bits(self) -> float:
        """Stored bits per weight."""
        return 8 * self.nbytes / max(1, self.weights)


def layer_modules(record: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """(full name, name within a decoder layer, description) of every module of a record."""
    layers = record.get("layers")
    for layer in layers if isinstance(layers, list) else ():
        if not isinstance(layer, Mapping) or not isinstance(layer.get("modules"), Mapping):
            continue
        prefix = str(layer.get("name", ""))
        for path, module in layer["modules"].items():
            if isinstance(module, Mapping):
                full = ".".join(part for part in (prefix, path) if part)
                own = path if layer.get("index") is not None else full
                yield full, _NUMBER.sub(".*", own), module


def rows_of(record: Mapping[str, Any]) -> list[Row]:
    """One row for each name and number format, in the order of the record."""
    found: dict[tuple[str, str], Row] = {}
    sqnr = record.get("sqnr_db")
    errors = sqnr if isinstance(sqnr, Mapping) else {}
    for full, name, module in layer_modules(record):
        tensors = [tensor for tensor in _mapping(module.get("tensors")).values() if isinstance(tensor, Mapping)]
        label = _label(module)
        written = label if label is not None else _dtype(module)
        cache = str(module.get("role", "")).endswith("_cache")  # scales of the KV cache: they belong to no weight
        if cache:
            name = f"{name} (KV cache scales)"
        row = found.setdefault((name, written), Row(name, written, label is not None))
        row.count += 1
        row.weights += 0 if cache else math.prod(_shape(module))
        row.nbytes += sum(_nbytes(tensor) for tensor in tensors)
        error = errors.get(full)
        if isinstance(error, (int, float)) and (row.sqnr_db is None or error < row.sqnr_db):
            row.sqnr_db, row.worst = float(error), full
    return list(found.values())


def stored_of(record: Mapping[str, Any]) -> Stored:
    """The facts of an exported checkpoint that decide which engine loads it."""
    recipe = _mapping(record.get("recipe"))
    ways = [recipe.get(f"target_{axis}", 1) for axis in ("tp", "pp", "ep")]
    model_type = _mapping(record.get("model")).get("model_type")
    labels = {label for _, _, module in layer_modules(record) if (label := _label(module)) is not None}
    return Stored(
        format=str(recipe.get("format", "hf")),
        number_formats=tuple(sorted(labels)) or ("none",),
        model_type=model_type if isinstance(model_type, str) else None,
        sharded=any(size != 1 for size in ways),
        kv_cache=recipe.get("kv_cache") is not None,
    )


def linears_of(record: Mapping[str, Any]) -> Iterator[Linear]:
    """The quantised linears, as the table of what engines refuse wants them."""
    for full, name, module in layer_modules(record):
        shape = _shape(module)
        if _label(module) is not None and len(shape) == 2:
            yield Linear(
                full,
                str(module["number_format"]),
                (shape[0], shape[1]),
                module.get("group_size"),
                str(module.get("role", "")),
                str(module.get("partition", "replicated")),
                ".*" in name,
            )


def _label(module: Mapping[str, Any]) -> str | None:
    name, size = module.get("number_format"), module.get("group_size")
    if not isinstance(name, str) or name == "none":
        return None
    return name if size in (None, DEFAULT_GROUP) else f"{name}:{size}"


def _dtype(module: Mapping[str, Any]) -> str:
    tensors = _mapping(module.get("tensors"))
    dtypes = [str(tensor["dtype"]).lower() for tensor in tensors.values() if _mapping(tensor).get("dtype")]
    return dtypes[0] if dtypes else "-"


def _shape(module: Mapping[str, Any]) -> tuple[int, ...]:
    shape = module.get("shape")
    good = isinstance(shape, list) and all(isinstance(n, int) and n >= 0 for n in shape)
    return tuple(shape) if good and shape is not None else (0,)


def _nbytes(tensor: Mapping[str, Any]) -> int:
    dtype = tensor.get("dtype")
    return tensor_nbytes(dtype, _shape(tensor)) if isinstance(dtype, str) else 0


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
