"""Any model, any number format, any route through formats and parallelisms: every stop holds the same model.

More examples: ``pytest tests/resharding/test_reshard_matrix.py --hypothesis-profile=search``.
"""

from __future__ import annotations

import functools
import itertools
import shutil
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from modelexport.checkpoints.raw_io import same_bytes
from modelexport.checkpoints.safetensors.file import Reader
from modelexport.errors import CheckpointError, ModelExportError, PlanError, RankFailedError, UsageError
from modelexport.exporting import export
from modelexport.inspection.diff import diff_checkpoints
from modelexport.inspection.verify import verify_checkpoint
from modelexport.models import checkpoint_formats as formats
from modelexport.models.opening import open_model
from modelexport.resharding import reshard
from tests.exporting.test_export import digests
from tests.helpers.models import LlamaShape, make_llama

pytestmark = pytest.mark.timeout(3600)

SHARE = settings().max_examples  # 100, or the profile's
FORMATS = ("dcp", "hf", "megatron", "trtllm", "vllm-sharded")
REFUSALS = (PlanError, UsageError, CheckpointError, RankFailedError)


@dataclass(frozen=True)
class Stop:
    format: str
    tp: int
    pp: int
    ep: int


@st.composite
def shapes(draw: st.DrawFn) -> LlamaShape:
    model_type = draw(st.sampled_from(("llama", "mixtral", "phi3", "qwen2", "mistral")))
    heads = draw(st.sampled_from((8, 4, 6, 2)))
    own = model_type == "llama"
    return LlamaShape(
        model_type=model_type,
        hidden=96 if heads == 6 else draw(st.sampled_from((32, 64, 96))),
        heads=heads,
        kv_heads=draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0])),
        head_dim=draw(st.sampled_from((16, 32))),
        intermediate=draw(st.sampled_from((64, 128, 160, 256))),
        vocab=draw(st.integers(40, 300)),
        layers=draw(st.sampled_from((3, 2, 1))),
        attention_bias=own and draw(st.booleans()),
        mlp_bias=own and draw(st.booleans()),
        tied=draw(st.booleans()),
        dtype=draw(st.sampled_from(("bfloat16", "float16", "float32"))),
        max_shard_size=draw(st.sampled_from(("5GB", "30KB"))),
        experts=draw(st.sampled_from((2, 4, 6))),
        seed=draw(st.integers(0, 3)),
    )


def fits(shape: LlamaShape, quant: str, stop: Stop) -> bool | None:
    """Whether a model can be cut so, written down a second time; None where its number format has a say too."""
    kv_heads, tp = shape.kv_heads, stop.tp
    experts = shape.experts if shape.model_type == "mixtral" else 0
    cut = not shape.heads % tp and not shape.intermediate % tp and (not kv_heads % tp or not tp % kv_heads)
    if not cut or stop.pp > shape.layers or (stop.ep > 1 and (not experts or experts % stop.ep)):
        return False
    if quant != "none":
        return None if stop.format in ("hf", "dcp") else False
    if stop.format == "trtllm":
        return not tp % stop.ep and not (experts and shape.dtype == "float16")
    padded = -(-shape.vocab // 64) * 64
    return stop.format != "vllm-sharded" or (stop.pp == 1 and stop.ep in (1, tp) and not padded % tp)


EVERY_STOP = [
    Stop(name, tp, pp, ep) for name, tp, pp, ep in itertools.product(FORMATS, (1, 2, 3, 4, 8), (1, 2, 3), (1, 2, 3))
]


@st.composite
def journeys(draw: st.DrawFn) -> tuple[LlamaShape, str, list[Stop]]:
    """A model, a number format and stops, most of which the model can go to."""
    shape = draw(shapes())
    quant = draw(st.sampled_from(("none", "none", "none", "int4", "fp8", "int8")))
    possible = st.sampled_from([stop for stop in EVERY_STOP if fits(shape, quant, stop) is not False])
    stops = st.one_of(possible, possible, possible, st.sampled_from(EVERY_STOP))
    return shape, quant, draw(st.lists(stops, min_size=1, max_size=4))


def refused(checkpoint: Path, out: Path, **how: object) -> ModelExportError | None:
    """Reshard; returns what was said where that was refused. Whatever else is raised is a defect."""
    try:
        reshard(checkpoint=str(checkpoint), out=str(out), quiet=True, **how)
    except ModelExportError as error:
        refusal = error
    else:
        return None
    assert isinstance(refusal, REFUSALS)
    assert len(str(refusal)) > 20
    assert not out.exists()
    return refusal


@contextmanager
def room() -> Iterator[Path]:
    """A directory that is gone afterwards; one for each example."""
    with tempfile.TemporaryDirectory(prefix="modelexport-matrix-") as path:
        yield Path(path)


def test_no_format_is_forgotten() -> None:
    """But GGUF and MXFP4's, which are for one rank: their own tests reshard them."""
    assert {*FORMATS, "gguf", "mxfp4"} == set(formats.formats())


@pytest.mark.extended
@settings(max_examples=max(1, SHARE // 4))
@given(journeys())
def test_every_stop_is_the_same_model(journey: tuple[LlamaShape, str, list[Stop]]) -> None:
    shape, quant, route = journey
    with room() as directory:
        start = directory / "start"
        group = {"group_size": 32} if quant == "int4" else {}
        export(model=str(make_llama(**vars(shape))), quant=quant, out=str(start), quiet=True, evaluate=False, **group)
        at = start
        for number, stop in enumerate(route):
            out = directory / f"stop-{number}"
            possible = fits(shape, quant, stop)
            refusal = refused(at, out, max_shard_bytes=40_000, **vars(stop))
            if refusal is not None:
                assert possible is not True, refusal
                assert not isinstance(refusal, RankFailedError), "it could have been known before"
                assert not list(directory.glob(".*")), "nothing stays of what could not begin"
                event("refused")
                continue
            assert possible is not False, "it should have been refused"
            event(f"to {stop.format}")
            assert diff_checkpoints(start, out, threads=1).differences == []
            assert verify_checkpoint(out, threads=1).problems == []
            at = out
        reshard(checkpoint=str(at), out=str(directory / "end"), quiet=True)
        assert digests(directory / "end") == digests(start)


# ------------------------------------------------------------------ damage


@functools.cache
def sharded(name: str) -> Path:
    """A checkpoint of that format, of two ranks at least, without a record that would give changes away."""
    home = Path(tempfile.mkdtemp(prefix="modelexport-damage-", dir=make_llama().parent))
    source = make_llama(hidden=64, heads=4, kv_heads=1, head_dim=16, intermediate=128, vocab=99, tied=True)
    pp = 1 if name == "vllm-sharded" else 2
    reshard(checkpoint=str(source), out=str(home / name), format=name, tp=2, pp=pp, quiet=True)
    return home / name


def spoil(directory: Path, data: st.DataObject) -> str:
    """Do to one file what happens to files; returns what was done."""
    path = data.draw(st.sampled_from(sorted(directory.iterdir())), label="file")
    content = bytearray(path.read_bytes())
    how = data.draw(st.sampled_from(("flip", "flip", "cut", "grow", "zeros", "swap", "delete")), label="how")
    if how == "flip":
        # Where damage is not just another weight: the header, or all of a file that is one.
        size = struct.unpack("<Q", content[:8])[0] + 8 if path.suffix == ".safetensors" else min(len(content), 4000)
        content[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif how == "cut":
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    elif how == "grow":
        content += b"\0x"
    elif how == "zeros":
        content = bytearray(len(content))
    elif how == "swap":
        other = data.draw(st.sampled_from(sorted(directory.iterdir())), label="with")
        content, mine = bytearray(other.read_bytes()), content
        other.write_bytes(mine)
    path.write_bytes(content)
    if how == "delete":
        path.unlink()
    return f"{how} {path.name}"


@settings(max_examples=max(1, SHARE))
@given(st.sampled_from(FORMATS), st.data())
def test_damage_is_said_in_a_sentence(name: str, data: st.DataObject) -> None:
    with room() as directory:
        damaged, out = directory / "damaged", directory / "out"
        shutil.copytree(sharded(name), damaged)
        what = spoil(damaged, data)
        if refused(damaged, out) is not None:
            event("refused")
            return
        event("read")
        before, after = open_model(damaged), open_model(out)  # changed, and whole: what is there was moved as it is
        assert set(before.infos) - set(before.left_out) >= set(after.infos), what
        with Reader(before) as old, Reader(after) as new:
            for key, info in after.infos.items():
                assert same_bytes(old.read(before.infos[key]), new.read(info)), f"{what}: {key}"


def test_ranks_of_two_runs(tmp_path: Path) -> None:
    shape = {"hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate": 128}
    for name in ("hf", "trtllm", "vllm-sharded"):
        ours, theirs = tmp_path / f"{name}-ours", tmp_path / f"{name}-theirs"
        for seed, out in enumerate((ours, theirs)):
            reshard(checkpoint=str(make_llama(**shape, seed=seed)), out=str(out), format=name, tp=2, quiet=True)
        last = max(path.name for path in ours.glob("*.safetensors"))
        shutil.copyfile(theirs / last, ours / last)
        with pytest.raises(RankFailedError, match=rf"{last} has other values for .*norm.*of different runs"):
            reshard(checkpoint=str(ours), out=str(tmp_path / "out"), quiet=True)
        assert not (tmp_path / "out").exists()
        assert any("other values" in problem for problem in verify_checkpoint(ours).problems)
        shutil.rmtree(tmp_path / ".out.modelexport", ignore_errors=True)


def test_a_damaged_record_is_noticed_before_any_work(tmp_path: Path) -> None:
    start = tmp_path / "start"
    export(model=str(make_llama()), quant="none", out=str(start), quiet=True, evaluate=False)
    (start / "modelexport.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"modelexport\.json: is not valid JSON"):
        reshard(checkpoint=str(start), out=str(tmp_path / "out"), quiet=True)
    assert [path.name for path in tmp_path.iterdir()] == ["start"]


def test_a_rank_file_without_the_model_does_not_come_along(tmp_path: Path) -> None:
    run = tmp_path / "run"
    reshard(checkpoint=str(make_llama()), out=str(run), format="dcp", tp=2, quiet=True)
    (run / "__7_0.distcp").write_bytes(b"an optimiser's state")
    reshard(checkpoint=str(run), out=str(tmp_path / "out"), quiet=True)
    assert not list((tmp_path / "out").glob("*.distcp"))


@pytest.mark.parametrize("tp", [100_000, 2_000_000_000, 10**30])
def test_absurd_parallelisms_are_answered_at_once(tp: int, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="The largest that does: tp 4, pp 2, ep 1"):
        reshard(checkpoint=str(make_llama()), out=str(tmp_path / "out"), tp=tp, pp=10**12, ep=10**12, quiet=True)


def test_targets_that_cannot_be(tmp_path: Path) -> None:
    source = str(make_llama())
    for out, text in (("", "--out is empty"), ("/", "root directory"), ("a\0b", "null byte"), ("n" * 300, "too long")):
        with pytest.raises(UsageError, match=text):
            reshard(checkpoint=source, out=out if out in ("", "/") else f"{tmp_path}/{out}", quiet=True)
    for checkpoint in ("~no-such-user-here", "a\0b"):
        with pytest.raises(CheckpointError, match="does not exist"):
            reshard(checkpoint=checkpoint, out=str(tmp_path / "out"), quiet=True)
    with pytest.raises(UsageError, match="no such directory"):
        export(model="~no-such-user-here", out=str(tmp_path / "out"))
    assert not list(tmp_path.iterdir())


def test_links_and_strange_names(tmp_path: Path) -> None:
    """As in a hub's cache: a directory of links into another. Names that are no UTF-8 are names too."""
    start, blobs, snapshot = tmp_path / "start", tmp_path / "blobs", tmp_path / "sn\u00e4p \u2603"
    export(model=str(make_llama()), quant="int8", out=str(start), quiet=True, evaluate=False)
    blobs.mkdir()
    snapshot.mkdir()
    for number, path in enumerate(sorted(start.iterdir())):
        shutil.copyfile(path, blobs / str(number))
        (snapshot / path.name).symlink_to(f"../blobs/{number}")
    between = tmp_path / "be\udcfftween"
    reshard(checkpoint=str(snapshot), out=str(between), format="dcp", tp=2, quiet=True)
    reshard(checkpoint=str(between), out=str(tmp_path / "end"), quiet=True)
    assert digests(tmp_path / "end") == digests(start)


@pytest.mark.parametrize("name", FORMATS)
def test_the_same_parallelism_again_is_the_same_directory(name: str, tmp_path: Path) -> None:
    start = sharded(name)
    pp = 1 if name == "vllm-sharded" else 2
    target = tmp_path / "again"
    shutil.copytree(make_llama(), target)  # of another model, to be replaced
    reshard(checkpoint=str(start), out=str(target), format=name, tp=2, pp=pp, overwrite=True, quiet=True)
    assert digests(target) == digests(start)
