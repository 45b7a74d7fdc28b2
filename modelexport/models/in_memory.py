"""A model that is in memory already, as a checkpoint: nothing of it is written but what is made of it.

The names are those that ``save_pretrained`` gives: transformers joins the experts of a layer in memory, and renames,
and its own way back is run for one layer at a time, when one of the layer's tensors is asked for. So a quantised
checkpoint has the bytes that saving the model and exporting that gives.

Of DTensors (FSDP2, tensor parallelism, meshes of several dims) every rank has a part. Ranks gather them layer by layer,
all together: see :func:`gather_layers`.
"""

from __future__ import annotations

import copy
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelexport.checkpoints.safetensors.file import Checkpoint, Reader, TensorInfo, tensor_nbytes
from modelexport.checkpoints.source import Source
from modelexport.distributed.dtensors import as_sharded
from modelexport.errors import CheckpointError, UsageError, quoted
from modelexport.sharding.plan import Range
from modelexport.system.dtypes import dtype_name
from modelexport.system.small_files import LARGEST_CONFIG, LARGEST_JSON, read_json, read_small, write_small

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["MemoryTensor", "forget_layers", "gather_layers", "is_gathered", "is_in_memory", "opened"]

LABEL = "a model in memory"
_TOKENIZER = ("*token*.json", "*.model", "vocab*", "merges.txt", "chat_template*", "*processor_config.json")
_DIMS = {"colwise": 0, "rowwise": 1}
_LAYER = re.compile(r".*?\.\d+(?=\.)")
Convert = Callable[[Mapping[str, "Tensor"]], Mapping[str, "Tensor"]]


class Layer:
    """Tensors that are converted together.

    Args:
        held: name in memory -> tensor.
        convert: from these to those of a checkpoint, by its names.

    Attributes:
        is_sharded: whether ranks have parts of some of them.
    """

    def __init__(self, held: Mapping[str, Tensor], convert: Convert) -> None:
        self.held, self.convert = held, convert
        self.is_sharded = any(map(_is_sharded, held.values()))

    def tensors(self) -> Mapping[str, Tensor]:
        """Returns the tensors of a checkpoint. Those of one layer are kept, until another's are asked for."""
        if self not in _converted_layers:
            assert not self.is_sharded, "its ranks have not gathered it"
            _converted_layers.clear()
            _converted_layers[self] = self.convert(self.held)
        return _converted_layers[self]

    def gather(self) -> None:
        """Gathers the whole tensors on every rank. Collective."""
        held: Mapping[str, Any] = self.held
        whole = {name: value.full_tensor() if _is_sharded(value) else value for name, value in held.items()}
        _converted_layers[self] = self.convert(whole)


_converted_layers: dict[Layer, Mapping[str, Tensor]] = {}
"""The layers whose tensors were asked for last."""


def _is_sharded(value: Any) -> bool:
    return hasattr(value, "full_tensor")  # a DTensor, without importing its module


def gather_layers(checkpoint: Checkpoint, names: Iterable[str]) -> None:
    """Gathers what these tensors are made of, of a checkpoint that is in the memory of several ranks, and lets go of
    what was gathered before. All ranks call it with the same names; of another checkpoint it does nothing.

    Args:
        names: of a layer's tensors, or of others that are read together.
    """
    tensors = (checkpoint.computed.get(name) for name in names)
    layers = {each.layer: None for each in tensors if isinstance(each, MemoryTensor) and each.layer.is_sharded}
    if layers.keys() <= _converted_layers.keys():
        return
    _converted_layers.clear()
    for layer in layers:
        layer.gather()


def forget_layers() -> None:
    """Lets go of the tensors that were converted last."""
    _converted_layers.clear()


def is_gathered(checkpoint: Checkpoint) -> bool:
    """Returns whether ranks have to gather the tensors of a checkpoint before they can be read."""
    return any(isinstance(each, MemoryTensor) and each.layer.is_sharded for each in checkpoint.computed.values())


@dataclass(frozen=True)
class MemoryTensor:
    """A tensor of a checkpoint that is in this process's memory.

    Attributes:
        layer: what it is a part of.
        name: its own.
        expert: of a stack, which expert's it is; None: the whole.
        experts: of a stack, how many there are: along its first dim, or along that and their rows.
        start, step: the first of the expert's output features in the stack, and how many further the next one is.
        transposed: whether the stack has input features ahead of output features.
    """

    layer: Layer
    name: str
    expert: int | None = None
    experts: int = 1
    start: int = 0
    step: int = 1
    transposed: bool = False
    sources: tuple[TensorInfo, ...] = field(default=())

    def read(self, reader: Reader, rows: Range, cols: Range, out: Tensor | None = None) -> Tensor:
        """See :class:`~modelexport.checkpoints.safetensors.reader.ComputedTensor`."""
        tensor = self.layer.tensors()[self.name]
        if self.expert is not None:
            joined = tensor.shape[0] != self.experts
            tensor = (tensor.unflatten(0, (self.experts, -1)) if joined else tensor)[self.expert]
            if self.transposed and tensor.dim() > 1:
                tensor = tensor.t()
            tensor = tensor[self.start :: self.step]
        part = tensor[rows[0] : rows[1]] if tensor.dim() else tensor
        part = part[:, cols[0] : cols[1]] if tensor.dim() > 1 else part
        return part.detach().to("cpu", copy=True).contiguous() if out is None else out.copy_(part.detach())


def is_in_memory(model: object) -> bool:
    """Returns whether a model is given itself, and not by the name of a directory or of a repository."""
    return hasattr(model, "state_dict") or isinstance(model, Mapping)


@contextmanager
def opened(
    model: Any, config: Any = None, tokenizer: Any = None, plan: Mapping[str, int | str] | None = None
) -> Iterator[Source]:
    """A model as a source of exports: its tensors stay where they are, and its small files are written to a temporary
    directory.

    Args:
        model: a module of transformers; or tensors by the names that they have in a checkpoint.
        config: of the latter, or of another kind of module: config.json as a dict, or transformers' object.
        tokenizer: transformers' object, or a directory that holds one: for calibration, and to lie beside the weights.
        plan: where each rank has a part of plain tensors: pattern of their names, as ``fnmatch`` has them -> the dim
            that is cut, or "colwise" (0) or "rowwise" (1). The first that matches counts; others are whole.

    Raises:
        UsageError: there is no config, or the model is quantised.
        CheckpointError: there is no tensor, or one of a dtype that no checkpoint has.
    """
    own = getattr(model, "config", None) if config is None else config
    if not hasattr(own, "to_dict") and not isinstance(own, Mapping):
        raise UsageError("a model in memory needs its config.json: export(model=..., config=...), a dict or an object")
    with tempfile.TemporaryDirectory(prefix="modelexport-model-") as name:
        directory = Path(name)
        _write_config(directory, model, own)
        _write_tokenizer(directory, tokenizer)
        content = read_json(directory / "config.json", largest=LARGEST_CONFIG)
        if content.get("quantization_config"):
            raise UsageError(f"{LABEL} is quantised: give the directory that it was loaded from")
        try:
            yield Source(directory, LABEL, checkpoint=_checkpoint(directory, model, content, plan))
        finally:
            forget_layers()


def _write_config(directory: Path, model: Any, own: Any) -> None:
    """Writes config.json, and generation_config.json, as ``save_pretrained`` does."""
    if isinstance(own, Mapping):
        write_small(directory / "config.json", (json.dumps(own, indent=2) + "\n").encode())
        return
    own = copy.deepcopy(own)
    if hasattr(model, "save_pretrained"):
        own.architectures = [type(model).__name__.removeprefix("FSDP")]
        own.dtype = str(model.dtype).removeprefix("torch.")
    own.save_pretrained(directory)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(directory)


def _write_tokenizer(directory: Path, tokenizer: Any) -> None:
    if hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(directory)
    elif tokenizer is not None:
        found = [path for pattern in _TOKENIZER for path in Path(tokenizer).glob(pattern)]
        if not found:
            raise UsageError(f"tokenizer={str(tokenizer)!r}: there is no tokenizer: give its directory, or the object")
        for path in found:
            write_small(directory / path.name, read_small(path, largest=LARGEST_JSON))


def _checkpoint(
    directory: Path, model: Any, config: dict[str, Any], plan: Mapping[str, int | str] | None = None
) -> Checkpoint:
    """The tensors of a model as those of a checkpoint that lies nowhere."""
    import torch

    held = dict(model) if isinstance(model, Mapping) else _untied(model)
    wrong = next((name for name, value in held.items() if not isinstance(value, torch.Tensor)), None)
    if wrong is not None:
        raise UsageError(f"{LABEL}: {quoted(wrong)} is a {type(held[wrong]).__name__}, where a tensor is needed")
    if plan is not None:
        held = as_sharded(held, _cut_dims(held, plan))
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in held.items():
        match = _LAYER.match(name)
        layers.setdefault(match[0] if match else name, {})[name] = tensor
    convert = _converted(model)
    infos: dict[str, TensorInfo] = {}
    computed: dict[str, MemoryTensor] = {}
    for own in layers.values():
        layer = Layer(own, convert)
        shapes = convert({name: torch.empty(x.shape, dtype=x.dtype, device="meta") for name, x in own.items()})
        for name, tensor in shapes.items():
            dtype, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
            infos[name] = TensorInfo(name, dtype, shape, directory / LABEL, 0, tensor_nbytes(dtype, shape))
            computed[name] = MemoryTensor(layer, name)
    if not infos:
        raise CheckpointError(f"{LABEL} holds no tensor")
    return Checkpoint(directory, infos, config, {}, computed=computed)


def _cut_dims(held: Mapping[str, Tensor], plan: Mapping[str, int | str]) -> dict[str, int]:
    """The dims along which tensors are cut.

    Raises:
        UsageError: a pattern names none, or a dim that its tensors do not have.
    """
    dims: dict[str, int] = {}
    used: set[str] = set()
    for name, tensor in held.items():
        pattern = next((pattern for pattern in plan if fnmatchcase(name, pattern)), None)
        if pattern is None:
            continue
        used.add(pattern)
        asked = plan[pattern]
        dim = _DIMS.get(asked) if isinstance(asked, str) else asked
        if not isinstance(dim, int) or not 0 <= dim < tensor.dim():
            raise UsageError(
                f"plan: {plan[pattern]!r} of {pattern!r} is no dim of {name} {list(tensor.shape)}: give 0 or 1, or "
                f"{' or '.join(_DIMS)}"
            )
        dims[name] = dim
    unused = next((pattern for pattern in plan if pattern not in used), None)
    if unused is not None:
        raise UsageError(f"plan: no tensor of the model matches {unused!r}; it has {next(iter(held))!r} and others")
    return dims


def _untied(model: Any) -> dict[str, Tensor]:
    """A module's tensors without those that it says are others' by another name."""
    held = model.state_dict()
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return {name: tensor for name, tensor in held.items() if tied.get(name) not in held}


def _converted(model: Any) -> Convert:
    """transformers' way from a module's tensors to a checkpoint's; of others, which have none, as they are."""
    if not hasattr(model, "save_pretrained"):
        return dict
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before transformers 5 the names are the same
        return dict
    return lambda held: revert_weight_conversion(model, dict(held))
