"""A decoder layer with this rank's part of its weights, as whoever calibrates sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from modelexport.quantization.calibration.cut import WHOLE, ForwardCut, ForwardShard, general
from modelexport.quantization.calibration.model import TensorSource, misshapen
from modelexport.quantization.calibration.watch import LinearRows

__all__ = ["FilledLayer", "MadeOf", "Read", "fill"]

Read = Callable[[str, ForwardShard], Tensor]
MadeOf = Mapping[str, Sequence[TensorSource]]
"""A layer's tensor -> those of the checkpoint that it is made of."""


class FilledLayer:
    """A decoder layer with its weights.

    Attributes:
        index: which one.
        tensors: name in the checkpoint -> this rank's part of it: memory of the layer itself, to be written to. float32
            (the runner's ``dtype``); experts one by one, even where transformers stacks them.
        products: address of a weight -> the linears that it is.
        linears: modules whose products are watched, by their names in the checkpoint, in the model's order.
        routers: those of them that choose experts and are not quantised.
    """

    def __init__(self, index: int, prefix: str, made_of: MadeOf, tensors: dict[str, Tensor], cut: ForwardCut) -> None:
        self.index, self.tensors = index, tensors
        self.products: dict[int, list[LinearRows]] = {}
        self._prefix, self._made_of, self._cut = prefix, made_of, cut

    def find_products(self, module: nn.Module) -> None:
        """Find the linears of transformers' module, which has its weights."""
        plain = {f"{name}.weight" for name, each in module.named_modules() if isinstance(each, nn.Linear)}
        routers = set()
        for key, parameter in module.named_parameters():
            first = self._made_of[key][0]
            stacked = first.expert is not None and first.name.endswith(".weight")
            if not stacked and (parameter.dim() != 2 or not key.endswith(".weight")):
                continue
            for source in self._made_of[key]:
                weight = source.matrix(parameter)
                name = source.name.removesuffix(".weight")
                path = general(name.removeprefix(self._prefix))
                rows, share = source.span(weight.shape[0]), self._cut.share(path)
                part = LinearRows(name, path, rows, share, source.is_multiplied)
                self.products.setdefault(weight.data_ptr(), []).append(part)
                if not stacked and key not in plain:
                    routers.add(part.name)
        self.routers = frozenset(routers)
        self.linears = tuple(part.name for parts in self.products.values() for part in parts)

    def share(self, name: str) -> ForwardShard:
        """Returns this rank's shard of a linear."""
        return self._cut.share(name.removeprefix(self._prefix))


def fill(
    empty: nn.Module,
    index: int,
    prefix: str,
    made_of: MadeOf,
    read: Read,
    *,
    cut: ForwardCut,
    dtype: torch.dtype,
    device: torch.device,
    stacked_as_stored: bool,
    experts_apart: bool = False,
) -> tuple[dict[str, Tensor], FilledLayer]:
    """Read a layer's tensors into new memory: what to load into transformers' module, and the layer as others see it.

    Args:
        experts_apart: the weights of experts are in the host's memory.

    Raises:
        CheckpointError: a tensor has another shape than the module's.
    """
    state, tensors = {}, {}
    for key, shape in empty.state_dict().items():
        out: Tensor | None = None
        for source in made_of[key]:
            value = read(source.name, _share_of(source.name.removeprefix(prefix), cut))
            wanted = source.view(shape).shape
            if value.shape != wanted:
                raise misshapen(source.name, value.shape, wanted)
            if out is None:
                stacked = stacked_as_stored and source.expert is not None
                as_is = stacked or not value.is_floating_point()
                apart = experts_apart and value.dim() == 2 and is_expert(source)
                place = torch.device("cpu") if apart else device
                out = _empty(shape.shape, source, value.dtype if as_is else dtype, place)
            source.view(out).copy_(value)
            tensors[source.name] = source.view(out)
        assert out is not None, "made of nothing"
        state[key] = out
    return state, FilledLayer(index, prefix, made_of, tensors, cut)


def is_expert(source: TensorSource) -> bool:
    """Returns whether a tensor is the weight of one of a layer's experts."""
    return source.name.endswith(".weight") and general(source.name) != source.name


def _empty(shape: torch.Size, source: TensorSource, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of a module's tensor, in which the input features of a linear lie next to each other."""
    if not source.transposed:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty((*shape[:-2], shape[-1], shape[-2]), dtype=dtype, device=device).transpose(-2, -1)


def _share_of(path: str, cut: ForwardCut) -> ForwardShard:
    """Of a tensor: biases go with their linear's output features."""
    module, _, parameter = path.rpartition(".")
    share = cut.share(module)
    return share if parameter == "weight" or share.dim == 0 else WHOLE
