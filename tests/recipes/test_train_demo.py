"""recipes/train_demo.py end to end on made-up text, with a tiny model and no Debian packages."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_demo", ROOT / "recipes" / "train_demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_demo"] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


def tiny(recipe: ModuleType, **changes: Any) -> Any:
    values = {
        "steps": 3,
        "batch": 4,
        "window": 32,
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 48,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "warmup": 1,
        "document_characters": 300,
        "heldout_every": 5,
        "heldout_first": 2,
        "calibration_characters": 1000,
    }
    return recipe.Settings(**{**values, **changes})


def prose(paragraphs: int) -> str:
    """Text with some order in it, no paragraph like another."""
    subjects, verbs = ("the king", "a program", "the river", "my brother"), ("sees", "breaks", "carries")
    lines = []
    for i in range(paragraphs):
        words = [f"{subjects[(i + j) % 4]} {verbs[(i * j) % 3]} {i * j} of {j} stones," for j in range(1, 6)]
        lines.append(f"   {words[0]}\n   {' '.join(words[1:])}")
    return "\n\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def made(recipe: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], list[float]]:
    directory = tmp_path_factory.mktemp("train")
    (directory / "text").mkdir()
    (directory / "text" / "a.txt").write_text(prose(60), encoding="utf-8")
    settings = tiny(recipe, steps=12)
    documents = recipe.directory_documents(directory / "text", settings.document_characters)
    losses = recipe.make(documents, directory / "out", settings)
    return directory / "out", documents, losses


def test_end_to_end(made: tuple[Path, list[str], list[float]]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out, _, losses = made
    assert len(losses) == 12
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[0] == pytest.approx(math.log(300), abs=0.5)
    assert losses[-1] < losses[0] - 0.3
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == 0
    text = "the king carries 3 of 5 stones, \u2018\u00e9\u2019"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    with torch.inference_mode():
        assert torch.isfinite(model(torch.tensor([ids])).logits).all()
    assert not out.with_name(".out.partial").exists()


def test_heldout_is_disjoint_from_training(recipe: ModuleType, made: tuple[Path, list[str], list[float]]) -> None:
    out, documents, _ = made
    training, heldout = recipe.split_documents(documents, tiny(recipe))
    assert not set(training) & set(heldout)
    assert sorted(training + heldout) == sorted(documents)
    assert heldout == documents[2::5]
    assert (out / "heldout.txt").read_text(encoding="utf-8").split("\n\n") == heldout[::2]
    calibration = (out / "calibration.txt").read_text(encoding="utf-8").split("\n\n")
    assert set(calibration) <= set(training)
    assert 1000 <= sum(map(len, calibration)) < 1000 + max(map(len, training))


def test_a_repeated_document_is_not_in_both(recipe: ModuleType) -> None:
    documents = [f"document {i}" for i in range(10)] + ["document 2"]
    training, heldout = recipe.split_documents(documents, tiny(recipe))
    assert heldout == ["document 2", "document 7"]
    assert "document 2" not in training


def test_existing_target_and_too_little_text(
    recipe: ModuleType, made: tuple[Path, list[str], list[float]], tmp_path: Path
) -> None:
    out, documents, _ = made
    with pytest.raises(recipe.UsageError, match="exists"):
        recipe.make(documents, out, tiny(recipe))
    with pytest.raises(recipe.UsageError, match="2 documents, but at least 3"):
        recipe.make(documents[:2], tmp_path / "new", tiny(recipe))
    with pytest.raises(recipe.UsageError, match="windows of 4096 need 8193"):
        recipe.make(documents, tmp_path / "new", tiny(recipe, window=4096))
    assert not (tmp_path / "new").exists()


def test_missing_debian_packages_say_what_to_type(
    recipe: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(recipe, "SWORD_MODULE_FILE", tmp_path / "engWEB2015eb.conf")
    monkeypatch.setattr(recipe, "JARGON_FILE", tmp_path / "jargon.txt.gz")
    assert recipe.main(["--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "apt-get install -y libsword-utils sword-text-web jargon-text" in said
    assert "mod2imp" in said
    assert str(tmp_path / "jargon.txt.gz") in said
    assert not (tmp_path / "out").exists()


def test_text_directory_without_text(recipe: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert recipe.main(["--out", str(tmp_path / "out"), "--text", str(tmp_path)]) == 2
    assert "no *.txt file" in capsys.readouterr().err
    (tmp_path / "latin.txt").write_bytes("caf\u00e9 ".encode("latin-1") * 10)
    assert recipe.main(["--out", str(tmp_path / "out"), "--text", str(tmp_path)]) == 2
    assert "not UTF-8" in capsys.readouterr().err
    assert recipe.main(["--out", str(tmp_path / "out"), "--steps", "0"]) == 2


def test_bible_chapters(recipe: ModuleType) -> None:
    verse = '<div type="x-milestone" subType="x-preverse" {}ID="pv1"/>'
    imp = (
        "$$$[ Module Heading ]\nabout\n$$$Genesis 1:0\n<title>Chapter</title>\n"
        f"$$$Genesis 1:1\n{verse.format('s')}<title>A heading</title>{verse.format('e')}"
        '<w lemma="strong:H1">In</w> the\n beginning<note placement="foot">or, <b>first</b></note>, God.\n'
        "$$$Genesis 1:2\n<q>The</q>  earth.\n$$$Genesis 1:3\n<div/>\n$$$I Samuel 2:1\nHannah prayed.\n"
    )
    assert recipe.bible_documents(imp) == [
        "Genesis 1\nIn the beginning, God.\nThe earth.",
        "I Samuel 2\nHannah prayed.",
    ]


def test_paragraphs_are_unwrapped_and_packed(recipe: ModuleType) -> None:
    table = "   \u250c\u2500\u2510\n   \u2502 cell"
    text = f"   One line\n   goes on.\n\n{table}\n\nTwo.\n \n  Three\n   \u00a0 as verse.\n\nFour"
    assert recipe.plain_documents(text, 23) == [
        "One line goes on.\nTwo.",
        "Three\n\u00a0 as verse.\nFour",
    ]


def test_schedule(recipe: ModuleType) -> None:
    settings = recipe.Settings()
    factors = [recipe.schedule(step, settings) for step in range(settings.steps)]
    assert factors[0] == pytest.approx(1 / 50)
    assert factors[49:836] == [1.0] * 787
    assert factors[1252] == pytest.approx(0.5, abs=2e-3)
    assert 0 < factors[-1] < 2e-3


def test_orthogonalise(recipe: ModuleType) -> None:
    import torch

    torch.manual_seed(0)
    for shape in ((16, 40), (40, 16)):
        values = torch.linalg.svdvals(recipe.orthogonalise(torch.randn(shape)))
        assert values.min() > 0.5
        assert values.max() < 1.5


def test_text_reproduces_the_embedded_files(recipe: ModuleType) -> None:
    """With the Debian packages at hand: tokenizer and texts byte for byte as embedded."""
    from modelexport.assets import demo_documents, demo_model_path

    try:
        documents = recipe.debian_documents(recipe.Settings.document_characters)
    except recipe.UsageError as error:
        pytest.skip(str(error).splitlines()[0])
    assert len(documents) == 1924
    training, heldout = recipe.split_documents(documents, recipe.Settings())
    assert heldout[::2] == demo_documents("heldout")
    assert recipe.calibration_documents(training, recipe.Settings()) == demo_documents("calibration")
    tokenizer = json.loads(recipe.train_tokenizer(training, 2048).to_str())
    assert tokenizer == json.loads((demo_model_path() / "tokenizer.json").read_text(encoding="utf-8"))
