"""verify of checkpoints whose weights are not the source's on purpose: folded, untied, or compensated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from modelexport.exporting import export
from modelexport.inspection.verify import verify_checkpoint
from tests.helpers.models import copy_checkpoint, make_llama

pytestmark = pytest.mark.timeout(180)

SHAPE = {"hidden": 128, "layers": 2, "vocab": 211}
NORM = "model.layers.0.input_layernorm.weight"
READERS = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]


def exported(source: Path, out: Path, quant: str) -> Path:
    export(model=str(source), out=str(out), quant=quant, evaluate=False, quiet=True)
    return out


def edit_record(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = directory / "modelexport.json"
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def fold(tensors: dict[str, Tensor]) -> None:
    """The norm times four, its readers divided by it: the same function."""
    tensors[NORM] = tensors[NORM] * 4
    for name in READERS:
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"] / 4


@pytest.fixture(scope="module")
def folded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of a source after something was folded, recorded as such."""
    directory = tmp_path_factory.mktemp("folded")
    source = copy_checkpoint(make_llama(**SHAPE), directory / "source", tensors=fold)
    out = exported(source, directory / "out", "int8")

    def change(record: dict[str, Any]) -> None:
        record["recipe"]["algorithm"] = "smoothquant"
        record["changed"] = [NORM, *READERS]  # tensors, and modules

    edit_record(out, change)
    return out


def test_what_was_folded_is_not_compared_and_the_rest_is(folded: Path) -> None:
    source = make_llama(**SHAPE)
    result = verify_checkpoint(folded, source)
    assert result.problems == []
    assert len(result.modules) == 14 - 3
    assert result.identical == 2 * 2 + 3 - 1  # norms, embedding and head, without the one that was changed
    assert result.hashes == result.tensors
    [note] = result.notes
    assert note.startswith("4 tensors hold other values than the source's, since smoothquant ")
    assert note.endswith(f"modelexport eval {folded} --against {source} compares what the two compute")
    assert verify_checkpoint(folded).notes == [], "without a source there is nothing to skip"


def test_without_the_record_saying_so_it_is_another_model(folded: Path, tmp_path: Path) -> None:
    bad = copy_checkpoint(folded, tmp_path / "bad")
    edit_record(bad, lambda record: record.update(changed=[NORM]))
    problems = "\n".join(verify_checkpoint(bad, make_llama(**SHAPE)).problems)
    assert all(name in problems for name in READERS)
    assert NORM not in problems
    edit_record(bad, lambda record: record.update(changed="everything"))
    problems = "\n".join(verify_checkpoint(bad, make_llama(**SHAPE)).problems)
    assert "'changed' is a text, not a list; the record is damaged" in problems
    assert f"{NORM}: not equal to the source's" in problems


def test_damage_of_what_was_changed_is_found_by_its_hash(folded: Path, tmp_path: Path) -> None:
    def damage(tensors: dict[str, Tensor]) -> None:
        tensors[f"{READERS[0]}.weight"][3, 4] += 1

    problems = verify_checkpoint(
        copy_checkpoint(folded, tmp_path / "bad", tensors=damage), make_llama(**SHAPE)
    ).problems
    assert len(problems) == 1
    assert problems[0].startswith(f"{READERS[0]}.weight: its bytes are not those that were exported")


def test_a_changed_tensor_must_have_the_sources_shape(folded: Path, tmp_path: Path) -> None:
    other = copy_checkpoint(
        make_llama(**SHAPE), tmp_path / "other", tensors=lambda t: t.update({NORM: torch.ones(64).bfloat16()})
    )
    assert f"{NORM} is BF16 [128], the source's BF16 [64]" in verify_checkpoint(folded, other).problems


def untie(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


@pytest.mark.parametrize("changed", [False, True])
def test_a_head_that_was_untied_is_compared_with_the_embedding(changed: bool, tmp_path: Path) -> None:
    source = make_llama(tied=True, **SHAPE)

    def make(name: str, factor: float) -> Path:
        def tensors(found: dict[str, Tensor]) -> None:
            untie(found)
            found["lm_head.weight"] *= factor

        untied = copy_checkpoint(source, tmp_path / name, tensors=tensors)
        config = json.loads((untied / "config.json").read_text())
        (untied / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
        out = exported(untied, tmp_path / f"{name}-out", "int8")
        if changed:
            edit_record(out, lambda record: record.update(changed=["lm_head.weight"]))
        return out

    good = verify_checkpoint(make("good", 1), source)
    assert good.problems == []
    assert good.identical == 2 * 2 + 2 + (not changed)
    scaled = verify_checkpoint(make("scaled", 2), source)
    expected = [] if changed else ["lm_head.weight: not equal to the source's, though it was passed through"]
    assert scaled.problems == expected


def test_gptqs_linears_may_be_further_away_than_the_nearest(tmp_path: Path) -> None:
    """As far as the record says, which was written by who compared them."""
    source = make_llama(**SHAPE)

    def noisy(tensors: dict[str, Tensor]) -> None:
        generator = torch.Generator().manual_seed(0)
        for name, weight in tensors.items():
            if name.endswith("_proj.weight"):
                noise = torch.randn(weight.shape, generator=generator) * weight.float().std()
                tensors[name] = (weight.float() + 0.3 * noise).to(weight.dtype)

    out = exported(copy_checkpoint(source, tmp_path / "noisy", tensors=noisy), tmp_path / "out", "int4")
    found = verify_checkpoint(out, source)
    assert any("is it another model?" in problem for problem in found.problems)
    measured = {module.name: module.sqnr_db or 0.0 for module in found.modules}
    edit_record(out, lambda record: record.update(sqnr_db=measured))
    assert not verify_checkpoint(out, source).ok
    edit_record(out, lambda record: record["recipe"].update(algorithm="rotation+gptq"))
    good = verify_checkpoint(out, source)
    assert good.problems == []
    [note] = good.notes
    assert note.startswith("14 linears are up to ")
    assert "gptq makes their outputs' error small" in note
    edit_record(out, lambda record: record["sqnr_db"].update({READERS[0]: measured[READERS[0]] + 1}))
    assert [p.split(":")[0] for p in verify_checkpoint(out, source).problems] == [READERS[0]]
