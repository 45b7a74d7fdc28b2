"""Samples through decoder layers, on one rank as transformers has it, and on several with the same bits."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from modelexport.assets import demo_model_path
from modelexport.errors import CheckpointError, PlanError
from modelexport.exporting.calibrated.forward import forward_cut
from modelexport.models.architecture import Dimensions, family_of
from modelexport.quantization.calibration import layers as calibration_layers
from modelexport.quantization.calibration.cut import WHOLE, ForwardCut, ForwardShard, even_ranges, nodes, over_tree
from modelexport.quantization.calibration.layers import LayerRunner
from modelexport.quantization.calibration.sums import ForwardRanks
from tests.helpers.marks import few
from tests.helpers.models import make_llama
from tests.quantization import _forward_ranks as targets
from tests.quantization._forward_ranks import WANTS, digest, on_ranks, opened

MODELS: dict[str, dict[str, Any]] = {
    "biases": {"attention_bias": True, "mlp_bias": True},
    "mixtral": {"model_type": "mixtral"},
    "phi3": {"model_type": "phi3"},
    "qwen2": {"model_type": "qwen2", "kv_heads": 1},
    "one tile": {"intermediate": 100, "heads": 8, "kv_heads": 4, "hidden": 64, "head_dim": 16},
    "seven heads": {"heads": 14, "kv_heads": 2, "hidden": 112, "head_dim": 16, "intermediate": 96},
    "deepseek_v3": {"model_type": "deepseek_v3", "shared_experts": 2},
    "deepseek_v2": {"model_type": "deepseek_v2", "query_rank": None, "attention_bias": True, "mlp_bias": True},
    "qwen3_moe": {"model_type": "qwen3_moe"},
}
MODULES = sorted({"llama", *(model["model_type"] for model in MODELS.values() if "model_type" in model)})


def directories(*names: str) -> list[str]:
    return [str(make_llama(**MODELS[name])) for name in names]


def check_equal(alone: list[dict[str, Any]], ranks: list[list[dict[str, Any]]]) -> None:
    """Every rank has the hidden states of one alone; the first, which puts Hessians together, all statistics."""
    for number, expected in enumerate(alone):
        assert len(expected) > 10
        assert ranks[0][number] == expected
        hidden = {key: value for key, value in expected.items() if key == "head" or key.startswith("hidden")}
        assert len(hidden) > 2
        for found in ranks:
            assert {key: found[number][key] for key in hidden} == hidden


# ------------------------------------------------------------------ one rank


@pytest.mark.parametrize("name", MODELS)
def test_tiles_give_what_transformers_gives(name: str) -> None:
    from transformers import AutoModelForCausalLM

    [directory] = directories(name)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    both: tuple[dict[str, Any], ...] = ({}, {"cut": ForwardCut()})
    for settings in both:
        with opened(directory, 3, 50, **settings) as runner, runner:
            for index in range(len(runner.layers)):
                with runner.filled(index) as layer:
                    runner.advance(layer)
            [found] = runner.outputs()
            with torch.inference_mode():
                expected = model.base_model(input_ids=runner.batches[0]).last_hidden_state
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_what_is_read_is_what_is_needed(tmp_path: Path) -> None:
    reads: list[tuple[str, ForwardShard]] = []
    with opened(directories("biases")[0], reads=reads) as runner, runner:
        tokens = torch.cat([batch.flatten() for batch in runner.batches]).unique().tolist()
        (first, share), *_ = reads
        assert first == "model.embed_tokens.weight"
        assert [row for start, stop in share.spans for row in range(start, stop)] == tokens
        expected = digest(*runner.hidden)
        runner.save(tmp_path / "hidden.safetensors", 0)
    assert len({name for name, _ in reads}) == 2  # and the norm
    reads.clear()
    with opened(directories("biases")[0], reads=reads) as runner:
        assert runner.restore(tmp_path / "hidden.safetensors") == 0
        with runner:
            assert reads == []
            assert digest(*runner.hidden) == expected
            with runner.filled(0) as layer:
                assert layer.share("model.layers.0.self_attn.o_proj").dim == 1
            shares = dict(reads)
            assert shares["model.layers.0.self_attn.q_proj.bias"].spans == ((0, 128),)
            assert shares["model.layers.0.self_attn.o_proj.bias"] == WHOLE
            assert shares["model.layers.0.input_layernorm.weight"] == WHOLE


def test_tensors_are_the_layers_own(tmp_path: Path) -> None:
    [directory] = directories("mixtral")
    prefix = "model.layers.0.block_sparse_moe"
    with opened(directory) as runner, runner, runner.filled(0) as layer:
        before = list(runner.hidden)
        assert set(layer.linears) >= {f"{prefix}.gate", f"{prefix}.experts.3.w2", "model.layers.0.self_attn.q_proj"}
        assert layer.routers == {f"{prefix}.gate"}
        assert {tensor.dtype for tensor in layer.tensors.values()} == {torch.float32}
        for name, tensor in layer.tensors.items():
            if name.endswith((".w2.weight", ".o_proj.weight")):
                tensor.zero_()
        runner.advance(layer)
        assert digest(*runner.hidden) == digest(*before), "both branches are silent"
        layer.tensors[f"{prefix}.experts.1.w2.weight"].fill_(1e-3)
        runner.advance(layer)
        assert digest(*runner.hidden) != digest(*before)


def test_linears_that_are_given_the_same_share_its_statistics() -> None:
    [directory] = directories("deepseek_v3")
    with opened(directory) as runner, runner:
        with runner.filled(0) as layer:
            runner.advance(layer)
        with runner.filled(1) as layer:
            before = digest(*runner.hidden)
            inputs = runner.observe(layer, {"amax"}).inputs
            assert digest(*runner.hidden) == before
    own = {name.removeprefix("model.layers.1."): found for name, found in inputs.items()}
    assert own["self_attn.q_a_proj"] is own["self_attn.kv_a_proj_with_mqa"]
    assert own["mlp.gate"] is own["mlp.shared_experts.up_proj"] is own["mlp.shared_experts.gate_proj"]
    assert own["mlp.experts.0.gate_proj"] is own["mlp.experts.0.up_proj"]
    assert own["mlp.experts.0.gate_proj"] is not own["mlp.experts.1.gate_proj"]
    assert own["self_attn.o_proj"] is not own["self_attn.q_b_proj"]


def test_a_layer_is_left_at_its_last_linear_where_outputs_count_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second layer of these linears on; what is seen is the same."""
    multiplied: list[str] = []
    product = ForwardRanks.product

    def noted(self: ForwardRanks, x: Tensor, weight: Tensor, path: str, share: ForwardShard) -> Tensor:
        multiplied.append(path)
        return product(self, x, weight, path, share)

    monkeypatch.setattr(ForwardRanks, "product", noted)
    [directory] = directories("qwen2")
    with opened(directory) as runner, runner:
        for index in range(2):
            with runner.filled(index) as layer:
                multiplied.clear()
                down = f"model.layers.{index}.mlp.down_proj"
                left = targets.of_statistics(runner.observe(layer, WANTS).inputs[down])
                seen = multiplied.count("mlp.down_proj")  # a batch that begins late may know by the first one
                assert (seen > 0) == (index == 0)
                assert multiplied.count("mlp.up_proj") == len(runner.batches)
                runner._called_once = dict.fromkeys(runner._called_once, False)
                assert left == targets.of_statistics(runner.observe(layer, WANTS).inputs[down])
                runner._called_once = dict.fromkeys(runner._called_once, True)
                runner.advance(layer)
                assert multiplied.count("mlp.down_proj") == seen + 2 * len(runner.batches)


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "deepseek_v2", "qwen3_moe"])
def test_all_experts_see_all_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    [directory] = directories(name)
    with opened(directory) as runner, runner:
        with runner.filled(0) as layer:
            runner.advance(layer)
        with runner.filled(1) as layer:
            routed = runner.observe(layer, {"amax"})
            shown = runner.observe(layer, {"amax"}, all_experts=True)
            again = runner.observe(layer, {"amax"})
            monkeypatch.setattr(calibration_layers, "choosing_all", lambda layer: nullcontext())
            with pytest.raises(PlanError, match=r"cannot show every token to every expert .* of 600; leave"):
                runner.observe(layer, {"amax"}, all_experts=True)
    experts = [expert for expert in routed.tokens if ".experts." in expert]
    assert len(experts) == 12
    assert sum(routed.tokens[expert] for expert in experts) == 600 * 2 * 3
    assert {shown.tokens[expert] for expert in experts} == {600}
    assert again.tokens == routed.tokens


# ------------------------------------------------------------- hidden states


def walk(runner: LayerRunner) -> str:
    for index in range(len(runner.layers)):
        with runner.filled(index) as layer:
            runner.advance(layer)
    return digest(*runner.hidden)


def test_above_a_budget_they_are_in_a_file(tmp_path: Path) -> None:
    [directory] = directories("biases")
    found = []
    for memory in (None, 4 * 120 * 128 * 4, 0):  # all, one batch, none
        with opened(directory, memory=memory, directory=tmp_path) as runner, runner:
            found.append(walk(runner))
    assert list(tmp_path.iterdir()) == []
    assert found[0] == found[1] == found[2]


def test_a_run_is_taken_up_from_a_file(tmp_path: Path) -> None:
    [directory] = directories("mixtral")
    path = tmp_path / "1.safetensors"
    with opened(directory) as runner:
        assert runner.restore(path) is None
        with runner:
            with runner.filled(0) as layer:
                runner.advance(layer)
            runner.save(path, 1)
            with runner.filled(1) as layer:
                runner.advance(layer)
            expected = digest(*runner.hidden)
    assert list(tmp_path.iterdir()) == [path]
    with opened(directory, memory=0) as runner:
        assert runner.restore(path) == 1
        with runner, runner.filled(1) as layer:
            runner.advance(layer)
            assert digest(*runner.hidden) == expected
    data = bytearray(path.read_bytes())
    for spoilt in (data[:-40], data[:90], b"", data + b"x", data[:5000] + bytes([data[5000] ^ 1]) + data[5001:]):
        path.write_bytes(spoilt)
        with opened(directory) as runner, pytest.raises(CheckpointError, match="remove it and start again"):
            runner.restore(path)
    path.write_bytes(data)
    with opened(directory, 4) as runner, pytest.raises(CheckpointError, match="of another run"):
        runner.restore(path)


def test_they_are_a_safetensors_file(tmp_path: Path) -> None:
    from safetensors import safe_open

    with opened(directories("biases")[0]) as runner, runner:
        runner.save(tmp_path / "hidden.safetensors", 7)
        with safe_open(tmp_path / "hidden.safetensors", "pt") as file:
            assert file.metadata()["index"] == "00000007"
            assert torch.equal(file.get_tensor("1"), runner.hidden[1])


# --------------------------------------------------------------------- cuts


@given(st.integers(1, 40), st.integers(0, 40), st.integers(1, 9))
def test_a_sum_is_the_same_expression_for_any_number_of_ranks(count: int, spread: int, world: int) -> None:
    def add(left: str, right: str) -> str:
        return f"({left}+{right})"

    def leaf(node: tuple[int, int]) -> str | None:
        return str(node[0]) if node[1] - node[0] == 1 else None

    alone = over_tree((0, count), leaf, add)
    edges = sorted({0, count, *((spread * place) % count for place in range(world))})
    held = [node for first, stop in pairwise(edges) for node in nodes(first, stop, count)]
    known = {node: over_tree(node, leaf, add) for node in held}
    assert over_tree((0, count), known.get, add) == alone
    assert nodes(3, 3, 5) == []


def dimensions_of(heads: int, group: int, intermediate: int) -> Dimensions:
    return Dimensions(
        layers=1,
        hidden=64,
        heads=heads * group,
        kv_heads=heads,
        head_dim=8,
        intermediate=intermediate,
        vocab=10,
        tied_embeddings=False,
    )


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 700), st.integers(1, 20))
def test_cuts_are_made_of_the_same_tiles(kv_heads: int, group: int, intermediate: int, world: int) -> None:
    for name in ("llama", "phi3"):
        family, dimensions = family_of({"model_type": name}), dimensions_of(kv_heads, group, intermediate)
        alone = forward_cut(family, dimensions, 0, 1)
        cuts = [forward_cut(family, dimensions, rank, world) for rank in range(world)]
        for path, whole in alone.shares.items():
            shares = [cut.shares[path] for cut in cuts]
            assert 1 <= whole.count <= 16 or whole.dim == 0
            assert [n for share in shares for n in share.numbers] == list(range(whole.count))
            covered = {tile: place for place, tile in enumerate(whole.tiles)}
            seen = [tile for share in shares for tile in global_tiles(share)]
            assert set(seen) == set(covered), path
            if whole.dim == 1:
                assert seen == list(whole.tiles)
        check_attention(cuts, group)
        widths = {stop - start for start, stop in alone.shares["mlp.down_proj"].tiles}
        assert len(alone.shares["mlp.down_proj"].tiles) == 1 or not any(width % 32 for width in widths)


def global_tiles(share: ForwardShard) -> list[tuple[int, int]]:
    """A rank's tiles in the whole weight."""
    starts = [start - sum(b - a for a, b in share.spans[:place]) for place, (start, _) in enumerate(share.spans)]
    ends = [sum(b - a for a, b in share.spans[: place + 1]) for place in range(len(share.spans))]
    shifts = [next(s for s, end in zip(starts, ends, strict=True) if stop <= end) for _, stop in share.tiles]
    return [(start + by, stop + by) for (start, stop), by in zip(share.tiles, shifts, strict=True)]


def check_attention(cuts: list[ForwardCut], group: int) -> None:
    """Each rank's heads read the keys that it has, as transformers' module will have it."""
    for cut in cuts:
        heads, kv_heads = cut.config["num_attention_heads"], cut.config["num_key_value_heads"]
        assert heads % kv_heads == 0
        share = cut.shares["self_attn.o_proj"]
        [(start, stop)] = share.spans
        assert stop - start == heads * 8
        assert cut.kv_heads is not None
        if not share.tiles:
            assert cut.kv_heads == (0, 0)
            continue
        low, high = cut.kv_heads
        assert high - low == kv_heads
        for head in range(heads):
            assert (start // 8 + head) // group == low + head // (heads // kv_heads)


def test_even_ranges() -> None:
    assert even_ranges(7, 3) == [(0, 2), (2, 4), (4, 7)]
    assert even_ranges(1, 3) == [(0, 0), (0, 0), (0, 1)]


# ------------------------------------------------------------- several ranks


@pytest.mark.timeout(200)
@pytest.mark.parametrize("world", few([2, 3], 3))
def test_several_ranks_have_the_bits_of_one(world: int) -> None:
    models = directories("biases", "mixtral")
    check_equal(targets.run_all(models), on_ranks(targets.run_all, world, models, models=("llama", "mixtral")))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_every_family_on_any_number_of_ranks(world: int) -> None:
    models = [*directories(*MODELS), str(demo_model_path())]
    check_equal(targets.run_all(models), on_ranks(targets.run_all, world, models, models=MODULES))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_without_shared_memory_and_with_all_experts() -> None:
    models = directories("mixtral", "deepseek_v3")
    alone = targets.run_all(models, True)
    check_equal(alone, on_ranks(targets.run_all, 2, models, True, False, models=MODULES))
