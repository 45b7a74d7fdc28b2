"""Load a checkpoint of ours as a plain transformers model: quantised weights decoded, activations rounded by hooks.

Needs neither compressed-tensors nor an engine. Weights come only from the checkpoint's own files, checked as
everywhere; what is missing is an error, never made up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from modelexport.checkpoints.safetensors_file import Checkpoint, Reader
from modelexport.contents.opening import open_model
from modelexport.errors import CheckpointError
from modelexport.quantization.decoding import dequantise
from modelexport.quantization.formats import of_scheme
from modelexport.quantization.methods import (
    Part,
    QuantizationConfig,
    Scheme,
    extras,
    of_method,
    promised,
    read_quantization_config,
)

if TYPE_CHECKING:
    from modelexport.quantization.formats.base import NumberFormat

__all__ = ["load_dequantised", "load_reference"]


def load_reference(directory: str | Path, *, dtype: torch.dtype = torch.float32) -> Any:
    """An unquantised checkpoint as a transformers model on CPU, weights in ``dtype``, eager attention.

    Raises:
        CheckpointError: files damaged or missing, a tensor missing or left over, or it is quantised.
    """
    checkpoint = open_model(directory)
    if (checkpoint.config or {}).get("quantization_config"):
        raise CheckpointError(f"{directory} is quantised; load_dequantised reads it")
    return _load(checkpoint, dtype)


def load_dequantised(directory: str | Path, *, dtype: torch.dtype = torch.float32) -> Any:
    """A quantised checkpoint, decoded into the plain transformers architecture on CPU.

    Formats that quantise activations get a hook on every such linear that rounds its input as engines do.
    An unquantised checkpoint loads as with :func:`load_reference`.

    Raises:
        CheckpointError: files damaged or missing, a tensor missing, left over or of the wrong shape, or a
            quantisation that none of our number formats is.
    """
    return _load(open_model(directory), dtype)


def _load(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    # Parameters are made without storage and then filled, by names that only the checkpoint's files give:
    # from_pretrained would want compressed-tensors, and fills what is missing with random numbers.
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(checkpoint.directory), local_files_only=True, trust_remote_code=False)
    quantization = read_quantization_config(checkpoint.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    tensors = _Tensors(checkpoint)
    state: dict[str, Tensor] = {}
    try:
        for name, module, scheme in _quantised_linears(model, quantization):
            stored, shape = _take(tensors, name, module, scheme), (module.out_features, module.in_features)
            number_format = of_scheme(scheme)
            state[f"{name}.weight"] = dequantise(scheme.method, number_format, stored, shape, dtype=dtype)
            if number_format.input_arguments() is not None:
                multiplied = stored.pop("pre_quant_scale", None)
                native = of_method(scheme.method).decode(number_format, stored, Part.whole(shape))
                _hook_activations(module, number_format, native, multiplied)
        tensors.untaken -= _kv_scales(tensors.untaken, quantization)
        for name in sorted(tensors.untaken):
            value = tensors.take(name)
            state[name] = value.to(dtype) if value.is_floating_point() else value
    finally:
        tensors.reader.close()
    _fill(model, state, checkpoint)
    return model.eval()


def _kv_scales(names: Collection[str], quantization: QuantizationConfig | None) -> set[str]:
    """The scales of a KV cache, which the plain model has not."""
    if quantization is None or quantization.kv_cache_scheme is None:
        return set()
    ends = tuple(f".{where}" for where in of_method(quantization.method).KV_SCALES.values())
    return {name for name in names if name.endswith(ends)}


class _Tensors:
    """A checkpoint's tensors, each handed out once."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.reader = Reader(checkpoint)
        self.untaken = set(checkpoint.infos)

    def take(self, name: str) -> Tensor:
        self.untaken.remove(name)
        return self.reader.read(self.checkpoint.infos[name])


def _fill(model: Any, state: Mapping[str, Tensor], checkpoint: Checkpoint) -> None:
    try:
        left_over = model.load_state_dict(state, strict=False, assign=True).unexpected_keys
    except RuntimeError as error:
        raise CheckpointError(f"{checkpoint.directory} does not fit its config.json: {error}") from error
    if left_over:
        raise CheckpointError(f"{checkpoint.directory}: {left_over[0]} belongs to no part of the model")
    model.tie_weights()
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise CheckpointError(f"{checkpoint.directory}: {missing[0]} is missing ({len(missing)} tensors are)")


def _quantised_linears(
    model: nn.Module, quantization: QuantizationConfig | None
) -> Iterator[tuple[str, nn.Linear, Scheme]]:
    """The linears that config.json says are quantised, and how."""
    if quantization is None:
        return
    of_method(quantization.method)  # raises where it is not known
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            scheme = quantization.scheme_of(name)
            if scheme is not None:
                yield name, module, scheme


def _take(tensors: _Tensors, name: str, module: nn.Linear, scheme: Scheme) -> dict[str, Tensor]:
    """The tensors of one quantised linear."""
    directory = tensors.checkpoint.directory
    parts: dict[str, Tensor] = {}
    shape = (module.out_features, module.in_features)
    spare = extras(scheme, shape)
    for suffix, promise in {**promised(scheme, shape), **spare}.items():
        full = f"{name}.{suffix}"
        if suffix in spare and full not in tensors.untaken:
            continue
        if full not in tensors.untaken:
            raise CheckpointError(f"{directory}: {full} is missing ({scheme.describe()} needs it)")
        info = tensors.checkpoint.infos[full]
        if info.dtype not in promise.dtypes or info.shape not in promise.shapes:
            raise CheckpointError(
                f"{directory}: {full} is {info.dtype} {list(info.shape)}, but {scheme.describe()} stores {promise}"
            )
        parts[suffix] = tensors.take(full)
    return parts


def _hook_activations(
    module: nn.Linear, number_format: NumberFormat, native: Mapping[str, Tensor], multiplied: Tensor | None
) -> None:
    """Rounds a linear's inputs as engines do; ``multiplied``: what they are multiplied by first, ``[in]``.

    The weight has been multiplied by that, too, so that it is taken back after the rounding.
    """
    small = {suffix: tensor for suffix, tensor in native.items() if suffix.startswith("input_")}

    def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x = inputs[0]
        if multiplied is None:
            return (number_format.fake_quantise_activations(x, small), *inputs[1:])
        rounded = number_format.fake_quantise_activations(x * multiplied.to(x.dtype), small)
        return (torch.where(multiplied == 0, 0.0, rounded / multiplied).to(x.dtype), *inputs[1:])

    module.register_forward_pre_hook(hook)
