"""Phi-4-multimodal as its makers publish it: Phi-3's decoder, whose linears have LoRA branches for images and sound.

The branches (``lora_A.vision``, ``lora_B.speech``, ...) and the encoders below ``embed_tokens_extend`` are taken over
as they are: engines add what a branch gives to what its linear gives, ``base_layer``, which alone is quantised. On
text no branch takes part: it is calibrated as Phi-3.
"""

from modelexport.models.families._blocks import BUFFERS, embedding, fused_layer, head
from modelexport.models.families.base import Family

FAMILY = Family(
    name="phi4mm",
    architecture="Phi4MMForCausalLM",
    before=embedding(),
    layer=fused_layer(".base_layer"),
    after=head(),
    ignored_tensors=BUFFERS,
    computed_as="phi3",
    carried=(r"\.lora_[AB]\.", r"^model\.embed_tokens_extend\."),
)
