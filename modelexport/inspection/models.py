"""Load a checkpoint of ours as a plain transformers model: quantised weights decoded, activations rounded by hooks.

Needs neither compressed-tensors nor an engine. Weights come only from the checkpoint's own files, checked as
everywhere; what is missing is an error, never made up.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from modelexport.checkpoints.safetensors_file import Checkpoint, Reader
from modelexport.contents.opening import open_model
from modelexport.errors import CheckpointError, UsageError
from modelexport.quantization import formats

if TYPE_CHECKING:
    from modelexport.quantization.formats.base import NumberFormat

__all__ = ["format_of_group", "load_dequantised", "load_reference"]


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
    """A checkpoint in compressed-tensors form, decoded into the plain transformers architecture on CPU.

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
    quantization = (checkpoint.config or {}).get("quantization_config")
    if quantization:
        del config.quantization_config
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    tensors = _Tensors(checkpoint)
    state: dict[str, Tensor] = {}
    try:
        for name, module, number_format in _quantised_linears(model, quantization):
            state[f"{name}.weight"] = _decode(tensors, name, module, number_format).to(dtype)
            _hook_activations(module, number_format)
        for name in sorted(tensors.untaken):
            value = tensors.take(name)
            state[name] = value.to(dtype) if value.is_floating_point() else value
    finally:
        tensors.reader.close()
    _fill(model, state, checkpoint)
    return model.eval()


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
    model: nn.Module, quantization: Mapping[str, Any] | None
) -> Iterator[tuple[str, nn.Linear, NumberFormat]]:
    """The linears that ``quantization_config`` says are quantised, and how."""
    if not quantization:
        return
    if quantization.get("quant_method") != "compressed-tensors":
        raise CheckpointError(
            f"quant_method is {quantization.get('quant_method')!r}; only 'compressed-tensors' is decoded here"
        )
    config_groups = (quantization.get("config_groups") or {}).values()
    groups = [(group.get("targets") or [], format_of_group(group)) for group in config_groups]
    ignore = quantization.get("ignore") or []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or _matches(ignore, name):
            continue
        for targets, number_format in groups:
            if _matches(targets, name):
                yield name, module, number_format
                break


def _matches(patterns: Sequence[str], name: str) -> bool:
    """Whether compressed-tensors' targets mean a linear: by class, by name, or by ``re:`` pattern."""
    return any(
        pattern in ("Linear", name) or (pattern.startswith("re:") and re.match(pattern[3:], name) is not None)
        for pattern in patterns
    )


def format_of_group(group: Mapping[str, Any]) -> NumberFormat:
    """The number format whose ``config_group()`` says the same as this ``config_groups`` entry.

    Raises:
        CheckpointError: none does.
    """
    weights = group.get("weights") or {}
    size = weights.get("group_size") if weights.get("strategy") == "group" else None
    for name in formats.names():
        try:
            candidate = formats.get(name, group_size=size)
        except UsageError:  # it has no groups, or none of this size
            continue
        own = candidate.config_group()
        if own is not None and _meaning(own) == _meaning(group):
            return candidate
    raise CheckpointError(f"no number format of ours is {group}; known: {', '.join(formats.names())}")


def _meaning(group: Mapping[str, Any]) -> dict[str, Any]:
    """What of a ``config_groups`` entry decides the numbers; other tools write more, such as observers."""
    defaults = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": None, "dynamic": False}
    meaning: dict[str, Any] = {}
    for part in ("weights", "input_activations"):
        arguments = group.get(part)
        meaning[part] = arguments and {k: arguments.get(k, default) for k, default in defaults.items()}
        if arguments and arguments.get("strategy") == "group":
            meaning[part]["group_size"] = arguments.get("group_size")
    return meaning


def _decode(tensors: _Tensors, name: str, module: nn.Linear, number_format: NumberFormat) -> Tensor:
    """The weight of one linear, ``[out_features, in_features]`` float32."""
    directory = tensors.checkpoint.directory
    any_float = torch.bfloat16  # stands for the source's dtype, which scales are stored in
    parts: dict[str, Tensor] = {}
    for spec in number_format.specs((module.out_features, module.in_features), any_float):
        full = f"{name}.{spec.suffix}"
        if full not in tensors.untaken:
            raise CheckpointError(f"{directory}: {full} is missing ({number_format.name} needs it)")
        part = tensors.take(full)
        fits = part.dtype == spec.dtype or (spec.dtype == any_float and part.is_floating_point())
        if tuple(part.shape) != tuple(spec.shape) or not fits:
            raise CheckpointError(
                f"{directory}: {full} is {part.dtype} {tuple(part.shape)}, but {number_format.name} stores "
                f"{spec.dtype} {tuple(spec.shape)}"
            )
        parts[spec.suffix] = part
    return number_format.dequantise(parts, dtype=torch.float32)


def _hook_activations(module: nn.Linear, number_format: NumberFormat) -> None:
    group = number_format.config_group()
    if group is None or group.get("input_activations") is None:
        return

    def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (number_format.fake_quantise_activations(inputs[0]), *inputs[1:])

    module.register_forward_pre_hook(hook)
