"""GPT-NeoX and Pythia: q, k and v of a head next to each other in one linear; LayerNorms with biases; a plain MLP.

``query_key_value`` has the rows of the first head's query, key and value, then those of the second's, and so on: it is
cut between heads. (Values cannot be told from keys by a range of its rows, so nothing is scaled from them into the
output projection.) In most models attention and MLP stand side by side, each behind a norm of its own.
"""

from modelexport.models.families._blocks import column, embedding, head, norm, row
from modelexport.models.families.base import Axis, Family, Scaling

FAMILY = Family(
    name="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    layer_prefix="gpt_neox.layers.{i}",
    axes={"heads_qkv": Axis(of="heads", each=3)},
    before=embedding("gpt_neox.embed_in"),
    layer=(
        norm("input_layernorm", "attention.norm", bias=True),
        column("attention.query_key_value", "attention.qkv_heads", "heads_qkv", bias="attention_bias"),
        row("attention.dense", "attention.o", "heads", bias="attention_bias"),
        norm("post_attention_layernorm", "mlp.norm", bias=True),
        column("mlp.dense_h_to_4h", "mlp.in", "intermediate", bias=True),
        row("mlp.dense_4h_to_h", "mlp.out", "intermediate", bias=True),
    ),
    after=head("gpt_neox.final_layer_norm", "embed_out", norm_bias=True, in_memory="lm_head"),
    ignored_tensors=("rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias"),
    scalings=(
        Scaling(source="attention.norm", into=("attention.qkv_heads",)),
        Scaling(source="mlp.norm", into=("mlp.in",)),
    ),
    defaults={"attention_bias": True},
    norms_centre=True,
)
