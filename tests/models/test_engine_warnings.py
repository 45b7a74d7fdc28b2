"""The table of what engines refuse: rows mean what they should and nothing else, and name things that exist."""

from __future__ import annotations

import pytest

from modelexport.models.checkpoint_formats import names as format_names
from modelexport.models.engines import REFUSALS, Linear, warnings
from modelexport.quantization import formats
from modelexport.quantization.kv_caches import CACHES

EXPERT = Linear("experts.0.w1", "int4", (512, 256), 128, "expert.gate", "column", True)
QUERY = Linear("q_proj", "int4", (512, 256), 128, "attention.q", "column")
OUT = Linear("o_proj", "int4", (256, 512), 128, "attention.o", "row")


def changed(linear: Linear, **changes: object) -> Linear:
    return Linear(**{**vars(linear), **changes})  # type: ignore[arg-type]


def test_rows_name_formats_that_exist() -> None:
    for refusal in REFUSALS:
        assert set(refusal.number_formats) <= set(formats.names())
        assert set(refusal.formats) <= set(format_names())
        assert set(refusal.caches) <= set(CACHES)
        assert "--" in refusal.instead


@pytest.mark.parametrize("format_name", ["hf", "awq", "gptq"])
def test_what_everybody_loads_has_no_line(format_name: str) -> None:
    assert warnings(format_name, [QUERY, OUT, EXPERT], tp=2) == []
    assert warnings(format_name, [changed(QUERY, number_format="none")]) == []


@pytest.mark.parametrize(
    ("format_name", "linear", "words"),
    [
        ("gptq", changed(QUERY, number_format="int4-asym"), "symmetric gptq only; use --format awq"),
        ("awq", changed(OUT, group_size=-1), "tensor-parallel size 1 only"),
        ("hf", changed(QUERY, number_format="w4a8"), "Hopper GPUs alone"),
        ("hf", changed(EXPERT, number_format="int8-static"), "no experts in int8 with static activations"),
        ("hf", changed(EXPERT, number_format="nvfp4-wo", group_size=None), "nonsense without an error"),
        ("hf", changed(EXPERT, number_format="int8", group_size=None), "does not load such experts"),
        ("modelopt", changed(QUERY, number_format="int4"), "of modelopt's algorithms"),
        ("modelopt", changed(QUERY, number_format="fp8-static"), "knows no modelopt"),
        ("gguf", QUERY, "reads no GGUF"),
    ],
)
def test_what_is_refused_has_a_line_that_says_what_to_type(format_name: str, linear: Linear, words: str) -> None:
    lines = warnings(format_name, [linear])
    (line,) = [line for line in lines if words in line]
    assert f"{linear.number_format} as {format_name}" in line
    assert "; use " in line


def test_a_row_may_be_about_one_type_of_models() -> None:
    assert warnings("hf", [QUERY], model="llama") == []
    (line,) = warnings("hf", [QUERY], model="gpt_oss")
    assert "--format mxfp4" in line


def test_a_row_may_be_about_the_kv_cache() -> None:
    assert warnings("hf", [QUERY], cache="fp8") == []
    (line,) = warnings("hf", [], cache="fp8-head")
    assert "a KV cache in fp8-head as hf: of its attentions only FlashAttention 3" in line
    fp8, nvfp4 = (changed(QUERY, number_format=name, group_size=None) for name in ("fp8", "nvfp4"))
    for linears, words in (([], "nothing but the cache"), ([nvfp4], ""), ([fp8, nvfp4], "leaves the scales out")):
        lines = [line for line in warnings("modelopt", linears, cache="nvfp4") if "KV cache" in line]
        assert "only FlashInfer" in lines[0]
        assert len(lines) == 1 + bool(words)
        assert words in lines[-1]


def test_a_row_may_be_about_formats_beside_each_other() -> None:
    fp8, static, nvfp4 = (
        changed(QUERY, number_format=name, group_size=None) for name in ("fp8", "fp8-static", "nvfp4")
    )
    for linears, words in (
        ([fp8], []),
        ([static, nvfp4], []),
        ([fp8, nvfp4], ["SGLang 0.5.23 and fp8 as modelopt"]),
        ([fp8, static], ["SGLang 0.5.23 and fp8, fp8-static as modelopt", "SGLang 0.5.23 and fp8 as modelopt"]),
    ):
        lines = [line for line in warnings("modelopt", linears) if "SGLang" in line]
        assert len(lines) == len(words)
        assert all(line.startswith(start) for line, start in zip(lines, words, strict=True))


def test_kinds_are_counted_and_not_names() -> None:
    names = [changed(EXPERT, number_format="int8", group_size=None, name=f"experts.{e}.w1") for e in range(3)]
    other = changed(names[0], name="experts.0.w2", role="expert.down")
    assert warnings("hf", [QUERY, names[0], other]) == warnings("hf", [QUERY, *names, other])


def test_a_condition_is_asked_of_a_rank_s_part() -> None:
    """256 outputs are whole blocks of 128 on two ranks and not on four; v's and up's come last in what is fused."""
    key = Linear("k_proj", "fp8-block", (256, 512), None, "attention.k", "column")
    value = changed(key, name="v_proj", role="attention.v")
    down = Linear("down_proj", "fp8-block", (256, 320), None, "mlp.down", "row")
    assert warnings("hf", [key, value, down], tp=2) == []
    (line,) = warnings("hf", [key, value, down], tp=4)
    assert "(k_proj, 256 x 512)" in line


def test_groups_other_than_the_only_one_are_named() -> None:
    lines = warnings("hf", [changed(QUERY, number_format="w4a8", group_size=64)])
    assert any("--group-size 128" in line for line in lines)
    assert not any("--group-size 128" in line for line in warnings("hf", [changed(QUERY, number_format="w4a8")]))


@pytest.mark.parametrize("model", ["dbrx", "jetmoe"])
def test_experts_that_are_read_in_one_tensor_alone(model: str) -> None:
    assert all("'*experts*=none,*=int4'" in line for line in warnings("hf", [EXPERT], model=model))
    assert len(warnings("hf", [EXPERT], model=model)) == 2  # vLLM and transformers
