"""The export end to end: the same bytes whatever the parallelism, and engines' view of them."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from modelexport.exporting import export
from modelexport.quantization import formats
from tests.helpers.marks import few
from tests.helpers.models import make_llama

pytestmark = pytest.mark.timeout(240)

QUANTS = ("none", "int8", "fp8", "int4")
AWKWARD = {
    "kv_heads": 2,
    "vocab": 1003,
    "attention_bias": True,
    "mlp_bias": True,
    "tied": False,
    "hidden": 256,
}


def digests(directory: Path) -> dict[str, str]:
    """SHA-256 of every file below ``directory``."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def run(tmp_path: Path, name: str, **settings: object) -> dict[str, str]:
    """Export to ``tmp_path/name``; returns the hashes of what was written."""
    if settings.get("gather") == "nfs":
        settings["workspace"] = str(tmp_path / "workspace")
        (tmp_path / "workspace").mkdir(exist_ok=True)
    export(out=str(tmp_path / name), evaluate=False, quiet=True, timeout=60.0, **settings)
    left = [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert not left, f"left behind: {left}"
    return digests(tmp_path / name)


def source_of(model: str) -> str | None:
    return None if model == "demo" else str(make_llama(**AWKWARD))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], dict[str, str]]:
    """Hashes of what one process writes of a model in a number format."""

    @functools.cache
    def made(model: str, quant: str) -> dict[str, str]:
        return run(tmp_path_factory.mktemp("alone"), "out", model=source_of(model), quant=quant)

    return made


@pytest.mark.parametrize(
    ("tp", "gather"),
    few(itertools.product((1, 2, 3, 4, 8), ("shm", "nfs", "direct")), (2, "nfs"), (3, "shm"), (8, "direct")),
)
@pytest.mark.parametrize(
    ("model", "quant"), few(itertools.product(("demo", "awkward"), QUANTS), ("awkward", "int4"), ("demo", "fp8"))
)
def test_every_parallelism_and_gather_gives_the_same_directory(
    tmp_path: Path, alone: Callable[[str, str], dict[str, str]], model: str, quant: str, tp: int, gather: str
) -> None:
    """Awkward: two key/value heads on four ranks, a vocabulary of 1003, biases everywhere, an untied head."""
    found = run(tmp_path, "out", model=source_of(model), quant=quant, tp=tp, gather=gather)
    assert found == alone(model, quant)


@pytest.mark.parametrize("dtype", few([torch.float16, torch.float32], torch.float16))
def test_other_source_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    source = str(make_llama(dtype=dtype))
    for quant in ("int8", "int4"):
        alone = run(tmp_path, f"alone-{quant}", model=source, quant=quant)
        assert run(tmp_path, f"two-{quant}", model=source, quant=quant, tp=2, gather="shm") == alone
        tensors = load_file(tmp_path / f"alone-{quant}" / "model.safetensors")
        assert tensors["model.layers.0.self_attn.q_proj.weight_scale"].dtype == dtype


def test_small_shards_make_an_index_and_the_same_tensors(tmp_path: Path) -> None:
    run(tmp_path, "one", quant="fp8")
    run(tmp_path, "many", quant="fp8", tp=2, max_shard_bytes=1_000_000)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    many = {name: t for file in files for name, t in load_file(tmp_path / "many" / file).items()}
    one = load_file(tmp_path / "one" / "model.safetensors")
    assert set(index["weight_map"]) == set(one) == set(many)
    for name, tensor in one.items():
        assert torch.equal(tensor.view(torch.uint8), many[name].view(torch.uint8)), name


def test_slabs_of_a_large_embedding_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(tmp_path, "whole", quant="int4")
    monkeypatch.setattr("modelexport.exporting.plan.SLAB_BYTES", 100_000)
    assert run(tmp_path, "slabs", quant="int4") == whole
    assert run(tmp_path, "slabs-8", quant="int4", tp=8, gather="direct") == whole


def test_steps_of_parts_of_a_layer_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(tmp_path, "whole", quant="int4")
    monkeypatch.setattr("modelexport.exporting.plan.STEP_BYTES", 100_000)
    assert run(tmp_path, "parts", quant="int4") == whole
    assert run(tmp_path, "parts-2", quant="int4", tp=2, gather="shm") == whole


def test_parts_of_a_layer_share_the_scale_of_all_its_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"model": str(make_llama(model_type="qwen3_moe")), "quant": "nvfp4-wo"}
    whole = run(tmp_path, "whole", **settings)
    monkeypatch.setattr("modelexport.exporting.plan.STEP_BYTES", 1)
    assert run(tmp_path, "parts", **settings) == whole
    assert run(tmp_path, "parts-2", tp=2, **settings) == whole


def test_what_none_writes_is_what_the_source_held(tmp_path: Path) -> None:
    source = make_llama(**AWKWARD)
    run(tmp_path, "out", model=str(source), quant="none", tp=3)
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert set(before) == set(after)
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name


def test_dequantised_weights_are_near_the_source_and_biases_equal(tmp_path: Path) -> None:
    source = make_llama(**AWKWARD)
    before = load_file(source / "model.safetensors")
    bound = {"int8": 1 / 127, "fp8": 1 / 16, "int4": 1 / 7}
    for quant, relative in bound.items():
        run(tmp_path, quant, model=str(source), quant=quant, tp=2)
        after = load_file(tmp_path / quant / "model.safetensors")
        number_format = formats.get(quant)
        linears = [n.removesuffix(".weight") for n in before if n.endswith("_proj.weight")]
        assert len(linears) == 14
        for name in linears:
            stored = {k.removeprefix(f"{name}."): v for k, v in after.items() if k.startswith(f"{name}.")}
            bias = stored.pop("bias", None)
            if bias is not None:
                assert torch.equal(bias, before[f"{name}.bias"])
            weight = before[f"{name}.weight"].float()
            error = (number_format.dequantise(stored) - weight).abs()
            assert error.max() <= relative * weight.abs().max(), (quant, name)


def test_side_files_come_along_and_weights_of_other_kinds_do_not(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for path in make_llama().iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    (source / "LICENSE").write_text("licence")
    (source / "pytorch_model.bin").write_bytes(b"never loaded")
    (source / "nested").mkdir()
    (source / "nested" / "template.jinja").write_text("{{ x }}")
    written = run(tmp_path, "out", model=str(source), quant="int8")
    assert {"LICENSE", "nested/template.jinja", "generation_config.json"} <= set(written)
    assert "pytorch_model.bin" not in written
    record = json.loads((tmp_path / "out" / "modelexport.json").read_text())
    assert "pytorch_model.bin" in record["left_out"]


def test_a_tied_copy_of_the_head_is_written_once(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    source = tmp_path / "source"
    source.mkdir()
    for path in make_llama(tied=True).iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    tensors = load_file(source / "model.safetensors")
    save_file(
        {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()},
        source / "model.safetensors",
    )
    run(tmp_path, "out", model=str(source), quant="fp8")
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")


def test_overwrite_replaces_and_the_default_refuses(tmp_path: Path) -> None:
    from modelexport.errors import UsageError

    run(tmp_path, "out", quant="int8")
    with pytest.raises(UsageError, match="--overwrite"):
        run(tmp_path, "out", quant="fp8")
    replaced = run(tmp_path, "out", quant="fp8", overwrite=True)
    assert replaced == run(tmp_path, "fresh", quant="fp8")
