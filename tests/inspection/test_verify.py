"""verify: a good checkpoint passes, and each kind of damage is found and named."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig as TheirConfig
from compressed_tensors.quantization import apply_quantization_config, preset_name_to_scheme
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from modelexport.checkpoints.safetensors.file import open_checkpoint
from modelexport.cli import main
from modelexport.errors import CheckpointError, UsageError
from modelexport.exporting import export
from modelexport.inspection.verify import Verification, audit, verify_checkpoint
from tests.helpers.models import copy_checkpoint, make_llama

pytestmark = pytest.mark.timeout(180)

SHAPE = {"hidden": 256, "layers": 2, "attention_bias": True}
QUANTS = ("none", "int8", "fp8", "int4")
SCALE = "model.layers.{}.mlp.up_proj.weight_scale"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """An export of the tiny model in a number format, made once; do not write into it."""

    @functools.cache
    def make(quant: str) -> Path:
        out = tmp_path_factory.mktemp("exported") / quant
        export(model=str(make_llama(**SHAPE)), out=str(out), quant=quant, evaluate=False, quiet=True)
        return out

    return make


def edit_config(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change config.json in place."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def problems(directory: Path, against: Path | None = None) -> str:
    """All problems as one text; there must be some."""
    result = verify_checkpoint(directory, against)
    assert not result.ok
    return "\n".join(result.problems)


# ------------------------------------------------------------------------------------------------ good


@pytest.mark.parametrize("quant", QUANTS)
def test_an_export_is_good_and_its_error_is_the_recorded_one(exported: Callable[[str], Path], quant: str) -> None:
    result = verify_checkpoint(exported(quant), make_llama(**SHAPE))
    assert result.problems == []
    assert result.notes == []
    infos = open_checkpoint(exported(quant)).infos
    assert result.hashes == result.tensors == len(infos)
    assert result.nbytes == sum(info.nbytes for info in infos.values())
    quantised = 0 if quant == "none" else 14
    assert len(result.modules) == quantised
    assert result.identical == len(open_checkpoint(make_llama(**SHAPE)).infos) - quantised
    for module in result.modules:
        assert module.sqnr_db == module.nearest_db
        assert module.sqnr_db == pytest.approx(module.recorded_db, abs=0.01)
    assert [m.sqnr_db for m in result.modules] == sorted(m.sqnr_db for m in result.modules)


def test_sqnr_is_that_of_plain_torch(exported: Callable[[str], Path]) -> None:
    ours, source = (
        load_file(exported("int8") / "model.safetensors"),
        load_file(make_llama(**SHAPE) / "model.safetensors"),
    )
    for module in verify_checkpoint(exported("int8"), make_llama(**SHAPE)).modules:
        weight = source[f"{module.name}.weight"].double()
        decoded = ours[f"{module.name}.weight"].double() * ours[f"{module.name}.weight_scale"].double()
        sqnr = 10 * torch.log10(weight.square().sum() / (weight - decoded).square().sum())
        assert module.sqnr_db == pytest.approx(float(sqnr), abs=1e-3)


@pytest.mark.parametrize("preset", ["W8A8", "FP8_DYNAMIC", "W4A16"])
def test_a_checkpoint_of_compressed_tensors_itself_is_good(tmp_path: Path, preset: str) -> None:
    source = make_llama(**SHAPE)
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    config = TheirConfig(config_groups={"group_0": preset_name_to_scheme(preset, ["Linear"])}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    limits = {"W8A8": 127.5, "FP8_DYNAMIC": 448.0, "W4A16": 7.5}
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            rows, groups = module.weight_scale.shape
            amax = module.weight.detach().float().view(rows, groups, -1).abs().amax(2)
            module.weight_scale.data.copy_(amax / limits[preset])
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path / "theirs")
    compressor.update_config(tmp_path / "theirs")
    result = verify_checkpoint(tmp_path / "theirs", source)
    assert result.problems == []
    assert result.hashes == 0
    assert any("no modelexport.json" in note for note in result.notes)
    assert len(result.modules) == 14
    worst = result.modules[0].sqnr_db
    assert worst is not None
    assert worst > {"W8A8": 35, "FP8_DYNAMIC": 28, "W4A16": 17}[preset]


def test_an_unquantised_checkpoint_of_transformers_is_good() -> None:
    result = verify_checkpoint(make_llama())
    assert result.problems == []
    assert result.notes == ["there is no modelexport.json: no hashes to compare with"]


def test_tied_head_of_the_source_may_be_left_out(tmp_path: Path) -> None:
    def add_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    source = copy_checkpoint(make_llama(tied=True), tmp_path / "source", tensors=add_head)
    export(model=str(source), out=str(tmp_path / "out"), quant="fp8", evaluate=False, quiet=True)
    assert verify_checkpoint(tmp_path / "out", source).problems == []
    assert verify_checkpoint(source).problems == []


# --------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_a_flipped_byte_in_any_tensor_is_found_and_named(
    exported: Callable[[str], Path], tmp_path: Path, quant: str
) -> None:
    bad = copy_checkpoint(exported(quant), tmp_path / "bad")
    path = bad / "model.safetensors"
    for number, info in enumerate(open_checkpoint(bad).infos.values()):
        at = info.offset + number * 7919 % info.nbytes
        with open(path, "r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ (1 << number % 8)]))
        assert info.name in problems(bad)
        with open(path, "r+b") as file:
            file.seek(at)
            file.write(bytes([byte]))
    assert verify_checkpoint(bad).ok


@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize("quant", ["int8", "fp8", "int4"])
def test_missing_scale(exported: Callable[[str], Path], tmp_path: Path, quant: str, record: bool) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[SCALE.format(1)]

    bad = copy_checkpoint(exported(quant), tmp_path / "bad", tensors=drop)
    if not record:
        (bad / "modelexport.json").unlink()
    assert f"{SCALE.format(1)} is missing: group_0" in problems(bad)


@pytest.mark.parametrize("quant", ["int8", "fp8", "int4"])
def test_scale_of_another_layer(exported: Callable[[str], Path], tmp_path: Path, quant: str) -> None:
    def swap(tensors: dict[str, torch.Tensor]) -> None:
        a, b = SCALE.format(0), SCALE.format(1)
        tensors[a], tensors[b] = tensors[b], tensors[a]

    bad = copy_checkpoint(exported(quant), tmp_path / "bad", tensors=swap)
    found = problems(bad)
    assert f"{SCALE.format(0)}: its bytes are not those that were exported" in found
    (bad / "modelexport.json").unlink()  # then only the source can tell
    assert verify_checkpoint(bad).ok
    result = verify_checkpoint(bad, make_llama(**SHAPE))
    told = "\n".join(result.problems + result.notes)
    assert "model.layers.0.mlp.up_proj: SQNR" in told
    assert "model.layers.1.mlp.up_proj: SQNR" in told
    assert len([line for line in told.splitlines() if "SQNR" in line]) == 2


def test_truncated_file(exported: Callable[[str], Path], tmp_path: Path) -> None:
    bad = copy_checkpoint(exported("int8"), tmp_path / "bad")
    path = bad / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert "truncated" in problems(bad)


def test_extra_tensor(exported: Callable[[str], Path], tmp_path: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.up_proj.weight_scale_2"] = torch.ones(1)
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.ones(2, 2)

    bad = copy_checkpoint(exported("fp8"), tmp_path / "bad", tensors=add)
    for record in (True, False):
        found = problems(bad)
        assert "model.layers.0.mlp.up_proj.weight_scale_2 (F32 [1]) is not expected" in found
        assert "model.layers.7.mlp.up_proj.weight (F32 [2, 2]) is not expected: a llama model of 2 layers" in found
        assert ("was not exported" in found) == record
        (bad / "modelexport.json").unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("quant", "part", "change", "expected"),
    [
        (
            "int8",
            "weights",
            {"type": "float"},
            "weight is I8 [384, 256] but config.json makes it F8_E4M3 [384, 256] (group_0 (fp8 weights",
        ),
        ("int8", "weights", {"strategy": "tensor"}, "weight_scale is BF16 [256, 1] but config.json makes it"),
        ("int8", "input_activations", {"dynamic": False}, "input_scale is missing"),
        ("int8", "input_activations", None, "input_activations is None instead of"),
        ("fp8", "weights", {"num_bits": 4}, "cannot hold 4-bit float"),
        ("int4", "weights", {"group_size": 64}, "weight_scale is BF16 [256, 2] but config.json makes it"),
        (
            "int4",
            "weights",
            {"num_bits": 8},
            "q_proj.weight_packed is I32 [256, 32] but config.json makes it I32 [256, 64]",
        ),
        ("int4", "weights", {"symmetric": False}, "weight_zero_point is missing"),
        ("int4", "format", "int-quantized", "int-quantized cannot hold 4-bit"),
        ("fp8", "targets", ["Conv2d"], "is not expected: config.json does not quantise it"),
    ],
)
def test_wrong_config_group(
    exported: Callable[[str], Path], tmp_path: Path, quant: str, part: str, change: Any, expected: str
) -> None:
    bad = copy_checkpoint(exported(quant), tmp_path / "bad")

    def spoil(config: dict[str, Any]) -> None:
        group = config["quantization_config"]["config_groups"]["group_0"]
        group[part] = {**group[part], **change} if isinstance(change, dict) else change

    edit_config(bad, spoil)
    assert expected in problems(bad)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"num_hidden_layers": 3}, "model.layers.2.self_attn.q_proj.weight_packed is missing: group_0"),
        (
            {"num_hidden_layers": 1},
            "layers.1.input_layernorm.weight (BF16 [256]) is not expected: a llama model of 1 layers has no such",
        ),
        ({"hidden_size": 512}, "model.norm.weight is [256] but config.json makes it [512]"),
        ({"num_key_value_heads": 1}, "k_proj.weight_packed is I32 [128, 32] but config.json makes it I32 [64, 32]"),
        ({"vocab_size": 212}, "model.embed_tokens.weight is [211, 256] but config.json makes it [212, 256]"),
        ({"intermediate_size": 256}, "down_proj.weight_packed is I32 [256, 48] but config.json makes it I32 [256, 32]"),
    ],
)
def test_changed_number_in_config(
    exported: Callable[[str], Path], tmp_path: Path, change: dict[str, Any], expected: str
) -> None:
    bad = copy_checkpoint(exported("int4"), tmp_path / "bad", config=change)
    assert expected in problems(bad)


def test_changed_number_that_no_shape_shows(exported: Callable[[str], Path], tmp_path: Path) -> None:
    bad = copy_checkpoint(exported("int4"), tmp_path / "bad", config={"rms_norm_eps": 0.5})
    assert "config.json: rms_norm_eps is 0.5, the source's is 1e-06" in problems(bad, make_llama(**SHAPE))


def test_files_whose_hash_is_recorded_may_not_change(exported: Callable[[str], Path], tmp_path: Path) -> None:
    bad = copy_checkpoint(exported("int4"), tmp_path / "bad", config={"rms_norm_eps": 0.5})
    assert "config.json is not the file that was exported" in problems(bad)


def test_missing_side_file(exported: Callable[[str], Path], tmp_path: Path) -> None:
    bad = copy_checkpoint(exported("int4"), tmp_path / "bad")
    (bad / "generation_config.json").unlink()
    assert "generation_config.json is missing, though it was exported" in problems(bad)


def test_another_model(exported: Callable[[str], Path]) -> None:
    other = make_llama(**SHAPE, seed=1)
    found = problems(exported("int8"), other)
    assert "14 of 14 linears are far from" in found
    assert "is it another model?" in found
    shorter = make_llama(**{**SHAPE, "layers": 1})
    found = problems(exported("int8"), shorter)
    assert "config.json: num_hidden_layers is 2, the source's is 1" in found
    assert "model.layers.1.input_layernorm.weight is not in" in found


@pytest.mark.parametrize("record", [True, False])
def test_weight_shape_that_lies(exported: Callable[[str], Path], tmp_path: Path, record: bool) -> None:
    def lie(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.up_proj.weight_shape"] = torch.tensor([256, 384])

    bad = copy_checkpoint(exported("int4"), tmp_path / "bad", tensors=lie)
    if not record:
        (bad / "modelexport.json").unlink()
    assert "weight_shape says [256, 384]" in problems(bad)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
def test_scales_that_are_no_scales(exported: Callable[[str], Path], tmp_path: Path, value: float) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[SCALE.format(1)][5] = value

    bad = copy_checkpoint(exported("int8"), tmp_path / "bad", tensors=spoil)
    (bad / "modelexport.json").unlink()
    kind = {"nan": "1 NaN", "inf": "1 Inf"}.get(str(value), "1 values that are zero or less")
    assert f"{SCALE.format(1)} holds {kind}" in problems(bad)


def test_nan_in_fp8_weights(exported: Callable[[str], Path], tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.up_proj.weight"].view(torch.uint8)[3, :2] = torch.tensor([0x7F, 0xFF]).byte()

    bad = copy_checkpoint(exported("fp8"), tmp_path / "bad", tensors=spoil)
    (bad / "modelexport.json").unlink()
    assert "model.layers.0.mlp.up_proj.weight holds 2 NaN" in problems(bad)


def test_pass_through_that_differs_from_the_source(exported: Callable[[str], Path], tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"][0] += 1

    bad = copy_checkpoint(exported("int8"), tmp_path / "bad", tensors=spoil)
    (bad / "modelexport.json").unlink()
    assert verify_checkpoint(bad).ok
    assert "model.norm.weight: not equal to the source's" in problems(bad, make_llama(**SHAPE))


def test_recorded_error_that_is_not_the_measured_one(exported: Callable[[str], Path], tmp_path: Path) -> None:
    bad = copy_checkpoint(exported("int8"), tmp_path / "bad")
    path = bad / "modelexport.json"
    record = json.loads(path.read_text())
    record["sqnr_db"]["model.layers.0.mlp.up_proj"] += 1
    path.write_text(json.dumps(record))
    assert verify_checkpoint(bad).ok
    assert "model.layers.0.mlp.up_proj: SQNR" in problems(bad, make_llama(**SHAPE))


# ---------------------------------------------------------------------------------- chunks and the rest


def test_small_chunks_give_the_same_result(exported: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {q: verify_checkpoint(exported(q), make_llama(**SHAPE), threads=1).as_json() for q in QUANTS}
    monkeypatch.setattr(audit, "CHUNK_BYTES", 5000)
    for quant, expected in whole.items():
        assert verify_checkpoint(exported(quant), make_llama(**SHAPE), threads=3).as_json() == expected


def test_several_files(tmp_path: Path, exported: Callable[[str], Path]) -> None:
    export(
        model=str(make_llama(**SHAPE)),
        out=str(tmp_path / "out"),
        quant="int4",
        max_shard_bytes=100_000,
        evaluate=False,
        quiet=True,
    )
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    assert verify_checkpoint(tmp_path / "out", make_llama(**SHAPE)).ok
    next((tmp_path / "out").glob("model-00002-*.safetensors")).unlink()
    assert "missing" in problems(tmp_path / "out")


def test_command_line(exported: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, source = str(exported("int4")), str(make_llama(**SHAPE))
    assert main(["verify", good]) == 0
    assert "good: " in capsys.readouterr().out
    assert main(["verify", good, "--against", source, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["ok"] is True
    assert len(printed["modules"]) == 14
    assert main(["verify", good, "--against", source]) == 0
    assert "worst SQNR" in capsys.readouterr().out
    shutil.copytree(good, tmp_path / "bad")
    (tmp_path / "bad" / "modelexport.json").write_text("{")
    assert main(["verify", str(tmp_path / "bad")]) == 1
    captured = capsys.readouterr()
    assert "1 problem\n- " in captured.out
    assert "Traceback" not in captured.err
    assert main(["verify", str(tmp_path / "nothing")]) == 2
    assert "no such directory" in capsys.readouterr().err


def test_source_that_is_no_source(exported: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        verify_checkpoint(exported("int4"), tmp_path / "nothing")
    with pytest.raises(UsageError):
        verify_checkpoint(tmp_path / "nothing")


def test_result_is_good_only_without_problems() -> None:
    assert Verification("x").ok
    assert not Verification("x", problems=["one"]).ok
