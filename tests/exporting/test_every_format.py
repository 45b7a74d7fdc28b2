"""Every number format in every checkpoint format: the same bytes at any parallelism, read back, converted, decoded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from modelexport.cli import main
from modelexport.errors import CheckpointError, PlanError, UsageError
from modelexport.exporting import export
from modelexport.inspection.verify import verify_checkpoint
from modelexport.models import checkpoint_formats
from modelexport.quantization import formats
from modelexport.quantization.ggml_layouts import LAYOUTS
from modelexport.resharding import reshard
from tests.exporting.test_export import digests
from tests.helpers.marks import extended, few
from tests.helpers.models import make_llama

pytestmark = pytest.mark.timeout(240)


@dataclass(frozen=True)
class Case:
    """A number format in a checkpoint format."""

    quant: str
    format: str = "hf"
    group: int | None = None
    algorithm: str = "rtn"

    def __str__(self) -> str:
        return "-".join(map(str, filter(None, (self.format, self.quant, self.group, self.algorithm))))


BLOCKS = [layout.number_format for layout in LAYOUTS.values()]
NAMES = [name for name in formats.names() if name not in ("none", *BLOCKS)]
HF = [
    *(Case(name) for name in NAMES),
    *(Case(name, algorithm="mse") for name in NAMES),
    Case("int4", group=-1),
    Case("int8-wo-asym", group=32),
]
OTHERS = [
    Case("int4-asym", "awq", 64),
    Case("int4", "awq", 32),
    Case("int4", "gptq", 128),
    Case("int8-wo", "gptq", 64),
    Case("fp8-block", "fp8-block"),
    Case("fp8-static", "modelopt"),
    Case("fp8", "modelopt"),
    Case("int4", "modelopt", 64),
    Case("int8-wo", "modelopt", -1),
    Case("nvfp4", "modelopt"),
    Case("nvfp4-wo", "modelopt"),
    Case("mxfp8", "modelopt"),
    Case("mxfp4", "modelopt"),
    Case("int4", "gguf", 32),
    Case("int8-wo", "gguf", 32),
    Case("mxfp4-wo", "gguf"),
    Case("nvfp4-wo", "gguf"),
    *(Case(name, "gguf") for name in BLOCKS),
    *(Case(name, "gguf", algorithm="imatrix") for name in BLOCKS),
]
MIXED = "*.layers.0.*=int8,*.self_attn.*=nvfp4,*.mlp.*=int4:64"


SHAPE: dict[str, Any] = {"heads": 8, "kv_heads": 2, "head_dim": 64, "vocab": 307, "layers": 2}


@pytest.fixture(scope="module")
def model() -> str:
    """Small, with two key/value heads; groups of 128 divide its dimensions."""
    return str(make_llama(hidden=256, intermediate=384, **SHAPE))


@pytest.fixture(scope="module")
def odd() -> str:
    """The same with dimensions that no block of 128 divides."""
    return str(make_llama(hidden=192, intermediate=448, **SHAPE))


@pytest.fixture(scope="module")
def even() -> str:
    """The same with dimensions that blocks of 256 divide."""
    return str(make_llama(hidden=256, intermediate=512, **SHAPE))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Tokens for calibration: the tiny models have no tokenizer."""
    path = tmp_path_factory.mktemp("text") / "tokens.jsonl"
    path.write_text("".join(json.dumps({"input_ids": [(7 * i + j) % 250 for j in range(40)]}) + "\n" for i in range(4)))
    return str(path)


@pytest.fixture(autouse=True)
def _calibrate_with(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CALIBRATION, "calib", text)


CALIBRATION: dict[str, object] = {"calib_samples": 2, "calib_length": 32}


def write(source: str, out: Path, case: Case, **settings: object) -> dict[str, str]:
    """Export with little text to calibrate; returns the hashes of what was written."""
    made: dict[str, object] = {
        "quant": f"*_proj={case.quant}" if case.quant in BLOCKS else case.quant,  # alone most of these are mixtures
        "format": case.format,
        "group_size": case.group,
        "algorithm": case.algorithm,
        **CALIBRATION,
        "evaluate": False,
        "quiet": True,
        "timeout": 60.0,
    }
    export(model=source, out=str(out), **{**made, **settings})
    return digests(out)


FAST = {
    *(Case("int8"), Case("int4", "gptq", 128), Case("nvfp4", "modelopt")),
    *(Case("int4-asym", "awq", 64), Case("fp8-block", "fp8-block"), Case("int4", "gguf", 32), Case("q4-k", "gguf")),
}
"""Each checkpoint format once."""
SLOW = [Case(name, "gguf", algorithm="imatrix") for name in BLOCKS if name not in ("q4-k", "iq4-nl")]


@pytest.mark.parametrize("case", few([*HF, *OTHERS], *FAST, slow=SLOW), ids=str)
def test_three_ranks_write_what_one_writes_and_it_reads_back(
    case: Case, model: str, odd: str, even: str, tmp_path: Path
) -> None:
    model = odd if case.quant in ("fp8-block", "int8", "fp8-static") else even if case.quant in BLOCKS else model
    alone = write(model, tmp_path / "1", case)
    assert write(model, tmp_path / "3", case, tp=3, gather="shm") == alone
    found = verify_checkpoint(tmp_path / "1", model)
    assert found.ok, found.problems
    assert not found.notes
    floor = {2: 8.0, 3: 13.0, 4: 14.0, 5: 22.0, 6: 28.0, 8: 28.0}[formats.get(case.quant).weight_bits]
    assert len(found.modules) == 14
    assert all(module.sqnr_db is not None and module.sqnr_db > floor for module in found.modules)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*HF, *OTHERS], ids=str)
def test_every_parallelism_gives_the_same_directory(case: Case, tmp_path: Path) -> None:
    """The demo model at tp 1, 2, 4 and 8."""
    source = str(make_llama(hidden=256, intermediate=512, heads=8, kv_heads=4, head_dim=64, vocab=1003, layers=2))
    alone = write(source, tmp_path / "1", case)
    for tp in (2, 4, 8):
        assert write(source, tmp_path / f"{tp}", case, tp=tp) == alone, tp


@pytest.mark.parametrize(
    ("method", "kv"), [("hf", "self_attn.k_scale"), extended("modelopt", "self_attn.k_proj.k_scale")]
)
def test_mixed_formats_and_the_cache_of_keys_and_values(method: str, kv: str, model: str, tmp_path: Path) -> None:
    case = Case("*.layers.0.*=fp8-static,*.self_attn.*=nvfp4,*.mlp.*=int4:64", method)
    alone = write(model, tmp_path / "1", case, kv_cache="fp8")
    assert write(model, tmp_path / "3", case, kv_cache="fp8", tp=3) == alone
    found = verify_checkpoint(tmp_path / "1", model)
    assert found.ok, found.problems
    tensors = load_file(tmp_path / "1" / "model.safetensors")
    scale = tensors[f"model.layers.1.{kv}"]
    assert scale.dtype == torch.float32
    assert 0 < float(scale) < 1
    assert tensors["model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    assert tensors["model.layers.1.mlp.up_proj." + ("weight_packed" if method == "hf" else "weight")].dtype in (
        torch.int32,
        torch.uint8,
    )


def test_modules_that_engines_fuse_share_the_scale_of_the_whole_weight(tmp_path: Path) -> None:
    mixtral = str(make_llama(model_type="mixtral", hidden=128, intermediate=128, heads=4, kv_heads=2, head_dim=32))
    for quant, scale in (("nvfp4-wo", "weight_global_scale"), ("fp8-static", "weight_scale")):
        write(mixtral, tmp_path / quant, Case(quant))
        tensors = load_file(tmp_path / quant / "model.safetensors")
        for layer in ("model.layers.0", "model.layers.1"):
            groups = [
                [f"{layer}.self_attn.{part}_proj.{scale}" for part in "qkv"],
                [n for n in tensors if n.startswith(f"{layer}.") and n.endswith((f".w1.{scale}", f".w3.{scale}"))],
                [n for n in tensors if n.startswith(f"{layer}.") and n.endswith(f".w2.{scale}")],
            ]
            values = [{float(tensors[name]) for name in group} for group in groups]
            assert all(len(group) > 1 for group in groups)
            assert all(len(same) == 1 for same in values), values


# ------------------------------------------------------------------- convert

WAYS = [
    (Case("int4-asym", "hf", 64), "awq"),
    (Case("int4", "hf", 64), "gptq"),
    (Case("int4", "awq", 64), "gptq"),
    (Case("int8-wo", "gptq", 64), "hf"),
    (Case("fp8-block"), "fp8-block"),
    (Case("fp8-block"), "modelopt"),
    (Case("fp8-static"), "modelopt"),
    (Case("fp8-static", "modelopt"), "fp8-block"),
    (Case("nvfp4"), "modelopt"),
    (Case("nvfp4-wo", "modelopt"), "hf"),
    (Case("mxfp8"), "modelopt"),
    (Case("mxfp4-wo"), "gguf"),
    (Case("nvfp4-wo"), "gguf"),
    (Case("int8-wo", "gguf", 32), "hf"),
]


@pytest.mark.parametrize(("case", "target"), few(WAYS, WAYS[0], WAYS[8], WAYS[-1]), ids=str)
def test_what_is_converted_holds_the_same_numbers(case: Case, target: str, model: str, tmp_path: Path) -> None:
    """There, at two parallelisms, and back; and what is decoded of each is the same."""
    write(model, tmp_path / "source", case)
    there = write(str(tmp_path / "source"), tmp_path / "there", Case("keep", target))
    assert write(str(tmp_path / "source"), tmp_path / "there2", Case("keep", target), tp=2) == there
    assert verify_checkpoint(tmp_path / "there", model).ok
    decoded = []
    for name in ("source", "there"):
        write(str(tmp_path / name), tmp_path / f"{name}-none", Case("none"))
        decoded.append(load_file(tmp_path / f"{name}-none" / "model.safetensors"))
        assert "quantization_config" not in json.loads((tmp_path / f"{name}-none" / "config.json").read_text())
    assert decoded[0].keys() == decoded[1].keys()
    assert all(torch.equal(decoded[0][name], decoded[1][name]) for name in decoded[0])
    write(str(tmp_path / "there"), tmp_path / "back", Case("keep", case.format))
    assert same_numbers(tmp_path / "source", tmp_path / "back")


def same_numbers(a: Path, b: Path) -> bool:
    """Whether two directories hold the same tensors, scales of whatever float dtype."""
    if (a / "model.gguf").exists():
        return digests(a)["model.gguf"] == digests(b)["model.gguf"]
    left, right = (load_file(path / "model.safetensors") for path in (a, b))
    return left.keys() == right.keys() and all(torch.equal(left[n].double(), right[n].double()) for n in left)


def test_convert_from_the_command_line(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(model, tmp_path / "source", Case("int4", group=64))
    assert main(["convert", str(tmp_path / "source"), "--format", "awq", "--out", str(tmp_path / "awq")]) == 0
    assert json.loads((tmp_path / "awq" / "config.json").read_text())["quantization_config"]["quant_method"] == "awq"
    assert main(["convert", str(tmp_path / "source"), "--format", "fp8-block", "--out", str(tmp_path / "no")]) == 1
    error = capsys.readouterr().err
    assert "int4" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "no").exists()


def test_what_cannot_be_converted_is_said_before_anything_is_written(model: str, tmp_path: Path) -> None:
    write(model, tmp_path / "int8", Case("int8"))
    for target in ("awq", "gptq", "gguf", "fp8-block", "modelopt"):
        with pytest.raises(PlanError, match="int8"):
            write(str(tmp_path / "int8"), tmp_path / "out", Case("keep", target))
    with pytest.raises(PlanError, match="has no place for its scales"):
        write(model, tmp_path / "out", Case("int4", "awq", 64), kv_cache="fp8")
    assert [path.name for path in tmp_path.iterdir()] == ["int8"]


def test_reshard_moves_tensors_and_spells_nothing_anew(model: str, tmp_path: Path) -> None:
    write(model, tmp_path / "int4", Case("int4", group=64))
    write(model, tmp_path / "awq", Case("int4", "awq", 64))
    for source, how in ((model, "is not quantised.*--model"), (str(tmp_path / "int4"), "compressed-tensors.*convert")):
        with pytest.raises(UsageError, match=how):
            reshard(checkpoint=source, format="awq", out=str(tmp_path / "out"), quiet=True)
    reshard(checkpoint=str(tmp_path / "awq"), format="awq", tp=2, out=str(tmp_path / "cut"), quiet=True)
    reshard(checkpoint=str(tmp_path / "cut"), format="awq", out=str(tmp_path / "back"), quiet=True)
    assert digests(tmp_path / "back") == digests(tmp_path / "awq")


def test_a_tensor_that_is_missing_in_a_quantised_source(model: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    write(model, tmp_path / "source", Case("int4", group=64))
    path = tmp_path / "source" / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight_scale"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight_scale is missing"):
        write(str(tmp_path / "source"), tmp_path / "out", Case("keep", "awq"))


def test_every_format_is_tried_here() -> None:
    written = {case.format for case in OTHERS} | {"hf"}
    assert written == set(checkpoint_formats.names()) - {"dcp", "megatron", "mxfp4", "vllm-sharded", "trtllm"}
    assert {case.quant for case in HF} == set(NAMES)
