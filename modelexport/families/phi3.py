"""Phi-3: Llama's decoder with q, k and v in one linear on disk, and gate and up in another.

Each part is cut by itself: a rank's ``qkv_proj`` is its query heads, then its key heads, then its value heads. (Even
shares of the rows, which is what transformers' own plan avoids by gathering the output, would mix them.)
"""

from modelexport.families.base import Family, Module, Scaling

FAMILY = Family(
    name="phi3",
    architecture="Phi3ForCausalLM",
    before=(Module(path="model.embed_tokens", kind="embedding", role="embedding", partition="column", axis="vocab"),),
    layer=(
        Module(path="input_layernorm", kind="norm", role="attention.norm"),
        Module(
            path="self_attn.qkv_proj",
            kind="linear",
            role="attention.qkv",
            partition="column",
            parts=(("attention.q", "heads"), ("attention.k", "kv_heads"), ("attention.v", "kv_heads")),
            bias=False,
        ),
        Module(path="self_attn.o_proj", kind="linear", role="attention.o", partition="row", axis="heads", bias=False),
        Module(path="post_attention_layernorm", kind="norm", role="mlp.norm"),
        Module(
            path="mlp.gate_up_proj",
            kind="linear",
            role="mlp.gate_up",
            partition="column",
            parts=(("mlp.gate", "intermediate"), ("mlp.up", "intermediate")),
            bias=False,
        ),
        Module(path="mlp.down_proj", kind="linear", role="mlp.down", partition="row", axis="intermediate", bias=False),
    ),
    after=(
        Module(path="model.norm", kind="norm", role="final_norm"),
        Module(path="lm_head", kind="head", role="head", partition="column", axis="vocab"),
    ),
    ignored_tensors=("rotary_emb.inv_freq",),
    scalings=(
        Scaling(source="attention.v", into=("attention.o",)),
        Scaling(source="mlp.up", into=("mlp.down",)),
        Scaling(source="attention.norm", into=("attention.qkv",)),
        Scaling(source="mlp.norm", into=("mlp.gate_up",)),
    ),
)
