"""The sharded hf format: each rank's rectangles of the tensors, and back; torch's reader: tests/conformance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from modelexport.checkpoints.formats import hf_sharded
from modelexport.errors import CheckpointError
from modelexport.sharding.boxes import slices
from tests.helpers.format_models import Model, assert_same, make_model, reopen, round_trip, write

SHAPES: dict[str, dict[str, Any]] = {
    "biased": {"attention_bias": True, "mlp_bias": True, "layers": 4, "heads": 8, "kv_heads": 2},
    "tied": {"tied": True, "vocab": 1003, "layers": 3},
    "phi3": {"model_type": "phi3", "heads": 8, "kv_heads": 2, "layers": 3},
    "mixtral": {"model_type": "mixtral", "layers": 3},
}
ROOMY = {"hidden": 256, "intermediate": 512, "head_dim": 128, "heads": 2, "kv_heads": 2}


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())


@pytest.mark.parametrize(
    ("shape", "tp", "pp", "ep"),
    [*((shape, 4, 3, 1) for shape in SHAPES), *((shape, 1, 2, 1) for shape in SHAPES), ("mixtral", 2, 1, 4)],
)
def test_each_rank_holds_what_the_plan_says(tmp_path: Path, shape: str, tp: int, pp: int, ep: int) -> None:
    model = make_model(**SHAPES[shape])
    plan = model.plan(tp, pp, ep)
    round_trip(hf_sharded, tmp_path, model, tp, pp, ep)
    for path in tmp_path.glob("*.safetensors"):
        assert {"tp": tp, "pp": pp, "ep": ep}.items() <= json.loads(metadata_of(path)[hf_sharded.SHARD_KEY]).items()
    for rank in range(plan.parallelism.size):
        held = {}
        for path in tmp_path.glob(f"shard-{rank:05d}-*"):
            where = json.loads(metadata_of(path)["DCP_SHARDING_INFO"])
            for name, value in load_file(path).items():
                held[name, tuple(where[name]["saved_offsets"])] = value
                assert where[name]["global_shape"] == list(model.values[name].shape)
        wanted = {
            (name, tuple(start for start, _ in box)): model.values[name][slices(box)]
            for name in plan.names(rank)
            for _, box in plan.held(name, rank)
        }
        if tp == 1:  # parts of a fused tensor that touch are one
            assert {name for name, _ in held} == {name for name, _ in wanted}
            assert all(torch.equal(value, model.values[name]) for (name, _), value in held.items())
        else:
            assert held.keys() == wanted.keys()
            assert all(torch.equal(held[key].view(torch.int16), wanted[key].view(torch.int16)) for key in wanted)


@pytest.mark.parametrize(
    "scheme", ["int8", "fp8-static", "fp8-block", "int4", "int4-asym", "int8-wo", "nvfp4", "mxfp8"]
)
def test_every_number_format(tmp_path: Path, scheme: str) -> None:
    round_trip(hf_sharded, tmp_path, make_model(scheme, **ROOMY), 2, 2)


def test_large_files_are_divided(tmp_path: Path) -> None:
    model = make_model(model_type="phi3", layers=3)
    write(hf_sharded, tmp_path, model, model.plan(2), max_shard_bytes=150_000)
    paths = sorted(tmp_path.glob("shard-00001-*"))
    assert len(paths) > 4
    assert paths[0].name == f"shard-00001-model-00001-of-{len(paths):05d}.safetensors"
    single = max(value.nbytes for value in model.values.values())
    assert all(path.stat().st_size < 150_000 + single for path in paths)
    assert_same(reopen(hf_sharded, tmp_path), model)


def test_names_mean_nothing(tmp_path: Path) -> None:
    model = make_model()
    write(hf_sharded, tmp_path, model, model.plan(2))
    for number, path in enumerate(sorted(tmp_path.glob("*.safetensors"), reverse=True)):
        path.rename(tmp_path / f"{number}.safetensors")
    assert_same(reopen(hf_sharded, tmp_path), model)


def test_files_that_are_missing(tmp_path: Path) -> None:
    model = make_model(layers=4)
    write(hf_sharded, tmp_path, model, model.plan(2, 2), max_shard_bytes=200_000)
    files = sorted(tmp_path.glob("shard-00003-*"))
    files[1].unlink()
    for path in tmp_path.glob("shard-00001-*"):
        path.unlink()
    with pytest.raises(CheckpointError) as caught:
        reopen(hf_sharded, tmp_path)
    text = str(caught.value)
    assert "made of 4 ranks' files, those of rank 1 are missing" in text
    assert f"rank 3 has {len(files)} files, file 2 is missing" in text
    assert "model.embed_tokens.weight [211, 128]: no file holds its part [106:211, 0:128]" in text
    assert text.endswith("more tensors are not whole")


def test_without_our_own_notes_parts_are_missed_still(tmp_path: Path) -> None:
    """As torch writes it: no whole shape, no number of files."""
    model = make_model()
    write(hf_sharded, tmp_path, model, model.plan(2))
    for path in tmp_path.glob("*.safetensors"):
        where = json.loads(metadata_of(path)["DCP_SHARDING_INFO"])
        plain = {name: {"saved_offsets": each["saved_offsets"]} for name, each in where.items()}
        save_file(load_file(path), path, metadata={"format": "pt", "DCP_SHARDING_INFO": json.dumps(plain)})
    found = reopen(hf_sharded, tmp_path)
    assert_same(found, model)
    next(tmp_path.glob("shard-00000-*")).unlink()
    with pytest.raises(
        CheckpointError, match=r"embed_tokens.weight \[211, 128\]: no file holds its part \[0:106, 0:128\]"
    ):
        reopen(hf_sharded, tmp_path)


def respell(path: Path, change: Any, key: str = "DCP_SHARDING_INFO") -> None:
    metadata = metadata_of(path)
    value = json.loads(metadata[key])
    value = change(value) or value
    save_file(load_file(path), path, metadata={**metadata, key: value if isinstance(value, str) else json.dumps(value)})


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda where: "nonsense", "DCP_SHARDING_INFO is not valid JSON"),
        (lambda where: [1], "must be a JSON object, is a list"),
        (lambda where: where.pop(NORM) and None, r"norm.weight: DCP_SHARDING_INFO must tell 1 saved_offsets, has None"),
        (lambda where: where[NORM].update(saved_offsets=[-1]), r"must tell 1 saved_offsets"),
        (lambda where: where[NORM].update(saved_offsets=[0, 0]), r"must tell 1 saved_offsets"),
        (lambda where: where[NORM].update(global_shape="x"), "global_shape must be a list of sizes, is 'x'"),
        (lambda where: where[NORM].update(global_shape=[64]), r"a part of \[128\], but in another file of \[64\]"),
        (lambda where: where[NORM].update(saved_offsets=[3]), r"\[128\] at \[3\] is outside of its whole \[128\]"),
    ],
)
def test_headers_that_make_no_sense(tmp_path: Path, change: Any, message: str) -> None:
    model = make_model()
    write(hf_sharded, tmp_path, model, model.plan(2))
    (path,) = tmp_path.glob("shard-00000-*")
    respell(path, change)
    with pytest.raises(CheckpointError, match=message):
        hf_sharded.open(tmp_path, None)


def test_files_that_do_not_belong_together(tmp_path: Path) -> None:
    model = make_model()
    write(hf_sharded, tmp_path, model, model.plan(2))
    (second,) = tmp_path.glob("shard-00001-*")
    save_file({"model.norm.weight": torch.zeros(128)}, tmp_path / "z.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"z.safetensors: has no DCP_SHARDING_INFO, the other files have"):
        reopen(hf_sharded, tmp_path)
    (tmp_path / "z.safetensors").unlink()
    respell(second, lambda shard: shard.update(ranks=4, tp=4), "modelexport_shard")
    with pytest.raises(CheckpointError, match=r"different parallelisms .*\"ranks\": 2.*\"ranks\": 4"):
        reopen(hf_sharded, tmp_path)
    respell(second, lambda shard: shard.update(ranks=2, tp=2, rank=0), "modelexport_shard")
    with pytest.raises(CheckpointError, match=r"are both file 1 of rank 0; .* those of rank 1 are missing"):
        reopen(hf_sharded, tmp_path)
    respell(second, lambda shard: shard.update(rank="1"), "modelexport_shard")
    with pytest.raises(CheckpointError, match="must have rank, ranks, file, files as numbers"):
        reopen(hf_sharded, tmp_path)
    tensors = load_file(second)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    save_file(tensors, second, metadata=metadata_of(second))
    respell(second, lambda shard: shard.update(rank=1), "modelexport_shard")
    with pytest.raises(CheckpointError, match=r"norm.weight: is F32, but BF16 in shard-00000"):
        reopen(hf_sharded, tmp_path)


def test_other_directories_are_not_taken_for_it(tmp_path: Path) -> None:
    assert not hf_sharded.recognises(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    assert not hf_sharded.recognises(tmp_path)
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert not hf_sharded.recognises(tmp_path)


def test_a_config_of_ones_own(tmp_path: Path) -> None:
    model: Model = make_model()
    write(hf_sharded, tmp_path, model, model.plan(2))
    assert hf_sharded.open(tmp_path, None).config == model.config
    assert hf_sharded.open(tmp_path, {"model_type": "other"}).config == {"model_type": "other"}
    (tmp_path / "config.json").unlink()
    assert hf_sharded.open(tmp_path, None).config is None
