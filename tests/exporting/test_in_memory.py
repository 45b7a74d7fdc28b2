"""Exports of a model that is in memory: the bytes of saving it and exporting that; nothing of it is changed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import modelexport
from modelexport.distributed.config import free_port
from modelexport.errors import UsageError
from tests.helpers.marks import few
from tests.helpers.models import make_llama
from tests.helpers.tiny_models import tiny_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of many things

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "int4", {}),
    ("llama", "none", {}),
    ("llama", "fp8-static", {}),
    ("llama", "nvfp4", {"algorithm": "awq+gptq"}),
    ("llama", "int4", {"algorithm": "rotation+gptq"}),
    ("llama", "*=int4:32,lm_head=int8,*embed_tokens=int8-wo", {}),
    ("mixtral", "int4", {"group_size": 32}),
    ("qwen3_5_moe", "int4", {"group_size": 32, "algorithm": "gptq"}),
    ("gpt_oss", "int4", {"group_size": 32}),
    ("granitemoe", "fp8", {}),
    ("dbrx", "int4", {"group_size": 32}),
    ("llama4", "none", {}),
    ("deepseek_v3", "fp8-block", {"format": "fp8-block"}),
    ("gemma3", "int4", {"group_size": 32}),
]


def loaded(kind: str) -> Any:
    """transformers' model of a tiny checkpoint, in bfloat16."""
    import transformers

    source = make_llama() if kind == "llama" else tiny_checkpoint(kind)
    [architecture] = json.loads((source / "config.json").read_text())["architectures"]
    return getattr(transformers, architecture).from_pretrained(source, dtype=torch.bfloat16)


@pytest.fixture
def text(tmp_path: Path) -> str:
    """Two samples, as token ids."""
    path = tmp_path / "samples.jsonl"
    lines = ({"input_ids": [(7 * i + j) % 199 + 3 for j in range(24)]} for i in range(2))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.mark.parametrize(("kind", "quant", "settings"), few(CASES, CASES[0], CASES[6]))
def test_the_bytes_are_those_of_saving_and_exporting(
    kind: str, quant: str, settings: dict[str, Any], tmp_path: Path, text: str
) -> None:
    model = loaded(kind)
    model.save_pretrained(tmp_path / "saved")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    settings = {"quant": quant, "calib": text, "calib_samples": 2, "calib_length": 16, "quiet": True, **settings}
    modelexport.export(model=str(tmp_path / "saved"), out=str(tmp_path / "of-files"), **settings)
    modelexport.export(model=model, out=str(tmp_path / "of-memory"), **settings)
    for path in (tmp_path / "of-files").iterdir():
        if path.name not in ("modelexport.json", "README.md"):  # which name the source
            assert (tmp_path / "of-memory" / path.name).read_bytes() == path.read_bytes(), path.name
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()), "it was changed"


def test_tensors_by_name_and_a_config(tmp_path: Path) -> None:
    source = make_llama()
    config = json.loads((source / "config.json").read_text())
    modelexport.export(model=str(source), quant="fp8", out=str(tmp_path / "of-files"), quiet=True)
    tensors = load_file(source / "model.safetensors")
    done = modelexport.export(model=tensors, config=config, quant="fp8", out=str(tmp_path / "of-memory"), quiet=True)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("of-files", "of-memory")]
    assert weights[0] == weights[1]
    assert done.source == "a model in memory"
    assert modelexport.verify(tmp_path / "of-memory", against=source).ok


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "needs its config.json"),
        ({"config": {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}}, "is quantised: give the"),
        ({"config": {"model_type": "llama"}, "tokenizer": "/"}, "there is no tokenizer"),
        ({"config": {"model_type": "llama"}, "tp": 2}, "is exported by the process that holds it: leave out tp"),
        ({"config": {"model_type": "llama"}, "quant": "fp8-static"}, "has no tokenizer, .* give tokenizer="),
        ({"config": {"model_type": "llama"}, "model": {"a": 1}}, "is a int, where a tensor is needed"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=words):
        modelexport.export(**{"model": {"a": torch.zeros(1)}, "out": str(tmp_path / "out"), "quiet": True, **settings})
    assert list(tmp_path.iterdir()) == []


def by_ranks(world: int, source: Path, out: Path, how: str, settings: dict[str, Any], function: str = "") -> str:
    """Exports a model of which each of several processes holds a part; what the first one prints."""
    environment = {**os.environ, "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.exporting._sharded_model", str(source), str(out), how]
    ranks = [
        subprocess.Popen(
            [*command, function + json.dumps(settings)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        said = [rank.communicate(timeout=150) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, errors) in zip(ranks, said, strict=True):
        assert rank.returncode == 0, errors[-3000:]
    return said[0][0]


SHARDED = [
    ("llama", "fsdp", 2, {"quant": "int4", "algorithm": "gptq"}),
    ("llama", "fsdp", 2, {"quant": "fp8-static"}),
    ("llama", "mesh", 4, {"quant": "nvfp4", "algorithm": "awq"}),
    ("mixtral", "fsdp", 2, {"quant": "int4", "group_size": 32}),
    ("qwen3_5_moe", "fsdp", 2, {"quant": "fp8"}),
    ("llama", "plain", 2, {"quant": "int8", "more": {"*.gate_proj.weight": 0}}),
    ("llama", "auto", 4, {"quant": "int4", "algorithm": "gptq"}),
    ("qwen3_moe", "auto", 2, {"quant": "int8"}),
    ("phi3", "auto", 2, {"quant": "fp8"}),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "how", "world", "settings"), few(SHARDED, slow=[each for each in SHARDED if each[2] == 4])
)
def test_ranks_that_hold_parts_write_the_same(
    kind: str, how: str, world: int, settings: dict[str, Any], tmp_path: Path, text: str
) -> None:
    source = make_llama() if kind == "llama" else tiny_checkpoint(kind)
    settings = {**settings, "calib": text, "calib_samples": 2, "calib_length": 16}
    of_files = {name: value for name, value in settings.items() if name != "more"}
    modelexport.export(model=str(source), out=str(tmp_path / "of-files"), quiet=True, **of_files)
    by_ranks(world, source, tmp_path / "of-ranks", how, settings)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("of-files", "of-ranks")]
    assert weights[0] == weights[1]
    records = [json.loads((tmp_path / name / "modelexport.json").read_text()) for name in ("of-files", "of-ranks")]
    assert records[0]["sqnr_db"] == records[1]["sqnr_db"]


@pytest.mark.extended
@pytest.mark.timeout(300)
def test_what_reads_several_layers_is_refused(tmp_path: Path, text: str) -> None:
    settings = {"quant": "int4", "algorithm": "rotation+gptq", "calib": text}
    said = by_ranks(2, make_llama(), tmp_path / "out", "fsdp", settings)
    assert said.startswith("REFUSED --algorithm rotation+gptq reads several layers at a time")
    assert not (tmp_path / "out").exists()


@pytest.mark.extended
@pytest.mark.timeout(300)
def test_every_rank_is_given_all_tensors(tmp_path: Path, text: str) -> None:
    source, settings = make_llama(), {"quant": "int4"}
    modelexport.export(model=str(source), out=str(tmp_path / "out"), quiet=True, **settings)
    by_ranks(2, source, tmp_path / "rank", "fsdp", settings, "quantise ")
    written = load_file(tmp_path / "out" / "model.safetensors")
    for rank in range(2):
        found = load_file(tmp_path / f"rank-{rank}.safetensors")
        assert found.keys() == written.keys()
        assert all(torch.equal(tensor, written[name]) for name, tensor in found.items())
    said = by_ranks(2, source, tmp_path / "no", "fsdp", {"quant": "fp8-static", "calib": text}, "quantise ")
    assert said.startswith("REFUSED this process is one of 2 ranks, and quantise() calibrates in one process")


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"*.nothing.weight": 0}, "no tensor of the model matches '*.nothing.weight'"),
        ({"model.norm.weight": "rowwise"}, "'rowwise' of 'model.norm.weight' is no dim of model.norm.weight"),
        ({"*.q_proj.weight": "colwise"}, "says how ranks have cut a model, and this process is none"),
    ],
)
def test_a_plan_that_cannot_be(plan: dict[str, Any], words: str, tmp_path: Path) -> None:
    config = json.loads((make_llama() / "config.json").read_text())
    with pytest.raises(modelexport.UsageError, match=re.escape(words)):
        modelexport.export(
            model=load_file(make_llama() / "model.safetensors"), config=config, plan=plan, out=str(tmp_path / "out")
        )
