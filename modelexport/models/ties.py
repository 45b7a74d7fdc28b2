"""Tied embeddings are written once, and what is dropped must be what is kept; or they are parted."""

from __future__ import annotations

from dataclasses import replace

from modelexport.checkpoints import raw_io
from modelexport.checkpoints.replicas import chunks
from modelexport.checkpoints.safetensors.file import Checkpoint, Reader, TensorInfo
from modelexport.checkpoints.safetensors.placement import itemsize
from modelexport.errors import CheckpointError
from modelexport.models.architecture import family_of, ties_embeddings
from modelexport.sharding.boxes import extent

_CHUNK_BYTES = 8 << 20


def check_ties(checkpoint: Checkpoint) -> None:
    """Compare a second copy of tied embeddings, where a checkpoint has one, with the first; else nothing is read.

    Raises:
        CheckpointError: they differ, so that config.json and the weights contradict each other.
    """
    family = family_of(checkpoint.config or {}, checkpoint.infos)
    if not ties_embeddings(checkpoint.config, checkpoint.infos):
        return
    heads, embeddings = (
        [
            checkpoint.infos[f"{m.path}.weight"]
            for m in modules
            if m.kind == kind and f"{m.path}.weight" in checkpoint.infos
        ]
        for modules, kind in ((family.after, "head"), (family.before, "embedding"))
    )
    for head, embedding in zip(heads, embeddings, strict=False):
        check_tied(checkpoint, head, embedding)


def untie(checkpoint: Checkpoint) -> Checkpoint:
    """The same model, with a head that is a tensor of its own: a tied one is read where the embedding lies.

    Raises:
        CheckpointError: there is a head already, which differs from the embedding that it is tied to.
        PlanError: the architecture is unknown.
    """
    config = checkpoint.config or {}
    if not ties_embeddings(config, checkpoint.infos):
        return checkpoint
    check_ties(checkpoint)
    family = family_of(config, checkpoint.infos)
    infos, placements, computed = dict(checkpoint.infos), dict(checkpoint.placements), dict(checkpoint.computed)
    heads, embeddings = (
        [f"{m.path}.weight" for m in modules if m.kind == kind]
        for modules, kind in ((family.after, "head"), (family.before, "embedding"))
    )
    for head, embedding in zip(heads, embeddings, strict=True):
        if head not in infos and embedding in infos:
            infos[head] = replace(infos[embedding], name=head)
            if embedding in placements:
                placements[head] = placements[embedding]
            if embedding in computed:
                computed[head] = computed[embedding]
    own = {**config, "tie_word_embeddings": False}
    return replace(checkpoint, infos=infos, placements=placements, computed=computed, config=own)


def check_tied(checkpoint: Checkpoint, head: TensorInfo, embedding: TensorInfo) -> None:
    """Compare the head of a model whose config ties it to the embedding with that embedding. Reads both.

    Raises:
        CheckpointError: they differ, so that config.json and the weights contradict each other.
    """
    if not _same_bytes(checkpoint, head, embedding):
        raise CheckpointError(
            f"{checkpoint.directory}: config.json ties the embeddings, but {head.name} differs from "
            f"{embedding.name}; set tie_word_embeddings to false to keep both"
        )


def _same_bytes(checkpoint: Checkpoint, a: TensorInfo, b: TensorInfo) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    with Reader(checkpoint) as reader:
        for box in chunks(a, _CHUNK_BYTES):
            left, right = (raw_io.empty(extent(box), itemsize(info)) for info in (a, b))
            reader.read_box(a, box, left)
            reader.read_box(b, box, right)
            if not raw_io.same_bytes(left, right):
                return False
    return True
