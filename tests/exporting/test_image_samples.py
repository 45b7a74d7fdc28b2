"""Exports that are calibrated on rows with images."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from modelexport.errors import ModelExportError, UsageError
from modelexport.exporting import export
from modelexport.recipe import ExportRecipe
from tests.helpers.marks import few
from tests.helpers.tiny_wrappers import PROCESSED, save_chat, save_wrapper

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore")]

GPTQ = {"quant": "int4", "group_size": 32, "algorithm": "gptq", "calib_samples": 5, "calib_length": 16}


def exported(source: Path, out: Path, text: Path, **settings: Any) -> tuple[str, dict[str, Any]]:
    export(model=str(source), out=str(out), calib=str(text), quiet=True, **{**GPTQ, **settings})
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(out.glob("*.safetensors")))).hexdigest()
    return digest, json.loads((out / "modelexport.json").read_text())["calibration"]


@pytest.mark.parametrize("model_type", few(PROCESSED, "gemma3"))
def test_the_bytes_are_the_same_on_two_ranks(tmp_path: Path, model_type: str) -> None:
    source, text = save_wrapper(model_type, tmp_path / "source"), save_chat(tmp_path)
    one, calibration = exported(source, tmp_path / "one", text)
    two, _ = exported(source, tmp_path / "two", text, tp=2)
    assert one == two
    assert (calibration["samples"], calibration["with_images"], calibration["length"]) == (5, 2, 16)
    without = text.with_name("text.jsonl")
    without.write_text("".join(line for line in text.read_text().splitlines(True) if "messages" not in line))
    assert exported(source, tmp_path / "three", without)[0] != one


@pytest.mark.extended
@pytest.mark.parametrize(
    "settings",
    [
        {"quant": "fp8-static", "algorithm": "rtn", "group_size": None, "kv_cache": "fp8"},
        {"algorithm": "awq+gptq", "calib_memory": 1000},
        {
            "quant": ExportRecipe.quant,
            "group_size": None,
            "algorithm": "autoquant+gptq",
            "autoquant_bits": 9,
            "autoquant_candidates": "int4:32,none",
        },
    ],
    ids=["static", "above a budget", "autoquant"],
)
def test_other_algorithms_see_them(tmp_path: Path, settings: dict[str, Any]) -> None:
    source, text = save_wrapper("gemma3", tmp_path / "source"), save_chat(tmp_path)
    _, calibration = exported(source, tmp_path / "one", text, **settings)
    assert calibration["with_images"] == 2


def test_only_images_and_too_few_of_them(tmp_path: Path) -> None:
    source, text = save_wrapper("llava", tmp_path / "source"), save_chat(tmp_path, texts=0)
    with pytest.raises(ModelExportError, match=r"2 of 5 samples are its rows with images.*--calib-samples 2"):
        exported(source, tmp_path / "one", text)
    (source / "processor_config.json").unlink()
    with pytest.raises(UsageError, match=r"has neither preprocessor_config.json nor processor_config.json"):
        exported(source, tmp_path / "one", text)
