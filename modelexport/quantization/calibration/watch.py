"""A layer's products as this rank computes them: seen, and changed, by watching torch's functions while it runs.

``F.linear`` and ``F.scaled_dot_product_attention`` (or what stands for it) are watched, not modules, so that experts
whose weights transformers stacks into one parameter are like any other linear; matrix products are, too, for stacks
that have input features ahead of output features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from modelexport.quantization.calibration.attention import attention_of_heads
from modelexport.quantization.calibration.cut import ForwardShard
from modelexport.quantization.calibration.sums import ForwardRanks
from modelexport.quantization.kv_caches import CacheRounding

__all__ = ["Activation", "LayerInputs", "LinearRows", "ShardedProducts"]

_PRODUCTS = (torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__)
Activation = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LinearRows:
    """A linear of the checkpoint, or some of a weight that several of them are stacked into.

    Attributes:
        name: of the module in the checkpoint.
        path: within its layer, with ``*`` for an expert's number.
        rows: output features of the weight.
        share: what the rank holds of it.
        is_multiplied: whether it is a part of a stack whose layer multiplies by ``[in, out]``, without ``F.linear``.
    """

    name: str
    path: str
    rows: slice
    share: ForwardShard
    is_multiplied: bool = False


@dataclass
class LayerInputs:
    """The inputs of a layer's linears and of its attention by one batch, whole.

    Attributes:
        inputs: each different input ``[tokens, in_features]``, and the linears that it was given to.
        keys, values: of the attention, ``[tokens, key/value heads, features]``; of latent attention, one head.
    """

    inputs: list[tuple[Tensor, list[str]]] = field(default_factory=list)
    keys: Tensor | None = None
    values: Tensor | None = None


class AllSeen(Exception):
    """Every linear of a layer has been given its input: what the layer computes further is of no use."""


class ShardedProducts(TorchFunctionMode):
    """While it is entered, linears are multiplied as the ranks have cut them.

    Args:
        products: address of a weight -> the linears that it is.
        together: the ranks.
        activations: linear -> what its whole input is put through first.
        seen: filled with what the linears get; None: nothing is kept.
        leaves: filled with the weights that are multiplied by, each as a leaf of autograd's graph, by their addresses;
            functions of ``activations`` then have the gradient 1. None: nothing is differentiated.
        kv_heads: that this rank's attention has.
        rotary: of latent attention: the last so many columns of a key are what the cache holds of it.
        cache: rounds keys and values as an engine's cache does.
        only_seen: whether outputs count for nothing: then :class:`AllSeen` is raised when every weight of ``products``
            has been multiplied by.

    Attributes:
        calls: address of a weight -> how often it was multiplied by; where ``seen`` is filled.
    """

    def __init__(
        self,
        products: Mapping[int, Sequence[LinearRows]],
        together: ForwardRanks,
        *,
        activations: Mapping[str, Activation] | None = None,
        seen: LayerInputs | None = None,
        leaves: dict[int, Tensor] | None = None,
        kv_heads: int | None = None,
        rotary: int | None = None,
        cache: CacheRounding | None = None,
        only_seen: bool = False,
    ) -> None:
        super().__init__()
        self.only_seen = only_seen
        self.calls: dict[int, int] = {}
        self.products, self.together, self.activations = products, together, activations or {}
        self.seen, self.leaves, self.kv_heads, self.rotary = seen, leaves, kv_heads, rotary
        self.cache = cache
        self._places: dict[tuple[int, int, int], int] = {}  # of inputs that were seen
        self._alive: list[Tensor] = []  # so that no address is used twice

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Called by torch in place of every function of its own."""
        if func is functional.linear:
            return self._linear(*args, **(kwargs or {}))
        if func in _PRODUCTS and not kwargs and (found := self._product(*args)) is not None:
            return found
        if func is functional.scaled_dot_product_attention:
            return self._attention(*args, **(kwargs or {}))
        if func is attention_of_heads:
            module, query, key, value, *more = args
            args = (module, query, *self._cache_of(key, value), *more)
        return func(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        address = weight.data_ptr()
        parts = self.products.get(address)
        weight = weight.to(input.device, input.dtype)  # experts may be in the host's memory, stacked ones as stored
        if parts is None or not input.numel():
            return functional.linear(input, weight, bias)
        if self.leaves is not None:
            weight = self.leaves.setdefault(address, weight.detach().requires_grad_())
        x = input.reshape(-1, input.shape[-1])
        first = parts[0]
        functions = [self.activations.get(part.name) for part in parts]
        whole = x
        if self.seen is not None or any(functions):
            whole = self._whole(input, x, first)
        if self.seen is not None:
            self._note(input, whole, [part.name for part in parts])
            self.calls[address] = self.calls.get(address, 0) + 1
            if self.only_seen and len(self.calls) == len(self.products):
                raise AllSeen
        outputs: list[Tensor] = []
        rounded: dict[int, Tensor] = {}
        for part, function in zip(parts, functions, strict=True):
            given = x
            if function is not None:
                if id(function) not in rounded:
                    rounded[id(function)] = self.together.own_columns(self._put_through(function, whole), part.share)
                given = rounded[id(function)]
            outputs.append(self.together.product(given, weight[part.rows], part.path, part.share))
        out = outputs[0] if len(outputs) == 1 else x.new_empty(x.shape[0], sum(each.shape[1] for each in outputs))
        if len(outputs) > 1:
            for part, output in zip(parts, outputs, strict=True):
                out[:, part.rows] = output
        if bias is not None:
            out = out + bias
        return out.view(*input.shape[:-1], out.shape[-1])

    def _put_through(self, function: Activation, whole: Tensor) -> Tensor:
        """Returns a function's value of a linear's input; its gradient is 1, since rounding has 0 nearly everywhere."""
        if self.leaves is None:
            return function(whole)
        return whole + (function(whole.detach()) - whole.detach())

    def _product(self, input: Tensor, other: Tensor) -> Tensor | None:
        """``input @ other``, where the second is an expert's ``[in, out]`` or a stack of them; None where it is not."""
        parts = self.products.get(other.data_ptr()) if isinstance(other, Tensor) else None
        if parts is None or not parts[0].is_multiplied:
            return None
        if other.dim() == 2:
            return self._linear(input, other.t())
        out = input.new_zeros(*input.shape[:2], other.shape[2])
        for expert, (rows, weight) in enumerate(zip(input, other, strict=True)):
            routed = rows.any(dim=1)  # all tokens are there, of which zeros are left of those that are others'
            out[expert, routed] = self._linear(rows[routed], weight.t())
        return out

    def _whole(self, input: Tensor, x: Tensor, part: LinearRows) -> Tensor:
        """The whole input, the same tensor where another linear was given the same."""
        place = self._places.get(_address(input))
        if place is not None:
            assert self.seen is not None
            return self.seen.inputs[place][0]
        return self.together.whole_input(x, part.path, part.share)

    def _note(self, input: Tensor, whole: Tensor, names: list[str]) -> None:
        assert self.seen is not None
        place = self._places.setdefault(_address(input), len(self.seen.inputs))
        if place == len(self.seen.inputs):
            self.seen.inputs.append((whole, []))
            self._alive.append(input)
        self.seen.inputs[place][1].extend(names)

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        key, value = self._cache_of(key, value)
        if kwargs.pop("enable_gqa", False):
            # Whether heads share keys depends on how many of them a rank has: all ranks take the same way.
            times = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
        return functional.scaled_dot_product_attention(query, key, value, *args, **kwargs)

    def _cache_of(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as attention is given them, which are noted as the model makes them."""
        if self.seen is not None:
            self._note_cache(key, value)
        if self.cache is None:
            return key, value
        rounded = self.cache(key.detach(), value.detach(), self.together.kv_heads)
        if self.leaves is None:
            return rounded
        # As for inputs of linears: the gradient is 1.
        return key + (rounded[0] - key.detach()), value + (rounded[1] - value.detach())

    def _note_cache(self, key: Tensor, value: Tensor) -> None:
        assert self.seen is not None
        if self.rotary is not None:  # the same for all heads
            keys = key[:, 0, :, key.shape[-1] - self.rotary :].reshape(-1, self.rotary)
            latent = next((x for x, names in self.seen.inputs if any(n.endswith(".kv_b_proj") for n in names)), None)
            both = keys if latent is None else torch.cat([latent, keys], dim=1)
            self.seen.keys = self.seen.values = both.unsqueeze(1)
            return
        self.seen.keys, self.seen.values = (self._cached(x) for x in (key, value))

    def _cached(self, x: Tensor) -> Tensor:
        """``[samples, heads, length, head_dim]`` -> ``[tokens, heads, head_dim]`` of all ranks."""
        # transformers may have repeated them; some layers have fewer than others.
        times = max(1, x.shape[1] // (self.kv_heads or x.shape[1]))
        whole = self.together.whole_heads(x[:, ::times].transpose(1, 2).flatten(0, 1))
        return whole.unflatten(1, (-1, x.shape[3]))


def _address(x: Tensor) -> tuple[int, int, int]:
    return x.data_ptr(), x.numel(), x.shape[-1]
