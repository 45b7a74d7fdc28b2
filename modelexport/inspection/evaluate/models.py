"""A checkpoint as the plain transformers architecture: quantised weights decoded, activations rounded as engines do.

Needs neither compressed-tensors nor an engine. Weights come only from the checkpoint's own files, checked as
everywhere; what is missing is an error, never made up. :class:`PlainTensors` decodes one linear at a time, when it is
read; the other two functions make whole models of that.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from modelexport.checkpoints.safetensors.file import Checkpoint, Reader, TensorInfo, torch_dtype
from modelexport.errors import CheckpointError, PlanError, error_text
from modelexport.models.architecture import family_of, language_config
from modelexport.models.decoded import decoded, viewed
from modelexport.models.draft_layers import draft_tensors
from modelexport.models.matching import match
from modelexport.models.modules import StoredModule, read_architecture, read_modules
from modelexport.models.opening import open_model
from modelexport.models.rules import left_out
from modelexport.models.stacked import experts_apart
from modelexport.quantization.calibration.cut import WHOLE, ForwardShard
from modelexport.quantization.calibration.model import in_memory
from modelexport.quantization.decoding import dequantise
from modelexport.quantization.formats import of_scheme
from modelexport.quantization.kv_caches import CACHES, NOT_ROUNDED, CacheRounding
from modelexport.quantization.kv_caches import of_scheme as of_cache_scheme
from modelexport.quantization.methods import (
    QuantizationConfig,
    ReadOnlyNumbers,
    Scheme,
    WeightSlice,
    extras,
    of_method,
    read_only_numbers,
    read_quantization_config,
    tensor_specs,
)

if TYPE_CHECKING:
    from modelexport.quantization.formats.base import NumberFormat

__all__ = ["PlainTensors", "cache_kind", "load_dequantised", "load_reference"]

Activation = Callable[[Tensor], Tensor]
"""A linear's input as an engine rounds it, ``[..., in_features]``, dtype kept."""


class PlainTensors:
    """A checkpoint's tensors by the names that the unquantised model has; quantised linears are decoded when read.

    Thread-safe; a context manager, which closes the files.

    Attributes:
        names: every tensor that the unquantised model may have, in the checkpoint's order.
        activations: linear -> how its input is rounded; of the linears that have been read and whose format rounds
            them.
        cache: the number format in which engines keep keys and values (see :meth:`cache_rounding`);
            ``"not rounded"`` where they round them in a way that is not done here (latent attention, other numbers);
            None: as they are.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint = _as_matrices(checkpoint)
        self.names: list[str] = []
        self.activations: dict[str, Activation] = {}
        self.cache: str | None = None
        self._cache_scales: dict[str, TensorInfo] = {}
        self._reader = Reader(checkpoint)
        self._linears: dict[str, _Linear] = {}
        self._lock = threading.Lock()
        self._list()
        self._untaken = set(self.names)

    def _list(self) -> None:
        """Lists the tensors of quantised linears, and those that are stored as the model has them.

        Raises:
            CheckpointError: one is quantised, but config.json does not say how; or its tensors are not as it says.
            PlanError: ``quant_method`` is not known.
        """
        config = self.checkpoint.config
        quantization, architecture = read_quantization_config(config), read_architecture(config, self.checkpoint.infos)
        cached: tuple[str, ...] = ()
        if quantization is not None:
            method = of_method(quantization.method)  # raises where it is not known
            if quantization.kv_cache_scheme is not None:
                cached = tuple(f".{where}" for where in method.KV_SCALES.values())
                self.cache = cache_kind(config, quantization)
        for module in read_modules(self.checkpoint, architecture, quantization):
            names = [info.name for info in module.tensors.values() if not info.name.endswith(cached)]
            self._cache_scales |= {info.name: info for info in module.tensors.values() if info.name not in names}
            if module.stored.quantised:
                scheme = None if quantization is None else quantization.scheme_of(module.name)
                if scheme is None:
                    raise CheckpointError(
                        f"{self.checkpoint.directory}: {module.name} is stored as {module.stored.number_format}, but "
                        "config.json does not say how it is quantised"
                    )
                linear = _Linear.of(self.checkpoint, self._reader, module, scheme, module.path in architecture.shapes)
                self._linears[f"{module.name}.weight"] = linear
                used = {info.name for info in linear.tensors.values()}
                names = [f"{module.name}.weight", *(name for name in names if name not in used)]
            self.names += names

    def read(self, name: str, share: ForwardShard = WHOLE) -> Tensor:
        """A tensor of the plain model: as stored, or decoded into float32; of which ``share`` says how much.

        Raises:
            CheckpointError: the file is damaged, or a linear holds what its number format cannot say.
        """
        with self._lock:
            self._untaken.discard(name)
        linear = self._linears.get(name)
        if linear is not None:
            weight = linear.decode(self._reader, self.activations)
            if share.dim is None:
                return weight
            return torch.cat([weight.narrow(share.dim, start, stop - start) for start, stop in share.spans], share.dim)
        info = self.checkpoint.infos[name]
        if share.dim is None:
            return self._reader.read(info)
        extents = [stop - start for start, stop in share.spans]
        shape = tuple(sum(extents) if dim == share.dim else size for dim, size in enumerate(info.shape))
        out = torch.empty(shape, dtype=torch_dtype(info.dtype))
        for span, part in zip(share.spans, out.split(extents, share.dim), strict=True):
            rows, cols = (span, None) if share.dim == 0 else (None, span)
            self._reader.read(info, rows=rows, cols=cols, out=part)
        return out

    @property
    def vocabulary(self) -> int:
        """Size of the vocabulary by config.json; 0 where it does not say."""
        size = (self.checkpoint.config or {}).get("vocab_size")
        return size if isinstance(size, int) else 0

    def cache_rounding(self, layer: str) -> CacheRounding | None:
        """Returns what rounds a layer's keys and values; None where engines do not, or not as it is done here.

        By the checkpoint's scales of each; by 1 where it has none, as engines do.

        Args:
            layer: what the names of its tensors begin with, ``"model.layers.0."``.

        Raises:
            CheckpointError: a scale is no number above 0.
        """
        if self.cache is None or self.cache not in CACHES:
            return None
        cache, count = CACHES[self.cache], 1
        if cache.by_head:
            config = language_config(self.checkpoint.config or {}, self.names)
            count = config.get("num_key_value_heads") or config.get("num_attention_heads") or 1
        scales = {"k": torch.ones(1), "v": torch.ones(1)}
        for name, info in self._cache_scales.items():
            if name.startswith(layer):
                scales[name.rpartition(".")[2][0]] = self._cache_scale(info, count)
        return CacheRounding(cache, scales["k"], scales["v"])

    def _cache_scale(self, info: TensorInfo, count: int) -> Tensor:
        """So many scales of a layer's keys or values, float32 ``[count]``."""
        scale = self._reader.read(info).float().flatten()
        wrong = scale[~((scale > 0) & torch.isfinite(scale))]
        if scale.numel() != count or wrong.numel():
            numbers = f"{scale.numel()} numbers, not {count}" if scale.numel() != count else f"{wrong[0].item():g}"
            raise CheckpointError(f"{self.checkpoint.directory}: {info.name} is no scale of a KV cache: {numbers}")
        return scale

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor of the plain model."""
        linear = self._linears.get(name)
        return self.checkpoint.infos[name].shape if linear is None else linear.shape

    def is_decoded(self, name: str) -> bool:
        """Returns True if reading ``name`` decodes a whole quantised linear."""
        return name in self._linears

    def check_all_read(self, but: Collection[str] = ()) -> None:
        """Refuse a checkpoint of which something was not read, though it is not known to be no part of the model.

        Args:
            but: what is still to be read.

        Raises:
            CheckpointError: with the first such tensor.
        """
        if self._untaken <= set(but):
            return
        try:
            spare = {*left_out(self.checkpoint), *draft_tensors(self.checkpoint.config, self.names), *self._beside()}
        except (CheckpointError, PlanError):  # a family that is not known: only a copy of the embedding is
            spare = {"lm_head.weight"} if (self.checkpoint.config or {}).get("tie_word_embeddings") else set()
        for name in self.names:
            if name in self._untaken and name not in spare and name not in but:
                raise CheckpointError(f"{self.checkpoint.directory}: {name} belongs to no part of the model")

    def _beside(self) -> Iterator[str]:
        """Yields the tensors beside the language model, of a model of which that is a part.

        Raises:
            CheckpointError, PlanError: the family is not known.
        """
        config = self.checkpoint.config or {}
        family = family_of(config, self.names)
        yield from (name for name in self.names if any(re.search(pattern, name) for pattern in family.carried))
        if language_config(config, self.names).get("model_type") == config.get("model_type"):
            return
        inside = family.layer_prefix.rpartition(".{i}")[0].rpartition(".")[0] + "."
        whole = tuple(f"{module.path}." for module in (*family.before, *family.after) if module.kind == "other")
        yield from (name for name in self.names if not name.startswith(inside) or name.startswith(whole))

    def close(self) -> None:
        """Close the checkpoint's files."""
        self._reader.close()

    def __enter__(self) -> PlainTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _as_matrices(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with linears of each expert in place of stacks, and decoded into the model's dtype where no number
    format holds what it has: numbers in stacks, or with groups in an order of their own.

    A checkpoint that cannot be taken apart is returned as it is.
    """
    quantization = read_quantization_config(checkpoint.config)
    try:
        if quantization is None:
            return experts_apart(checkpoint)
        matched = match(checkpoint)
        schemes = {module.scheme.describe(): module.scheme for module in matched.modules if module.scheme is not None}
        stacks = any(
            module.place.module.experts is not None and module.place.module.parameter not in module.tensors
            for module in matched.modules
        )
        held = not stacks and all(map(_is_held, schemes.values()))
        return checkpoint if held else experts_apart(decoded(checkpoint))
    except (CheckpointError, PlanError):  # what is wrong with it is said where its tensors are read
        return checkpoint


def _is_held(scheme: Scheme) -> bool:
    """Returns whether a number format says the same as a scheme."""
    try:
        return read_only_numbers(scheme) is not None or of_scheme(scheme) is not None
    except CheckpointError:
        return False


class _Linear:
    """One quantised linear: where its tensors lie, and what they mean."""

    def __init__(
        self, name: str, scheme: Scheme, shape: tuple[int, int], tensors: Mapping[str, TensorInfo], where: Path
    ) -> None:
        self.name, self.scheme, self.shape, self.tensors, self.where = name, scheme, shape, tensors, where
        self.number_format = read_only_numbers(scheme) or of_scheme(scheme)

    @classmethod
    def of(cls, checkpoint: Checkpoint, reader: Reader, module: StoredModule, scheme: Scheme, known: bool) -> _Linear:
        """Checked against its scheme's tensor specs; ``known``: config.json tells its shape."""
        where = checkpoint.directory
        shape = module.stored.shape
        said = module.tensors.get("weight_shape")
        if not known and said is not None and said.shape == (2,):  # words are filled up: headers tell no exact width
            shape = tuple(map(int, reader.read(said).tolist()))
        if shape is None or len(shape) != 2:
            raise CheckpointError(
                f"{where}: {module.name} is {module.stored.number_format} of shape {shape}: no matrix"
            )
        size = (shape[0], shape[1])
        spare = extras(scheme, size)
        tensors = {}
        for suffix, spec in {**tensor_specs(scheme, size), **spare}.items():
            info = module.tensors.get(suffix)
            if info is None:
                if suffix in spare:
                    continue
                raise CheckpointError(f"{where}: {module.name}.{suffix} is missing ({scheme.describe()} needs it)")
            if info.dtype not in spec.dtypes or not spec.has_shape(info.shape):
                raise CheckpointError(
                    f"{where}: {info.name} is {info.dtype} {list(info.shape)}, but {scheme.describe()} stores {spec}"
                )
            tensors[suffix] = info
        return cls(module.name, scheme, size, tensors, where)

    def decode(self, reader: Reader, activations: dict[str, Activation]) -> Tensor:
        """The weight, float32 ``[out, in]``; and how its inputs are rounded goes into ``activations``."""
        tensors, _ = viewed(self.scheme, self.tensors, self.shape)
        stored = {suffix: reader.read(info) for suffix, info in tensors.items()}
        try:
            weight = dequantise(self.scheme.method, self.number_format, stored, WeightSlice.whole(self.shape))
            held = self.number_format
            if not isinstance(held, ReadOnlyNumbers) and held.input_arguments() and self.name not in activations:
                activations[self.name] = self._activation(held, stored)
        except CheckpointError as error:  # of one among hundreds
            raise CheckpointError(f"{self.where}: {self.name}: {error}") from error
        return weight

    def _activation(self, number_format: NumberFormat, stored: dict[str, Tensor]) -> Activation:
        multiplied = stored.pop("pre_quant_scale", None)
        small: dict[str, Tensor] = {}
        if number_format.has_static_inputs:
            native = of_method(self.scheme.method).decode(number_format, stored, WeightSlice.whole(self.shape))
            small = {suffix: tensor.clone() for suffix, tensor in native.items() if suffix.startswith("input_")}
        return partial(_rounded, number_format, small, multiplied)


def cache_kind(config: Mapping[str, Any] | None, quantization: QuantizationConfig | None) -> str | None:
    """See :attr:`PlainTensors.cache`."""
    scheme = None if quantization is None else quantization.kv_cache_scheme
    if scheme is None:
        return None
    cache = None if (config or {}).get("kv_lora_rank") else of_cache_scheme(scheme)
    return NOT_ROUNDED if cache is None else cache.name


def _rounded(number_format: NumberFormat, small: Mapping[str, Tensor], multiplied: Tensor | None, x: Tensor) -> Tensor:
    """A linear's input as engines round it; ``multiplied``: what it is multiplied by first, ``[in]``.

    The weight has been multiplied by that, too, so that it is taken back after the rounding.
    """
    if multiplied is None:
        return number_format.fake_quantise_activations(x, small)
    multiplied = multiplied.to(x.device)
    rounded = number_format.fake_quantise_activations(x * multiplied.to(x.dtype), small)
    return torch.where(multiplied == 0, 0.0, rounded / multiplied).to(x.dtype)


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

    Formats that quantise activations get a hook on every such linear that rounds its input as engines do; a KV cache
    is not rounded.
    An unquantised checkpoint loads as with :func:`load_reference`. The model must have its linears under the names
    that the checkpoint has: not so where transformers stacks a layer's experts, see
    :mod:`modelexport.inspection.evaluate.streaming`.

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
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    state: dict[str, Tensor] = {}
    with PlainTensors(checkpoint) as tensors:
        renamed = {disk: memory for memory, disk in in_memory(model, tensors.names).items()}
        for name in tensors.names:
            value = tensors.read(name)
            state[renamed.get(name, name)] = value.to(dtype) if value.is_floating_point() else value
    _fill(model, state, checkpoint)
    for name, activation in tensors.activations.items():
        model.get_submodule(name).register_forward_pre_hook(partial(_before, activation))
    return model.eval()


def _before(activation: Activation, _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (activation(inputs[0]), *inputs[1:])


def _fill(model: Any, state: Mapping[str, Tensor], checkpoint: Checkpoint) -> None:
    try:
        left_over = model.load_state_dict(state, strict=False, assign=True).unexpected_keys
    except RuntimeError as error:
        raise CheckpointError(f"{checkpoint.directory} does not fit its config.json: {error_text(error)}") from error
    if left_over:
        raise CheckpointError(f"{checkpoint.directory}: {left_over[0]} belongs to no part of the model")
    model.tie_weights()
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise CheckpointError(f"{checkpoint.directory}: {missing[0]} is missing ({len(missing)} tensors are)")
