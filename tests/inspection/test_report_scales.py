"""The report's scales: what stored ones mean in every format, counted exactly, in bounded memory."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from modelexport.checkpoints.safetensors.file import Reader, TensorInfo
from modelexport.exporting import export
from modelexport.inspection.evaluate.models import PlainTensors
from modelexport.inspection.opened import open_contents
from modelexport.inspection.report import scales as report_scales
from modelexport.inspection.report.data import gather
from modelexport.inspection.report.scales import ScaleCounts, bin_edge, count_scales
from tests.helpers.models import make_llama
from tests.inspection._quantised import save_quantised

pytestmark = pytest.mark.timeout(180)

E2M1 = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def counted(directory: Path, **limits: Any) -> dict[str, ScaleCounts]:
    """Scales by the module's kind."""
    contents = open_contents(directory)
    kinds: dict[str, Any] = {}
    for module in contents.modules:
        kinds.setdefault(module.path, []).append(module)
    found, notes = count_scales(contents.checkpoint, kinds, **limits)
    assert notes == []
    return {counts.name: counts for counts in found}


@given(st.floats(min_value=2.0**-149, max_value=2.0**127, width=32))
def test_a_bin_holds_what_is_between_its_edges(value: float) -> None:
    counts = ScaleCounts("name", "int8")
    counts.add(torch.tensor([value, -value, 0.0, math.nan, math.inf]))
    [number] = counts.counts
    assert bin_edge(number) <= value < bin_edge(number + 1)
    assert counts.counts[number] == 2
    assert (counts.seen, counts.unusable) == (5, 3)
    assert counts.least == counts.most == counts.median == value


def test_the_median_is_right_to_within_a_bin() -> None:
    values = torch.rand(1001, generator=torch.Generator().manual_seed(0)) * 0.01
    counts = ScaleCounts("name", "int8")
    for part in values.split(100):
        counts.add(part)
    assert counts.median == pytest.approx(float(values.median()), rel=0.07)
    assert counts.least == float(values.min())
    assert counts.most == float(values.max())
    assert sum(counts.counts.values()) == counts.seen == 1001


def test_scales_are_those_that_are_stored(tmp_path: Path) -> None:
    out = save_quantised(make_llama(), tmp_path / "q", "int4")
    stored = load_file(out / "model.safetensors")
    for name, counts in counted(out).items():
        scales = torch.cat([t.float().flatten() for n, t in stored.items() if n.endswith(f"{name}.weight_scale")])
        assert (counts.total, counts.seen, counts.unusable) == (scales.numel(), scales.numel(), 0)
        assert (counts.least, counts.most) == (float(scales.min()), float(scales.max()))
        for number, count in counts.counts.items():
            assert count == int(((scales >= bin_edge(number)) & (scales < bin_edge(number + 1))).sum())


@pytest.mark.parametrize(
    ("settings", "group", "numbers"),
    [
        ({"quant": "int4", "group_size": 32}, 32, range(1, 9)),
        ({"quant": "int4-asym", "group_size": 32, "format": "awq"}, 32, range(1, 16)),
        ({"quant": "int4", "group_size": 32, "format": "gguf"}, 32, range(1, 9)),
        ({"quant": "mxfp4-wo", "format": "gguf"}, 32, E2M1),
        ({"quant": "nvfp4-wo", "format": "gguf"}, 16, E2M1),
        ({"quant": "int8-wo", "group_size": 32, "format": "gptq"}, 32, range(1, 129)),
        ({"quant": "mxfp4-wo"}, 32, E2M1),
        ({"quant": "nvfp4-wo"}, 16, E2M1),
        ({"quant": "nvfp4-wo", "format": "modelopt"}, 16, E2M1),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_a_scale_is_what_numbers_are_multiplied_by(
    settings: dict[str, Any], group: int, numbers: Any, tmp_path: Path
) -> None:
    """Decoded weights, by other code, are one of the format's numbers times the group's scale."""
    out = tmp_path / "out"
    export(model=str(make_llama()), out=str(out), evaluate=False, quiet=True, **settings)
    name = "model.layers.1.self_attn.q_proj"
    contents = open_contents(out)
    with PlainTensors(contents.checkpoint) as tensors:
        weight = tensors.read(f"{name}.weight")
    module = next(module for module in contents.modules if module.name == name)
    [counts], _ = count_scales(contents.checkpoint, {"q": [module]})
    groups = weight.reshape(-1, group)
    largest = (groups.amax(1) - groups.amin(1)) if "asym" in settings["quant"] else groups.abs().amax(1)
    assert counts.total == counts.seen == largest.numel()
    quotients = largest / counts.most, largest / counts.least
    for found in quotients:  # the groups that have these scales are among them
        assert min(float((found - n).abs().min()) for n in numbers) < 1e-3
    # Of most groups the largest weight is the format's largest number, or (4 of 6) the one below it.
    assert 0.6 < float(largest.median()) / counts.median / max(numbers) < 1.1


@pytest.mark.parametrize(("quant", "at"), [("q6-k", 208), ("q4-k", 0), ("iq4-nl", 0)])
def test_a_scale_of_a_block_is_where_its_type_has_it(quant: str, at: int, tmp_path: Path) -> None:
    out = tmp_path / "out"
    model = make_llama(hidden=256, intermediate=256, layers=1)
    export(model=str(model), out=str(out), quant=quant, format="gguf", evaluate=False, quiet=True)
    contents = open_contents(out)
    module = next(module for module in contents.modules if module.path == "mlp.up_proj")
    [counts], _ = count_scales(contents.checkpoint, {"up": [module]})
    with Reader(contents.checkpoint) as reader:
        blocks = reader.read(module.tensors["weight"]).flatten(2)
    scales = blocks[..., at : at + 2].contiguous().view(torch.float16).float()
    usable = scales[scales != 0].abs()  # some have a sign: it goes with the numbers
    assert (counts.total, counts.least, counts.most) == (scales.numel(), float(usable.min()), float(usable.max()))


def test_stacked_experts_and_unreadable_scales(tmp_path: Path) -> None:
    """gpt-oss' exponents, for all experts in one tensor; and scales that are quantised themselves."""
    tensors = {
        "model.layers.0.mlp.experts.down_proj_blocks": torch.zeros(2, 64, 2, 16, dtype=torch.uint8),
        "model.layers.0.mlp.experts.down_proj_scales": torch.full((2, 64, 2), 120, dtype=torch.uint8),
        "model.layers.0.self_attn.q_proj.weight": torch.zeros(2048, 1, dtype=torch.uint8),
        "model.layers.0.self_attn.q_proj.weight.absmax": torch.zeros(64, dtype=torch.uint8),
    }
    tensors["model.layers.0.mlp.experts.down_proj_scales"][1, 0] = torch.tensor([0, 255])
    save_file(tensors, tmp_path / "model.safetensors")
    report = gather(tmp_path)
    [counts] = report.scales
    assert (counts.number_format, counts.powers) == ("mxfp4", True)
    assert counts.counts == {4: 1, 120 * 8: 254}
    assert (counts.least, counts.most, counts.median) == (2.0**-127, 2.0**-7, 2.0**-7)
    assert (counts.total, counts.unusable) == (256, 1)
    assert "nf4: scales stored as U8 are not read here (1 tensors)" in report.warnings


# ------------------------------------------------------------------- bounded


def big(directory: Path, **shapes: tuple[int, ...]) -> Path:
    """A checkpoint of linears in int8 with as many scales as wanted."""
    tensors = {}
    for name, shape in shapes.items():
        tensors[f"model.layers.{name[1:]}.mlp.up_proj.weight"] = torch.zeros(shape[0], 1, dtype=torch.int8)
        scale = torch.arange(1, math.prod(shape) + 1, dtype=torch.float32).reshape(shape)
        tensors[f"model.layers.{name[1:]}.mlp.up_proj.weight_scale"] = scale
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_pieces_in_memory_are_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = big(tmp_path / "big", L0=(3000, 40), L1=(50, 1))
    monkeypatch.setattr(report_scales, "_PIECE", 4096)
    sizes: list[int] = []
    read = Reader.read

    def watched(self: Reader, info: TensorInfo, **part: Any) -> torch.Tensor:
        found = read(self, info, **part)
        sizes.append(found.numel())
        return found

    monkeypatch.setattr(Reader, "read", watched)
    counts = counted(out)["mlp.up_proj"]
    assert counts.seen == counts.total == sum(sizes) == 120_050
    assert max(sizes) <= 4096
    assert (counts.least, counts.most) == (1.0, 120_000.0)


def test_of_large_tensors_an_even_part_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = big(tmp_path / "big", L0=(4000, 40), L1=(4000, 40))
    monkeypatch.setattr(report_scales, "_SMALL", 1000)
    counts = counted(out, most=32_000)["mlp.up_proj"]
    assert counts.total == 320_000
    assert 30_000 < counts.seen <= 32_000
    assert counts.median == pytest.approx(80_000, rel=0.15)
    assert (counts.least, counts.most) == (1.0, 160_000.0)


def test_of_many_small_tensors_some_are_read(tmp_path: Path) -> None:
    out = big(tmp_path / "big", **{f"L{n}": (100, 2) for n in range(40)})
    counts = counted(out, most=2000)["mlp.up_proj"]
    assert (counts.total, counts.seen) == (8000, 2000)
    assert counted(out)["mlp.up_proj"].seen == 8000


def test_the_page_says_what_was_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from modelexport.inspection.report import render

    out = big(tmp_path / "big", **{f"L{n}": (100, 2) for n in range(40)})
    assert "were looked at" not in render(gather(out))
    monkeypatch.setattr(report_scales, "_MOST_TENSORS", 10)
    assert "2,000 of 8,000 were looked at, spread evenly." in render(gather(out))
