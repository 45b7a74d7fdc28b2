"""Names of the modules of draft layers (multi-token prediction), as published checkpoints have them.

Formats that keep a model's tensors among others (a training run's) know draft layers that are not numbered on behind
the decoder layers by :data:`PREFIX`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

PREFIX = "mtp"


@dataclass(frozen=True, kw_only=True)
class DraftNames:
    """The names that draft layers have in the checkpoints of some models.

    Attributes:
        below: the module that they are below; ``""``: they are numbered on behind the model's decoder layers.
        around: names of what may stand around a draft's decoder layer.
        shared: whether that stands beside the draft layers, once for all of them; else in each of them.
        renamed: paths of modules within a decoder layer of the model -> within a draft layer.
    """

    below: str = ""
    around: tuple[str, ...]
    shared: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)

    @property
    def usual(self) -> dict[str, str]:
        """Paths of modules within a draft layer -> within a decoder layer of the model, where they differ."""
        return {own: usual for usual, own in self.renamed.items()}


NUMBERED = DraftNames(around=("eh_proj", "enorm", "hnorm", "embed_tokens", "shared_head.norm", "shared_head.head"))
"""Of DeepSeek-V3 and GLM-4.5."""

BELOW_MTP = DraftNames(below=PREFIX, around=("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"), shared=True)
"""Of Qwen3-Next and Qwen3.5."""

BELOW_MODEL = DraftNames(
    below=f"model.{PREFIX}",
    around=("eh_proj", "enorm", "hnorm", "final_layernorm"),
    renamed={"post_attention_layernorm": "pre_mlp_layernorm"},
)
"""Of MiMo-V2-Flash."""

LAYOUTS = (NUMBERED, BELOW_MTP, BELOW_MODEL)
