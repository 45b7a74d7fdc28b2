"""Families made from transformers' plans: the declared ones are the oracle, where there are both."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from modelexport.checkpoints.safetensors.file import open_checkpoint
from modelexport.errors import CheckpointError, ModelExportError, PlanError
from modelexport.exporting.plan import build_plan
from modelexport.models import matching, rules
from modelexport.models.architecture import Family, family_of
from modelexport.models.derived import derive, model_types
from modelexport.quantization.assignment import Assignment
from modelexport.sharding.plan import Parallelism
from modelexport.sharding.rules import TensorRule
from modelexport.sharding.shard_plan import build_shard_plan
from tests.helpers.tiny_models import tiny_checkpoint

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]

DECLARED = ["llama", "qwen2", "qwen3", "mixtral", "qwen3_moe", "phi3", "gemma2", "gemma3_text", "cohere2", "starcoder2"]
MORE = ["glm4", "granite", "olmo2", "gpt_neox", "deepseek_v2", "smollm3", "helium", "seed_oss", "gpt2"]


def config_of(model_type: str, /, **changes: Any) -> dict[str, Any]:
    return {**json.loads((tiny_checkpoint(model_type) / "config.json").read_text()), **changes}


def rules_of(source: Path, family: Family, monkeypatch: pytest.MonkeyPatch) -> dict[str, TensorRule]:
    monkeypatch.setattr(matching, "family_of", lambda *_: family)
    return {rule.name: rule for rule in rules.tensor_rules(open_checkpoint(source))}


def cut(rule: TensorRule) -> tuple[object, ...]:
    parts = [(part.start, part.stop, part.unit, part.spread, part.heads) for part in rule.parts]
    return rule.dtype, rule.shape, rule.dim, parts, rule.layer, rule.expert, rule.stages


@pytest.mark.parametrize("model_type", [*DECLARED, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_a_derived_family_cuts_as_the_declared_one(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tiny_checkpoint(model_type)
    config = config_of(model_type)
    declared, found = (rules_of(source, make(config), monkeypatch) for make in (family_of, derive))
    assert set(found) == set(declared)
    for name, rule in declared.items():
        assert cut(found[name]) == cut(rule), name


def test_it_goes_to_ranks_small() -> None:
    family = derive(config_of("glm4_moe"))
    assert pickle.loads(pickle.dumps(family)) == family
    assert len(pickle.dumps(family)) < 100_000


def test_what_stays_is_named_with_its_reason() -> None:
    plan = build_plan(
        open_checkpoint(tiny_checkpoint("granitemoe")),
        Assignment.parse("int4", group_size=32, observer="amax"),
        Parallelism(tp=2),
    )
    reasons = {name: why for name, why in plan.unquantised.items() if "input_linear" in name}
    assert reasons, "a stack of experts is not passed over in silence"
    assert all("all experts of a layer in one tensor" in why for why in reasons.values())
    assert any(name.endswith("q_proj") for name in plan.formats())
    assert not any("linear" in name for name in plan.formats())


def test_a_multimodal_models_language_part_alone_is_quantised() -> None:
    source = tiny_checkpoint("gemma3")
    plan = build_plan(
        open_checkpoint(source), Assignment.parse("int8", group_size=None, observer="amax"), Parallelism()
    )
    formats = plan.formats()
    assert formats
    assert all(name.startswith("language_model.model.layers.") for name in formats)
    assert any("vision_tower" in note for note in plan.family.notes)
    ignored = plan.ignored()
    kept = "vision_tower.encoder.layers.0.mlp.fc1"
    assert {kept, f"model.{kept}"} <= set(ignored), "as the file calls it, and as transformers does"


def test_a_type_without_a_plan_is_replicated_and_says_so() -> None:
    family = derive(config_of("bloom"))
    assert all(module.partition == "replicated" for module in family.layer)
    assert "no tensor-parallel plan" in family.notes[0]
    assert "no plan" not in derive(config_of("cohere")).notes[0]


def test_stacked_experts_are_dealt_out_and_cut() -> None:
    source = tiny_checkpoint("granitemoe")
    found = rules.tensor_rules(open_checkpoint(source))
    plan = build_shard_plan(found, Parallelism(tp=2, ep=2), layers=2)
    name = next(rule.name for rule in found if "output_linear" in rule.name)
    experts, hidden, inner = plan.rules[name].shape
    assert plan.experts == experts
    boxes = [plan.held(name, rank)[0][1] for rank in range(4)]
    halves = [(0, experts // 2), (experts // 2, experts)]
    columns = [(0, inner // 2), (inner // 2, inner)]
    assert boxes == [(half, (0, hidden), column) for half in halves for column in columns]
    assert [plan.owners(name, rank) for rank in range(4)] == [(0,), (1,), (2,), (3,)]
    with pytest.raises(PlanError, match=f"{experts} experts cannot be divided equally among ep 3"):
        build_shard_plan(found, Parallelism(ep=3), layers=2)


def test_every_type_with_a_plan_is_known() -> None:
    kinds = model_types()
    assert len(kinds) > 150
    assert sum(how == "tensor-parallel plan" for how in kinds.values()) >= 97


@pytest.mark.parametrize(
    ("model_type", "changes", "says"),
    [
        ("cohere", {"hidden_size": "big"}, "transformers refuses it"),
        ("cohere", {"hidden_size": -1}, "cannot build"),
        ("cohere", {"hidden_size": 1 << 40}, "cannot build"),
        ("cohere", {"num_attention_heads": 0}, "cannot build"),
        ("cohere", {"num_hidden_layers": 10**9}, "at most 4,096"),
        ("cohere", {"num_hidden_layers": None}, "transformers refuses it"),
        ("cohere", {"layer_types": ["full_attention"] * 70_000}, "layer_types has 70,000 entries"),
        ("gemma3", {"vision_config": {"num_hidden_layers": 10**8}}, "vision_config: num_hidden_layers"),
        ("gemma3", {"text_config": "x"}, "transformers refuses it"),
        ("glm4_moe", {"n_routed_experts": 10**9}, "n_routed_experts"),
        ("glm4_moe", {"n_routed_experts": 30_000, "num_hidden_layers": 64}, "tensors; at most"),
        ("dbrx", {"ffn_config": {"moe_num_experts": 10**9}}, "moe_num_experts"),
        ("gpt_neo", {"attention_types": [[["global"], 10**9]]}, "attention_types"),
        ("cohere", {"model_type": "cohereX"}, "did you mean 'cohere'"),
    ],
)
def test_a_strangers_numbers_give_one_line(model_type: str, changes: Mapping[str, Any], says: str) -> None:
    with pytest.raises(ModelExportError, match=says) as caught:
        family_of(config_of(model_type, **changes))
    assert "\n" not in str(caught.value)


def test_a_checkpoints_own_code_is_never_looked_for() -> None:
    config = config_of("cohere", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    assert derive({**config, "architectures": ["os.system"]}).architecture == "CohereForCausalLM"


def test_an_expert_too_many_is_no_part_of_the_model(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = tiny_checkpoint("cohere")
    tensors = load_file(source / "model.safetensors")
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    tensors[name.replace("q_proj", "extra")] = tensors[name].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match="not part of a cohere model"):
        rules.tensor_rules(open_checkpoint(tmp_path))
