"""Tied embeddings that are there twice: equal copies are dropped, different ones are a contradiction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from modelexport.errors import CheckpointError
from modelexport.inspection.diff import diff_checkpoints
from modelexport.models import ties
from modelexport.models.opening import open_model
from modelexport.models.ties import check_ties
from modelexport.resharding import reshard
from tests.helpers.models import copy_checkpoint, make_llama

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def with_head(target: Path, change: Any = None, **shape: Any) -> Path:
    """A model of tied embeddings with a head of its own: the embedding's copy, changed."""

    def add(tensors: dict[str, torch.Tensor]) -> None:
        head = tensors[EMBEDDING].clone()
        tensors[HEAD] = head if change is None else change(head)

    return copy_checkpoint(make_llama(**{"tied": True, **shape}), target, tensors=add)


def last_bit(head: torch.Tensor) -> torch.Tensor:
    head.view(torch.int16)[-1, -1] ^= 1
    return head


def test_an_equal_copy_is_dropped(tmp_path: Path) -> None:
    source = with_head(tmp_path / "source")
    check_ties(open_model(source))
    result = reshard(checkpoint=str(source), out=str(tmp_path / "out"), tp=2, quiet=True)
    assert list(result.left_out) == [HEAD]
    assert HEAD not in open_model(tmp_path / "out").infos
    for a, b in ((source, tmp_path / "out"), (tmp_path / "out", source)):
        found = diff_checkpoints(a, b)
        assert found.equal, "one copy more is no other model"
        assert list(found.left_out) == [HEAD]


@pytest.mark.parametrize(
    "change", [last_bit, lambda head: head[:-1].clone(), lambda head: head.float(), lambda head: -head]
)
def test_a_head_that_differs(change: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ties, "_CHUNK_BYTES", 1000)
    source = with_head(tmp_path / "source", change)
    with pytest.raises(CheckpointError, match=rf"{HEAD} differs from {EMBEDDING}; set tie_word_embeddings to false"):
        check_ties(open_model(source))
    with pytest.raises(CheckpointError, match="ties the embeddings"):
        reshard(checkpoint=str(source), out=str(tmp_path / "out"), quiet=True)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    [found] = diff_checkpoints(source, make_llama(tied=True)).differences
    assert (found.tensor, found.what) == (HEAD, "only in A")


def test_nothing_is_read_where_nothing_is_tied_or_there_is_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> bool:
        raise AssertionError("it was read")

    monkeypatch.setattr(ties, "_same_bytes", never)
    check_ties(open_model(make_llama()))
    check_ties(open_model(make_llama(tied=True)))
    with pytest.raises(AssertionError, match="it was read"):
        check_ties(open_model(with_head(tmp_path / "source")))


def test_a_missing_embedding_is_for_others_to_say(tmp_path: Path) -> None:
    def swap(tensors: dict[str, torch.Tensor]) -> None:
        tensors[HEAD] = tensors.pop(EMBEDDING)

    source = copy_checkpoint(make_llama(tied=True), tmp_path / "source", tensors=swap)
    check_ties(open_model(source))
    with pytest.raises(CheckpointError, match=f"{EMBEDDING} is missing"):
        reshard(checkpoint=str(source), out=str(tmp_path / "out"), quiet=True)
