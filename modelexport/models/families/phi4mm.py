"""Phi-4-multimodal as its makers publish it: Phi-3's decoder, whose linears have LoRA branches for images and sound.

The branches (``lora_A.vision``, ``lora_B.speech``, ...) and the encoders below ``embed_tokens_extend`` are taken over
as they are: engines add what a branch gives to what its linear gives, ``base_layer``, which alone is quantised.
"""

from dataclasses import replace

from modelexport.models.families.base import Family
from modelexport.models.families.phi3 import FAMILY as PHI3

FAMILY = Family(
    name="phi4mm",
    architecture="Phi4MMForCausalLM",
    before=PHI3.before,
    layer=tuple(
        replace(module, path=f"{module.path}.base_layer", in_memory=f"model.layers.{{i}}.{module.path}")
        if module.kind == "linear"
        else module
        for module in PHI3.layer
    ),
    after=PHI3.after,
    ignored_tensors=PHI3.ignored_tensors,
    carried=(r"\.lora_[AB]\.", r"^model\.embed_tokens_extend\."),
)
