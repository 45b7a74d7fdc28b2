"""The cuts of a derived family's tensors: transformers' style for each, and what no cut may separate.

transformers cuts features into equal shares and leaves whole heads to chance; engines need whole heads. A linear of an
attention is therefore cut on the features of a head, parts of a fused one each for itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from modelexport.models.derived.skeleton import Skeleton
from modelexport.models.families.base import AxisSize, Dimensions, Module, Partition

STYLES: dict[str, Partition] = {
    "colwise": "column",
    "colwise_rep": "column",
    "colwise_gather_output": "column",
    "packed_colwise": "column",
    "embedding_rowwise": "column",  # rows of a table, which is what columns of a product are
    "rowwise": "row",
    "rowwise_rep": "row",
    "rowwise_split_input": "row",
    "packed_rowwise": "row",
    "embedding_colwise": "row",
}
ROLES = {  # the last part of a linear's name -> what it does
    **dict.fromkeys(("q_proj", "query", "wq"), "q"),
    **dict.fromkeys(("k_proj", "key", "wk"), "k"),
    **dict.fromkeys(("v_proj", "value", "wv"), "v"),
    **dict.fromkeys(("o_proj", "wo"), "o"),
    **dict.fromkeys(("gate_proj", "w1"), "gate"),
    **dict.fromkeys(("up_proj", "w3"), "up"),
    **dict.fromkeys(("down_proj", "w2"), "down"),
    **dict.fromkeys(("qkv_proj", "query_key_value", "Wqkv"), "qkv"),
    "gate_up_proj": "gate_up",
}
_MLP = ("gate", "up", "down", "gate_up")
_ATTENTION_NAMES = ("attn", "attention")


@dataclass
class Axes:
    """Gives modules the axes that they are cut along, and keeps those that are a model's own.

    Attributes:
        own: the model's own axes, by name.
    """

    skeleton: Skeleton
    dims: Dimensions
    own: dict[str, AxisSize] = field(default_factory=dict)

    def is_attention(self, target: str) -> bool:
        """Returns whether a tensor in memory is that of a linear of an attention."""
        parent = target.rpartition(".")[0].rpartition(".")[0]
        called = f"{parent.rpartition('.')[2]} {self.skeleton.modules.get(parent, '')}".lower()
        return parent in self.skeleton.head_dims or any(name in called for name in _ATTENTION_NAMES)

    def linear(self, module: Module, does: str, target: str) -> Module:
        """The same with the axis, or the parts, that a linear of that partition is cut along.

        Args:
            does: a word of :data:`ROLES`, or "".
            target: its tensor in memory.
        """
        if module.partition == "replicated" or module.shape is None:
            return module
        size = module.shape[0 if module.partition == "column" else 1]
        assert isinstance(size, int)
        if self.is_attention(target):
            return self._of_attention(module, does, target, size)
        if does == "gate_up" and module.partition == "column" and size % 2 == 0:
            half = self.features(size // 2)
            place = module.role.partition(".")[0]
            return replace(module, parts=((f"{place}.gate", half), (f"{place}.up", half)))
        if does in _MLP and size == self.dims.intermediate and not module.is_expert:
            return replace(module, axis="intermediate")
        return replace(module, axis=self.features(size))

    def _of_attention(self, module: Module, does: str, target: str, size: int) -> Module:
        dims = self.dims
        each = self.skeleton.head_dims.get(target.rpartition(".")[0].rpartition(".")[0], dims.head_dim)
        usual = each == dims.head_dim
        if does in ("q", "o") and usual and size == dims.heads * each:
            return replace(module, axis="heads")
        if does in ("k", "v"):
            if usual and size == dims.kv_heads * each:
                return replace(module, axis="kv_heads")
            if size % each == 0:
                return replace(module, axis=self.features(size, size // each, shared=True))
        one_by_one = module.path.endswith("qkv_proj") and usual  # all queries, then all keys, then all values
        if does == "qkv" and one_by_one and size == (dims.heads + 2 * dims.kv_heads) * each:
            parts = (("attention.q", "heads"), ("attention.k", "kv_heads"), ("attention.v", "kv_heads"))
            return replace(module, parts=parts)
        return replace(module, axis=self.features(size, dims.heads if size % dims.heads == 0 else 0))

    def features(self, size: int, heads: int = 0, *, shared: bool = False) -> str:
        """The name of an axis of so many features, of so many heads (0: none)."""
        name = f"features_{size}" + (f"_of_{heads}_heads" if heads else "") + ("_shared" if shared else "")
        self.own[name] = AxisSize(size, size // heads if heads else 1, heads, shared)
        return name

    def other(self, module: Module, target: str) -> Module:
        """The same for a parameter that is no linear's: cut as transformers cuts it, where the checkpoint has it so."""
        style = self.skeleton.style(target) or ""
        partition = STYLES.get(style)
        shape = module.shape or ()
        if partition is None or not shape or shape != self.skeleton.shapes.get(target):
            return module
        dim = len(shape) - (2 if partition == "column" else 1)
        if len(shape) == 1:
            if partition == "row":
                return module
            dim = 0
        if module.stacked and len(shape) == 2:  # a bias for each expert: [experts, features]
            if partition == "row":
                return module
            dim = 1
        size = shape[dim]
        assert isinstance(size, int)
        if style.startswith("packed") and size % 2 == 0:
            half = self.features(size // 2)
            halves = ((f"{module.role}.0", half), (f"{module.role}.1", half))
            return replace(module, partition=partition, dim=dim, parts=halves)
        heads = self.dims.heads if len(shape) == 1 and size % self.dims.heads == 0 else 0
        return replace(module, partition=partition, dim=dim, axis=self.features(size, heads))
