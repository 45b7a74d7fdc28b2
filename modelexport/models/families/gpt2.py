"""GPT-2: its linears lie on disk as ``[in_features, out_features]``, and stay as they are.

transformers multiplies by them in a module of its own (``Conv1D``), and engines turn them round as they load them:
neither looks for a quantised one there. Checkpoints of before 2020 lack the prefix ``transformer.``.
"""

from modelexport.models.families._blocks import embedding, head, norm
from modelexport.models.families.base import Axis, Family, Module

WHY = "stored as [in_features, out_features], in which no engine looks for quantised weights"
POSITIONS = "positions: engines look rows up in the model's dtype"


def _transposed(path: str, role: str, inputs: str, outputs: str) -> tuple[Module, Module]:
    """A linear as GPT-2 has them, with its bias."""
    return (
        Module(path=path, kind="other", role=role, shape=(inputs, outputs), why=WHY),
        Module(path=path, kind="other", role=f"{role}_bias", parameter="bias", shape=(outputs,)),
    )


FAMILY = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    layer_prefix="transformer.h.{i}",
    axes={"hidden_qkv": Axis(of="hidden", each=3), "positions": Axis(features=("n_positions",))},
    before=(
        *embedding("transformer.wte"),
        Module(path="transformer.wpe", kind="other", role="positions", shape=("positions", "hidden"), why=POSITIONS),
    ),
    layer=(
        norm("ln_1", "attention.norm", bias=True),
        *_transposed("attn.c_attn", "attention.qkv", "hidden", "hidden_qkv"),
        *_transposed("attn.c_proj", "attention.o", "hidden", "hidden"),
        norm("ln_2", "mlp.norm", bias=True),
        *_transposed("mlp.c_fc", "mlp.in", "hidden", "intermediate"),
        *_transposed("mlp.c_proj", "mlp.out", "intermediate", "hidden"),
    ),
    after=head("transformer.ln_f", norm_bias=True),
    ignored_tensors=(".attn.bias", ".attn.masked_bias"),
    defaults={"tie_word_embeddings": True, "n_positions": 1024},
    keys={
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "intermediate_size": "n_inner",
    },
    mlp_ratio=4,
    old_prefix="transformer.",
    norms_centre=True,
    notes=("gpt2 models lie transposed on disk: their linears stay as they are, whole on every rank",),
)
