"""The scales of a KV cache, and what runs through it while later layers are calibrated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from modelexport.errors import PlanError
from modelexport.exporting import convert, export
from modelexport.exporting.calibrated.rank import CalibratedExport
from modelexport.exporting.plan import ExportStep
from modelexport.inspection.evaluate.models import load_dequantised
from tests.conformance._kv_cache import round_kv_cache
from tests.exporting.test_export import digests
from tests.helpers.marks import few
from tests.helpers.models import make_llama

pytestmark = pytest.mark.timeout(240)

HEADS = 2
SHAPE: dict[str, Any] = {"hidden": 128, "intermediate": 128, "heads": 8, "kv_heads": HEADS, "head_dim": 16}
SCALE = "model.layers.{}.self_attn.{}_scale"


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "ids.jsonl"
    rows = torch.randint(0, 200, (4, 40), generator=torch.Generator().manual_seed(0)).tolist()
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return str(path)


def exported(out: Path, ids: str, **settings: Any) -> dict[str, str]:
    calibration = {"calib": ids, "calib_samples": 3, "calib_length": 32}
    model = str(make_llama(**{**SHAPE, **settings.pop("shape", {})}))
    export(model=model, out=str(out), evaluate=False, quiet=True, **{**calibration, **settings})
    return digests(out)


def test_heads_have_scales_of_their_own_whichever_ranks_have_them(ids: str, tmp_path: Path) -> None:
    """Two ranks have one head each, of four two share one."""
    settings = {"quant": "none", "kv_cache": "fp8-head", "calib_range": "mse"}
    alone = exported(tmp_path / "1", ids, **settings)
    assert all(exported(tmp_path / f"{tp}", ids, tp=tp, **settings) == alone for tp in (2, 4))
    exported(tmp_path / "max", ids, **{**settings, "calib_range": "max"})
    exported(tmp_path / "whole", ids, quant="none", kv_cache="fp8", calib_range="max")
    heads, whole = (load_file(tmp_path / name / "model.safetensors") for name in ("max", "whole"))
    for name in (SCALE.format(layer, part) for layer in range(2) for part in "kv"):
        assert heads[name].shape == (HEADS, 1, 1)
        assert heads[name].max() == whole[name], "the largest is that of all heads together"
        assert heads[name].min() < whole[name]


@pytest.mark.parametrize(
    ("algorithm", "cache", "form"),
    few(
        [
            *(("gptq", "fp8-head", "hf"), ("autoround", "fp8-head", "hf"), ("awq", "fp8", "hf")),
            *(("gptq", "nvfp4", "modelopt"), ("autoround", "nvfp4", "modelopt")),
        ],
        ("gptq", "fp8-head", "hf"),
    ),
)
def test_calibration_rounds_keys_and_values_alike_on_all_ranks(
    algorithm: str, cache: str, form: str, ids: str, tmp_path: Path
) -> None:
    own = {"autoround_steps": 2, "autoround_batch_size": 2} if algorithm == "autoround" else {}
    settings = {"quant": "int4:32", "algorithm": algorithm, "kv_cache": cache, "format": form, **own}
    alone = exported(tmp_path / "1", ids, **settings)
    assert all(exported(tmp_path / f"{tp}", ids, tp=tp, **settings) == alone for tp in (2, 4))


@pytest.mark.parametrize("cache", few(["fp8", "fp8-head"], "fp8-head"))
def test_later_layers_are_calibrated_on_what_comes_out_of_the_cache(
    cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the last layer is quantised for is what the layers before it make of the samples, their keys and values
    rounded by the scales that are written."""
    seen: dict[int | None, tuple[Tensor, Tensor]] = {}
    original = CalibratedExport._calibrated

    def noting(self: CalibratedExport, step: ExportStep) -> Any:
        seen[step.index] = self.runner.batches[0], self.runner.hidden[0].clone()
        return original(self, step)

    monkeypatch.setattr(CalibratedExport, "_calibrated", noting)
    few_samples = {"calib_samples": 2, "calib_length": 64, "evaluate": False, "quiet": True}
    export(out=str(tmp_path / "out"), quant="int4", algorithm="gptq", kv_cache=cache, **few_samples)
    tokens, given = seen[3]

    def difference() -> float:
        model = load_dequantised(tmp_path / "out")
        found: list[Tensor] = []
        model.model.layers[3].register_forward_pre_hook(lambda _, args: found.append(args[0]))
        with torch.inference_mode():
            model(input_ids=tokens)
        return float((found[0] - given).abs().mean() / given.abs().mean())

    unrounded = difference()
    round_kv_cache(monkeypatch, tmp_path / "out")
    rounded = difference()
    print(f"{cache}: {rounded:.2e}, {unrounded:.2e} with keys and values as they are")
    assert rounded < 0.01 * unrounded


def test_scales_of_heads_are_kept_where_there_are_words_for_them(ids: str, tmp_path: Path) -> None:
    exported(tmp_path / "hf", ids, quant="int8", kv_cache="fp8-head")
    convert(str(tmp_path / "hf"), out=str(tmp_path / "kept"), format="hf", quiet=True)
    kept, made = (load_file(tmp_path / name / "model.safetensors") for name in ("kept", "hf"))
    assert all(torch.equal(kept[name], tensor) for name, tensor in made.items())
    with pytest.raises(PlanError, match=r"strategy 'attn_head'.*'modelopt' cannot say: --format hf can"):
        convert(str(tmp_path / "hf"), out=str(tmp_path / "refused"), format="modelopt", quiet=True)


def test_int8_reaches_as_far_as_fp8_in_fewer_steps(ids: str, tmp_path: Path) -> None:
    """In TensorRT-LLM's checkpoint, the same whichever ranks make it."""
    settings = {"quant": "none", "format": "trtllm", "calib_range": "max"}
    alone = exported(tmp_path / "int8", ids, kv_cache="int8", **settings)
    assert exported(tmp_path / "2", ids, kv_cache="int8", tp=2, **settings) == alone
    exported(tmp_path / "fp8", ids, kv_cache="fp8", **settings)
    config = json.loads((tmp_path / "int8" / "config.json").read_text())
    assert config["quantization"]["kv_cache_quant_algo"] == "INT8"
    int8, fp8 = (load_file(tmp_path / name / "rank0.safetensors") for name in ("int8", "fp8"))
    for name in (f"transformer.layers.{n}.attention.{part}_cache_scaling_factor" for n in (0, 1) for part in "kv"):
        assert float(int8[name]) == pytest.approx(float(fp8[name]) * 448 / 127)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_cache": "fp8-head", "format": "modelopt"}, "'modelopt' has no place for its scales; --format hf has"),
        ({"kv_cache": "int8"}, "'compressed-tensors' has no place for its scales; --format trtllm has"),
        ({"kv_cache": "nvfp4"}, "'compressed-tensors' has no place for its scales; --format modelopt has"),
        (
            {"kv_cache": "nvfp4", "format": "modelopt", "shape": {"head_dim": 24}},
            "16 numbers of a head share a scale, and heads have 24: choose --kv-cache fp8",
        ),
        ({"kv_cache": "fp8-head", "shape": {"model_type": "deepseek_v3"}}, "latent attention keeps one latent of"),
    ],
)
def test_caches_that_nobody_keeps_are_refused(settings: dict[str, Any], words: str, ids: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=words):
        exported(tmp_path / "out", ids, quant="none", **settings)
    assert not (tmp_path / "out").exists()
