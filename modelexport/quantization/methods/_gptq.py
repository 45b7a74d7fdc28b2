"""GPTQ's tensors, whichever way their zero points are stored: what ``gptq.py`` and ``gptq_read_only.py`` share.

Follows https://github.com/ModelCloud/GPTQModel (and AutoGPTQ before it). Of a linear ``[out, in]`` with b bits:

- ``qweight`` int32 ``[in * b / 32, out]``: consecutive input channels a word, low bits first;
- ``qzeros`` int32 ``[in / g, out * b / 32]``, packed along the output channels;
- ``scales`` ``[in / g, out]``;
- ``g_idx`` int32 ``[in]``: the group of each input channel, column // g unless they were grouped by activation order.

A value is (q - zero point) * scale, both unsigned: our native numbers, which are stored with 2 ** (b - 1) added.
Checkpoints of format "gptq" (v1) store the zero point minus one, those of "gptq_v2" the zero point.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from modelexport.errors import CheckpointError
from modelexport.quantization.methods import _words
from modelexport.quantization.methods.base import Axes, Scheme, StoredTensorSpec, WeightSlice
from modelexport.system.dtypes import FLOATS

if TYPE_CHECKING:
    from torch import Tensor

    from modelexport.quantization.methods.base import NumberFormatProtocol

_ACT_ORDER = (
    "g_idx puts columns into groups by activation order (desc_act), which no number format of ours holds: "
    "--quant none dequantises such a model exactly, and it can then be quantised anew"
)


def is_act_ordered(scheme: Scheme) -> bool:
    """Returns whether any column may belong to any group."""
    return scheme.weights.get("actorder") == "group"


def tensor_specs(scheme: Scheme, shape: tuple[int, int]) -> dict[str, StoredTensorSpec]:
    """``qweight``, ``qzeros``, ``scales`` and ``g_idx`` of a linear ``[out, in]``.

    Raises:
        CheckpointError: its channels do not fill the words, or its groups do not divide its inputs.
    """
    rows, cols = shape
    per_word = 32 // scheme.bits
    grouped = scheme.weights.get("strategy") == "group"
    group = scheme.weights.get("group_size") if grouped else cols
    if rows % per_word or cols % per_word or not isinstance(group, int) or (group and cols % group):
        raise CheckpointError(
            f"{scheme.name}: a linear of {rows} outputs and {cols} inputs cannot be gptq in groups of {group}: "
            f"both go by {per_word}, inputs by whole groups too"
        )
    groups = cols // group if group else 0
    along = (1, group) if grouped and not is_act_ordered(scheme) else None
    packed: Axes = (along, (0, per_word))
    return {
        "qweight": StoredTensorSpec(("I32",), ((cols // per_word, rows),), ((1, per_word), (0, 1))),
        "qzeros": StoredTensorSpec(("I32",), ((groups, rows // per_word),), packed),
        "scales": StoredTensorSpec(FLOATS, ((groups, rows),), (along, (0, 1))),
        "g_idx": StoredTensorSpec(("I32",), ((cols,),), ((1, 1),)),
    }


def encode(number_format: NumberFormatProtocol, tensors: Mapping[str, Tensor], part: WeightSlice) -> dict[str, Tensor]:
    """Native tensors as GPTQ's; zero points minus one where the format is symmetric, else as they are."""
    import torch

    scales = tensors["weight_scale"].t().contiguous()
    bits, symmetric = bits_of(number_format), is_symmetric(number_format)
    if symmetric:
        shape = (scales.shape[0], part.extent[0] * bits // 32)
        qzeros = torch.full(shape, _repeated(2 ** (bits - 1) - 1, bits), dtype=torch.int32, device=scales.device)
    else:
        qzeros = tensors["weight_zero_point"].t().contiguous()
    return {
        "qweight": tensors["weight_packed"].t().contiguous(),
        "qzeros": qzeros,
        "scales": scales,
        "g_idx": _groups_of_columns(number_format, part, scales.device),
    }


def decode(
    number_format: NumberFormatProtocol, tensors: Mapping[str, Tensor], part: WeightSlice, *, minus_one: bool
) -> dict[str, Tensor]:
    """The inverse of :func:`encode`.

    Args:
        minus_one: whether the zero points of an asymmetric format are stored minus one. Those of a symmetric one are
            all the same, and say themselves which way.

    Raises:
        CheckpointError: the columns were grouped by activation order, or the format is symmetric and its zero points
            are not in the middle.
    """
    import torch

    if not _is_in_order(number_format, tensors, part):
        raise CheckpointError(_ACT_ORDER)
    qzeros, scales = (_own_groups(tensors[suffix], number_format, part) for suffix in ("qzeros", "scales"))
    found = {
        "weight_packed": tensors["qweight"].t().contiguous(),
        "weight_scale": scales.t().contiguous(),
        "weight_shape": torch.tensor(part.shape, dtype=torch.int64, device=scales.device),
    }
    stored = _zero_points(number_format, qzeros, minus_one=minus_one)
    return found if stored is None else {**found, "weight_zero_point": stored.t().contiguous()}


def dequantise(
    number_format: NumberFormatProtocol, tensors: Mapping[str, Tensor], part: WeightSlice, *, minus_one: bool
) -> Tensor:
    """The weight that the tensors stand for, also of columns that were grouped by activation order.

    Those no number format holds, since each has a group of its own; their values are the same as a format's would be:
    exact in float32.

    Args:
        tensors: of the part. Where the columns are not in order, the scales and zero points of all groups, as the
            promised axes say.
        minus_one: as for :func:`decode`.

    Returns:
        float32 ``[out, in]``, the columns in the weight's own order.

    Raises:
        CheckpointError: a column's group is none that has scales; or a symmetric format's zero points are not in the
            middle.
    """
    if _is_in_order(number_format, tensors, part):
        return number_format.dequantise(decode(number_format, tensors, part, minus_one=minus_one))
    bits, scales, g_idx = bits_of(number_format), tensors["scales"], tensors["g_idx"].long()
    if not (int(g_idx.min()) >= 0 and int(g_idx.max()) < scales.shape[0]):
        raise CheckpointError(
            f"g_idx holds groups {int(g_idx.min())} to {int(g_idx.max())}, but there are scales of {scales.shape[0]}"
        )
    stored = _zero_points(number_format, tensors["qzeros"], minus_one=minus_one)
    values = _words.unpack(tensors["qweight"].t(), bits, part.extent[1])
    if stored is None:
        values = values - 2 ** (bits - 1)
    else:
        values = values - _words.unpack(stored, bits, part.extent[0]).t()[:, g_idx]
    return values.float() * scales.float().t()[:, g_idx]


def _is_in_order(number_format: NumberFormatProtocol, tensors: Mapping[str, Tensor], part: WeightSlice) -> bool:
    """Returns whether each column is in the group that its place gives it."""
    import torch

    g_idx = tensors["g_idx"]
    return torch.equal(g_idx, _groups_of_columns(number_format, part, g_idx.device))


def _zero_points(number_format: NumberFormatProtocol, qzeros: Tensor, *, minus_one: bool) -> Tensor | None:
    """Zero points as they are, packed as before; None where the format is symmetric.

    Raises:
        CheckpointError: it is, and they are not in the middle.
    """
    bits = bits_of(number_format)
    if not is_symmetric(number_format):
        return _words.add(qzeros, bits, 1) if minus_one else qzeros
    middle = 2 ** (bits - 1)
    if not any(bool((qzeros == _repeated(stored, bits)).all()) for stored in (middle - 1, middle)):
        raise CheckpointError(
            f"qzeros holds other zero points than {middle}, but config.json says that the weights are symmetric: "
            "set sym to false in its quantization_config"
        )
    return None


def bits_of(number_format: NumberFormatProtocol) -> int:
    """Bits of a weight."""
    return int(number_format.weight_arguments()["num_bits"])


def is_symmetric(number_format: NumberFormatProtocol) -> bool:
    """True where its weights have no zero points."""
    return bool(number_format.weight_arguments().get("symmetric", True))


def group_size(number_format: NumberFormatProtocol) -> int:
    """Columns of a group; -1 is a whole row."""
    weights = number_format.weight_arguments()
    return int(weights["group_size"]) if weights.get("strategy") == "group" else -1


def _own_groups(stored: Tensor, number_format: NumberFormatProtocol, part: WeightSlice) -> Tensor:
    """Of scales or zero points, those of the part's columns; those of all groups where they could not be cut."""
    group = group_size(number_format)
    if group == -1 or part.origin[1] % group:
        return stored
    first, count = part.origin[1] // group, -(-part.extent[1] // group)
    return stored if stored.shape[0] == count else stored[first : first + count]


def _groups_of_columns(number_format: NumberFormatProtocol, part: WeightSlice, device: object) -> Tensor:
    """int32 ``[columns of the part]``: the group of each, counted in the whole weight."""
    import torch

    columns = torch.arange(part.extent[1], dtype=torch.int32, device=device)  # type: ignore[call-overload]
    group = group_size(number_format)
    if group == -1:
        return torch.zeros_like(columns)
    return (columns + part.origin[1]).div_(group, rounding_mode="floor")


def _repeated(value: int, bits: int) -> int:
    """A word that holds ``value`` in each of its places, as int32."""
    word = sum(value << at for at in range(0, 32, bits))
    return word - (1 << 32) if word >= 1 << 31 else word
