"""A layout written as a checkpoint: random numbers that mean something in its number format."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from modelexport.system.dtypes import tensor_nbytes, torch_dtype
from tests.published._models import DENSE, Layout

_HQQ = {
    **{name: torch.tensor(value) for name, value in (("nbits", 4), ("group_size", 64), ("axis", 1))},
    **{name: torch.tensor(0) for name in ("view_as_float", "quant_scale", "quant_zero", "offload_meta", "round_zero")},
    **{name: torch.tensor(1) for name in ("encoded_state_dict", "stores_quant_config", "channel_wise", "optimize")},
    "packing": torch.tensor(list(b"4bit_u8")),
    "unpack_view_dtype": torch.tensor(list(b"torch.uint8")),
    "compute_dtype": torch.tensor(list(b"torch.bfloat16")),
}
"""The settings beside HQQ's numbers."""


def write(layout: Layout, directory: Path) -> Path:
    """Writes config.json, the weights and what is beside them; returns ``directory``."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True)
    files = {**({"config.json": layout.config} if layout.config else {}), **layout.files}
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=2))
    quantised = layout.config.get("quantization_config") or {}
    act_order = bool(isinstance(quantised, Mapping) and quantised.get("desc_act"))
    shapes, tied = _shapes(layout), bool(layout.config.get("tie_word_embeddings"))
    tensors = {
        name: _filled(
            "model.embed_tokens.weight" if tied and name == "lm_head.weight" else name,
            dtype,
            shape,
            shapes,
            act_order=act_order,
        )
        for name, (dtype, shape) in layout.tensors.items()
    }
    save_file(tensors, directory / layout.weights, metadata={"format": "pt"})
    return directory


def write_headers(layout: Layout, directory: Path) -> Path:
    """Writes what :func:`write` does but for the weights: a header, and a hole of their size behind it."""
    directory.mkdir(parents=True)
    for name, content in {"config.json": layout.config, **layout.files}.items():
        if content:
            (directory / name).write_text(json.dumps(content, indent=2))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in layout.tensors.items():
        begin, end = end, end + tensor_nbytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    said = json.dumps(header).encode()
    said += b" " * (-len(said) % 8)
    with (directory / layout.weights).open("wb") as file:
        file.write(len(said).to_bytes(8, "little") + said)
        file.truncate(file.tell() + end)
    return directory


def _shapes(layout: Layout) -> dict[str, tuple[int, int]]:
    """Rows and columns of the linears whose tensors say them; of those without any, a dense decoder's."""
    found = {name: (shape[0], shape[1]) for name, (_, shape) in DENSE.items() if len(shape) == 2}
    for name, (_, shape) in layout.tensors.items():
        if name.endswith(".weight_packed"):
            found[name.removesuffix("_packed")] = (shape[0], shape[1] * 8)
    return found


def _filled(
    name: str, dtype: str, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, int]], *, act_order: bool
) -> Tensor:
    """The values of one tensor, the same in every run."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    leaf = name.rpartition(".")[2]
    kind = torch_dtype(dtype)
    if leaf == "weight_shape":
        return torch.tensor(shapes[name.removesuffix("_shape")])
    if leaf == "g_idx":
        order = torch.arange(shape[0], dtype=kind) // 128
        return order[torch.randperm(shape[0], generator=generator)] if act_order else order
    if leaf == "bitsandbytes__nf4":
        return _quant_state(shape[0], shapes[name.partition(".quant_state.")[0]])
    if leaf in _HQQ:
        return _HQQ[leaf].to(kind)
    if leaf == "shape":
        return torch.tensor(shapes[name.replace(".shape", ".weight")])
    if leaf == "qzeros":
        return torch.full(shape, 0x77777777, dtype=kind)
    if dtype == "U8" and leaf.endswith("scales"):  # exponents
        return torch.randint(118, 124, shape, generator=generator).to(kind)
    if not kind.is_floating_point:
        low, high = (0, 256) if dtype == "U8" else (-128, 128) if dtype == "I8" else (-(2**31), 2**31)
        return torch.randint(low, high, shape, generator=generator).to(kind)
    value = torch.randn(shape, generator=generator)
    if "scale" in leaf or leaf.endswith("absmax"):
        value = 0.001 + 0.001 * torch.rand(shape, generator=generator)
        return (value * (1000 if dtype == "F8_E4M3" else 1)).to(kind)
    if dtype == "F8_E4M3":
        return (64 * value).clamp(-448, 448).to(kind)
    if len(shape) < 2:
        return (1 + 0.05 * value).to(kind)
    return (value / math.sqrt(128)).to(kind)


def _quant_state(size: int, rows_and_columns: tuple[int, int]) -> Tensor:
    said = {
        "quant_type": "nf4",
        "blocksize": 64,
        "dtype": "bfloat16",
        "shape": list(rows_and_columns),
        "nested_blocksize": 256,
        "nested_dtype": "float32",
        "nested_offset": 0.04,
    }
    return torch.tensor(list(json.dumps(said).encode().ljust(size)), dtype=torch.uint8)
