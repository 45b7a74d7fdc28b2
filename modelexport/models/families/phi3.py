"""Phi-3: Llama's decoder with q, k and v in one linear on disk, and gate and up in another.

Each part is cut by itself: a rank's ``qkv_proj`` is its query heads, then its key heads, then its value heads. (Even
shares of the rows, which is what transformers' own plan avoids by gathering the output, would mix them.)
"""

from modelexport.models.families._blocks import BUFFERS, GATED, VALUES, embedding, fused_layer, head
from modelexport.models.families.base import Family, Scaling

FAMILY = Family(
    name="phi3",
    architecture="Phi3ForCausalLM",
    before=embedding(),
    layer=fused_layer(),
    after=head(),
    ignored_tensors=BUFFERS,
    scalings=(
        VALUES,
        GATED,
        Scaling(source="attention.norm", into=("attention.qkv",)),
        Scaling(source="mlp.norm", into=("mlp.gate_up",)),
    ),
)
