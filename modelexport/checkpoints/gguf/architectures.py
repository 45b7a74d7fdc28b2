"""The model types that GGUF files are written of: what llama.cpp calls the architecture, its tensors and its values.

One table, :data:`ARCHITECTURES`: nothing but data, read by :mod:`modelexport.checkpoints.formats.gguf` (tensors) and
:mod:`modelexport.checkpoints.gguf.metadata` (values). Facts are those of llama.cpp's loader and graphs, as
llama-cpp-python 0.3.36 has them; what its graph of an architecture takes for granted is a :class:`Requirement`, so that
a model which it would compute otherwise is refused and not written wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from modelexport.checkpoints.draft_names import BELOW_MODEL, BELOW_MTP, NUMBERED, DraftNames
from modelexport.checkpoints.gguf.file import Value
from modelexport.checkpoints.gguf.values import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    AdjustedWidth,
    Among,
    BaseWhere,
    Choice,
    Count,
    DeepstackMapping,
    DoubleSlidingKvHeads,
    DoubleWidth,
    EachLayer,
    EveryFourth,
    EveryKind,
    First,
    Fixed,
    Flag,
    FusedKvHeads,
    Heads,
    If,
    IndexerTypes,
    Kinds,
    KvHeadsByLayer,
    LastOfEach,
    Leading,
    Limits,
    Negative,
    NoLayer,
    NumberOfKind,
    OfEachLayer,
    OfFullLayers,
    OneBase,
    Only,
    Product,
    Quotient,
    Requirement,
    Rotated,
    RotatedFeatures,
    SameLayers,
    Says,
    Sections,
    SlidingHeads,
    Sum,
    ValueSource,
    Where,
    Word,
    number,
    whole,
)
from modelexport.checkpoints.safetensors.conversions import Function

Rows = Literal["in order", "pairs", "halves", "grouped", "groups of qkvz", "heads of kv_b", "values by turns"]
"""Where the rows of a tensor go.

``in order``: to the arrays one after the other, to each as many. ``pairs``: the two halves of a head's rotated features
by turns, which is how llama.cpp rotates such a model; ``halves``: the way back. ``grouped``: of a fused tensor that has
the queries, the key and the value of one head after those of another, all queries, then all keys, then all values.
``groups of qkvz``: the same of linear attention, whose gates (z) go to an array of their own. ``values by turns``: of
linear attention's heads of values, which lie with the head of keys that they are for, the first of each head of keys,
then the second of each, behind all other rows. ``heads of kv_b``: latent attention's keys, each head by itself and
turned round, and its values.
"""


@dataclass(frozen=True)
class Stored:
    """The arrays that a tensor goes to.

    Attributes:
        names: of the arrays, without ``blk.N.``; the tensor's parameter follows where they have no dot.
        rows: the way of its rows.
        columns: the way of its columns.
        function: what is computed from its numbers.
        transposed: whether its two dims change places.
        is_norm: whether the architecture's ``norms`` holds for it, where its name ends so.
        shape: its shape by the file's header, where it is another one: a number, or ``"rows"``, for each dim; 0 for
            what is left over.
    """

    names: tuple[str, ...]
    rows: Rows = "in order"
    columns: Literal["in order", "values by turns"] = "in order"
    function: Function = "value"
    transposed: bool = False
    is_norm: bool = True
    shape: tuple[int | str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Drafts:
    """The draft layers (multi-token prediction) of an architecture's models, blocks behind those of its decoder layers.

    Attributes:
        count: the key of config.json that counts them, in a config.json that is made from a file; ``""``: none does.
        names: of their modules.
        listed: of values that are lists, one for each block: those of a draft layer.
        joined: arrays that hold the rows of others one after the other, and those others.
    """

    count: str = "num_nextn_predict_layers"
    names: DraftNames = NUMBERED
    listed: Mapping[str, ValueSource] = field(default_factory=dict)
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class GgufArchitecture:
    """One of llama.cpp's architectures, as models of some types have it.

    Attributes:
        name: llama.cpp's.
        model_types: as config.json has them.
        applies: rules that tell it from others of the same model types: the first that all of them suit is meant.
        values: of the header beside those that every architecture has, or in their place; None: it has no such value.
        tensors: names of modules, or of single parameters, beside those of :data:`TENSORS`.
        pairs: whether llama.cpp rotates neighbouring elements of a head where transformers rotates halves.
        halves: whether it is the other way round.
        norms: what is computed from the weights of norms.
        activations: that its graph has.
        rules: what its graph takes for granted.
        rotated: the features of a head that are rotated, before ``partial_rotary_factor``; None: no rotary embedding.
        partial: whether ``partial_rotary_factor`` says how many of them are; else all are.
        alike: whether layers with a sliding window rotate as many of them as the others; else all.
        halved: whether it rotates, in layers without a sliding window, half of the features that it is told.
        plain_rope: whether it is told that the rotary embedding is not scaled.
        longrope: whether its graph has LongRoPE's factors.
        alpha: whether the base of its rotary embedding may be what transformers makes of ``alpha`` (type ``dynamic``).
        proportional: whether its layers with full attention rotate a part of a head's features, by the frequencies that
            they would have if all were rotated: by factors, which are infinite for the others.
        yarn: what its graph makes of the factors that YaRN's settings have for the attention: nothing, or it computes
            with ``mscale_all_dim`` where ``mscale`` is the same, or 1.
        filled: arrays of every layer that hold one number of config.json for each feature of a head, by their names
            without ``blk.N.``.
        output: whether the head is stored as well where it is the embedding.
        assumed: what llama.cpp takes for values that a file lacks, beside what it takes in every architecture.
        implied: keys of config.json that have no value in the file, and what they are by others.
        drafts: its draft layers; None: its loader has no place for them, or its graph no use.
        no_drafts: the reason why draft layers that its loader has a place for are not written.
    """

    name: str
    model_types: tuple[str, ...]
    applies: tuple[Requirement | NoLayer, ...] = ()
    values: Mapping[str, ValueSource | None] = field(default_factory=dict)
    tensors: Mapping[str, str | Stored] = field(default_factory=dict)
    pairs: bool = False
    halves: bool = False
    norms: Function = "value"
    activations: tuple[str, ...] = ("silu",)
    rules: tuple[Requirement | SameLayers | EveryKind, ...] = ()
    rotated: ValueSource | None = HEAD_DIM
    partial: bool = True
    alike: bool = False
    halved: bool = False
    plain_rope: bool = False
    longrope: bool = False
    alpha: bool = False
    proportional: bool = False
    yarn: Literal["", "mscale alike", "mscale 1"] = ""
    filled: Mapping[str, ValueSource] = field(default_factory=dict)
    output: bool = False
    assumed: Mapping[str, Value] = field(default_factory=dict)
    implied: Mapping[str, ValueSource] = field(default_factory=dict)
    drafts: Drafts | None = None
    no_drafts: str = ""


RMS = {"attention.layer_norm_rms_epsilon": number("rms_norm_eps", "norm_eps", "layer_norm_epsilon")}
LAYER_NORM = {
    "attention.layer_norm_rms_epsilon": None,
    "attention.layer_norm_epsilon": number("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
}

VALUES: Mapping[str, ValueSource] = {
    "block_count": LAYERS,
    "context_length": whole("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    "embedding_length": HIDDEN,
    "feed_forward_length": whole("intermediate_size"),
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    **RMS,
    "attention.key_length": HEAD_DIM,
    "attention.value_length": HEAD_DIM,
    "vocab_size": whole("vocab_size"),
}
"""Of every architecture that does not say otherwise, in their order in the file."""

ROLES = {
    "embedding": "token_embd",
    "final_norm": "output_norm",
    "head": "output",
    **dict.fromkeys(("draft.eh_proj", "draft.fc"), "nextn.eh_proj.weight"),
    **dict.fromkeys(("draft.enorm", "draft.pre_fc_norm_embedding"), "nextn.enorm.weight"),
    **dict.fromkeys(("draft.hnorm", "draft.pre_fc_norm_hidden"), "nextn.hnorm.weight"),
    **dict.fromkeys(("draft.shared_head.norm", "draft.norm"), "nextn.shared_head_norm.weight"),
    "draft.embedding": "nextn.embed_tokens.weight",
    "draft.head": "nextn.shared_head_head.weight",
}
"""Of modules outside of the layers, or around a draft's decoder layer, whose names differ most, by what they do."""

DRAFT_PARTS = ("nextn.eh_proj.weight", "nextn.enorm.weight", "nextn.hnorm.weight")
"""Arrays that stand around the decoder layer of every draft."""


def _under(prefix: str, names: Mapping[str, str | Stored]) -> dict[str, str | Stored]:
    """The same for modules that stand below one."""
    return {f"{prefix}.{path}": name for path, name in names.items()}


_MLP: dict[str, str | Stored] = {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}
_SHARED: dict[str, str | Stored] = {path: f"{name}_shexp" for path, name in _MLP.items()}
_EXPERTS: dict[str, str | Stored] = {f"experts.{{e}}.{path}": f"{name}_exps" for path, name in _MLP.items()}
_NUMBERED: dict[str, str | Stored] = {"w1": "ffn_gate", "w3": "ffn_up", "w2": "ffn_down"}
_NUMBERED_EXPERTS: dict[str, str | Stored] = {
    f"experts.{{e}}.{path}": f"{name}_exps" for path, name in _NUMBERED.items()
}
_ROUTER = "ffn_gate_inp"
_CORRECTION = "exp_probs_b.bias"
_SSM: dict[str, str | Stored] = {
    "in_proj": "ssm_in",
    "conv1d": "ssm_conv1d",
    "conv1d.weight": Stored(("ssm_conv1d.weight",), shape=("rows", 0)),
    "x_proj": "ssm_x",
    "dt_proj": "ssm_dt",
    "dt_bias": "ssm_dt.bias",
    "A_log": Stored(("ssm_a.",), function="minus exp"),
    "D": "ssm_d.",
    "norm": "ssm_norm",
    "out_proj": "ssm_out",
}

TENSORS: Mapping[str, str | Stored] = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "pre_ff_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    **_under(
        "self_attn",
        {
            "q_proj": "attn_q",
            "k_proj": "attn_k",
            "v_proj": "attn_v",
            "o_proj": "attn_output",
            "out_proj": "attn_output",
            "dense": "attn_output",
            "qkv_proj": "attn_qkv",
            **dict.fromkeys(("q_norm", "q_layernorm", "query_layernorm"), "attn_q_norm"),
            **dict.fromkeys(("k_norm", "k_layernorm", "key_layernorm"), "attn_k_norm"),
            "sinks": "attn_sinks.weight",
            "q_a_proj": "attn_q_a",
            "q_a_layernorm": "attn_q_a_norm",
            "q_b_proj": "attn_q_b",
            "kv_a_proj_with_mqa": "attn_kv_a_mqa",
            "kv_a_layernorm": "attn_kv_a_norm",
            "kv_b_proj": Stored(("attn_k_b.weight", "attn_v_b.weight"), rows="heads of kv_b"),
        },
    ),
    **_under(
        "mlp",
        {
            **_MLP,
            "gate_up_proj": "ffn_up",
            **_EXPERTS,
            **_under("shared_expert", _SHARED),
            **_under("shared_experts", _SHARED),
            **_under("shared_mlp", _SHARED),
            **dict.fromkeys(("gate", "router", "gate.wg", "router.gate"), _ROUTER),
            "shared_expert_gate": Stored(("ffn_gate_inp_shexp",), shape=(0,)),
            **dict.fromkeys(
                ("gate.e_score_correction_bias", "experts.e_score_correction_bias", "expert_bias"), _CORRECTION
            ),
            "moe_statics.e_score_correction_bias": Stored((_CORRECTION,), shape=(0,)),
            "fc1": "ffn_up",
            "fc2": "ffn_down",
            "c_fc": "ffn_up",
            "c_proj": "ffn_down",
            "dense_h_to_4h": "ffn_up",
            "dense_4h_to_h": "ffn_down",
        },
    ),
    **_under(
        "block_sparse_moe",
        {
            **_EXPERTS,
            **_NUMBERED_EXPERTS,
            **dict.fromkeys(("gate", "router", "router.layer"), _ROUTER),
            "e_score_correction_bias": _CORRECTION,
        },
    ),
    **_under(
        "feed_forward",
        {
            **_MLP,
            **_NUMBERED,
            **_EXPERTS,
            **_NUMBERED_EXPERTS,
            **_under("shared_expert", _SHARED),
            **dict.fromkeys(("gate", "router"), _ROUTER),
            "expert_bias": _CORRECTION,
        },
    ),
}
"""Names of most architectures: of modules within a layer, and of parameters that are no ``weight`` or ``bias``."""

FLOAT32 = frozenset(
    {
        *(_ROUTER, "ffn_gate_inp_shexp", "position_embd", "indexer.proj"),
        *("attn_compressor_ape", "indexer_compressor_ape", "hc_attn_fn", "hc_ffn_fn", "output_hc_fn"),
        *("ssm_conv1d", "ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v", "shortconv.conv"),
    }
)
"""Arrays that llama.cpp wants in float32, beside norms, biases and whatever else has one dim or is no ``weight``."""

_ATTENTION_SCALES = frozenset({"attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output", "output"})
_MLP_SCALES = frozenset({"ffn_gate", "ffn_up", "ffn_down"})
_EXPERT_SCALES = frozenset(f"{name}_exps" for name in _MLP_SCALES)
_SHARED_SCALES = frozenset(f"{name}_shexp" for name in _MLP_SCALES)
_SSM_SCALES = frozenset({"ssm_in", "ssm_out"})
_DELTA_SCALES = frozenset({"attn_gate", "ssm_out"})

SCALED: Mapping[str, frozenset[str]] = {
    **dict.fromkeys(
        (
            *("afmoe", "arcee", "bloom", "chatglm", "command-r", "dbrx", "dots1", "ernie4_5", "ernie4_5-moe"),
            *("exaone-moe", "exaone4", "falcon", "gemma", "gemma2", "gemma3", "glm4", "glm4moe", "gpt-oss"),
            *("gpt2", "gptneox", "granite", "granite_swa", "granitemoe", "hunyuan-dense", "hunyuan-moe"),
            *("hunyuan_vl", "jais2", "lfm2", "lfm2moe", "minimax-m2", "minimax-m3", "mpt", "muse-glimmer", "nemotron"),
            *("olmo", "olmo2", "olmoe", "paddleocr", "phi2", "phi3", "qwen2", "qwen2moe", "qwen2vl", "qwen3vl"),
            *("qwen3vlmoe", "seed_oss", "smollm3", "stablelm", "starcoder", "starcoder2", "step35"),
        ),
        _ATTENTION_SCALES,
    ),
    "llama": _ATTENTION_SCALES | _MLP_SCALES | _EXPERT_SCALES,
    "qwen3": _ATTENTION_SCALES | _MLP_SCALES,
    "qwen3moe": _ATTENTION_SCALES | _EXPERT_SCALES,
    "cohere2": _ATTENTION_SCALES | _MLP_SCALES,
    "qwen3next": _ATTENTION_SCALES - {"attn_qkv"} | _EXPERT_SCALES | _SHARED_SCALES,
    "mistral3": _ATTENTION_SCALES | _MLP_SCALES,
    "gemma4": _ATTENTION_SCALES | _MLP_SCALES,
    "hy_v3": _ATTENTION_SCALES | _MLP_SCALES | _EXPERT_SCALES | _SHARED_SCALES,
    "cohere2moe": _ATTENTION_SCALES - {"output"} | _MLP_SCALES | _EXPERT_SCALES | _SHARED_SCALES,
    "minicpm3": frozenset({"attn_output", "output"}),
    **dict.fromkeys(
        ("deepseek32", "glm-dsa"), frozenset({"attn_output"}) | _MLP_SCALES | _EXPERT_SCALES | _SHARED_SCALES
    ),
    "qwen35": _ATTENTION_SCALES | _MLP_SCALES | _DELTA_SCALES,
    "qwen35moe": _ATTENTION_SCALES | _EXPERT_SCALES | _SHARED_SCALES | _DELTA_SCALES,
    "mellum": _ATTENTION_SCALES | _EXPERT_SCALES,
    "laguna": _ATTENTION_SCALES - {"output"},
    **dict.fromkeys(("deepseek2", "mistral4", "mimo2"), frozenset({"attn_output"})),
    **dict.fromkeys(("mamba", "mamba2"), _SSM_SCALES | {"output"}),
    **dict.fromkeys(("falcon-h1", "granitehybrid", "jamba"), _ATTENTION_SCALES | _SSM_SCALES),
    "nemotron_h": _ATTENTION_SCALES | _SSM_SCALES | _MLP_SCALES,
    "nemotron_h_moe": _ATTENTION_SCALES | _SSM_SCALES | _EXPERT_SCALES | _SHARED_SCALES,
}
"""By llama.cpp's name of the architecture: the tensors whose products its graph multiplies by a ``scale`` beside them.

Its loader reads the scales of more tensors than its graphs multiply by. An architecture that is not listed has none.
"""

SCALED_BEFORE_BIAS = _MLP_SCALES | _SHARED_SCALES
"""Those of them whose scale would be applied behind the bias, which llama.cpp refuses."""

ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Arrays of factors of the rotary embedding."""

_GELUS = ("gelu_new", "gelu_pytorch_tanh", "gelu", "gelu_fast")
_WINDOW = whole("sliding_window")
_PATTERN = "attention.sliding_window_pattern"
_SLIDING = Where(("sliding_attention",))
_RECURRENT = ("linear_attention", "mamba", "conv")
_ATTENDING = Where(("full_attention", "attention"), others="linear_attention")
_EXPERT_COUNT = whole("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_USED_COUNT = whole("num_experts_per_tok", "moe_k", "moe_topk")
_MOE: dict[str, ValueSource | None] = {"expert_count": _EXPERT_COUNT, "expert_used_count": _USED_COUNT}
_EXPERT_WIDTH = whole("moe_intermediate_size")
_SHARED_COUNT: ValueSource = whole("n_shared_experts", least=0)
_LEADING_DENSE = First((Leading("dense", Kinds("mlp_layer_types")), whole("first_k_dense_replace", least=0)))
_LEADING_OR_SPARSE = Leading("dense", Kinds("mlp_layer_types"), others="sparse")
_SIGMOID = Fixed(2)
_GROUPS: dict[str, ValueSource | None] = {
    "expert_group_count": whole("n_group", optional=True),
    "expert_group_used_count": whole("topk_group", optional=True),
}
_AS_MANY_KEYS = Requirement("num_key_value_heads", (None,), equal=HEADS, why="has as many heads of keys as of queries")
_MROPE: dict[str, ValueSource | None] = {"rope.dimension_sections": Sections("rope_parameters.mrope_section")}
_OPTIONAL_SECTIONS = Sections("rope_parameters.mrope_section", optional=True)
_DEEPSTACK: dict[str, ValueSource | None] = {
    **_MROPE,
    "n_deepstack_layers": First((whole("num_deepstack_layers", optional=True, least=0), Fixed(0))),
}
_UNTIED_HEAD = Requirement("tie_word_embeddings", (True,), why="has no head of its own in such a model")
_GRANITE: dict[str, ValueSource | None] = {
    "attention.scale": number("attention_multiplier"),
    "embedding_scale": number("embedding_multiplier"),
    "residual_scale": number("residual_multiplier"),
    "logit_scale": number("logits_scaling"),
}
_SHARED_MLP: dict[str, str | Stored] = {
    "shared_mlp.input_linear": Stored(("ffn_gate_shexp", "ffn_up_shexp")),
    "shared_mlp.output_linear": "ffn_down_shexp",
}
_DENSE_SHARED_MLP: dict[str, str | Stored] = {
    "shared_mlp.input_linear": Stored(("ffn_gate", "ffn_up")),
    "shared_mlp.output_linear": "ffn_down",
}
_POST_ATTENTION: dict[str, str | Stored] = {"post_attention_layernorm": "post_attention_norm"}
_MAMBA2: dict[str, str | Stored] = {
    **_SSM,
    "A_log": Stored(("ssm_a.",), function="minus exp", shape=(0, 1)),
    "D": Stored(("ssm_d.",), shape=(0, 1)),
}
_GPT: dict[str, str | Stored] = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "transformer.wpe": "position_embd",
    "wpe": "position_embd",
}
_FOUR_TIMES = First(
    (whole("intermediate_size", "n_inner", "ffn_hidden_size", optional=True), Product((Fixed(4), HIDDEN)))
)
_LATENT: dict[str, ValueSource | None] = {
    "attention.head_count_kv": Fixed(1),
    "attention.q_lora_rank": whole("q_lora_rank", optional=True),
    "attention.kv_lora_rank": whole("kv_lora_rank"),
    "attention.key_length": Sum(("kv_lora_rank", "qk_rope_head_dim")),
    "attention.value_length": whole("kv_lora_rank"),
    "attention.key_length_mla": Sum(("qk_nope_head_dim", "qk_rope_head_dim")),
    "attention.value_length_mla": whole("v_head_dim"),
}

_GEMMA3 = GgufArchitecture(
    name="gemma3",
    model_types=("gemma3_text",),
    values={
        "attention.sliding_window": _WINDOW,
        _PATTERN: Where(("sliding_attention",), Kinds(period="sliding_window_pattern")),
        "final_logit_softcapping": number("final_logit_softcapping", optional=True),
    },
    tensors=_POST_ATTENTION,
    norms="one more",
    activations=_GELUS,
    assumed={_PATTERN: 6, "rope.freq_base_swa": 1e4},
    rules=(
        Requirement(
            "query_pre_attn_scalar", equal=HEAD_DIM, unless=("num_hidden_layers", 62), otherwise=Quotient(HIDDEN, HEADS)
        ),
        Requirement("attn_logit_softcapping", (None,)),
    ),
)

_GRANITE_MOE = GgufArchitecture(
    name="granitemoe",
    model_types=("granitemoe", "granitemoeshared"),
    values={
        **_MOE,
        "expert_shared_feed_forward_length": If("shared_intermediate_size", whole("shared_intermediate_size")),
        **_GRANITE,
    },
    tensors=_SHARED_MLP,
    pairs=True,
)
_MAMBA_BESIDE_ATTENTION: dict[str, ValueSource | None] = {
    "ssm.conv_kernel": whole("mamba_d_conv"),
    "ssm.inner_size": Product(("mamba_expand", HIDDEN)),
    "ssm.state_size": whole("mamba_d_state"),
    "ssm.time_step_rank": whole("mamba_n_heads"),
    "ssm.group_count": whole("mamba_n_groups"),
}
_GROUPED_MAMBA2 = _under("mamba", {**_MAMBA2, "norm.weight": Stored(("ssm_norm.weight",), shape=("mamba_n_groups", 0))})
_GRANITE_HYBRID = replace(
    _GRANITE_MOE,
    name="granitehybrid",
    model_types=("granitemoehybrid",),
    values={
        **_GRANITE_MOE.values,
        "attention.head_count_kv": Only(KV_HEADS, _ATTENDING),
        **_MAMBA_BESIDE_ATTENTION,
        "rope.scaling.finetuned": Says("position_embedding_type", "rope"),
    },
    tensors={**_SHARED_MLP, **_GROUPED_MAMBA2},
)
_GRANITE_SWA = GgufArchitecture(
    name="granite_swa",
    model_types=("granite_swa",),
    values={
        **_GRANITE,
        "attention.sliding_window": _WINDOW,
        _PATTERN: Where(("sliding_attention",), Kinds(first_of=4)),
        "rope.freq_base": number("rope_parameters.rope_theta", "rope_theta"),
        "attention.rope_pattern": Rotated("layer_rope_theta"),
    },
    pairs=True,
    rules=(
        Requirement(
            "layer_rope_theta", (None,), equal=OneBase("layer_rope_theta"), why="has one base for all layers it rotates"
        ),
    ),
)

_DEEPSEEK = GgufArchitecture(
    name="deepseek2",
    model_types=("deepseek_v3",),
    values={
        **_LATENT,
        "leading_dense_block_count": _LEADING_DENSE,
        **_MOE,
        "expert_feed_forward_length": _EXPERT_WIDTH,
        "expert_shared_count": _SHARED_COUNT,
        **_GROUPS,
        "expert_weights_scale": number("routed_scaling_factor"),
        "expert_weights_norm": Flag("norm_topk_prob"),
        "expert_gating_func": _SIGMOID,
    },
    rotated=whole("qk_rope_head_dim"),
    yarn="mscale alike",
    implied={"num_key_value_heads": HEADS},
    rules=(Requirement("rope_interleave", (True, None)),),
    drafts=Drafts(),
)

_INDEXER: dict[str, str | Stored] = _under(
    "self_attn.indexer",
    {
        "k_norm.weight": "indexer.k_norm.weight",
        "k_norm.bias": "indexer.k_norm.bias",
        "weights_proj": "indexer.proj.weight",
        "wk": "indexer.attn_k.weight",
        "wq_b": "indexer.attn_q_b.weight",
    },
)
_DEEPSEEK32 = replace(
    _DEEPSEEK,
    name="deepseek32",
    model_types=("deepseek_v32",),
    values={
        **_DEEPSEEK.values,
        "attention.indexer.head_count": whole("index_n_heads"),
        "attention.indexer.key_length": whole("index_head_dim"),
        "attention.indexer.top_k": whole("index_topk"),
    },
    tensors=_INDEXER,
    rules=(Requirement("index_head_dim", (64, 128, 192, 256), why="turns its features in blocks of 64"),),
)
_GLM_DSA = replace(
    _DEEPSEEK32,
    name="glm-dsa",
    model_types=("glm_moe_dsa",),
    values={**_DEEPSEEK32.values, "attention.indexer.types": IndexerTypes()},
    yarn="",
    assumed={"attention.indexer.types": 0},  # all have one
    rules=(*_DEEPSEEK32.rules, Requirement("rope_parameters.rope_type", ("default", None))),
)

_HYPER: dict[str, str | Stored] = {
    f".hc_{where}_{what}": f"hc_{where}_{what}.weight" for where in ("attn", "ffn") for what in ("fn", "base", "scale")
}
_COMPRESSOR = {"wkv": "kv", "wgate": "gate", "norm": "norm"}
_RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
_COMPRESSED = "rope_parameters.compress."
_ORIGINAL = "original_max_position_embeddings"
_DEEPSEEK4 = GgufArchitecture(
    name="deepseek4",
    model_types=("deepseek_v4",),
    values={
        **_MOE,
        "feed_forward_length": None,
        "embedding_length_out": Product((HIDDEN, "hc_mult")),
        "attention.head_count_kv": Fixed(1),
        "attention.q_lora_rank": whole("q_lora_rank"),
        "attention.sliding_window": _WINDOW,
        "attention.indexer.head_count": whole("index_n_heads"),
        "attention.indexer.key_length": whole("index_head_dim"),
        "attention.indexer.top_k": whole("index_topk"),
        "attention.output_group_count": whole("o_groups"),
        "attention.output_lora_rank": whole("o_lora_rank"),
        "attention.compress_ratios": NumberOfKind({"sliding_attention": 0, **_RATES}, "compress_ratios"),
        "attention.compress_rope_freq_base": number("compress_rope_theta"),
        "hyper_connection.count": whole("hc_mult"),
        "hyper_connection.sinkhorn_iterations": whole("hc_sinkhorn_iters"),
        "hyper_connection.epsilon": number("hc_eps"),
        "hash_layer_count": First(
            (Leading("hash_moe", Kinds("mlp_layer_types"), others="moe"), whole("num_hash_layers", least=0))
        ),
        "expert_feed_forward_length": _EXPERT_WIDTH,
        "expert_shared_count": _SHARED_COUNT,
        "expert_weights_scale": number("routed_scaling_factor"),
        "expert_weights_norm": Flag("norm_topk_prob"),
        "expert_gating_func": Fixed(4),
        "swiglu_clamp_exp": OfEachLayer(number("swiglu_limit")),
        "swiglu_clamp_shexp": OfEachLayer(number("swiglu_limit")),
        "rope.dimension_count": whole("qk_rope_head_dim"),
        "rope.freq_base": number("rope_theta"),
        "rope.scaling.type": Word(("rope_scaling.rope_type", "rope_scaling.type", _COMPRESSED + "rope_type"), "yarn"),
        **{
            f"rope.scaling.{key}": First(
                tuple(If(part + own, number(part + own)) for part in ("rope_scaling.", _COMPRESSED))
            )
            for key, own in (("factor", "factor"), ("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow"))
        },
        "rope.scaling.original_context_length": First(
            tuple(If(part + _ORIGINAL, whole(part + _ORIGINAL)) for part in ("rope_scaling.", _COMPRESSED))
        ),
    },
    tensors={
        **_HYPER,
        **{
            f"{module}{what}": f"output_hc_{what}.weight"
            for module in ("model.hc_head.hc_", ".hc_head_")
            for what in ("fn", "base", "scale")
        },
        **_under(
            "attn",
            {
                "attn_sink": "attn_sinks.weight",
                "wq_a": "attn_q_a",
                "q_norm": "attn_q_a_norm",
                "wq_b": "attn_q_b",
                "wkv": "attn_kv",
                "norm": "attn_kv_a_norm",
                "wo_a": "attn_output_a",
                "wo_b": "attn_output_b",
                **_under("compressor", {path: f"attn_compressor_{name}" for path, name in _COMPRESSOR.items()}),
                "compressor.ape": "attn_compressor_ape.weight",
                **_under(
                    "indexer.compressor", {path: f"indexer_compressor_{name}" for path, name in _COMPRESSOR.items()}
                ),
                "indexer.compressor.ape": "indexer_compressor_ape.weight",
                "indexer.wq_b": "indexer.attn_q_b.weight",
                "indexer.weights_proj": "indexer.proj.weight",
            },
        ),
        "attn_norm": "attn_norm",
        "ffn_norm": "ffn_norm",
        **_under(
            "ffn",
            {
                **_NUMBERED_EXPERTS,
                **{f"shared_experts.{path}": f"{name}_shexp" for path, name in _NUMBERED.items()},
                "gate": _ROUTER,
                "gate.bias": _CORRECTION,
                "gate.tid2eid": "ffn_gate_tid2eid.weight",
            },
        ),
    },
    rotated=None,
    output=True,
    implied={"num_nextn_predict_layers": Fixed(0)},
    rules=(
        Requirement("compress_rates", (None, _RATES)),
        Requirement("scoring_func", ("sqrtsoftplus", None)),
        Requirement("hc_mult", (4,), why="has four streams of hidden states"),
        Requirement("index_head_dim", (64, 128, 192, 256), why="turns its features in blocks of 64"),
        EveryKind(tuple(_RATES)),
        *(
            requirement
            for part in ("rope_scaling.", _COMPRESSED)
            for requirement in (
                Requirement(f"{part}rope_type", ("default", "yarn", None)),
                Requirement(f"{part}attention_factor", (1, None)),
            )
        ),
    ),
    no_drafts=(
        "llama.cpp computes the head of a draft by the model's own hc_head, and a draft has another (mtp.0.hc_head_fn, "
        "hc_head_base, hc_head_scale): its own conversion writes drafts to a file without the model"
    ),
)

_KDA: dict[str, str | Stored] = {
    **{f"{which}_conv1d": f"ssm_conv1d_{which}" for which in "qkv"},
    "dt_bias": "ssm_dt.bias",
    "f_a_proj": "ssm_f_a",
    "f_b_proj": "ssm_f_b",
    "b_proj": "ssm_beta",
    "g_a_proj": "ssm_g_a",
    "g_b_proj": "ssm_g_b",
    "o_norm": "ssm_norm",
}
_KDA_HEADS = tuple(
    Requirement(key, (None,), equal=HEADS, why="has as many heads in every layer")
    for key in ("linear_num_heads", "linear_attn_config.num_heads")
)
_KIMI_LINEAR = GgufArchitecture(
    name="kimi-linear",
    model_types=("kimi_linear",),
    values={
        **_LATENT,
        "context_length": whole("max_position_embeddings", "model_max_length"),
        "attention.head_count_kv": First(
            (
                If("layer_types", Only(Fixed(1), Where(("full_attention",), others="linear_attention"))),
                Only(Fixed(1), Among("linear_attn_config.full_attn_layers", start=1)),
            )
        ),
        "rope.dimension_count": whole("qk_rope_head_dim"),
        "ssm.conv_kernel": whole("linear_conv_kernel_dim", "linear_attn_config.short_conv_kernel_size"),
        "kda.head_dim": whole("linear_head_dim", "linear_attn_config.head_dim"),
        "leading_dense_block_count": First((_LEADING_OR_SPARSE, whole("first_k_dense_replace", least=0))),
        "expert_count": _EXPERT_COUNT,
        "expert_used_count": whole("num_experts_per_tok", "num_experts_per_token"),
        "expert_feed_forward_length": _EXPERT_WIDTH,
        "expert_shared_count": whole("n_shared_experts", "num_shared_experts"),
        "expert_group_count": whole("n_group", "num_expert_group"),
        "expert_group_used_count": whole("topk_group"),
        "expert_weights_scale": number("routed_scaling_factor"),
        "expert_gating_func": _SIGMOID,
    },
    tensors={
        **_under(
            "self_attn",
            {
                **_KDA,
                "A_log": Stored(("ssm_a.",), function="minus exp", shape=(0, 1)),
            },
        ),
        **_under(
            "block_sparse_moe",
            {**_MLP, **_under("shared_experts", _SHARED), "gate.e_score_correction_bias": _CORRECTION},
        ),
    },
    rotated=None,
    output=True,
    implied={"num_key_value_heads": HEADS, "linear_num_heads": HEADS},
    rules=(
        Requirement("q_lora_rank", (None,)),
        *_KDA_HEADS,
        Requirement("norm_topk_prob", (True,)),
        Requirement("moe_renormalize", (True, None)),
        Requirement("moe_router_activation_func", ("sigmoid", None)),
    ),
)
_GLM5_LAYERS = Where(("indexed_attention", "full_attention"), others="linear_attention")
_GLM5_NEXT = GgufArchitecture(
    name="glm5-next",
    model_types=("glm5_next_text",),
    values={
        **_LATENT,
        "attention.layer_norm_epsilon": Fixed(1e-6),
        "attention.head_count_kv": Only(Fixed(1), _GLM5_LAYERS),
        "attention.key_length": whole("kv_lora_rank"),
        "attention.key_length_mla": whole("qk_nope_head_dim"),
        "rope.dimension_count": Fixed(0),
        "ssm.conv_kernel": whole("linear_attn_config.short_conv_kernel_size", "linear_conv_kernel_dim"),
        "kda.head_dim": whole("linear_attn_config.head_dim", "linear_head_dim"),
        "kda.gate_lower_bound": Negative(("linear_attn_config.gate_lower_bound", "linear_lower_bound")),
        "leading_dense_block_count": First((_LEADING_OR_SPARSE, Fixed(3))),
        **_MOE,
        "expert_feed_forward_length": _EXPERT_WIDTH,
        "expert_shared_count": _SHARED_COUNT,
        **_GROUPS,
        "expert_weights_scale": number("routed_scaling_factor"),
        "expert_weights_norm": Flag("norm_topk_prob"),
        "expert_gating_func": _SIGMOID,
        "swiglu_clamp_exp": OfEachLayer(number("swiglu_limit")),
        "swiglu_clamp_shexp": OfEachLayer(number("swiglu_limit")),
        "attention.indexer.head_count": whole("index_n_heads"),
        "attention.indexer.key_length": whole("index_head_dim"),
        "attention.indexer.top_k": whole("index_topk"),
        "attention.indexer.kpool": whole("index_kpool", least=2),
        "attention.indexer.kpool_select_tail": Flag("index_kpool_always_select_tail"),
        "attention.indexer.types": IndexerTypes(),
        "hyper_connection.count": whole("hc_mult"),
        "hyper_connection.sinkhorn_iterations": whole("hc_sinkhorn_iters"),
        "hyper_connection.epsilon": number("hc_eps"),
    },
    tensors={
        **_HYPER,
        **_INDEXER,
        **_under(
            "self_attn",
            {
                **_KDA,
                "A_log": Stored(("ssm_a.",), function="minus exp", shape=(0,)),
                **{
                    f"indexer.index_kpool_compress_{what}": f"indexer_compressor_{what}.weight"
                    for what in ("ape", "gate")
                },
            },
        ),
    },
    rotated=None,
    output=True,
    implied={"num_key_value_heads": HEADS, "linear_num_heads": HEADS},
    rules=(
        Requirement("qk_rope_head_dim", (0, None), why="rotates nothing in such a model"),
        Requirement("hc_mult", (4,), why="has four streams of hidden states"),
        Requirement("attention_bias", (False, None)),
        *_KDA_HEADS,
        Requirement("linear_attn_config.safe_gate", (True, None)),
    ),
    no_drafts="llama.cpp loads them, and has no graph that runs them",
)
_MIMO_LAYERS = Kinds(last_of=6)
_TWICE_KV_HEADS = Product((Fixed(2), KV_HEADS))
_MIMO2 = GgufArchitecture(
    name="mimo2",
    model_types=("mimo_v2_flash",),
    values={
        **_MOE,
        "attention.head_count_kv": DoubleSlidingKvHeads(_MIMO_LAYERS),
        "attention.value_length": whole("v_head_dim"),
        "attention.value_scale": number("attention_value_scale", optional=True),
        "attention.sliding_window": First((whole("sliding_window_size", optional=True, plus=1), _WINDOW)),
        _PATTERN: Where(("sliding_attention",), _MIMO_LAYERS),
        "leading_dense_block_count": First((_LEADING_OR_SPARSE, Fixed(1))),
        "expert_feed_forward_length": _EXPERT_WIDTH,
        **_GROUPS,
    },
    tensors={"self_attn.attention_sink_bias": "attn_sinks.weight", "draft.final_layernorm": "layer_output_norm.weight"},
    alike=True,
    output=True,
    rules=(
        Requirement("attention_bias", (False, None)),
        Requirement("norm_topk_prob", (True,)),
        Requirement("routed_scaling_factor", (1, None)),
        Requirement("swa_num_key_value_heads", (None,), equal=_TWICE_KV_HEADS),
    ),
    drafts=Drafts(
        count="",
        names=BELOW_MODEL,
        listed={"attention.head_count_kv": _TWICE_KV_HEADS, _PATTERN: Fixed(True)},
        joined={"attn_qkv": ("attn_q", "attn_k", "attn_v")},
    ),
)

_STEP35 = GgufArchitecture(
    name="step35",
    model_types=("step3p5",),
    values={
        **_MOE,
        "attention.head_count": SlidingHeads("num_sliding_attention_heads"),
        "attention.sliding_window": _WINDOW,
        _PATTERN: _SLIDING,
        "leading_dense_block_count": First((_LEADING_OR_SPARSE, Fixed(3))),
        "expert_feed_forward_length": _EXPERT_WIDTH,
        "expert_shared_feed_forward_length": whole("share_expert_dim"),
        "expert_weights_scale": number("moe_router_scaling_factor"),
        "expert_weights_norm": Fixed(True),
        "expert_gating_func": _SIGMOID,
        "swiglu_clamp_exp": Limits("swiglu_limits"),
        "swiglu_clamp_shexp": Limits("swiglu_limits_shared"),
    },
    tensors={"self_attn.g_proj": "attn_gate"},
    norms="one more",
    partial=False,
    halved=True,
    output=True,
    rules=(
        Requirement("query_pre_attn_scalar", (None,), equal=HEAD_DIM),
        Requirement("attention_bias", (False, None)),
        Requirement("mlp_bias", (False, None)),
    ),
)
_MUSE_LAYERS = Kinds(every=4)
_MUSE_GLIMMER = GgufArchitecture(
    name="muse-glimmer",
    model_types=("muse_glimmer_text",),
    values={
        "attention.sliding_window": _WINDOW,
        _PATTERN: Where(("sliding_attention",), _MUSE_LAYERS),
        "final_logit_softcapping": number("final_logit_softcapping"),
        "logit_scale": number("output_multiplier"),
    },
    tensors={
        **_POST_ATTENTION,
        "self_attn.gate_proj": "attn_gate",
        "final_norm": Stored(("output_norm",), is_norm=False),
    },
    pairs=True,
    norms="one more",
    filled={"attn_q_norm.weight": number("qk_scale_factor"), "attn_k_norm.weight": Fixed(1.0)},
    output=True,
    implied={"layer_rope_theta": BaseWhere(Where(("sliding_attention",), _MUSE_LAYERS))},
    rules=(
        Requirement(
            "layer_rope_theta",
            (None,),
            equal=BaseWhere(Where(("sliding_attention",), _MUSE_LAYERS)),
            why="rotates the layers with a sliding window, all with one base, and no others",
        ),
        Requirement("post_norm_eps", (1e-8, None)),
    ),
)

_MLP_LAYERS = Kinds("mlp_layer_types", flags=("moe_layer_freq", ("dense", "sparse")))
_MINIMAX_M3 = GgufArchitecture(
    name="minimax-m3",
    model_types=("minimax_m3_vl_text",),
    values={
        **_MOE,
        "feed_forward_length": whole("dense_intermediate_size"),
        "leading_dense_block_count": First((Leading("dense", _MLP_LAYERS, others="sparse"), Fixed(0))),
        "expert_feed_forward_length": whole("intermediate_size"),
        "expert_shared_count": Fixed(1),
        "expert_weights_scale": number("routed_scaling_factor"),
        "expert_weights_norm": Fixed(True),
        "expert_gating_func": _SIGMOID,
        **{
            f"attention.indexer.{key}": whole(f"index_{own}", f"sparse_attention_config.sparse_{older}")
            for key, own, older in (
                ("head_count", "n_heads", "num_index_heads"),
                ("key_length", "head_dim", "index_dim"),
                ("top_k", "topk_blocks", "topk_blocks"),
                ("block_size", "block_size", "block_size"),
                ("local_blocks", "local_blocks", "local_block"),
            )
        },
    },
    tensors={
        **_under(
            "self_attn.indexer", {name: f"indexer.{name}.weight" for name in ("q_proj", "k_proj", "q_norm", "k_norm")}
        ),
        "mlp.gate_up_proj": Stored(("ffn_gate", "ffn_up")),
        "mlp.shared_experts.gate_up_proj": Stored(("ffn_gate_shexp", "ffn_up_shexp")),
        **_under("block_sparse_moe.shared_experts", _SHARED),
    },
    norms="one more",
    activations=("silu", "swigluoai"),
    output=True,
    implied={"shared_intermediate_size": whole("intermediate_size")},
    rules=(
        SameLayers(
            Kinds(
                flags=("sparse_attention_config.sparse_attention_freq", ("full_attention", "minimax_m3_sparse")),
            ),
            _MLP_LAYERS,
            {"dense": "full_attention", "sparse": "minimax_m3_sparse"},
            "full_attention",
            "has indexers in the layers with experts",
        ),
        Requirement(
            "rotary_dim", (None,), equal=RotatedFeatures(), why="rotates as many as partial_rotary_factor says"
        ),
        Requirement("shared_intermediate_size", equal=whole("intermediate_size")),
        Requirement("index_n_heads", (None,), equal=KV_HEADS, why="has an indexer's head for each of keys"),
        Requirement("swiglu_alpha", (1.702, None)),
        Requirement("swiglu_limit", (7, None)),
    ),
)

_COHERE = GgufArchitecture(
    name="command-r",
    model_types=("cohere",),
    values={**LAYER_NORM, "logit_scale": number("logit_scale")},
    rules=(_UNTIED_HEAD,),
    plain_rope=True,
)
_OLMO2 = GgufArchitecture(
    name="olmo2",
    model_types=("olmo2",),
    tensors=_POST_ATTENTION,
    output=True,
)
_ROUTED_BY_SIGMOID: dict[str, ValueSource | None] = {
    **_MOE,
    "expert_feed_forward_length": _EXPERT_WIDTH,
    "expert_shared_count": _SHARED_COUNT,
    "leading_dense_block_count": _LEADING_DENSE,
    **_GROUPS,
    "expert_weights_scale": number("routed_scaling_factor"),
    "expert_weights_norm": Flag("norm_topk_prob"),
    "expert_gating_func": _SIGMOID,
}
_QWEN_MOE: dict[str, ValueSource | None] = {
    **_MOE,
    "expert_feed_forward_length": _EXPERT_WIDTH,
    "expert_shared_feed_forward_length": whole("shared_expert_intermediate_size", optional=True),
}
_EVERY_LAYER_ROUTES = (
    Requirement("mlp_only_layers", (None, []), why="has experts in every layer of such a model"),
    Requirement("decoder_sparse_step", (None, 1), why="has experts in every layer of such a model"),
)
_LFM2: dict[str, str | Stored] = {
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "conv.conv.weight": Stored(("shortconv.conv.weight",), shape=("rows", 0)),
    "conv.in_proj": "shortconv.in_proj.weight",
    "conv.out_proj": "shortconv.out_proj.weight",
    "final_norm": "token_embd_norm",
}
_LFM2_VALUES: dict[str, ValueSource | None] = {
    "attention.head_count_kv": Only(KV_HEADS, replace(_ATTENDING, others="conv")),
    "shortconv.l_cache": whole("conv_L_cache"),
}
_MAMBA_VALUES: dict[str, ValueSource | None] = {
    "context_length": Fixed(1 << 20),
    "feed_forward_length": Fixed(0),
    "attention.head_count": Fixed(0),
    "attention.head_count_kv": None,
    "attention.key_length": None,
    "attention.value_length": None,
    "ssm.conv_kernel": whole("conv_kernel"),
    "ssm.state_size": whole("state_size"),
}
_GPT_BIGCODE = GgufArchitecture(
    name="starcoder",
    model_types=("gpt_bigcode",),
    values={**LAYER_NORM, "feed_forward_length": _FOUR_TIMES, "attention.head_count_kv": Fixed(1)},
    tensors=_GPT,
    activations=_GELUS,
    rules=(Requirement("multi_query", (True, None)),),
    rotated=None,
)
_FALCON = GgufArchitecture(
    name="falcon",
    model_types=("falcon",),
    values={**LAYER_NORM, "feed_forward_length": _FOUR_TIMES, "attention.head_count_kv": FusedKvHeads()},
    tensors={
        "self_attention.query_key_value": Stored(("attn_qkv",), rows="grouped"),
        "self_attention.dense": "attn_output",
        "ln_mlp": "attn_norm",
        "ln_attn": "attn_norm_2",
    },
    activations=_GELUS,
    rules=(
        Requirement("alibi", (False, None)),
        Requirement("parallel_attn", (True, None)),
        Requirement("bias", (False, None)),
    ),
)

_FALCON_H1 = GgufArchitecture(
    name="falcon-h1",
    model_types=("falcon_h1",),
    values={
        "ssm.conv_kernel": whole("mamba_d_conv"),
        "ssm.inner_size": First((whole("mamba_d_ssm", optional=True), Product(("mamba_expand", HIDDEN)))),
        "ssm.state_size": whole("mamba_d_state"),
        "ssm.time_step_rank": whole("mamba_n_heads"),
        "ssm.group_count": whole("mamba_n_groups"),
    },
    tensors={"pre_ff_layernorm": "ffn_norm.", **_GROUPED_MAMBA2},
    rules=(
        *(
            Requirement(key, (1, None), why="has no multipliers in such a model: they must be in its weights")
            for key in (
                "attention_in_multiplier",
                "attention_out_multiplier",
                "key_multiplier",
                "ssm_in_multiplier",
                "ssm_out_multiplier",
                "embedding_multiplier",
                "lm_head_multiplier",
            )
        ),
        Requirement("mlp_multipliers", (None, [1.0, 1.0])),
        Requirement("ssm_multipliers", (None, [1.0] * 5)),
        Requirement("mamba_proj_bias", (False, None)),
        Requirement("mamba_norm_before_gate", (False,), unless=("mamba_rms_norm", False)),
    ),
)
_JAMBA_LAYERS = Kinds(
    "layers_block_type", period="attn_layer_period", usual="mamba", other="attention", offset="attn_layer_offset"
)
_JAMBA = GgufArchitecture(
    name="jamba",
    model_types=("jamba",),
    values={
        **_MOE,
        "attention.head_count_kv": Only(KV_HEADS, Where(("attention", "full_attention"), _JAMBA_LAYERS, others="")),
        "ssm.conv_kernel": whole("mamba_d_conv"),
        "ssm.inner_size": Product(("mamba_expand", HIDDEN)),
        "ssm.state_size": whole("mamba_d_state"),
        "ssm.time_step_rank": whole("mamba_dt_rank"),
    },
    tensors={
        **_under(
            "mamba", {**_SSM, "dt_layernorm": "ssm_dt_norm", "b_layernorm": "ssm_b_norm", "c_layernorm": "ssm_c_norm"}
        ),
    },
    rules=(Requirement("mamba_proj_bias", (False, None)), Requirement("mamba_conv_bias", (True, None))),
    rotated=None,
)
_NEMOTRON_LAYERS = Kinds(
    "layers_block_type",
    letters=("hybrid_override_pattern", {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}),
)
_NEMOTRON_H = GgufArchitecture(
    name="nemotron_h",
    model_types=("nemotron_h",),
    applies=(NoLayer("moe", _NEMOTRON_LAYERS),),
    values={
        **LAYER_NORM,
        **RMS,
        "block_count": Count(_NEMOTRON_LAYERS),
        "feed_forward_length": Only(whole("intermediate_size"), Where(("mlp",), _NEMOTRON_LAYERS, others="")),
        "attention.head_count_kv": Only(KV_HEADS, Where(("attention", "full_attention"), _NEMOTRON_LAYERS, others="")),
        "ssm.conv_kernel": whole("conv_kernel"),
        "ssm.inner_size": Product(("mamba_num_heads", "mamba_head_dim")),
        "ssm.state_size": whole("ssm_state_size"),
        "ssm.time_step_rank": whole("mamba_num_heads"),
        "ssm.group_count": whole("n_groups"),
    },
    tensors={
        "norm": "attn_norm",
        **_under(
            "mixer",
            {
                **_MAMBA2,
                "norm.weight": Stored(("ssm_norm.weight",), shape=("n_groups", 0)),
                "q_proj": "attn_q",
                "k_proj": "attn_k",
                "v_proj": "attn_v",
                "o_proj": "attn_output",
                **_MLP,
                **_EXPERTS,
                **_under("shared_experts", _SHARED),
                "gate": _ROUTER,
                "gate.e_score_correction_bias": _CORRECTION,
            },
        ),
    },
    activations=("relu2",),
    rotated=None,
)
_QWEN3_NEXT = GgufArchitecture(
    name="qwen3next",
    model_types=("qwen3_next",),
    values={
        **_QWEN_MOE,
        "ssm.conv_kernel": whole("linear_conv_kernel_dim"),
        "ssm.state_size": whole("linear_key_head_dim"),
        "ssm.group_count": whole("linear_num_key_heads"),
        "ssm.time_step_rank": whole("linear_num_value_heads"),
        "ssm.inner_size": Product(("linear_num_value_heads", "linear_value_head_dim")),
        "attention.recurrent_layers": Where(("linear_attention",)),
        "full_attention_interval": First((whole("full_attention_interval", optional=True), Fixed(4))),
    },
    tensors={
        **_POST_ATTENTION,
        **_under(
            "linear_attn",
            {
                **_SSM,
                "norm": Stored(("ssm_norm",), is_norm=False),
                "in_proj_qkvz": Stored(("attn_qkv.weight", "attn_gate.weight"), rows="groups of qkvz"),
                "in_proj_ba": "ssm_ba",
            },
        ),
    },
    norms="one more",
    rules=(Requirement("norm_topk_prob", (True,)), *_EVERY_LAYER_ROUTES),
    drafts=Drafts(count="mtp_num_hidden_layers", names=BELOW_MTP, listed={"attention.recurrent_layers": Fixed(False)}),
)

_GLM4: dict[str, str | Stored] = {
    "post_self_attn_layernorm": "post_attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}
_GLM4_MOE = GgufArchitecture(
    name="glm4moe",
    model_types=("glm4_moe",),
    values=_ROUTED_BY_SIGMOID,
    tensors=_POST_ATTENTION,
    drafts=Drafts(),
)
_LLAMA4 = GgufArchitecture(
    name="llama4",
    model_types=("llama4_text",),
    values={
        **_MOE,
        "feed_forward_length": whole("intermediate_size_mlp"),
        "expert_feed_forward_length": whole("intermediate_size"),
        "interleave_moe_layer_step": whole("interleave_moe_layer_step"),
    },
    implied={"layer_types": EveryFourth("chunked_attention", "full_attention")},
    rules=(
        Requirement(
            "layer_types",
            (None,),
            equal=EveryFourth("chunked_attention", "full_attention"),
            why="attends to chunks in all layers but every fourth",
        ),
        Requirement("no_rope_layers", (None, []), equal=EveryFourth(), why="rotates all layers but every fourth"),
        Requirement("no_rope_layer_interval", (4,), why="rotates all layers but every fourth"),
        Requirement(
            "moe_layers",
            (None,),
            equal=LastOfEach("interleave_moe_layer_step"),
            why="has experts in each last of interleave_moe_layer_step layers",
        ),
        Requirement("attention_chunk_size", (8192,)),
        Requirement("attn_temperature_tuning", (True,)),
        Requirement("attn_scale", (0.1,)),
        Requirement("floor_scale", (8192,)),
        Requirement("use_qk_norm", equal=Fixed(True), unless=("num_local_experts", 128), otherwise=Fixed(False)),
    ),
)

_FULL_HEAD_DIM = OfFullLayers("head_dim", "global_head_dim", 512)
_GEMMA4 = GgufArchitecture(
    name="gemma4",
    model_types=("gemma4_text", "gemma4_unified_text"),
    applies=(Requirement("enable_moe_block", (False, None)),),
    values={
        "feed_forward_length": DoubleWidth(),
        "attention.head_count_kv": KvHeadsByLayer(OfFullLayers("num_key_value_heads", "num_global_key_value_heads")),
        "attention.key_length": _FULL_HEAD_DIM,
        "attention.value_length": _FULL_HEAD_DIM,
        "attention.key_length_swa": HEAD_DIM,
        "attention.value_length_swa": HEAD_DIM,
        "attention.sliding_window": _WINDOW,
        _PATTERN: _SLIDING,
        "attention.shared_kv_layers": whole("num_kv_shared_layers", least=0),
        "embedding_length_per_layer_input": First(
            (whole("hidden_size_per_layer_input", optional=True, least=0), Fixed(0))
        ),
        "rope.dimension_count_swa": HEAD_DIM,
        "final_logit_softcapping": number("final_logit_softcapping", optional=True),
    },
    tensors={
        **_POST_ATTENTION,
        "model.embed_tokens_per_layer": "per_layer_token_embd",
        "model.per_layer_model_projection": "per_layer_model_proj",
        "model.per_layer_projection_norm": "per_layer_proj_norm",
        ".layer_scalar": "layer_output_scale.weight",
        "per_layer_input_gate": "inp_gate",
        "per_layer_projection": "proj",
        "post_per_layer_input_norm": "post_norm",
    },
    activations=_GELUS,
    rotated=_FULL_HEAD_DIM,
    proportional=True,
    implied={"vocab_size_per_layer_input": whole("vocab_size")},
    rules=(Requirement("use_bidirectional_attention", (None, "vision")),),
)
_GEMMA4_MOE = replace(
    _GEMMA4,
    applies=(Requirement("enable_moe_block", (True,)),),
    values={
        **_GEMMA4.values,
        "expert_count": whole("num_experts"),
        "expert_used_count": whole("top_k_experts"),
        "expert_feed_forward_length": _EXPERT_WIDTH,
    },
    tensors={
        **_GEMMA4.tensors,
        **_EXPERTS,
        "router.proj": _ROUTER,
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "post_feedforward_layernorm_1": "post_ffw_norm_1",
        "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
        "post_feedforward_layernorm_2": "post_ffw_norm_2",
    },
)
_QWEN35 = replace(
    _QWEN3_NEXT,
    name="qwen35",
    model_types=("qwen3_5_text",),
    values={
        **{key: value for key, value in _QWEN3_NEXT.values.items() if key not in _QWEN_MOE},
        "rope.dimension_sections": First((_OPTIONAL_SECTIONS, Fixed((11, 11, 10, 0)))),
    },
    tensors={
        **_POST_ATTENTION,
        **_under(
            "linear_attn",
            {
                "in_proj_qkv": Stored(("attn_qkv",), rows="values by turns"),
                "in_proj_z": Stored(("attn_gate",), rows="values by turns"),
                "in_proj_b": Stored(("ssm_beta",), rows="values by turns"),
                "in_proj_a": Stored(("ssm_alpha",), rows="values by turns"),
                "conv1d.weight": Stored(("ssm_conv1d.weight",), rows="values by turns", shape=("rows", 0)),
                "dt_bias": Stored(("ssm_dt.bias",), rows="values by turns"),
                "A_log": Stored(("ssm_a.",), rows="values by turns", function="minus exp"),
                "norm": Stored(("ssm_norm",), is_norm=False),
                "out_proj": Stored(("ssm_out",), columns="values by turns"),
            },
        ),
    },
    rules=(Requirement("linear_value_head_dim", equal=whole("linear_key_head_dim")),),
)

ARCHITECTURES: tuple[GgufArchitecture, ...] = (
    GgufArchitecture(name="llama", model_types=("llama", "mistral", "internlm3", "iquestcoder"), pairs=True),
    GgufArchitecture(name="llama", model_types=("mixtral",), values=_MOE, pairs=True),
    GgufArchitecture(name="qwen2", model_types=("qwen2",)),
    GgufArchitecture(
        name="phi3",
        model_types=("phi3",),
        longrope=True,
        values={"attention.sliding_window": First((whole("sliding_window", optional=True), Fixed(0)))},
    ),
    GgufArchitecture(
        name="qwen2moe",
        model_types=("qwen2_moe",),
        values=_QWEN_MOE,
        rules=(Requirement("norm_topk_prob", (False, None)), *_EVERY_LAYER_ROUTES),
        output=True,
    ),
    GgufArchitecture(name="qwen3", model_types=("qwen3",)),
    GgufArchitecture(
        name="qwen3moe",
        model_types=("qwen3_moe",),
        values={**_MOE, "expert_feed_forward_length": _EXPERT_WIDTH},
        rules=(Requirement("norm_topk_prob", (True,)), *_EVERY_LAYER_ROUTES),
    ),
    GgufArchitecture(name="gemma", model_types=("gemma",), norms="one more", activations=_GELUS, rules=(_UNTIED_HEAD,)),
    replace(
        _GEMMA3,
        name="gemma2",
        model_types=("gemma2",),
        values={
            "attention.sliding_window": _WINDOW,
            _PATTERN: _SLIDING,
            "attn_logit_softcapping": number("attn_logit_softcapping"),
            "final_logit_softcapping": number("final_logit_softcapping"),
        },
        assumed={_PATTERN: 2},
        rules=(
            Requirement(
                "query_pre_attn_scalar",
                equal=HEAD_DIM,
                unless=("num_hidden_layers", 46),
                otherwise=Quotient(HIDDEN, HEADS),
            ),
            _UNTIED_HEAD,
        ),
    ),
    _GEMMA3,
    _OLMO2,
    replace(
        _OLMO2,
        model_types=("olmo3",),
        values={"attention.sliding_window": _WINDOW, _PATTERN: _SLIDING},
        assumed={_PATTERN: 4},
    ),
    GgufArchitecture(
        name="smollm3",
        model_types=("smollm3",),
        pairs=True,
        rules=(
            Requirement("no_rope_layers", (None,), equal=EveryFourth(), why="rotates all layers but every fourth"),
            Requirement("no_rope_layer_interval", (4, None), why="rotates all layers but every fourth"),
            Requirement("use_sliding_window", (False, None)),
        ),
    ),
    GgufArchitecture(name="granite", model_types=("granite", "granite_docling_text"), values=_GRANITE, pairs=True),
    GgufArchitecture(
        name="granite",
        model_types=("granite4_vision_text",),
        values={**_GRANITE, "deepstack_mapping": DeepstackMapping("deepstack_target_layers")},
        pairs=True,
    ),
    _GRANITE_SWA,
    replace(
        _GRANITE_SWA,
        model_types=("granitemoe_swa",),
        values={**_GRANITE_SWA.values, **_GRANITE_MOE.values},
        tensors={"shared_mlp.input_linear": "ffn_up_shexp", "shared_mlp.output_linear": "ffn_down_shexp"},
    ),
    _GRANITE_MOE,
    replace(
        _GRANITE_HYBRID,
        applies=(Requirement("num_local_experts", (0, None)),),
        values={
            **{key: value for key, value in _GRANITE_HYBRID.values.items() if not key.startswith("expert")},
            "feed_forward_length": whole("shared_intermediate_size"),
        },
        tensors={**_GRANITE_HYBRID.tensors, **_DENSE_SHARED_MLP},
    ),
    _GRANITE_HYBRID,
    GgufArchitecture(
        name="gpt-oss",
        model_types=("gpt_oss",),
        values={
            **_MOE,
            "expert_feed_forward_length": whole("intermediate_size"),
            "attention.sliding_window": _WINDOW,
            _PATTERN: _SLIDING,
        },
        tensors=_POST_ATTENTION,
        output=True,
        assumed={_PATTERN: 2},
    ),
    _DEEPSEEK,
    replace(
        _DEEPSEEK,
        model_types=("deepseek_v2",),
        values={**_DEEPSEEK.values, "expert_gating_func": Fixed(1)},
        assumed={"expert_gating_func": 1},
        rules=(Requirement("topk_method", ("greedy", None), why="adds up the two best of each group of experts"),),
    ),
    replace(_DEEPSEEK, model_types=("kimi_k2", "glm4_moe_lite")),
    _DEEPSEEK32,
    _GLM_DSA,
    _DEEPSEEK4,
    _KIMI_LINEAR,
    _GLM5_NEXT,
    _MIMO2,
    _STEP35,
    _MUSE_GLIMMER,
    _MINIMAX_M3,
    replace(
        _DEEPSEEK,
        name="mistral4",
        model_types=("mistral4",),
        values={
            **_DEEPSEEK.values,
            "expert_gating_func": Fixed(1),
            "attention.temperature_scale": number("rope_parameters.llama_4_scaling_beta", optional=True),
            "attention.temperature_length": If(
                "rope_parameters.llama_4_scaling_beta", whole("rope_parameters.original_max_position_embeddings")
            ),
        },
        partial=False,
        drafts=None,
    ),
    GgufArchitecture(name="glm4", model_types=("glm4",), tensors=_GLM4),
    GgufArchitecture(
        name="glm4",
        model_types=("glm4v_text", "glm_ocr_text"),
        values={"rope.dimension_sections": First((_OPTIONAL_SECTIONS, Fixed((8, 12, 12, 0))))},
        tensors=_GLM4,
        halves=True,
    ),
    _GLM4_MOE,
    replace(
        _GLM4_MOE,
        model_types=("glm4v_moe_text",),
        values={
            **_ROUTED_BY_SIGMOID,
            "rope.dimension_sections": First((_OPTIONAL_SECTIONS, Fixed((8, 12, 12, 0)))),
        },
    ),
    _COHERE,
    replace(
        _COHERE,
        name="cohere2",
        model_types=("cohere2",),
        values={
            **_COHERE.values,
            "attention.sliding_window": _WINDOW,
            _PATTERN: Where(("sliding_attention",), Kinds(period="sliding_window_pattern")),
        },
        assumed={_PATTERN: 4},
    ),
    GgufArchitecture(
        name="starcoder2",
        model_types=("starcoder2",),
        values=LAYER_NORM,
        activations=_GELUS,
        rules=(Requirement("use_bias", (True,)),),
    ),
    GgufArchitecture(
        name="gptneox",
        model_types=("gpt_neox",),
        values={**LAYER_NORM, "use_parallel_residual": Flag("use_parallel_residual")},
        tensors={
            "attention.query_key_value": Stored(("attn_qkv",), rows="grouped"),
            "attention.dense": "attn_output",
        },
        activations=_GELUS,
        rules=(Requirement("attention_bias", (True, None)),),
        output=True,
    ),
    GgufArchitecture(
        name="gpt2",
        model_types=("gpt2",),
        values={**LAYER_NORM, "feed_forward_length": _FOUR_TIMES},
        tensors={
            **_GPT,
            "attn.c_attn": Stored(("attn_qkv",), transposed=True),
            "attn.c_proj": Stored(("attn_output",), transposed=True),
            "mlp.c_fc": Stored(("ffn_up",), transposed=True),
            "mlp.c_proj": Stored(("ffn_down",), transposed=True),
        },
        activations=_GELUS,
        rotated=None,
    ),
    _GPT_BIGCODE,
    GgufArchitecture(
        name="olmo",
        model_types=("olmo",),
        values={
            "attention.layer_norm_rms_epsilon": None,
            "attention.layer_norm_epsilon": Fixed(1e-5),
            "attention.clamp_kqv": number("clip_qkv", optional=True),
        },
        pairs=True,
    ),
    GgufArchitecture(
        name="olmoe",
        model_types=("olmoe",),
        values=_MOE,
        rules=(
            Requirement("norm_topk_prob", (False, None)),
            Requirement("clip_qkv", (None,)),
            _AS_MANY_KEYS,
        ),
        output=True,
    ),
    GgufArchitecture(
        name="stablelm",
        model_types=("stablelm",),
        values={**LAYER_NORM, "use_parallel_residual": Flag("use_parallel_residual")},
        output=True,
    ),
    GgufArchitecture(
        name="nemotron",
        model_types=("nemotron",),
        values=LAYER_NORM,
        norms="one more",
        activations=("relu2",),
        plain_rope=True,
        output=True,
    ),
    GgufArchitecture(
        name="bloom",
        model_types=("bloom",),
        values={
            **LAYER_NORM,
            "context_length": First((whole("seq_length", optional=True), HIDDEN)),
            "feed_forward_length": Product((Fixed(4), HIDDEN)),
        },
        tensors={
            "self_attention.query_key_value": Stored(("attn_qkv",), rows="grouped"),
            "self_attention.dense": "attn_output",
            "transformer.word_embeddings_layernorm": "token_embd_norm",
            "word_embeddings_layernorm": "token_embd_norm",
        },
        activations=_GELUS,
        rules=(Requirement("apply_residual_connection_post_layernorm", (False, None)),),
        rotated=None,
    ),
    GgufArchitecture(
        name="mpt",
        model_types=("mpt",),
        values={
            "attention.layer_norm_rms_epsilon": None,
            "attention.layer_norm_epsilon": number("layer_norm_epsilon"),
            "feed_forward_length": Product(("expansion_ratio", HIDDEN)),
            "attention.clamp_kqv": number("attn_config.clip_qkv", optional=True),
            "attention.max_alibi_bias": number("attn_config.alibi_bias_max"),
        },
        tensors={
            "norm_1": "attn_norm",
            "attn.Wqkv": "attn_qkv",
            "attn.out_proj": "attn_output",
            "norm_2": "ffn_norm",
            "ffn.up_proj": "ffn_up",
            "ffn.down_proj": "ffn_down",
        },
        activations=_GELUS,
        rules=(
            Requirement("attn_config.alibi", (True, None)),
            Requirement("attn_config.softmax_scale", (None,)),
        ),
        rotated=None,
    ),
    GgufArchitecture(
        name="phi2",
        model_types=("phi",),
        values=LAYER_NORM,
        activations=_GELUS,
        rules=(Requirement("qk_layernorm", (False, None)),),
        output=True,
    ),
    GgufArchitecture(
        name="exaone4",
        model_types=("exaone4",),
        values={
            "attention.sliding_window": whole("sliding_window", optional=True),
            _PATTERN: If("sliding_window", _SLIDING),
        },
        tensors=_POST_ATTENTION,
        rules=(
            Requirement(
                "sliding_window",
                (None,),
                unless=("num_hidden_layers", 64),
                why="has sliding windows in models of 64 layers only",
            ),
        ),
        implied={"layer_types": EachLayer("full_attention")},
    ),
    GgufArchitecture(name="ernie4_5", model_types=("ernie4_5",), rules=(Requirement("use_bias", (False, None)),)),
    GgufArchitecture(
        name="ernie4_5-moe",
        model_types=("ernie4_5_moe",),
        values={
            **_MOE,
            "expert_feed_forward_length": _EXPERT_WIDTH,
            "expert_shared_feed_forward_length": Product((_EXPERT_WIDTH, "moe_num_shared_experts")),
            "interleave_moe_layer_step": whole("moe_layer_interval"),
            "leading_dense_block_count": whole("moe_layer_start_index", least=0),
        },
        rules=(Requirement("use_bias", (False, None)),),
    ),
    GgufArchitecture(
        name="mamba",
        model_types=("mamba",),
        values={
            **_MAMBA_VALUES,
            "ssm.inner_size": whole("intermediate_size", "d_inner"),
            "ssm.time_step_rank": whole("time_step_rank"),
            "ssm.dt_b_c_rms": Fixed(False),
        },
        tensors={"norm": "attn_norm", **_under("mixer", _SSM)},
        rules=(Requirement("use_bias", (False, None)), Requirement("use_conv_bias", (True, None))),
        rotated=None,
    ),
    GgufArchitecture(
        name="mamba2",
        model_types=("mamba2",),
        values={
            **_MAMBA_VALUES,
            "ssm.inner_size": Product(("expand", HIDDEN)),
            "ssm.time_step_rank": whole("num_heads"),
            "ssm.group_count": whole("n_groups"),
        },
        tensors={
            "norm": "attn_norm",
            **_under("mixer", {**_MAMBA2, "norm.weight": Stored(("ssm_norm.weight",), shape=("n_groups", 0))}),
        },
        implied={"head_dim": Quotient(Product(("expand", HIDDEN)), whole("num_heads"))},
        rules=(Requirement("use_bias", (False, None)),),
        rotated=None,
    ),
    GgufArchitecture(
        name="lfm2",
        model_types=("lfm2",),
        values={**_LFM2_VALUES, "feed_forward_length": AdjustedWidth()},
        tensors=_LFM2,
        rules=(Requirement("conv_bias", (False, None)),),
    ),
    GgufArchitecture(
        name="lfm2moe",
        model_types=("lfm2_moe",),
        values={
            **_LFM2_VALUES,
            **_MOE,
            "expert_feed_forward_length": _EXPERT_WIDTH,
            "leading_dense_block_count": whole("num_dense_layers", least=0),
            "expert_gating_func": _SIGMOID,
        },
        tensors=_LFM2,
        rules=(
            Requirement("conv_bias", (False, None)),
            Requirement("use_expert_bias", (True,)),
            Requirement("norm_topk_prob", (True,)),
            Requirement("routed_scaling_factor", (1, None)),
        ),
    ),
    GgufArchitecture(name="hunyuan-dense", model_types=("hunyuan_v1_dense",), alpha=True),
    GgufArchitecture(
        name="hunyuan_vl",
        model_types=("hunyuan_vl_text",),
        values=_MROPE,
        alpha=True,
    ),
    GgufArchitecture(
        name="hunyuan-moe",
        model_types=("hunyuan_v1_moe",),
        alpha=True,
        values={
            **_MOE,
            "expert_feed_forward_length": whole("intermediate_size"),
            "expert_shared_feed_forward_length": whole("intermediate_size"),
        },
    ),
    GgufArchitecture(
        name="dots1",
        model_types=("dots1",),
        values=_ROUTED_BY_SIGMOID,
        rules=(_AS_MANY_KEYS,),
        output=True,
    ),
    GgufArchitecture(name="arcee", model_types=("arcee",), activations=("relu2",), pairs=True),
    GgufArchitecture(name="seed_oss", model_types=("seed_oss",), tensors=_POST_ATTENTION),
    GgufArchitecture(name="jais2", model_types=("jais2",), values=LAYER_NORM, activations=("relu2",)),
    GgufArchitecture(
        name="minimax-m2",
        model_types=("minimax_m2",),
        values={**_MOE, "expert_feed_forward_length": whole("intermediate_size"), "expert_gating_func": _SIGMOID},
    ),
    _FALCON,
    _FALCON_H1,
    GgufArchitecture(
        name="mamba",
        model_types=("falcon_mamba",),
        values={
            **_MAMBA_VALUES,
            "ssm.inner_size": whole("intermediate_size"),
            "ssm.time_step_rank": whole("time_step_rank"),
            "ssm.dt_b_c_rms": Fixed(True),
        },
        tensors={"norm": "attn_norm", **_under("mixer", _SSM)},
        rules=(Requirement("use_bias", (False, None)), Requirement("use_conv_bias", (True, None))),
        rotated=None,
    ),
    _JAMBA,
    _NEMOTRON_H,
    replace(
        _NEMOTRON_H,
        name="nemotron_h_moe",
        applies=(NoLayer("mlp", _NEMOTRON_LAYERS),),
        values={
            **_NEMOTRON_H.values,
            **_MOE,
            "feed_forward_length": Only(_EXPERT_WIDTH, Where(("moe",), _NEMOTRON_LAYERS, others="")),
            "expert_feed_forward_length": _EXPERT_WIDTH,
            "expert_shared_feed_forward_length": whole("moe_shared_expert_intermediate_size"),
            "expert_shared_count": _SHARED_COUNT,
            **_GROUPS,
            "expert_weights_scale": number("routed_scaling_factor"),
            "expert_weights_norm": Flag("norm_topk_prob"),
        },
        rules=(Requirement("moe_latent_size", (None,)),),
    ),
    _QWEN3_NEXT,
    GgufArchitecture(
        name="exaone-moe",
        model_types=("exaone_moe",),
        values={
            **_ROUTED_BY_SIGMOID,
            "expert_shared_count": whole("num_shared_experts", least=0),
            "expert_shared_feed_forward_length": Product((_EXPERT_WIDTH, "num_shared_experts")),
            "attention.sliding_window": _WINDOW,
            _PATTERN: Where(("sliding_attention",), Kinds(period="sliding_window_pattern")),
        },
        tensors={"mlp.e_score_correction_bias": _CORRECTION},
    ),
    GgufArchitecture(
        name="mistral3",
        model_types=("ministral3",),
        values={"attention.temperature_scale": number("rope_parameters.llama_4_scaling_beta")},
        pairs=True,
        yarn="mscale 1",
        rules=(Requirement("rope_parameters.rope_type", ("yarn",)),),
    ),
    _LLAMA4,
    _GEMMA4,
    _GEMMA4_MOE,
    _QWEN35,
    replace(
        _QWEN35,
        name="qwen35moe",
        model_types=("qwen3_5_moe_text",),
        values={**_QWEN35.values, **_QWEN_MOE, "feed_forward_length": None},
    ),
    GgufArchitecture(
        name="qwen2vl", model_types=("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text"), values=_MROPE
    ),
    GgufArchitecture(
        name="paddleocr",
        model_types=("paddleocr_vl_text",),
        values={"rope.dimension_sections": First((_OPTIONAL_SECTIONS, Fixed((16, 24, 24, 0))))},
        rules=(Requirement("use_bias", (False, None)),),
    ),
    GgufArchitecture(name="qwen3vl", model_types=("qwen3_vl_text",), values=_DEEPSTACK),
    GgufArchitecture(
        name="qwen3vlmoe",
        model_types=("qwen3_vl_moe_text",),
        values={**_DEEPSTACK, **_MOE, "expert_feed_forward_length": _EXPERT_WIDTH},
        rules=_EVERY_LAYER_ROUTES,
    ),
    GgufArchitecture(
        name="qwen3vlmoe",
        model_types=("qwen3_omni_moe_text",),
        values={
            "rope.dimension_sections": First((_OPTIONAL_SECTIONS, Fixed((24, 20, 20, 0)))),
            "n_deepstack_layers": Fixed(0),  # as its own conversion has it
            **_MOE,
            "expert_feed_forward_length": _EXPERT_WIDTH,
        },
        rules=(Requirement("norm_topk_prob", (True, None)), *_EVERY_LAYER_ROUTES),
    ),
    GgufArchitecture(name="chatglm", model_types=("glm",)),
    GgufArchitecture(
        name="granitehybrid",
        model_types=("bamba",),
        values={"attention.head_count_kv": Only(KV_HEADS, Among("attn_layer_indices")), **_MAMBA_BESIDE_ATTENTION},
        tensors=_GROUPED_MAMBA2,
        pairs=True,
        rules=(
            Requirement("mamba_proj_bias", (False, None)),
            Requirement("mamba_conv_bias", (True, None)),
            Requirement("mamba_expand", (2, None)),
        ),
    ),
    GgufArchitecture(
        name="mellum",
        model_types=("mellum",),
        values={
            **_MOE,
            "expert_feed_forward_length": _EXPERT_WIDTH,
            "attention.sliding_window": _WINDOW,
            _PATTERN: _SLIDING,
        },
        output=True,
        assumed={_PATTERN: 4},
        rules=(
            Requirement("norm_topk_prob", (True,)),
            Requirement(
                "mlp_layer_types", (None,), equal=EachLayer("sparse"), why="has experts in every layer of such a model"
            ),
            Requirement(
                "rope_parameters.sliding_attention.rope_theta",
                (None,),
                equal=number("rope_parameters.full_attention.rope_theta", optional=True),
                why="has one base for all layers",
            ),
        ),
    ),
    GgufArchitecture(
        name="laguna",
        model_types=("laguna",),
        values={
            **_MOE,
            "attention.head_count": Heads("num_attention_heads_per_layer"),
            "leading_dense_block_count": First((_LEADING_OR_SPARSE, Fixed(1))),
            "expert_feed_forward_length": _EXPERT_WIDTH,
            "expert_shared_feed_forward_length": whole("shared_expert_intermediate_size"),
            "expert_weights_scale": number("moe_routed_scaling_factor"),
            "expert_weights_norm": Fixed(True),
            "expert_gating_func": _SIGMOID,
            "attention.sliding_window": _WINDOW,
            _PATTERN: _SLIDING,
            "rope.dimension_count_swa": HEAD_DIM,
        },
        tensors={"self_attn.g_proj": "attn_gate"},
        rules=(
            Requirement("moe_router_logit_softcapping", (0, None)),
            Requirement("moe_apply_router_weight_on_input", (False, None)),
        ),
    ),
    replace(
        _DEEPSEEK,
        model_types=("youtu",),
        values={
            **_LATENT,
            "leading_dense_block_count": LAYERS,
            "expert_feed_forward_length": whole("intermediate_size"),
            "expert_shared_count": Fixed(0),
        },
    ),
    replace(
        _GLM4_MOE,
        model_types=("solar_open",),
        values={**_ROUTED_BY_SIGMOID, "leading_dense_block_count": Fixed(0), "feed_forward_length": None},
        tensors={**_POST_ATTENTION},
    ),
    GgufArchitecture(
        name="minicpm3",
        model_types=("minicpm3",),
        values={
            **{key: _LATENT[key] for key in ("attention.q_lora_rank", "attention.kv_lora_rank")},
            "attention.key_length": _LATENT["attention.key_length_mla"],
            "attention.value_length": _LATENT["attention.value_length_mla"],
            "rope.dimension_count": whole("qk_rope_head_dim"),
        },
        tensors={"self_attn.kv_b_proj": "attn_kv_b"},
        rotated=whole("qk_rope_head_dim"),
        longrope=True,
        rules=(
            Requirement("scale_emb", (12, None)),
            Requirement("scale_depth", (1.4,)),
            Requirement("dim_model_base", (256,)),
        ),
    ),
    GgufArchitecture(
        name="dbrx",
        model_types=("dbrx",),
        values={
            "attention.layer_norm_rms_epsilon": None,
            "attention.layer_norm_epsilon": Fixed(1e-5),
            "embedding_length": whole("d_model"),
            "feed_forward_length": whole("ffn_config.ffn_hidden_size"),
            "attention.clamp_kqv": number("attn_config.clip_qkv"),
            "expert_count": whole("ffn_config.moe_num_experts"),
            "expert_used_count": whole("ffn_config.moe_top_k"),
            "rope.freq_base": number("attn_config.rope_theta", "rope_parameters.rope_theta"),
        },
        tensors={
            **_under(
                "norm_attn_norm",
                {"norm_1": "attn_norm", "attn.Wqkv": "attn_qkv", "attn.out_proj": "attn_output"},
            ),
            "norm_attn_norm.norm_2": "attn_output_norm",
            "ffn.router.layer": _ROUTER,
            **_under(
                "ffn.experts.mlp.{e}",
                {"w1": "ffn_gate_exps", "v1": "ffn_up_exps", "w2": "ffn_down_exps"},
            ),
        },
        rules=(
            Requirement("ffn_config.ffn_act_fn", (None, {"name": "silu"})),
            Requirement("ffn_config.moe_normalize_expert_weights", (1,)),
        ),
    ),
    GgufArchitecture(
        name="hy_v3",
        model_types=("hy_v3",),
        values={
            **_MOE,
            "expert_feed_forward_length": _EXPERT_WIDTH,
            "expert_shared_feed_forward_length": Product((_EXPERT_WIDTH, "num_shared_experts")),
            "leading_dense_block_count": First((_LEADING_OR_SPARSE, Fixed(1))),
            "expert_weights_scale": number("router_scaling_factor"),
            "expert_weights_norm": Fixed(True),
            "expert_gating_func": _SIGMOID,
        },
        tensors={"mlp.expert_bias": "exp_probs_b."},
    ),
    GgufArchitecture(
        name="afmoe",
        model_types=("afmoe",),
        values={
            **_MOE,
            "expert_feed_forward_length": _EXPERT_WIDTH,
            "expert_shared_count": whole("num_shared_experts", least=0),
            "leading_dense_block_count": whole("num_dense_layers", least=0),
            "expert_weights_scale": number("route_scale"),
            "expert_weights_norm": Fixed(True),
            "expert_gating_func": _SIGMOID,
            "attention.sliding_window": _WINDOW,
            _PATTERN: _SLIDING,
        },
        tensors={
            "post_attention_layernorm": "post_attention_norm",
            "pre_mlp_layernorm": "ffn_norm",
            "post_mlp_layernorm": "post_ffw_norm",
            "self_attn.gate_proj": "attn_gate",
        },
        assumed={_PATTERN: 4},
        rules=(
            Requirement("mup_enabled", (True,)),
            Requirement(
                "layer_types",
                (None,),
                equal=EveryFourth("sliding_attention", "full_attention"),
                why="rotates all layers but every fourth, which has no window",
            ),
        ),
    ),
    replace(
        _COHERE,
        name="cohere2moe",
        model_types=("cohere2_moe",),
        values={
            **_COHERE.values,
            "attention.layer_norm_rms_epsilon": number("rms_norm_eps", optional=True),
            "feed_forward_length": First(
                (whole("prefix_dense_intermediate_size", optional=True), whole("intermediate_size"))
            ),
            "attention.sliding_window": _WINDOW,
            _PATTERN: Where(("sliding_attention",), Kinds(period="sliding_window_pattern")),
            **_MOE,
            "expert_feed_forward_length": whole("intermediate_size"),
            "leading_dense_block_count": First((_LEADING_OR_SPARSE, whole("first_k_dense_replace", least=0))),
            "expert_shared_count": whole("num_shared_experts", least=0),
            "expert_weights_norm": Flag("norm_topk_prob"),
            "expert_gating_func": Choice("expert_selection_fn", {"softmax": 1, "sigmoid": 2}),
        },
        rules=(Requirement("shared_expert_combination_strategy", ("average",), unless=("num_shared_experts", 0)),),
    ),
)
"""Every architecture; of those of one model type, the first whose ``applies`` suit."""

_NO_GRAPH = (
    *("aria_text", "axk1", "axk2", "bailing_hybrid", "bart", "beam", "bert-generation", "big_bird", "bigbird_pegasus"),
    *("biogpt", "blenderbot", "blenderbot-small", "blt", "codegen", "cohere_compass_text", "cpmant", "ctrl", "cwm"),
    *("data2vec-text", "diffllama", "doge", "electra", "emu3_text_model", "ernie", "flex_olmo", "flint", "git"),
    *("gpt_neo", "gpt_neox_japanese", "gptj", "helium", "hyperclovax", "inkling2_text", "inkling_text", "jetmoe"),
    *("kolibri1", "lfm3", "longcat_flash", "marian", "mbart", "megatron-bert", "ministral", "mllama_text_model"),
    *(
        "modernbert-decoder",
        "moshi",
        "musicgen",
        "musicgen_melody",
        "mvp",
        "nanochat",
        "olmo_hybrid",
        "openai-gpt",
        "opt",
        "pegasus",
    ),
    *(
        "persimmon",
        "phi4_multimodal",
        "plbart",
        "prophetnet",
        "recurrent_gemma",
        "reformer",
        "rembert",
        "roberta-prelayernorm",
    ),
    *("roc_bert", "roformer", "rwkv", "trocr", "vaultgemma", "whisper", "xglm", "xlm", "xlm-roberta-xl", "xlnet"),
    *("xlstm", "xmod", "zamba", "zamba2", "zaya"),
)

LEFT_OUT: Mapping[str, str] = {
    **dict.fromkeys(_NO_GRAPH, "llama.cpp has no architecture for it"),
    **dict.fromkeys(
        ("bert", "camembert", "roberta", "xlm-roberta"),
        "llama.cpp has it as an encoder, without a head that predicts the next token",
    ),
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"),
        "llama.cpp has it beside the model that it drafts for, whose keys and values it attends to",
    ),
    "bitnet": "llama.cpp computes silu in its MLP, where the model has relu2 (hidden_act)",
    "minimax": (
        "its checkpoints hold what its decay is computed from (self_attn.slope_rate, query_decay, key_decay, "
        "diagonal_decay), and a file has no place for it, since llama.cpp computes it itself"
    ),
    "chameleon": (
        "llama.cpp wants the features of its norms of queries and keys (self_attn.q_norm, k_norm) in pairs, and "
        "columns are not put in that order here; its image tokenizer (model.vqmodel) is of the same config.json, and a "
        "file without it would be of no model that transformers has; and llama.cpp switches the tokens 4 to 8,195 off, "
        "whatever vocabulary_map says"
    ),
    "qwen4_exp_text": (
        "llama.cpp wants the multipliers of its n-gram embeddings, which are tensors, in the header, which is written "
        "before any tensor is read"
    ),
    "hy_v4": (
        "llama.cpp rotates neighbouring features, the last of each head (self_attn.q_b_proj, kv_a_proj_with_mqa, "
        "indexer), where the model rotates halves, and the rows of a part of a head are not put in another order here"
    ),
    "dots3_note_text": (
        "llama.cpp wants the scale of its latents multiplied into their norms (q_a_layernorm, kv_a_layernorm), and "
        "kv_b_proj of other heads in layers with a sliding window"
    ),
    "hrm_text": (
        "llama.cpp numbers the layers of its two stacks (model.L_module, model.H_module) on, and here the layers of "
        "one are numbered"
    ),
    "phimoe": (
        "llama.cpp computes its norms (input_layernorm, post_attention_layernorm, norm) without taking the mean away, "
        "and weighs its experts (block_sparse_moe.gate) by all of them, where the model masks those far from the best"
    ),
    "apertus": (
        "llama.cpp wants the numbers of its activation (mlp.act_fn.alpha_p, alpha_n, beta, eps) in the header, which "
        "is written before any tensor is read"
    ),
    "gemma3n_text": (
        "llama.cpp wants self_attn.k_proj, v_proj and k_norm in the layers, too, that share the keys and values of "
        "others, and always of those behind the 20th; and altup_projections and altup_unembed_projections in stacks"
    ),
}
"""Model types that are exported to other formats and not written -> why."""
