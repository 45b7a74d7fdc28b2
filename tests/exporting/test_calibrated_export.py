"""Layers quantised one by one while samples run through them: the same bytes on any number of ranks, taken up again."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from modelexport.assets import demo_documents, demo_model_path
from modelexport.checkpoints.safetensors.file import Reader
from modelexport.errors import RankFailedError, UsageError
from modelexport.exporting import export
from modelexport.exporting import rank as export_rank
from modelexport.exporting.calibrated.rank import CalibratedExport
from modelexport.exporting.calibrated.samples import samples_of
from modelexport.exporting.plan import ExportStep
from modelexport.exporting.prepare import prepare
from modelexport.inspection.evaluate import evaluate
from modelexport.inspection.evaluate.models import load_dequantised
from modelexport.inspection.evaluate.text import evaluate_on_text
from modelexport.inspection.verify import verify_checkpoint
from modelexport.models.opening import open_model
from modelexport.recipe import ExportRecipe
from tests.exporting.test_export import digests
from tests.helpers import faults
from tests.helpers.hard_model import make_hard
from tests.helpers.marks import few
from tests.helpers.models import copy_checkpoint, make_llama

pytestmark = pytest.mark.timeout(300)

FEW: dict[str, Any] = {"calib_samples": 6, "calib_length": 96, "evaluate": False, "quiet": True}
FEWER = {**FEW, "calib_samples": 2, "calib_length": 48}
"""Where two exports are compared, and not how good they are."""
LEARNING = {"calib_samples": 24, "autoround_steps": 3, "autoround_batch_size": 30}
"""Three batches in each step, for ranks to share."""
TINY = {
    "mixtral": {"model_type": "mixtral", "hidden": 256, "heads": 4},
    "qwen3_moe": {"model_type": "qwen3_moe", "hidden": 256, "heads": 4},
    "qwen2": {"model_type": "qwen2", "hidden": 256, "heads": 4},
    "phi3": {"model_type": "phi3", "hidden": 256, "heads": 4},
    "deepseek_v3": {"model_type": "deepseek_v3", "hidden": 256, "heads": 4, "layers": 3},
}


def record_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "modelexport.json").read_text())
    return found


@pytest.fixture
def ids(tmp_path: Path) -> str:
    """Samples for tiny models, which have no tokenizer."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 200, (12, 110), generator=generator).tolist()
    path = tmp_path / "ids.jsonl"
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in tokens))
    return str(path)


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    few(
        [
            ("gptq", {"kv_cache": "fp8"}),
            ("gptq", {"gptq_asymmetry": 0.5}),
            ("rotation+smoothquant", {}),
            ("autoround", {**LEARNING, "kv_cache": "fp8-head"}),
        ],
        ("rotation+smoothquant", {}),
    ),
)
def test_the_bytes_do_not_depend_on_the_number_of_ranks(
    tmp_path: Path, algorithm: str, settings: dict[str, Any]
) -> None:
    found = []
    for tp in (1, 3):
        export(out=str(tmp_path / f"tp{tp}"), quant="int4", algorithm=algorithm, tp=tp, **(FEWER | settings))
        found.append(digests(tmp_path / f"tp{tp}"))
    assert found[0] == found[1]
    assert not verify_checkpoint(tmp_path / "tp3", demo_model_path()).problems


@pytest.mark.slow
@pytest.mark.parametrize(
    "quant", ["int4", "int4:-1", "int4-asym", "int8-static", "fp8-static", "nvfp4", "mxfp4", "fp8-block"]
)
@pytest.mark.parametrize(
    "algorithm", ["smoothquant", "awq", "gptq", "rotation+gptq", "smoothquant+awq+mse", "autoround"]
)
def test_every_algorithm_at_every_parallelism(tmp_path: Path, algorithm: str, quant: str) -> None:
    expected = None
    for tp in (1, 2, 4, 8):
        out = tmp_path / f"tp{tp}"
        own = LEARNING if algorithm == "autoround" else {}
        settings = {**FEW, "kv_cache": "fp8", "calib_range": "mse", **own}
        export(out=str(out), quant=quant, algorithm=algorithm, tp=tp, **settings)
        found = digests(out)
        expected = expected or found
        assert found == expected
        shutil.rmtree(out)


@pytest.mark.slow
@pytest.mark.parametrize("gather", ["shm", "direct", "nfs"])
@pytest.mark.parametrize("format", ["hf", "modelopt", "trtllm", "dcp"])
def test_every_way_out(tmp_path: Path, gather: str, format: str) -> None:
    settings: dict[str, Any] = {"quant": "int4", "algorithm": "gptq", "format": format, **FEW}
    export(out=str(tmp_path / "one"), **settings)
    workspace = str(tmp_path / "workspace") if gather == "nfs" else None
    export(out=str(tmp_path / "two"), tp=2, gather=gather, workspace=workspace, **settings)
    assert digests(tmp_path / "one") == digests(tmp_path / "two")


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["gptq", "awq", "rotation+smoothquant+gptq", "autoround"])
@pytest.mark.parametrize("family", TINY)
def test_every_family_at_every_parallelism(tmp_path: Path, ids: str, family: str, algorithm: str) -> None:
    model, expected = str(make_llama(**TINY[family])), None
    settings = {"model": model, "quant": "int4:32", "algorithm": algorithm, "calib": ids, **FEW, "autoround_steps": 5}
    for tp in (1, 2, 4):
        export(out=str(tmp_path / f"tp{tp}"), tp=tp, **settings)
        found = digests(tmp_path / f"tp{tp}")
        expected = expected or found
        assert found == expected
    verification = verify_checkpoint(tmp_path / "tp4", Path(model))
    assert not verification.problems
    errors = record_of(tmp_path / "tp1")["output_error"]
    assert sum(errors["after"].values()) < sum(errors["before"].values())


@pytest.mark.parametrize(
    ("quant", "algorithm"),
    [("int8-static", "smoothquant"), pytest.param("int4", "smoothquant+gptq", marks=pytest.mark.slow)],
)
def test_what_runs_is_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quant: str, algorithm: str
) -> None:
    """What a layer is quantised for is what the written layer before it makes of the samples.

    Each layer is given what it was given in the run: the last bits of sums tip single inputs over from one integer to
    the next, and through several layers that would add up to more than is looked for here.
    """
    given: list[torch.Tensor] = []
    original = CalibratedExport._calibrated

    def noting(self: CalibratedExport, step: ExportStep) -> Any:
        if step.index is not None:
            given.append(self.runner.hidden[0].clone())
            batches.append(self.runner.batches[0])
        return original(self, step)

    batches: list[torch.Tensor] = []
    monkeypatch.setattr(CalibratedExport, "_calibrated", noting)
    export(out=str(tmp_path / "out"), quant=quant, algorithm=algorithm, **FEW)
    differences = []
    for rounded in (True, False):
        model = load_dequantised(tmp_path / "out")
        if not rounded:
            for module in model.modules():
                module._forward_pre_hooks.clear()
        found: list[float] = []

        def compare(_: Any, args: tuple[torch.Tensor, ...], own: list[float] = found) -> tuple[torch.Tensor, ...]:
            wanted = given[len(own)]
            own.append(float((args[0] - wanted).abs().mean() / wanted.abs().mean()))
            return wanted, *args[1:]

        for layer in model.model.layers:
            layer.register_forward_pre_hook(compare)
        with torch.inference_mode():
            model(input_ids=batches[0])
        assert len(found) == len(given) == 4
        differences.append(found)
    print(f"{algorithm} {quant}: {differences[0]}, {differences[1]} with inputs as they are")
    assert max(differences[0]) < (1e-5 if quant == "int4" else 0.01 * max(differences[1]))


@pytest.mark.parametrize(
    ("kind", "algorithm"), few([("raise", "gptq"), ("kill", "gptq"), ("kill", "autoround")], ("kill", "gptq"))
)
def test_a_run_that_is_cut_off_is_taken_up_at_its_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, algorithm: str
) -> None:
    own = LEARNING if algorithm == "autoround" else {"gptq_asymmetry": 0.5}
    settings: dict[str, Any] = {"quant": "int4", "algorithm": algorithm, "kv_cache": "fp8", **FEWER, **own}
    monkeypatch.setenv("FAULT", f"{kind} 1 3")
    with monkeypatch.context() as patch:
        patch.setattr(export_rank, "run_rank", faults.misbehave)
        with pytest.raises(RankFailedError, match="rank 1 failed"):
            export(out=str(tmp_path / "out"), tp=2, **settings)
    done: list[int | None] = []
    original = CalibratedExport._calibrated

    def noting(self: CalibratedExport, step: ExportStep) -> Any:
        done.append(step.index)
        return original(self, step)

    monkeypatch.setattr(CalibratedExport, "_calibrated", noting)
    export(out=str(tmp_path / "out"), **settings)
    assert done in ([1, 2, 3], [2, 3]), "layer 1 may have been in flight"
    export(out=str(tmp_path / "fresh"), **settings)
    assert digests(tmp_path / "out") == digests(tmp_path / "fresh")
    assert not (tmp_path / ".out.modelexport").exists()


def test_without_what_went_into_a_layer_all_are_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"quant": "int4", "algorithm": "awq", "awq_grid": 4, **FEWER}
    monkeypatch.setenv("FAULT", "raise 0 3")
    with monkeypatch.context() as patch:
        patch.setattr(export_rank, "run_rank", faults.misbehave)
        with pytest.raises(RankFailedError):
            export(out=str(tmp_path / "out"), **settings)
    shutil.rmtree(tmp_path / ".out.modelexport" / "beside")
    export(out=str(tmp_path / "out"), **settings)
    export(out=str(tmp_path / "fresh"), **settings)
    assert digests(tmp_path / "out") == digests(tmp_path / "fresh")


def test_the_record_tells_errors_and_what_was_changed(tmp_path: Path) -> None:
    result = export(out=str(tmp_path / "out"), quant="int4", algorithm="smoothquant+gptq", smoothquant_alpha=0.6, **FEW)
    record = record_of(tmp_path / "out")
    assert record["recipe"]["algorithm"] == "smoothquant+gptq"
    assert record["recipe"]["alpha"] == 0.6
    before, after = record["output_error"]["before"], record["output_error"]["after"]
    assert len(before) == 28
    assert set(before) == set(after)
    assert all(after[name] < before[name] for name in before)
    assert "model.layers.0.input_layernorm.weight" in record["changed"]
    assert "model.layers.3.self_attn.q_proj" in record["changed"]
    assert not set(record["changed"]) & set(record["sqnr_db"]), "its weights are not the source's"
    row = next(row for row in result.rows if row.name == "mlp.up_proj")
    assert row.error_before is not None
    assert row.error_after is not None
    assert row.error_after < row.error_before


def test_a_rotated_model_is_the_model_and_its_head_stands_alone(tmp_path: Path) -> None:
    export(out=str(tmp_path / "out"), quant="int8-wo", algorithm="rotation", **FEW)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    source = load_file(demo_model_path() / "model.safetensors")
    assert tensors["lm_head.weight"].shape == source["model.embed_tokens.weight"].shape
    assert not torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    assert bool((tensors["model.norm.weight"] == 1).all())
    found = evaluate(tmp_path / "out", demo_model_path(), demo_documents("heldout"), max_windows=4, max_new_tokens=1)
    assert found.comparison.mean_kl < 0.002
    other = record_of(tmp_path / "out")
    export(out=str(tmp_path / "seed"), quant="int8-wo", algorithm="rotation", calib_seed=1, **FEW)
    assert record_of(tmp_path / "seed")["sha256"] != other["sha256"], "the seed decides the signs"


@pytest.fixture(scope="module")
def hard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hard(demo_model_path(), tmp_path_factory.mktemp("hard") / "model")


def kl_of(hard: Path, out: Path, quant: str, algorithm: str) -> float:
    """Mean KL from the hard model of what is exported of it, on 8 windows of held-out text."""
    export(model=str(hard), out=str(out), quant=quant, algorithm=algorithm, **FEW)
    comparison = evaluate_on_text(out, hard, windows=8).comparison
    assert comparison is not None
    print(f"{algorithm} {quant}: mean KL {comparison.mean_kl:.5f}")
    return comparison.mean_kl


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["smoothquant", "awq", "smoothquant+awq", "rotation"])
def test_what_is_folded_leaves_the_function_as_it_was(tmp_path: Path, hard: Path, algorithm: str) -> None:
    """int8 in groups hides next to nothing: rounded to nearest, it has 0.018 here."""
    assert kl_of(hard, tmp_path / "out", "int8-wo", algorithm) < 0.0005


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quant", "parts"),
    [
        ("int8-static", {"smoothquant": 0.01, "awq": 0.01, "rotation": 0.01, "rotation+smoothquant": 0.01}),
        ("int4", {"awq": 0.4, "rotation": 0.45, "rotation+gptq": 0.3}),
    ],
)
def test_outliers_do_not_hurt_what_is_folded(tmp_path: Path, hard: Path, quant: str, parts: dict[str, float]) -> None:
    nearest = kl_of(hard, tmp_path / "rtn", quant, "rtn")
    for number, (algorithm, part) in enumerate(parts.items()):
        assert kl_of(hard, tmp_path / str(number), quant, algorithm) < part * nearest


def test_experts_that_see_nothing_are_told(tmp_path: Path, ids: str) -> None:
    model = str(make_llama(**TINY["mixtral"], experts=16))
    settings: dict[str, Any] = {"model": model, "quant": "int4:32", "algorithm": "gptq", "calib": ids, **FEW}
    settings |= {"calib_samples": 1, "calib_length": 3}
    export(out=str(tmp_path / "routed"), **settings)
    routed = record_of(tmp_path / "routed")["calibration"]
    assert routed["unseen_experts"]
    assert set(routed["rare_experts"].values()) <= {1, 2, 3}
    export(out=str(tmp_path / "all"), calib_experts="all", **settings)
    everything = record_of(tmp_path / "all")["calibration"]
    assert everything["unseen_experts"] == []
    assert set(everything["rare_experts"].values()) == {3}


def test_static_ranges_follow_the_setting(tmp_path: Path) -> None:
    scales = {}
    for reach in ("max", "percentile", "mse"):
        export(out=str(tmp_path / reach), quant="int8-static", algorithm="gptq", calib_range=reach, **FEW)
        tensors = load_file(tmp_path / reach / "model.safetensors")
        scales[reach] = float(tensors["model.layers.1.mlp.down_proj.input_scale"])
    assert scales["percentile"] < scales["max"]
    assert scales["mse"] < scales["max"]


def test_hidden_states_on_the_disk_are_the_same(tmp_path: Path) -> None:
    export(out=str(tmp_path / "memory"), quant="int4", algorithm="gptq", **FEWER)
    export(out=str(tmp_path / "disk"), quant="int4", algorithm="gptq", calib_memory=0, **FEWER)
    assert digests(tmp_path / "memory") == digests(tmp_path / "disk")


def test_tokens_too_few_for_a_hessian_are_told(ids: str) -> None:
    def warnings(kind: str, **settings: Any) -> tuple[str, ...]:
        settings = {"quant": "int4:32", "algorithm": "gptq", "calib": ids, "quiet": True, "dry_run": True, **settings}
        return prepare(ExportRecipe(model=str(make_llama(**TINY[kind])), **settings)).warnings

    few = {"calib_samples": 2, "calib_length": 100}
    (said,) = (each for each in warnings("qwen2", **few) if "too few" in each)
    assert re.search(
        r"gptq fits the [\d,]+ input features of model\.layers\.0\S+ to 200 tokens: .* --calib-samples \d", said
    )
    assert any("which the experts share" in each for each in warnings("mixtral", **few))
    assert not any("too few" in each for each in warnings("qwen2", calib_samples=12, calib_length=100))
    assert not any("too few" in each for each in warnings("qwen2", **few | {"algorithm": "awq"}))


def test_tokens_too_few_for_static_scales_are_told(ids: str) -> None:
    def said(quant: str, samples: int) -> list[str]:
        settings = {"quant": quant, "calib": ids, "quiet": True, "dry_run": True, "calib_length": 100}
        prepared = prepare(ExportRecipe(model=str(make_llama()), calib_samples=samples, **settings))
        return [each for each in prepared.warnings if each.startswith("static scales")]

    (warning,) = said("int8-static", 2)
    assert re.search(r"fitted to 200 tokens: about one token in 201 .* --calib-samples 10 or more", warning)
    assert said("int8-static", 10) == said("int8", 2) == []


def test_several_texts_take_their_shares_in_turn(tmp_path: Path) -> None:
    texts = []
    for token in (1, 2):
        (tmp_path / f"{token}.jsonl").write_text(json.dumps({"input_ids": [token] * 600}))
        texts.append(f"{tmp_path}/{token}.jsonl={token}")
    model = make_llama()
    checkpoint = open_model(model, None)
    recipe = ExportRecipe(quant="int8-static", calib=tuple(texts), calib_samples=6, calib_length=100)
    with contextlib.closing(Reader(checkpoint)) as reader:
        samples = samples_of(checkpoint, recipe, model, reader)
    assert samples.windows[:, 0].tolist() == [2, 1, 2, 2, 1, 2]
    settings: dict[str, Any] = {"model": str(model), "quant": "int8-static", "calib": texts, "quiet": True}
    export(out=str(tmp_path / "out"), calib_samples=6, calib_length=100, **settings)
    calibration = record_of(tmp_path / "out")["calibration"]
    assert calibration["text"] == "1.jsonl (2), 2.jsonl (4)"
    assert calibration["sources"] == [{"text": f"{n}.jsonl", "weight": n, "samples": 2 * n} for n in (1, 2)]
    assert "calib:\n- 1.jsonl=1\n- 2.jsonl=2\n" in (tmp_path / "out" / "README.md").read_text()
    with pytest.raises(RankFailedError, match=r"2\.jsonl has 600 tokens, but 8 samples of 100 .*--calib-samples 9\)"):
        export(out=str(tmp_path / "no"), calib_samples=12, calib_length=100, **settings)


def test_layers_that_another_second_text_made_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for text in texts:
        text.write_text("Some words that are written here. " * 300)
    settings: dict[str, Any] = {"quant": "int4", "algorithm": "gptq", "calib": list(map(str, texts)), **FEWER}
    monkeypatch.setenv("FAULT", "raise 0 4")
    with monkeypatch.context() as patch:
        patch.setattr(export_rank, "run_rank", faults.misbehave)
        with pytest.raises(RankFailedError):
            export(out=str(tmp_path / "out"), **settings)
    texts[1].write_text("Other words that are written here. " * 300)
    export(out=str(tmp_path / "out"), **settings)
    export(out=str(tmp_path / "new"), **settings)
    assert digests(tmp_path / "out") == digests(tmp_path / "new"), "layers of before were kept"


def test_what_cannot_be_calibrated_is_refused_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no tokenizer"):
        export(model=str(make_llama()), out=str(tmp_path / "no"), quant="int4:32", algorithm="gptq", quiet=True)
    assert not (tmp_path / "no").exists()


def test_what_would_do_nothing_is_refused(tmp_path: Path) -> None:
    for settings, said in (
        ({"quant": "none", "algorithm": "rotation+gptq"}, "nothing for gptq to do"),
        ({"quant": "*=none", "algorithm": "smoothquant+mse"}, "nothing for smoothquant and mse to do"),
        ({"quant": "int8", "algorithm": "autoquant"}, "autoquant chooses the number formats itself"),
        (
            {"algorithm": "autoquant", "format": "awq"},
            "-candidates int4,fp8,none: fp8: checkpoint format awq holds",
        ),
        ({"algorithm": "autoquant", "autoquant_candidates": "int4"}, "^--autoquant-candidates int4: at least two"),
        (
            {"algorithm": "autoquant", "format": "awq", "autoquant_candidates": "int4:64,int4:128"},
            "any two may be chosen for one checkpoint, but: checkpoint format awq has one group size",
        ),
    ):
        with pytest.raises(UsageError, match=said):
            export(out=str(tmp_path / "no"), quiet=True, **settings)


def test_what_autoquant_chose_from_is_recorded(tmp_path: Path, ids: str) -> None:
    settings: dict[str, Any] = {"autoquant_bits": 6, "autoquant_candidates": "int4:32,fp8", "kv_cache": "fp8", **FEWER}
    export(model=str(make_llama()), out=str(tmp_path / "out"), algorithm="autoquant", calib=ids, **settings)
    found = json.loads((tmp_path / "out" / "modelexport.json").read_text())["assignment"]
    assert found["bits"] <= 6
    assert found["cache"] > 0
    assert [found["bits"], found["error"]] in found["front"]
    assert not verify_checkpoint(tmp_path / "out").problems


def test_a_setting_that_differs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"quant": "int4", "algorithm": "gptq", **FEWER}
    monkeypatch.setenv("FAULT", "raise 0 2")
    with monkeypatch.context() as patch:
        patch.setattr(export_rank, "run_rank", faults.misbehave)
        with pytest.raises(RankFailedError):
            export(out=str(tmp_path / "out"), **settings)
    with pytest.raises(UsageError, match=r"differs from it:\n  gptq_damping: 0\.0 then, 0\.02 now$"):
        export(out=str(tmp_path / "out"), gptq_damping=0.02, **settings)


def test_a_weight_with_nan_is_named(tmp_path: Path, ids: str) -> None:
    def spoil(tensors: dict[str, Any]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.nan

    model = copy_checkpoint(make_llama(), tmp_path / "nan", tensors=spoil)
    with pytest.raises(RankFailedError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds NaN or Inf"):
        export(model=str(model), out=str(tmp_path / "out"), quant="int4:32", algorithm="gptq", calib=ids, **FEW)


@pytest.mark.slow
def test_folded_biases_do_not_depend_on_the_number_of_ranks(tmp_path: Path, ids: str) -> None:
    model = str(make_llama(hidden=256, attention_bias=True, mlp_bias=True))
    settings = {"model": model, "quant": "int8", "algorithm": "smoothquant", "calib": ids, **FEW}
    for tp in (1, 3):
        export(out=str(tmp_path / f"tp{tp}"), tp=tp, **settings)
    assert digests(tmp_path / "tp1") == digests(tmp_path / "tp3")
    biases = "model.layers.0.mlp.up_proj.bias"
    before, after = (load_file(Path(each) / "model.safetensors")[biases] for each in (model, tmp_path / "tp3"))
    assert not torch.equal(before, after), "up's bias takes part in what goes into down"


def test_what_is_converted_keeps_what_was_rotated(tmp_path: Path) -> None:
    export(out=str(tmp_path / "gptq"), quant="int4", algorithm="rotation+gptq", format="gptq", **FEWER)
    export(model=str(tmp_path / "gptq"), out=str(tmp_path / "hf"), quant="keep", quiet=True)
    assert record_of(tmp_path / "hf")["changed"] == record_of(tmp_path / "gptq")["changed"]
    verification = verify_checkpoint(tmp_path / "hf", demo_model_path())
    assert not verification.problems


def test_too_long_samples_are_warned_of(tmp_path: Path) -> None:
    result = export(quant="int4", algorithm="gptq", calib_length=600, dry_run=True)
    assert "beyond the 512 positions" in result.warnings[0]
    assert result.calibrated_bytes == (4 * 786_944, 4 * 64 * 600 * 256)
