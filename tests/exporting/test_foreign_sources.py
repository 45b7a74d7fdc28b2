"""Quantised checkpoints that others wrote, or spoilt: the numbers that they stand for, or a line that says why not."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from modelexport.cli import main
from modelexport.errors import CheckpointError, ModelExportError, PlanError, RankFailedError
from modelexport.exporting import export, prepare
from modelexport.inspection.evaluate.models import load_dequantised
from modelexport.inspection.inspect import inspect_checkpoint
from modelexport.inspection.verify import verify_checkpoint
from modelexport.quantization import formats
from modelexport.recipe import ExportRecipe
from tests.helpers.marks import few
from tests.helpers.models import copy_checkpoint, make_llama

SHAPE: dict[str, Any] = {"hidden": 128, "intermediate": 256, "heads": 4, "kv_heads": 2, "layers": 1, "vocab": 104}
Q = "model.layers.0.self_attn.q_proj"
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def source() -> Path:
    return make_llama(**SHAPE)


@pytest.fixture(scope="module")
def exported(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A checkpoint of ours of that ``--quant`` and ``--format``, made once."""
    root = tmp_path_factory.mktemp("ours")
    text = root / "tokens.jsonl"
    text.write_text("".join(json.dumps({"input_ids": [(7 * i + j) % 99 for j in range(20)]}) + "\n" for i in range(2)))
    calibration = {"calib": str(text), "calib_samples": 1, "calib_length": 16}

    def make(quant: str, format_name: str = "hf", **settings: Any) -> Path:
        out = root / "-".join(["made", quant, format_name, *map(str, settings.values())])
        if not out.exists():
            export(
                model=str(source), out=str(out), quant=quant, format=format_name, quiet=True, **calibration, **settings
            )
        return out

    return make


def spoilt(made: Path, target: Path, tensors: Callable[[Tensors], Any] | None = None, **config: Any) -> Path:
    """A copy without our own record; ``config`` goes into its quantization_config."""
    copy_checkpoint(made, target, tensors=tensors)
    whole = json.loads((made / "config.json").read_text())
    whole["quantization_config"] |= config
    (target / "config.json").write_text(json.dumps(whole))
    (target / "modelexport.json").unlink()
    (target / "hf_quant_config.json").unlink(missing_ok=True)
    return target


def group(made: Path, **changes: Any) -> dict[str, Any]:
    """The one config group of a checkpoint of ours, changed."""
    own = json.loads((made / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    return {"config_groups": {"group_0": {**own, **changes}}}


def weights(directory: Path, out: Path) -> Tensors:
    """What ``--quant none`` makes of a checkpoint."""
    export(model=str(directory), out=str(out), quant="none", quiet=True)
    return load_file(out / "model.safetensors")


def convert(directory: Path, out: Path, format_name: str) -> Path:
    export(model=str(directory), out=str(out), quant="keep", format=format_name, quiet=True)
    return out


# ----------------------------------------------------------------- other layouts of the same numbers


def as_int8(tensors: Tensors) -> Tensors:
    """Words of 8-bit numbers, and of zero points, as plain int8: "int-quantized"."""
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("weight_packed"):
            found[name.replace("weight_packed", "weight")] = tensor.view(torch.uint8).sub(128).view(torch.int8)
        elif name.endswith("weight_zero_point"):
            octets = tensor.t().contiguous().view(torch.uint8) - 128
            found[name] = octets.t().contiguous().view(torch.int8)
        elif not name.endswith("weight_shape"):
            found[name] = tensor
    return found


@pytest.mark.parametrize("quant", ["int8-wo", "int8-wo-asym"])
@pytest.mark.parametrize("inputs", [None, {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}])
def test_integers_without_words_are_the_same_integers(
    quant: str, inputs: dict[str, Any] | None, exported: Callable[..., Path], tmp_path: Path
) -> None:
    made = exported(quant, group_size=-1)
    changed = group(made, format="int-quantized", input_activations=inputs)
    theirs = spoilt(made, tmp_path / "theirs", as_int8, format="int-quantized", **changed)
    wanted, found = weights(made, tmp_path / "ours"), weights(theirs, tmp_path / "none")
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    if inputs is None:
        converted = load_file(convert(theirs, tmp_path / "kept", "hf") / "model.safetensors")
        ours = load_file(made / "model.safetensors")
        assert all(torch.equal(converted[name], tensor) for name, tensor in ours.items())


def test_integers_in_words_whose_inputs_are_rounded(
    exported: Callable[..., Path], source: Path, tmp_path: Path
) -> None:
    made = exported("int8-wo", group_size=-1)
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    theirs = spoilt(made, tmp_path / "theirs", **group(made, input_activations=inputs))
    found = verify_checkpoint(theirs, source)
    assert found.ok, found.problems
    assert len(found.modules) == 7
    load_dequantised(theirs)
    kept = load_file(convert(theirs, tmp_path / "kept", "hf") / "model.safetensors")
    assert kept[f"{Q}.weight"].dtype == torch.int8
    wanted, now = weights(made, tmp_path / "none"), weights(tmp_path / "kept", tmp_path / "none of it")
    assert all(torch.equal(now[name], tensor) for name, tensor in wanted.items())


def test_weights_are_read_though_nothing_here_rounds_inputs_so(exported: Callable[..., Path], tmp_path: Path) -> None:
    made = exported("fp8")
    theirs = spoilt(made, tmp_path / "theirs", **group(made, input_activations=None))
    wanted, found = weights(made, tmp_path / "ours"), weights(theirs, tmp_path / "none")
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    with pytest.raises(PlanError, match=r"rounds its inputs .* in a way that no number format of ours has"):
        convert(theirs, tmp_path / "kept", "hf")


def test_scales_of_several_dtypes(exported: Callable[..., Path], source: Path, tmp_path: Path) -> None:
    made = exported("fp8-static")

    def widen(tensors: Tensors) -> None:
        tensors[f"{Q}.input_scale"] = tensors[f"{Q}.input_scale"].float() * 1.001

    theirs = spoilt(made, tmp_path / "theirs", widen)
    kept = load_file(convert(theirs, tmp_path / "kept", "hf") / "model.safetensors")
    assert torch.equal(kept[f"{Q}.input_scale"], load_file(theirs / "model.safetensors")[f"{Q}.input_scale"])
    assert verify_checkpoint(tmp_path / "kept", source).ok
    assert len(json.loads((tmp_path / "kept" / "config.json").read_text())["quantization_config"]["config_groups"]) == 1


def test_transformers_words_for_fp8_are_verified(exported: Callable[..., Path], source: Path, tmp_path: Path) -> None:
    words = {"weight_scale": "weight_scale_inv", "input_scale": "activation_scale"}

    def renamed(tensors: Tensors) -> Tensors:
        return {".".join([*name.split(".")[:-1], words.get(name.split(".")[-1], name.split(".")[-1])]): t
                for name, t in tensors.items()}  # fmt: skip

    theirs = spoilt(exported("fp8-static", "fp8-block"), tmp_path / "theirs", renamed, weight_block_size=None)
    found = verify_checkpoint(theirs, source)
    assert found.ok, found.problems
    assert len(found.modules) == 7


def test_a_shape_of_narrower_words(exported: Callable[..., Path], source: Path, tmp_path: Path) -> None:
    def narrow(tensors: Tensors) -> None:
        tensors[f"{Q}.weight_shape"] = tensors[f"{Q}.weight_shape"].int()

    theirs = spoilt(exported("int4"), tmp_path / "theirs", narrow)
    assert verify_checkpoint(convert(theirs, tmp_path / "kept", "hf"), source).ok


@pytest.mark.parametrize("format_name", ["hf", "awq", "gptq", "modelopt"])
def test_a_quantised_head_stays_quantised(
    format_name: str, source: Path, exported: Callable[..., Path], tmp_path: Path
) -> None:
    made, wanted = exported("int4"), {}

    def quantise_head(tensors: Tensors) -> None:
        stored = formats.get("int4").quantise(tensors.pop("lm_head.weight"))
        wanted["lm_head.weight"] = formats.get("int4").dequantise(stored).bfloat16()
        tensors.update({f"lm_head.{suffix}": tensor for suffix, tensor in stored.items()})

    theirs = spoilt(made, tmp_path / "theirs", quantise_head, ignore=[])
    found = verify_checkpoint(convert(theirs, tmp_path / "kept", format_name), source)
    assert found.ok, found.problems
    assert "lm_head" in {module.name for module in found.modules}
    assert torch.equal(weights(tmp_path / "kept", tmp_path / "none")["lm_head.weight"], wanted["lm_head.weight"])


def test_a_tied_head_is_not_looked_for_though_no_list_has_it(tmp_path: Path) -> None:
    tied = make_llama(**SHAPE, tied=True)
    export(model=str(tied), out=str(tmp_path / "made"), quant="int4", quiet=True)
    theirs = spoilt(tmp_path / "made", tmp_path / "theirs", ignore=[])
    assert verify_checkpoint(convert(theirs, tmp_path / "kept", "hf"), tied).ok

    def quantise_head(tensors: Tensors) -> None:
        stored = formats.get("int4").quantise(tensors["model.embed_tokens.weight"])
        tensors.update({f"lm_head.{suffix}": tensor for suffix, tensor in stored.items()})

    spoilt(tmp_path / "made", tmp_path / "head", quantise_head, ignore=[])
    with pytest.raises(CheckpointError, match=r"ties the embeddings, but lm_head\..* is there"):
        weights(tmp_path / "head", tmp_path / "none")


# ----------------------------------------------------------------- inputs that are multiplied first


@pytest.mark.parametrize(("quant", "algo"), [("int4", "W4A16_AWQ"), ("nvfp4", "NVFP4_AWQ")])
def test_a_pre_quant_scale_is_never_dropped(
    quant: str, algo: str, exported: Callable[..., Path], source: Path, tmp_path: Path
) -> None:
    made = exported(quant, "modelopt")
    scale = torch.linspace(0.5, 2.0, 128)
    theirs = spoilt(made, tmp_path / "theirs", lambda t: t.update({f"{Q}.pre_quant_scale": scale}), quant_algo=algo)
    for format_name in ("modelopt", "hf"):
        with pytest.raises(ModelExportError, match=rf"{Q}: pre_quant_scale: .* --quant none"):
            convert(theirs, tmp_path / format_name, format_name)
    wanted, found = weights(made, tmp_path / "ours"), weights(theirs, tmp_path / "none")
    torch.testing.assert_close(found[f"{Q}.weight"].float(), wanted[f"{Q}.weight"].float() * scale, rtol=0.01, atol=0)
    verified = verify_checkpoint(theirs, source)
    assert verified.ok, verified.problems
    assert any(f"{Q}: " in note and "cannot be decoded" in note for note in verified.notes)
    model = load_dequantised(theirs)
    torch.testing.assert_close(model.get_submodule(Q).weight, found[f"{Q}.weight"].float(), rtol=0.01, atol=1e-6)
    assert torch.isfinite(model(torch.arange(8).unsqueeze(0)).logits).all()


def test_a_pre_quant_scale_of_another_length(exported: Callable[..., Path], tmp_path: Path) -> None:
    made = exported("int4", "modelopt")
    theirs = spoilt(made, tmp_path / "theirs", lambda t: t.update({f"{Q}.pre_quant_scale": torch.ones(1)}))
    with pytest.raises(CheckpointError, match=r"pre_quant_scale is F32 \[1\] but config.json makes it .* \[128\]"):
        weights(theirs, tmp_path / "none")


# ----------------------------------------------------------------- values that mean nothing


def set_to(suffix: str, value: Any) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        old = tensors[f"{Q}.{suffix}"]
        tensors[f"{Q}.{suffix}"] = value(old) if callable(value) else torch.full_like(old, value)

    return change


@pytest.mark.parametrize(
    ("quant", "format_name", "change", "why"),
    [
        ("int4", "hf", set_to("weight_shape", lambda t: t - 1), r"weight_shape says \[127, 127\].*\[128, 128\]"),
        ("int4", "hf", set_to("weight_shape", lambda t: -t), r"weight_shape says \[-128, -128\]"),
        ("int8", "hf", set_to("weight_scale", float("nan")), "weight_scale holds NaN or Inf"),
        ("fp8", "hf", set_to("weight", lambda t: t.view(torch.uint8).fill_(0xFF).view(t.dtype)), "weight holds NaN"),
        ("mxfp4", "hf", set_to("weight_scale", 255), "weight_scale holds NaN"),
        ("nvfp4-wo", "hf", set_to("weight_global_scale", 0.0), "weight_global_scale is 0: numbers are divided by it"),
        ("nvfp4-wo", "modelopt", set_to("weight_scale_2", -1.0), "weight_scale_2 is -1"),
        ("int4", "gptq", set_to("g_idx", lambda t: t + 5), "g_idx"),
        ("int4", "gptq", set_to("qzeros", 0x12345678), "qzeros holds other zero points than 8"),
    ],
)
@pytest.mark.parametrize("kept", [False, True], ids=["none", "convert"])
def test_values_that_mean_nothing_are_refused_with_the_module(
    quant: str, format_name: str, change: Any, why: str, kept: bool, exported: Callable[..., Path], tmp_path: Path
) -> None:
    theirs = spoilt(exported(quant, format_name), tmp_path / "theirs", change)
    with pytest.raises(RankFailedError, match=rf"{Q}: {why}") as refused:
        convert(theirs, tmp_path / "out", format_name) if kept else weights(theirs, tmp_path / "out")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_a_shape_that_fits_the_words_and_lies_is_found(exported: Callable[..., Path], tmp_path: Path) -> None:
    theirs = spoilt(exported("int4"), tmp_path / "theirs", set_to("weight_shape", lambda t: t - torch.tensor([0, 1])))
    assert any("weight_shape says [128, 127]" in problem for problem in verify_checkpoint(theirs).problems)


@pytest.mark.parametrize("fmt", ["nvfp4-pack-quantized", "mxfp8-quantized", "float-quantized", "marlin-24"])
def test_a_format_that_does_not_go_with_its_numbers(fmt: str, exported: Callable[..., Path], tmp_path: Path) -> None:
    made = exported("int4")
    theirs = spoilt(made, tmp_path / "theirs", format=fmt, **group(made, format=fmt))
    assert inspect_checkpoint(theirs).warnings
    assert not verify_checkpoint(theirs).ok
    with pytest.raises(CheckpointError, match=rf"group_0: .*{fmt}"):
        weights(theirs, tmp_path / "none")


@pytest.mark.parametrize(("numbers", "shape"), [({"num_bits": 8, "type": "int"}, (1,)), (None, (3,))])
def test_a_cache_that_is_not_fp8_is_not_announced_as_such(
    numbers: dict[str, Any] | None, shape: tuple[int, ...], exported: Callable[..., Path], tmp_path: Path
) -> None:
    made = exported("int8", kv_cache="fp8")
    scheme = json.loads((made / "config.json").read_text())["quantization_config"]["kv_cache_scheme"]
    name = "model.layers.0.self_attn.k_scale"
    change = {name: torch.ones(shape)}
    theirs = spoilt(
        made, tmp_path / "theirs", lambda t: t.update(change), kv_cache_scheme={**scheme, **(numbers or {})}
    )
    with pytest.raises(ModelExportError, match="8-bit int numbers" if numbers else r"k_scale is F32 \[3\]"):
        convert(theirs, tmp_path / "kept", "hf")


def test_only_the_cache_is_quantised(exported: Callable[..., Path], source: Path) -> None:
    found = verify_checkpoint(exported("none", kv_cache="fp8"), source)
    assert found.ok, found.problems


@pytest.mark.parametrize(
    ("format_name", "size", "dims"), [("hf", -1, {"hidden": 100, "head_dim": 20}), ("trtllm", 64, {})]
)
def test_shapes_that_words_do_not_tell_are_taken_from_config(
    format_name: str, size: int, dims: dict[str, int], tmp_path: Path
) -> None:
    """Rows of 100 numbers in words of eight; numbers of 4 bits in bytes that call themselves int8."""
    source = make_llama(**{**SHAPE, **dims})
    result = export(
        model=str(source), out=str(tmp_path / "out"), quant="int4", group_size=size, format=format_name, quiet=True
    )
    found = verify_checkpoint(tmp_path / "out", source)
    assert found.ok, found.problems
    assert len(found.modules) == 7
    assert inspect_checkpoint(tmp_path / "out").tensor_parallel_sizes == result.tensor_parallel_sizes


# ----------------------------------------------------------------- what is said of a plan


def plan_error(**settings: Any) -> str:
    with pytest.raises(ModelExportError) as refused:
        prepare(ExportRecipe.from_mapping({"dry_run": True, "quiet": True, **settings}, where="test"))
    return str(refused.value)


def test_a_refused_linear_with_a_bias_is_named_for_what_it_is() -> None:
    source = make_llama(**SHAPE, attention_bias=True)
    text = plan_error(model=str(source), quant="fp8", format="awq")
    assert "checkpoint format awq holds 4-bit integers" in text
    assert "not part of" not in text


@pytest.mark.parametrize("quant", ["fp8-block", "int8"])
def test_megatron_refuses_the_quantised_before_it_looks_for_heads(quant: str, source: Path) -> None:
    text = plan_error(model=str(make_llama(**{**SHAPE, "head_dim": 24})), quant=quant, format="megatron")
    assert "megatron holds unquantised models only" in text


def test_what_is_not_quantised_is_not_converted(source: Path) -> None:
    assert "is not quantised, so that there is nothing to convert" in plan_error(model=str(source), quant="keep")


def test_calibration_without_a_tokenizer_is_refused_before_ranks_are_started(source: Path, tmp_path: Path) -> None:
    assert "has no tokenizer" in plan_error(model=str(source), quant="fp8-static")
    assert "no such file" in plan_error(model=str(source), quant="fp8-static", calib=str(tmp_path / "no"))


@pytest.mark.parametrize(
    ("quant", "why"),
    [
        ("re:(=int4", "no regular expression"),
        ("re:a{99999999999}=int4", "no regular expression"),
        (r"re:(.+)+\1Z=int4", "repeats what repeats"),
        ("re:(.+)+Z=int4", "no linear of the model's 7 has such a name"),
        ("*=int4,*.mlp.*=int8", "patterns before it mean all that it means"),
    ],
)
def test_patterns_of_quant(quant: str, why: str, source: Path) -> None:
    assert why in plan_error(model=str(source), quant=quant)


@pytest.mark.parametrize(("kv_heads", "head_dim", "sizes"), [(2, 64, [1]), (2, 128, [1, 2]), (1, 96, [1])])
def test_blocks_of_keys_are_not_cut_whoever_says_it(
    kv_heads: int, head_dim: int, sizes: Sequence[int], tmp_path: Path
) -> None:
    source = make_llama(**{**SHAPE, "kv_heads": kv_heads, "head_dim": head_dim})
    result = export(model=str(source), out=str(tmp_path / "out"), quant="fp8-block", quiet=True)
    assert result.tensor_parallel_sizes == inspect_checkpoint(tmp_path / "out").tensor_parallel_sizes == list(sizes)


def test_another_text_is_another_export(source: Path, tmp_path: Path) -> None:
    from modelexport.exporting.record import _fingerprint

    text = tmp_path / "tokens.jsonl"
    text.write_text('{"input_ids": [1, 2]}\n')
    recipe = {"model": str(source), "quant": "fp8-static", "calib": str(text), "dry_run": True}
    first = _fingerprint(prepare(ExportRecipe.from_mapping(recipe, where="test")))
    text.write_text('{"input_ids": [1, 2, 3]}\n')
    assert _fingerprint(prepare(ExportRecipe.from_mapping(recipe, where="test"))) != first
    plain = {"model": str(source), "quant": "int8", "dry_run": True}
    before, after = (
        _fingerprint(prepare(ExportRecipe.from_mapping({**plain, "calib_seed": seed}, where="test"))) for seed in (0, 7)
    )
    assert before == after  # it calibrates nothing


def test_a_hostile_pattern_does_not_hang_inspect(
    exported: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = spoilt(exported("int8"), tmp_path / "theirs", ignore=["lm_head", "re:(.+)+Z", "re:(([a-z._0-9]+)+)+!"])
    assert main(["inspect", str(theirs)]) == 0
    assert "int8" in capsys.readouterr().out


@pytest.mark.parametrize("quant", few(("nvfp4-wo", "fp8", "fp8-block", "mxfp8"), "nvfp4-wo"))
def test_mxfp4_is_cast_exactly_and_that_is_said(quant: str, exported: Callable[..., Path], tmp_path: Path) -> None:
    made = exported("mxfp4-wo")
    results = [
        export(model=str(made), out=str(tmp_path / str(tp)), quant=quant, tp=tp, evaluate=False, quiet=True)
        for tp in (1, 2)
    ]
    said = "exact: 7 of 7 linears that are quantised in the source have the same values"
    assert all(said in result.notes for result in results)
    assert said.capitalize() in (tmp_path / "2" / "README.md").read_text()
    one, two = ((tmp_path / tp / "model.safetensors").read_bytes() for tp in "12")
    assert one == two
    assert verify_checkpoint(tmp_path / "2", made).problems == []


def test_mxfp4_whose_scales_are_searched_for_is_not_cast(exported: Callable[..., Path]) -> None:
    recipe = ExportRecipe(model=str(exported("mxfp4-wo")), quant="nvfp4-wo", algorithm="mse", dry_run=True)
    assert not any(task.is_cast for step in prepare(recipe).plan.steps for task in step.tasks)


def test_what_shares_a_scale_with_another_format_is_not_cast(exported: Callable[..., Path], tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        prefix = "model.layers.0.mlp.up_proj.weight"
        packed, _ = tensors.pop(f"{prefix}_packed"), tensors.pop(f"{prefix}_scale")
        tensors[prefix] = torch.ones(packed.shape[0], 2 * packed.shape[1], dtype=torch.bfloat16)

    mixed = spoilt(exported("mxfp4-wo"), tmp_path / "mixed", change)
    plan = prepare(ExportRecipe(model=str(mixed), quant="nvfp4-wo", dry_run=True)).plan
    plain = [t.path for step in plan.steps for t in step.tasks if t.quantised and not t.is_cast]
    assert plain == ["mlp.gate_proj", "mlp.up_proj"]
