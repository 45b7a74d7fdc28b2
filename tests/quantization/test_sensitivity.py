"""Sensitivities against hooks on transformers' whole model; and what is chosen by them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from _forward_ranks import on_ranks
from _sensitivity_targets import sensitivities
from torch import Tensor

from modelexport.checkpoints.safetensors.file import Reader, open_checkpoint
from modelexport.errors import CheckpointError, PlanError
from modelexport.exporting.calibrated.samples import forward_reader
from modelexport.inspection.evaluate import load_reference, mean_kl
from modelexport.quantization import formats
from modelexport.quantization.assignment import Assignment
from modelexport.quantization.calibration.layers import LayerRunner
from modelexport.quantization.formats.base import NumberFormat
from modelexport.quantization.kv_caches import CACHES
from modelexport.quantization.sensitivity import Assigned, affordable, assign, measure
from tests.helpers.models import copy_checkpoint, make_llama

ATTENTION = (("q_proj", "k_proj", "v_proj"), ("o_proj",))
PLAIN = tuple(tuple(f"self_attn.{name}" for name in group) for group in ATTENTION)
DENSE = (*PLAIN, ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",))


def tokens(samples: int = 5, length: int = 120, vocabulary: int = 211) -> Tensor:
    return torch.randint(vocabulary, (samples, length), generator=torch.Generator().manual_seed(3))


def candidates(*names: str) -> dict[str, NumberFormat]:
    found = {}
    for name in names:
        plain, _, size = name.partition(":")
        found[name] = formats.get(plain, group_size=int(size) if size else None)
    return found


class Model:
    """A checkpoint and a runner of it."""

    def __init__(self, directory: Path, paths: Sequence[Sequence[str]] = DENSE, layers: int = 2) -> None:
        self.directory, self.checkpoint = directory, open_checkpoint(directory)
        self.groups = [
            [[f"model.layers.{index}.{path}" for path in group] for group in paths] for index in range(layers)
        ]
        shapes = {
            name: self.checkpoint.infos[f"{name}.weight"].shape for layer in self.groups for g in layer for name in g
        }
        self.shapes = {name: (shape[0], shape[1]) for name, shape in shapes.items()}

    @contextmanager
    def runner(self, given: Tensor, **settings: Any) -> Iterator[LayerRunner]:
        with Reader(self.checkpoint) as reader:
            read = forward_reader(self.checkpoint, reader)
            with LayerRunner(self.checkpoint.config, self.checkpoint.infos.keys(), read, given, **settings) as runner:
                yield runner

    def errors(self, formats_of: Mapping[str, NumberFormat], by: str, given: Tensor) -> dict[str, dict[str, float]]:
        with self.runner(given) as runner:
            found = measure(runner, self.groups, self.shapes, formats_of, by=by)
        assert found.by == by
        return found.errors


class Whole:
    """transformers' whole model, of which linears are quantised for a while."""

    def __init__(self, directory: Path) -> None:
        self.model = load_reference(directory)

    @contextmanager
    def quantised(
        self, chosen: Mapping[str, NumberFormat], reaches: Mapping[str, float] | None = None
    ) -> Iterator[None]:
        kept, hooks = [], []
        for name, number_format in chosen.items():
            if not number_format.quantised:
                continue
            module = self.model.get_submodule(name)
            native = number_format.quantise(module.weight.bfloat16(), inputs=(reaches or {}).get(name))
            kept.append((module, module.weight.data))
            module.weight.data = number_format.dequantise(native)
            hooks.append(module.register_forward_pre_hook(_rounding(number_format, native)))
        yield
        for module, weight in kept:
            module.weight.data = weight
        for hook in hooks:
            hook.remove()

    def run(self, given: Tensor) -> tuple[list[Tensor], Tensor]:
        """Each layer's output, before any norm, and the logits."""
        seen: list[Tensor] = []
        hooks = [
            layer.register_forward_hook(lambda _, args, out: seen.append(out[0] if isinstance(out, tuple) else out))
            for layer in self.model.model.layers
        ]
        with torch.inference_mode():
            logits = self.model(input_ids=given, use_cache=False).logits
        for hook in hooks:
            hook.remove()
        return seen, logits


def _rounding(number_format: NumberFormat, native: Mapping[str, Tensor]) -> Callable[..., Any]:
    return lambda _, args: (number_format.fake_quantise_activations(args[0], native),)


def relative(states: Tensor, others: Tensor) -> float:
    return float((states - others).double().square().sum() / others.double().square().sum())


@pytest.fixture(scope="module")
def llama() -> Model:
    return Model(make_llama())


@pytest.fixture(scope="module")
def whole(llama: Model) -> Whole:
    return Whole(llama.directory)


def test_against_hooks_on_the_whole_model(llama: Model, whole: Whole) -> None:
    given = tokens()
    found = {by: llama.errors(candidates("int4:32", "fp8", "none"), by, given) for by in ("output", "kl")}
    base, logits = whole.run(given)
    for index, layer in enumerate(llama.groups):
        for group in layer:
            assert found["output"][group[0]]["none"] == found["kl"][group[0]]["none"] == 0.0
            for name, number_format in candidates("int4:32", "fp8").items():
                with whole.quantised(dict.fromkeys(group, number_format)):
                    states, wrong = whole.run(given)
                assert found["output"][group[0]][name] == pytest.approx(relative(states[index], base[index]), rel=1e-3)
                assert found["kl"][group[0]][name] == pytest.approx(float(mean_kl(logits, wrong).mean()), rel=1e-2)


def test_static_inputs_and_scales_that_are_shared(llama: Model, whole: Whole) -> None:
    """Largest inputs from the runner; fp8-static's weights of a fused module have one scale."""
    given = tokens()
    names = [name for layer in llama.groups for group in layer for name in group]
    reaches: dict[str, float] = {}
    hooks = [
        whole.model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: reaches.__setitem__(name, args[0].abs().max().item())
        )
        for name in names
    ]
    base, _ = whole.run(given)
    for hook in hooks:
        hook.remove()
    found = llama.errors(candidates("int8-static", "fp8-static"), "output", given)
    for index, layer in enumerate(llama.groups):
        for group in layer:
            with whole.quantised(dict.fromkeys(group, formats.get("int8-static")), reaches):
                states, _ = whole.run(given)
            assert found[group[0]]["int8-static"] == pytest.approx(relative(states[index], base[index]), rel=1e-2)
            assert 0 < found[group[0]]["fp8-static"] < 0.02
            if len(group) == 1:
                with whole.quantised(dict.fromkeys(group, formats.get("fp8-static")), reaches):
                    states, _ = whole.run(given)
                assert found[group[0]]["fp8-static"] == pytest.approx(relative(states[index], base[index]), rel=1e-2)


def test_the_runner_is_at_the_end_of_the_model_as_it_was(llama: Model, whole: Whole) -> None:
    given = tokens()
    base, _ = whole.run(given)
    for by in ("output", "kl"):
        with llama.runner(given, memory=0 if by == "output" else None) as runner:
            measure(runner, llama.groups, llama.shapes, candidates("int4:32"), by=by)
            torch.testing.assert_close(torch.cat(list(runner.hidden)), base[-1], rtol=1e-4, atol=1e-4)


def test_threads_leave_no_trace(llama: Model) -> None:
    for by in ("output", "kl"):
        found = []
        for threads in (1, 3):
            with llama.runner(tokens(), threads=threads) as runner:
                found.append(measure(runner, llama.groups, llama.shapes, candidates("int4:32", "nvfp4"), by=by))
        assert found[0] == found[1]


def test_experts() -> None:
    """One group has all experts of a layer; some of them see no token."""
    experts = range(4)
    paths = (
        *PLAIN,
        tuple(f"block_sparse_moe.experts.{e}.{w}" for e in experts for w in ("w1", "w3")),
        tuple(f"block_sparse_moe.experts.{e}.w2" for e in experts),
    )
    model = Model(make_llama(model_type="mixtral", experts=4), paths)
    found = model.errors(candidates("int4:32", "int8-static", "nvfp4"), "kl", tokens(1, 2))
    seen = model.errors(candidates("int4:32", "int8-static", "nvfp4"), "kl", tokens())
    for errors in (found, seen):
        assert all(math.isfinite(value) for table in errors.values() for value in table.values())
    for table in seen.values():
        assert table["int4:32"] > table["int8-static"] > 0


@pytest.mark.slow
def test_any_number_of_ranks(llama: Model) -> None:
    arguments = (str(llama.directory), llama.groups, ["int8-static", "nvfp4"])
    alone = sensitivities(*arguments)
    assert on_ranks(sensitivities, 3, *arguments) == [alone] * 3


def test_kl_where_it_is_affordable(llama: Model) -> None:
    chosen = candidates("int4:32", "fp8")
    with llama.runner(tokens()) as runner:
        assert affordable(runner, llama.groups, llama.shapes, chosen)
        large = {name: (shape[0] << 10, shape[1] << 8) for name, shape in llama.shapes.items()}
        assert not affordable(runner, llama.groups, large, chosen)
        assert affordable(runner, llama.groups, large, candidates("none"))
        assert measure(runner, llama.groups, llama.shapes, chosen).by == "kl"


def assigned(model: Model, given: Tensor, budget: float, *names: str, **settings: Any) -> Assigned:
    with model.runner(given) as runner:
        return assign(runner, model.groups, model.shapes, candidates(*names), [budget], torch.bfloat16, **settings)[0]


def chosen_of(found: Assigned, ending: str) -> set[str]:
    return {chosen for name, chosen in found.formats.items() if name.endswith(ending)}


def test_assign(llama: Model) -> None:
    found = assigned(llama, tokens(), 7.0, "int4:32", "fp8", "none")
    assert 6.0 < found.bits <= 7.0
    assert found.sensitivities.by == "kl"
    parsed = Assignment.parse(found.quant)
    for name, chosen in found.formats.items():
        got = parsed.of(name)
        assert got is not None
        assert got.name == chosen.partition(":")[0]
    for layer in llama.groups:
        for group in layer:
            assert len({found.formats[name] for name in group}) == 1
    each = {"int4:32": 4 + 16 / 32, "none": 16.0}
    stored = sum(
        each.get(chosen, 8 + 16 / llama.shapes[name][1]) * math.prod(llama.shapes[name])
        for name, chosen in found.formats.items()
    )
    assert found.bits == pytest.approx(stored / sum(map(math.prod, llama.shapes.values())))


def test_the_choice_is_on_its_front(llama: Model) -> None:
    found = assigned(llama, tokens(2), 6.0, "int4:32", "fp8", "none", by="output")
    below = [error for bits, error in found.front if bits <= found.bits]
    assert found.error == pytest.approx(below[-1])
    assert found.uniform.keys() == {"int4:32", "fp8", "none"}
    assert found.uniform["int4:32"] == pytest.approx(found.front[0])
    assert found.uniform["none"] == found.front[-1] == (16.0, 0.0)


@pytest.mark.parametrize("by", ["kl", "output"])
def test_an_error_with_a_rounded_cache_comes_on_top_of_the_cache(llama: Model, by: str) -> None:
    found = []
    for cache in (None, CACHES["fp8"]):
        with llama.runner(tokens()) as runner:
            found.append(measure(runner, llama.groups, llama.shapes, candidates("int4:32", "none"), by=by, cache=cache))
    assert found[0].cache == 0.0 < found[1].cache
    for group, table in found[0].errors.items():
        assert found[1].errors[group]["none"] == 0.0
        assert found[1].errors[group]["int4:32"] != table["int4:32"]
        assert found[1].errors[group]["int4:32"] == pytest.approx(table["int4:32"], rel=0.1)


def test_a_format_takes_its_bits_however_small_the_model(llama: Model) -> None:
    """What has one size for a linear of any size, such as its shape, does not count."""
    found = assigned(llama, tokens(1), 4.5, "int4:32", "fp8", by="output")
    assert (set(found.formats.values()), found.bits) == ({"int4:32"}, 4.5)


def test_refusals(llama: Model) -> None:
    def never(*_: object) -> None:
        raise AssertionError("time was spent")

    with pytest.raises(PlanError, match=r"--autoquant-bits 3: the smallest of the .* bits per weight: give"):
        assigned(llama, tokens(), 3.0, "int4:32", "fp8", progress=never)
    with pytest.raises(PlanError, match="is not divisible by the group size 128"):
        assigned(Model(make_llama(intermediate=352)), tokens(), 5.0, "int4:128", progress=never)
    # What does not fit is no candidate of that group.
    found = assigned(Model(make_llama(intermediate=352)), tokens(1), 6.0, "int4:128", "fp8", by="output")
    assert chosen_of(found, "down_proj") == {"fp8"}
    assert "int4:128" in chosen_of(found, "gate_proj")


def test_what_is_not_finite(llama: Model, tmp_path: Path) -> None:
    key = "model.layers.1.self_attn.o_proj.weight"

    def damage(state: dict[str, Tensor]) -> None:
        state[key] = state[key].clone()
        state[key][0, 0] = math.inf

    broken = Model(copy_checkpoint(llama.directory, tmp_path / "broken", tensors=damage))
    with pytest.raises(CheckpointError, match="outputs of layer 1 are not finite"):
        broken.errors(candidates("fp8"), "output", tokens(1))
