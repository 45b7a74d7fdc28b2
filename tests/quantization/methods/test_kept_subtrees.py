"""A part of a model that is kept is kept under every name that an engine may give what it builds of it."""

from __future__ import annotations

import pytest

from modelexport.quantization import formats
from modelexport.quantization.methods import of_method, read_quantization_config
from modelexport.quantization.methods.base import KeptSubtree, ModelQuantization

QUANTISED = [f"model.language_model.layers.{i}.self_attn.o_proj" for i in (0, 11)]
EXPERTS = KeptSubtree("layers.*.mlp.experts", tuple(f"model.language_model.layers.{i}.mlp.experts" for i in (0, 11)))
TOWER = KeptSubtree("visual", ("model.visual",))
ELSEWHERE = [  # as an engine has them: another prefix, stacks taken apart, linears fused
    "language_model.model.layers.11.mlp.experts.0.gate_proj",
    "language_model.model.layers.0.mlp.experts",
    "visual.blocks.3.attn.qkv_proj",
]


@pytest.mark.parametrize(
    ("method", "quant"),
    [("compressed-tensors", "int4"), ("awq", "int4"), ("gptq", "int4"), ("modelopt", "nvfp4-wo")],
)
def test_names_below_a_root_are_kept(method: str, quant: str) -> None:
    announced = ModelQuantization(dict.fromkeys(QUANTISED, formats.get(quant)), ["lm_head"], subtrees=[EXPERTS, TOWER])
    read = read_quantization_config({"quantization_config": of_method(method).quantization_files(announced).config})
    assert read is not None
    assert [name for name in ELSEWHERE if read.scheme_of(name) is not None] == []
    assert all(read.scheme_of(name) is not None for name in QUANTISED)


def test_where_no_patterns_are_read_the_roots_are_named() -> None:
    announced = ModelQuantization(
        dict.fromkeys(QUANTISED, formats.get("fp8-block")), ["lm_head"], subtrees=[EXPERTS, TOWER]
    )
    config = of_method("fp8").quantization_files(announced).config
    assert config["modules_to_not_convert"] == ["lm_head", *EXPERTS.names, *TOWER.names]


def test_a_pattern_ends_where_a_name_ends() -> None:
    announced = ModelQuantization({"model.visual_gate": formats.get("int4")}, [], subtrees=[TOWER])
    read = read_quantization_config(
        {"quantization_config": of_method("compressed-tensors").quantization_files(announced).config}
    )
    assert read is not None
    assert read.scheme_of("model.visual_gate") is not None
