"""What tensors are, told from their names and shapes alone: of types that nothing here knows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from modelexport.checkpoints.safetensors.file import Checkpoint, TensorInfo, tensor_nbytes
from modelexport.errors import CheckpointError, PlanError
from modelexport.models.architecture import family_of
from modelexport.models.derived.structure import KEY, described
from modelexport.models.families.base import Family, Module
from modelexport.models.matching import match
from modelexport.models.rules import expected_rules
from modelexport.models.structure import by_structure, check_whole

CONFIG: dict[str, Any] = {"model_type": "unheard_of", "num_hidden_layers": 2}
OUTSIDE = {"model.embed_tokens.weight": (96, 64), "model.norm.weight": (64,), "lm_head.weight": (96, 64)}


def layers(tensors: Mapping[str, tuple[int, ...]], count: int = 2, prefix: str = "model.layers") -> dict[str, Any]:
    return {f"{prefix}.{i}.{name}": shape for i in range(count) for name, shape in tensors.items()}


def checkpoint(shapes: Mapping[str, tuple[int, ...]], **config: Any) -> Checkpoint:
    infos = {
        name: TensorInfo(name, "BF16", shape, Path("model.safetensors"), 0, tensor_nbytes("BF16", shape))
        for name, shape in shapes.items()
    }
    return Checkpoint(Path("checkpoint"), infos, {**CONFIG, **config}, {})


def family(shapes: Mapping[str, tuple[int, ...]], **config: Any) -> Family:
    return family_of(by_structure(checkpoint({**OUTSIDE, **shapes}, **config)).config or {})


def module(shapes: Mapping[str, tuple[int, ...]], path: str = "") -> Module:
    """The module of that path in the layers; or the only one."""
    (found,) = [each for each in family(layers(shapes)).layer if each.path == path or not path]
    return found


NAMES = ("self_attn.q_proj", "attn.qkv_proj", "attention.query_key_value", "attention.wo", "mlp.gate_up_proj", "w3")


@pytest.mark.parametrize("path", NAMES)
def test_a_matrix_with_a_linears_name_is_one(path: str) -> None:
    found = module({f"{path}.weight": (192, 64)})
    assert (found.kind, found.why, found.partition) == ("linear", "", "replicated")


@pytest.mark.parametrize("path", ["mixer.x_proj", "mlp.gate", "conv", "attn.rope_table", "shared_expert_gate"])
def test_a_matrix_with_another_name_stays_and_says_why(path: str) -> None:
    assert "no linear's by any convention" in module({f"{path}.weight": (192, 64)}).why


def test_what_picks_experts_is_a_router() -> None:
    experts = {f"mlp.experts.{e}.w1.weight": (64, 64) for e in range(4)}
    assert module({"mlp.gate.weight": (4, 64), **experts}, "mlp.gate").kind == "router"


def test_experts_by_number_are_linears_whatever_their_names() -> None:
    found = module({f"moe.experts.{e}.linear_v.weight": (64, 64) for e in range(4)})
    assert (found.path, found.kind, found.why) == ("moe.experts.{e}.linear_v", "linear", "")


def test_gate_and_up_of_an_expert_are_fused_as_engines_do() -> None:
    shapes = {f"mlp.experts.{e}.{part}.weight": (64, 64) for e in range(2) for part in ("w1", "w3")}
    assert {each.fused_into for each in family(layers(shapes)).layer} == {"mlp.experts.w13"}


@pytest.mark.parametrize("name", ["mlp.experts.gate_up_proj", "block_sparse_moe.input_linear.weight"])
def test_stacked_experts_stay_and_say_why(name: str) -> None:
    found = module({name: (4, 64, 128)})
    assert (found.kind, found.stacked, found.experts) == ("other", True, None)
    assert found.why.startswith("all experts of a layer in one tensor")


def test_a_convolution_is_no_stack_of_experts() -> None:
    assert not module({"mixer.conv1d.weight": (64, 1, 4)}).stacked


def test_a_small_linear_stays() -> None:
    assert module({"attn.k_proj.weight": (16, 64)}).why == "one of its dims is smaller than 32"


def test_linears_of_a_tower_stay() -> None:
    found = family({**layers({"mlp.fc1.weight": (64, 64)}), **layers({"mlp.fc1.weight": (32, 32)}, 3, "vision.blocks")})
    assert {each.why for each in found.before} == {"", "outside of the language model's decoder layers"}


def test_the_layers_are_those_that_config_json_counts() -> None:
    shapes = {**layers({"q_proj.weight": (64, 64)}), **layers({"q_proj.weight": (512, 512)}, 3, "vision.blocks")}
    assert family(shapes).layer_prefix == "model.layers.{i}"


def test_the_largest_list_has_the_layers_where_config_json_does_not_count_them() -> None:
    shapes = {**layers({"q_proj.weight": (64, 64)}), **layers({"q_proj.weight": (512, 512)}, 3, "model.blocks")}
    assert family(shapes, num_hidden_layers=None).layer_prefix == "model.blocks.{i}"


def test_of_two_lists_of_layers_the_one_beside_the_embedding_counts() -> None:
    shapes = {**layers({"q_proj.weight": (64, 64)}), **layers({"q_proj.weight": (512, 512)}, 2, "vision.blocks")}
    assert family(shapes).layer_prefix == "model.layers.{i}"


@pytest.mark.parametrize("said", [True, None])
def test_a_head_that_is_not_there_is_tied(said: object) -> None:
    shapes = layers({"q_proj.weight": (64, 64)}) | {name: OUTSIDE[name] for name in list(OUTSIDE)[:2]}
    found = family_of(by_structure(checkpoint(shapes, tie_word_embeddings=said)).config or {})
    assert found.dimensions is not None
    assert found.dimensions.tied_embeddings


def test_a_head_that_is_there_is_none_where_a_part_of_config_json_says_so() -> None:
    said = {"tie_word_embeddings": True, "text_config": {"num_hidden_layers": 2, "tie_word_embeddings": False}}
    found = family(layers({"q_proj.weight": (64, 64)}), **said).dimensions
    assert found is not None
    assert not found.tied_embeddings


def test_a_head_of_several_modules_stays() -> None:
    shapes = {**layers({"q_proj.weight": (64, 64)}), "embed_tokens.weight": (96, 64), "lm_head.dense.weight": (64, 64)}
    matched = match(by_structure(checkpoint(shapes, tie_word_embeddings=True)))
    assert (matched.problems(), dict(matched.left_out)) == ([], {})


def test_layers_may_have_modules_of_their_own() -> None:
    shapes = {**layers({"q_proj.weight": (64, 64)}), "model.layers.1.mlp.up_proj.weight": (64, 64)}
    (found,) = [each for each in family(shapes).layer if each.path == "mlp.up_proj"]
    assert found.layers == {1}


def test_numbered_draft_layers_are_no_part_of_the_structure() -> None:
    shapes = {**OUTSIDE, **layers({"q_proj.weight": (64, 64)}, 3)}
    found = described(shapes, {**CONFIG, "num_nextn_predict_layers": 1})
    assert found["layers"] == 2
    assert not [each for each in found["tensors"] if "layers.2" in each["name"]]


def mixed() -> dict[str, tuple[int, ...]]:
    experts = {f"mlp.experts.{e}.w1.weight": (64, 64) for e in range(4)}
    common = layers({"attn.qkv_proj.weight": (192, 64), "norm.weight": (64,), **experts}, 3)
    return {**OUTSIDE, **common, "model.layers.1.mlp.experts.4.w1.weight": (64, 64)}


def test_every_tensor_has_its_module() -> None:
    matched = match(by_structure(checkpoint(mixed(), num_hidden_layers=3)))
    assert matched.problems() == []
    assert sum(len(each.tensors) for each in matched.modules) == len(mixed())


def test_config_json_alone_says_what_tensors_there_are() -> None:
    config = json.loads(json.dumps(by_structure(checkpoint(mixed(), num_hidden_layers=3)).config))
    assert {rule.name: rule.shape for rule in expected_rules(config, "BF16")} == mixed()


def test_a_known_type_is_left_alone() -> None:
    known = checkpoint(layers({"q_proj.weight": (64, 64)}), model_type="llama")
    assert by_structure(known) is known


def test_tensors_without_layers_are_refused() -> None:
    with pytest.raises(PlanError, match="none of its 3 tensors has a layer's number in its name"):
        by_structure(checkpoint(OUTSIDE))


def test_packed_weights_of_which_config_json_says_nothing_are_refused() -> None:
    packed = checkpoint({**OUTSIDE, **layers({"q_proj.weight_packed": (64, 8), "q_proj.weight_scale": (64, 2)})})
    with pytest.raises(
        PlanError, match=r"q_proj is quantised \(int4\), and config.json has no quantization_config: give"
    ):
        by_structure(packed)


def test_buffers_are_no_part_of_the_model() -> None:
    shapes = {**OUTSIDE, **layers({"q_proj.weight": (64, 64), "self_attn.rotary_emb.inv_freq": (8,)})}
    matched = match(by_structure(checkpoint(shapes)))
    assert (matched.problems(), len(matched.left_out)) == ([], 2)


def test_several_ranks_are_refused_by_their_flags() -> None:
    config = by_structure(checkpoint({**OUTSIDE, **layers({"q_proj.weight": (64, 64)})})).config
    with pytest.raises(PlanError, match=r"^--target-tp 2: .* do not say how .*: --target-tp 1$"):
        check_whole(config, {"tp": 1, "target-tp": 2})


def spoilt() -> Iterator[tuple[Any, str]]:
    good: dict[str, Any] = {"stack": "m", "layers": 2, "tensors": [{"name": "m.{i}.q_proj.weight", "shape": [64, 64]}]}
    yield [], "modelexport_structure is"
    yield {**good, "layers": 10**9}, "layers is 1,000,000,000; at most 4,096 are believed"
    yield {**good, "tensors": "x"}, "a list of objects is needed"
    yield {**good, "tensors": [{"name": "x", "shape": [-1]}]}, "shape is -1"
    yield {**good, "tensors": [{"name": "x", "shape": 3}]}, "no shape"
    yield {**good, "tensors": [{"name": "m.{i}.x", "shape": [], "layers": [2]}]}, "numbers below 2 are needed"
    yield {**good, "tensors": [{"name": "m.{i}.{e}", "shape": [], "experts": 10**9}]}, "at most 32,768 are believed"
    yield {**good, "layers": 4096, "tensors": [{"name": "m.{i}.{e}", "shape": [], "experts": 32768}]}, "more than 1,048"
    yield {**good, "embedding": "e"}, "e.weight is no matrix among its tensors"
    yield {**good, "tied": True}, "the head is tied"


@pytest.mark.parametrize(("description", "said"), list(spoilt()))
def test_a_description_that_is_none_is_refused(description: object, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        family_of({**CONFIG, KEY: description})


def test_the_refusal_of_an_unknown_type_names_the_setting() -> None:
    with pytest.raises(PlanError, match="modelexport --unknown-architecture structure exports it"):
        family_of(CONFIG)
