"""What a checkpoint will consist of, decided from headers alone; and the table of formats."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from modelexport.checkpoints.safetensors.file import INDEX_NAME, Layout, TensorInfo, tensor_nbytes
from modelexport.checkpoints.safetensors.placement import Placement, row_major
from modelexport.errors import PlanError, UsageError
from modelexport.models import checkpoint_formats as formats
from modelexport.models.rules import tensor_rules
from modelexport.models.target_plan import TargetPlan, places, plan_target
from modelexport.sharding.boxes import uncovered, whole
from modelexport.sharding.plan import Parallelism
from tests.helpers.models import headers_only, quantised_headers

MODEL = {"hidden": 128, "heads": 8, "kv_heads": 2, "head_dim": 128, "intermediate": 1024, "layers": 3}


def planned(name: str, *grid: int, scheme: str | None = None, limit: int = 1 << 40, **shape: object) -> TargetPlan:
    shape = {**MODEL, **shape}
    checkpoint = headers_only(**shape) if scheme is None else quantised_headers(scheme, **shape)
    assert checkpoint.config is not None
    rules = tensor_rules(checkpoint)
    return plan_target(name, rules, checkpoint.config, Parallelism(*grid), max_shard_bytes=limit)


# ------------------------------------------------------------------ formats


def test_the_formats() -> None:
    containers = ["dcp", "gguf", "hf", "megatron", "mxfp4", "trtllm", "vllm-sharded"]
    assert list(formats.formats()) == containers
    assert formats.names() == sorted([*containers, "awq", "fp8-block", "gptq", "modelopt"])
    assert [formats.get(name).NAME for name in ("awq", "modelopt", "dcp")] == ["hf", "hf", "dcp"]
    assert [formats.method_of(name).METHOD for name in ("hf", "dcp", "awq", "fp8-block")] == [
        "compressed-tensors",
        "compressed-tensors",
        "awq",
        "fp8",
    ]
    for name, module in formats.formats().items():
        assert formats.get(module.NAME) is module
        assert name == module.NAME
        assert isinstance(module.SIDE_FILES, tuple)
        for function in ("lay_out", "side_files", "recognises", "open"):
            assert callable(getattr(module, function)), f"{name}.{function}"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("trtlm", "--format trtlm: unknown; did you mean 'trtllm'"),
        ("HF", "--format HF: unknown"),
        ("", "--format : unknown"),
        ("zzz", "known: awq, dcp, fp8-block, gguf, gptq, hf, megatron, modelopt, mxfp4, trtllm, vllm-sharded"),
        ("../hf", "unknown"),
    ],
)
def test_unknown_formats(name: str, text: str) -> None:
    for ask in (lambda: formats.get(name), lambda: planned(name, 1, 1, 1)):
        with pytest.raises(UsageError, match=text):
            ask()


def test_no_format_claims_a_plain_directory(tmp_path: Path) -> None:
    def claims() -> list[str]:
        return [name for name, module in formats.formats().items() if module.recognises(tmp_path)]

    assert claims() == []
    for content in (b"", b"[]", b"{", b'{"architecture": 7}', b"\xff"):
        (tmp_path / "config.json").write_bytes(content)
        (tmp_path / "metadata.json").write_bytes(content)
        (tmp_path / "model.safetensors").write_bytes(content)
        assert claims() == []


# ------------------------------------------------------------------ targets


@pytest.mark.parametrize("name", formats.formats())
@pytest.mark.parametrize("grid", [(1, 1, 1), (2, 1, 1), (8, 1, 2), (4, 3, 4)])
def test_every_element_has_a_place_and_no_byte_two(name: str, grid: tuple[int, int, int]) -> None:
    if name == "vllm-sharded" and (grid[1] > 1 or grid[2] not in (1, grid[0])):
        with pytest.raises(PlanError, match="vllm-sharded"):
            planned(name, *grid, model_type="mixtral")
        return
    if name == "mxfp4":
        with pytest.raises(PlanError, match="known to hold gpt_oss models"):
            planned(name, *grid, model_type="mixtral")
        return
    if name == "gguf" and grid != (1, 1, 1):
        with pytest.raises(PlanError, match="gguf"):
            planned(name, *grid, model_type="mixtral")
        return
    target = planned(name, *grid, model_type="mixtral", vocab=256)
    sizes = {Path(file.name): file.size for file in target.layout.files}
    used: dict[Path, np.ndarray] = {path: np.zeros(size, bool) for path, size in sizes.items()}
    for rule in target.plan.rules.values():
        found = places(target.layout, target.layout.infos[rule.name])
        assert not uncovered(whole(rule.shape), [place.box for place in found]), rule.name
        for place in found:
            bits = np.lib.stride_tricks.as_strided(
                used[place.path][place.offset :], [b - a for a, b in place.box], place.strides
            )
            assert not bits.any(), f"{rule.name} shares bytes of {place.path}"
            bits[...] = True
    counts = Counter(bool(bits.sum()) for bits in used.values())
    assert counts[True] >= 1
    assert all(len(path.parts) == 1 for path in sizes), "no file leaves the directory"
    for file, content in target.side_files.items():
        assert Path(file).name == file
        assert content
        if file.endswith(".json"):
            json.loads(content)


def test_the_index_of_whole_tensors() -> None:
    alone, several = planned("hf", 1, 1, 1), planned("hf", 1, 1, 1, limit=200_000)
    assert alone.side_files == {}
    weight_map = json.loads(several.side_files[INDEX_NAME])["weight_map"]
    assert set(weight_map) == set(several.plan.rules)
    assert len(set(weight_map.values())) == len(several.layout.files) > 3
    assert INDEX_NAME not in planned("hf", 2, 1, 1, limit=200_000).side_files, "ranks' files tell themselves"


@pytest.mark.parametrize("name", ["megatron", "trtllm", "vllm-sharded"])
@pytest.mark.parametrize("scheme", ["int4", "int8", "fp8-block"])
def test_formats_of_unquantised_models_name_those_that_hold_others(name: str, scheme: str) -> None:
    with pytest.raises(PlanError, match=rf"--format {name}.*quantised.*hf"):
        planned(name, 2, 1, 1, scheme=scheme)


@pytest.mark.parametrize("name", formats.names())
def test_a_grid_that_does_not_fit(name: str) -> None:
    with pytest.raises(PlanError) as caught:
        planned(name, 16, 4, 2)
    for text in ("8 heads", "pp is 4", "only 3 layers", "ep is 2", "no experts", "tp 8, pp 3, ep 1"):
        assert text in str(caught.value)


def test_places_of_a_tensor_in_one_piece() -> None:
    info = TensorInfo("w", "BF16", (3, 4), Path("f"), 10, tensor_nbytes("BF16", (3, 4)))
    [place] = places(Layout((), {"w": info}, {}), info)
    assert (place.box, place.path, place.offset, place.strides) == (((0, 3), (0, 4)), Path("f"), 10, (8, 2))
    several = (Placement(((0, 3), (0, 4)), Path("g"), 0, row_major((3, 4), 2)),) * 2
    assert places(Layout((), {"w": info}, {"w": several}), info) == several
    assert math.prod(info.shape) == 12
