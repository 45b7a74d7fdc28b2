"""The one matcher: the same findings for the plan of an export, for the rules of a resharding, and for verify."""

from __future__ import annotations

from dataclasses import replace

import pytest

from modelexport.checkpoints.safetensors.file import Checkpoint
from modelexport.errors import CheckpointError
from modelexport.exporting.plan import build_plan
from modelexport.inspection.verify.structure import check_structure
from modelexport.models.matching import match
from modelexport.models.modules import read_architecture, read_modules
from modelexport.models.rules import tensor_rules
from modelexport.quantization.methods import read_quantization_config
from modelexport.sharding.plan import Parallelism
from tests.helpers.models import quantised_headers, with_tensor, without

PREFIX = "model.layers.1.self_attn"
SPOILT = {
    "missing": f"{PREFIX}.q_proj.weight_scale is missing: group_0 (int4 weights per group of 128) needs BF16",
    "unfit": f"{PREFIX}.o_proj.weight_packed is I32 [128, 32] but config.json makes it I32 [128, 16] (group_0",
    "bias": f"{PREFIX}.k_proj.bias is [3] but config.json makes it [64]",
    "norm": "model.norm.weight is [5] but config.json makes it [128]",
}


def spoilt(fault: str) -> Checkpoint:
    checkpoint = quantised_headers("int4", attention_bias=True)
    if fault == "missing":
        return without(checkpoint, f"{PREFIX}.q_proj.weight_scale")
    name, dtype, shape = {
        "unfit": (f"{PREFIX}.o_proj.weight_packed", "I32", (128, 32)),
        "bias": (f"{PREFIX}.k_proj.bias", "BF16", (3,)),
        "norm": ("model.norm.weight", "BF16", (5,)),
    }[fault]
    return with_tensor(checkpoint, name, shape, dtype)


@pytest.mark.parametrize("fault", SPOILT)
def test_plan_rules_and_verify_say_the_same(fault: str) -> None:
    checkpoint = spoilt(fault)
    (found,) = match(checkpoint).problems()
    assert found.startswith(SPOILT[fault])
    with pytest.raises(CheckpointError) as planned:
        build_plan(checkpoint, None, Parallelism())
    with pytest.raises(CheckpointError) as cut:
        tensor_rules(checkpoint)
    assert str(planned.value) == str(cut.value) == f"{checkpoint.directory}: {found}"
    architecture, quantization = read_architecture(checkpoint.config), read_quantization_config(checkpoint.config)
    modules = read_modules(checkpoint, architecture, quantization)
    assert check_structure(checkpoint, architecture, quantization, modules) == [found]


@pytest.mark.parametrize("scheme", ["int4", "fp8-block", "int8"])
def test_rules_of_a_plan_are_those_of_what_it_writes(scheme: str) -> None:
    checkpoint = quantised_headers(scheme, attention_bias=True, tied=True)
    assert build_plan(checkpoint, None, Parallelism(tp=2)).rules() == tensor_rules(checkpoint)


def test_every_tensor_is_matched_once() -> None:
    checkpoint = quantised_headers("int4", attention_bias=True)
    matched = match(checkpoint)
    names = [info.name for module in matched.modules for info in module.tensors.values()]
    assert sorted(names) == sorted(checkpoint.infos)
    assert not match(replace(checkpoint, infos={**checkpoint.infos})).problems()
