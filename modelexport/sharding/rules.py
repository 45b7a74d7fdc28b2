"""Rules of how one tensor of a model may be cut over ranks, of which a plan is made. Data, without tensors or models.

Whoever knows the model (its family, its number format) says for each tensor along which dimension it is cut and
what must stay whole there; :mod:`modelexport.sharding.shard_plan` then cuts it for any parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Spread = Literal["even", "heads", "kv_heads", "padded"]


@dataclass(frozen=True, kw_only=True)
class CutRange:
    """A range of a tensor's cut dimension that is divided by itself: the whole of it, or one module of a fused one.

    Attributes:
        role: what it is, e.g. ``"attention.q"``; the module's own role where nothing is fused.
        start, stop: the range, in elements of the tensor's cut dimension.
        unit: elements of it that no cut may separate (a head, a group of a quantised weight, a packed word).
        spread: ``even``: every rank gets the same number of units. ``heads``: the same, and the units are attention
            heads. ``kv_heads``: where there are more ranks than units, ranks share them, neighbours the same one.
            ``padded``: the last ranks get less, or nothing; engines fill up with zeros (a vocabulary).
        heads: attention heads in the range; 0 where it has none. ``unit`` may be several heads.
        stands_for: elements of the module's weight for each element of this tensor (a scale, a packed word); for words
            to people, who think in elements of the weight.
    """

    role: str
    start: int
    stop: int
    unit: int = 1
    spread: Spread = "even"
    heads: int = 0
    stands_for: int = 1

    @property
    def size(self) -> int:
        """Elements of the range."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class TensorRule:
    """A tensor of a model, and how it is cut.

    Attributes:
        name: its name in a Hugging Face checkpoint, e.g. ``"model.layers.3.self_attn.q_proj.weight"``.
        dtype: as safetensors spells it.
        shape: of the whole tensor, in elements.
        module: the module it belongs to, ``"model.layers.3.self_attn.q_proj"``.
        path: the module's name as its family declares it: within its layer, experts as ``{e}``.
        parameter: its name within the module: ``weight``, ``bias``, ``weight_scale``, ``weight_packed``, ...
        role: what the module does: ``embedding``, ``attention.norm``, ``attention.q``, ``attention.k``,
            ``attention.v``, ``attention.qkv`` (fused on disk), ``attention.o``, ``mlp.norm``, ``mlp.gate``,
            ``mlp.up``, ``mlp.gate_up`` (fused on disk), ``mlp.down``, ``router``, ``expert.gate``, ``expert.up``,
            ``expert.down``, ``final_norm``, ``head``; of latent attention ``latent.q``, or ``latent.q_a``,
            ``latent.q_norm`` and ``latent.q_b``, and ``latent.kv_a``, ``latent.kv_norm``, ``latent.kv_b``;
            ``router.correction``; ``shared.gate``, ``shared.up``, ``shared.down`` of experts that every token uses.
        layer: the decoder layer, or None outside of them.
        draft: the draft layer, counted from 0, or None outside of them.
        stages: for tensors outside the layers, the ends of the pipeline that need it: ``first``, ``last`` or both.
        expert: the expert it belongs to, or None.
        experts: of a stack of a layer's experts along dim 0: how many; else 0.
        dim: the dimension that tensor parallelism cuts; None where every rank holds the whole.
        parts: the ranges along ``dim``, in order, together all of it; empty where nothing is cut.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    module: str
    path: str
    parameter: str
    role: str
    layer: int | None = None
    draft: int | None = None
    stages: tuple[Literal["first", "last"], ...] = ()
    expert: int | None = None
    experts: int = 0
    dim: int | None = None
    parts: tuple[CutRange, ...] = ()
