"""What is done with a damaged file: everything that reads one, in this process, up to the first byte written."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelexport.checkpoints.card_metadata import read_card_metadata
from modelexport.checkpoints.gguf.file import encode_header
from modelexport.checkpoints.gguf.tokenizer import read_tokenizer
from modelexport.checkpoints.gguf.tokenizer.restored import restore_tokenizer
from modelexport.checkpoints.staging import staging_directory
from modelexport.checkpoints.staging.journal import Journal, OtherExport, published_inode
from modelexport.cli.diff import print_diff
from modelexport.cli.inspect import print_inspection
from modelexport.cli.report import print_report
from modelexport.cli.summary import reshard_summary, summary
from modelexport.cli.verify import print_verification
from modelexport.exporting import export, prepare
from modelexport.exporting.record import target_of_export
from modelexport.inspection.record.reading import read_record
from modelexport.inspection.report import gather, render
from modelexport.quantization.calibration.text import token_batches_from
from modelexport.recipe import ExportRecipe, ReshardRecipe
from modelexport.resharding import reshard
from modelexport.system.terminal import show
from tests.fuzz._mutations import mutate
from tests.fuzz._seeds import RECIPE, RESUMED, VOCABULARY, interrupted_export, make_seeds, make_tokenizers
from tests.helpers.small_tokenizers import ROWS

_QUANTS = ("none", "keep", "keep", "int8", "int4", "fp8-block", "nvfp4", "mxfp4-wo", "int8-wo")
_FORMATS = ("hf", "hf", "modelopt", "awq", "gptq", "trtllm", "vllm-sharded", "dcp", "megatron", "gguf", "gguf")
_CONTAINERS = ("hf", "trtllm", "vllm-sharded", "dcp", "megatron", "gguf")
_SMALL = ("config.json", "tokenizer.json", "modelexport.json", "hf_quant_config.json", "model.safetensors.index.json")


@dataclass(frozen=True)
class Seed:
    """A directory of sound files, of which one is damaged.

    Attributes:
        files: those that may be.
        operations: what is then done with the copy, by name.
    """

    name: str
    directory: Path
    files: tuple[str, ...]
    operations: Mapping[str, Operation]


Operation = Callable[[Path, Seed, random.Random], None]


@contextlib.contextmanager
def undamaged(seed: Seed, place: Path) -> Iterator[Path]:
    """A copy of a seed's directory, as long as it is needed; files are linked."""
    shutil.copytree(seed.directory, place, copy_function=os.link)
    try:
        yield place
    finally:
        shutil.rmtree(place)


@contextlib.contextmanager
def damaged(seed: Seed, place: Path, rng: random.Random) -> Iterator[Path]:
    """A copy in which one file is damaged."""
    with undamaged(seed, place):
        spoilt = place / rng.choice(seed.files)
        content = mutate(spoilt.name, spoilt.read_bytes(), rng)
        spoilt.unlink()  # the seed's own file stays as it is
        spoilt.write_bytes(content)
        yield place


def make_operations(root: Path) -> list[Seed]:
    """Every seed with what is done with it; the seeds are written below ``root``."""
    seeds = []
    for name, directory in make_seeds(root / "seeds").items():
        files = sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
        small = [file for file in files if file.endswith(_SMALL)]
        seeds.append(Seed(name, directory, (*files, *small, *small), _CHECKPOINT))
    return seeds + _small_files(root)


def _small_files(root: Path) -> list[Seed]:
    """The files that are read on their own."""
    seeds = []

    def add(name: str, content: str, **operations: Operation) -> None:
        directory = root / name.partition(".")[0]
        directory.mkdir()
        (directory / name).write_text(content)
        seeds.append(Seed(name, directory, (name,), operations))

    add("recipe.yaml", RECIPE, recipe=_read_recipe)
    ids = json.dumps({"input_ids": [number % VOCABULARY for number in range(16)]})
    add("text.jsonl", f"{ids}\n" * 4 + '{"text": "abc"}\n', calibration=_read_text)
    source = root / "seeds" / "source"
    home = interrupted_export(source, root / "cut" / "off")
    seeds.append(Seed("journal.jsonl", home, ("journal.jsonl",) * 3, {"resume": _resume, "journal": _read_journal}))
    seeds.append(Seed("README.md", source, ("README.md",), {"card": _read_card}))
    tokenizer = ("tokenizer.json", "tokenizer_config.json")
    seeds.append(Seed("tokenizer", source, tokenizer, {"tokenise": _tokenise, "gguf": _plan_gguf}))
    for name, content in make_tokenizers().items():
        directory = root / "tokenizers" / name
        directory.mkdir(parents=True)
        (directory / "tokenizer.json").write_text(json.dumps(content))
        seeds.append(Seed(f"tokenizer-{name}", directory, ("tokenizer.json",), {"translate": _translate}))
        vocabulary = root / "vocabularies" / name
        vocabulary.mkdir(parents=True)
        values = dict(read_tokenizer(directory, {}, ROWS).values)
        (vocabulary / "model.gguf").write_bytes(encode_header(values, [])[0])
        operations = {"restore": _restore, "translate": _translate}
        seeds.append(Seed(f"vocabulary-{name}", vocabulary, ("model.gguf",), operations))
    return seeds


# ------------------------------------------------------------------ checkpoints


def _inspect(directory: Path, seed: Seed, rng: random.Random) -> None:
    print_inspection(directory, None, as_json=rng.random() < 0.3)


def _export(directory: Path, seed: Seed, rng: random.Random) -> None:
    settings: dict[str, Any] = {"model": str(directory), "quiet": True, "evaluate": False}
    settings |= {"quant": rng.choice(_QUANTS), "format": rng.choice(_FORMATS), "tp": rng.choice((1, 2))}
    if rng.random() < 0.3:
        target_of_export(prepare(ExportRecipe.from_mapping({**settings, "out": str(directory.parent / "out")})))
        return
    result = export(dry_run=True, **settings)
    show(summary(result))
    json.dumps(result.as_json())


def _verify(directory: Path, seed: Seed, rng: random.Random) -> None:
    against = seed.directory.parent / "source" if rng.random() < 0.3 else None
    print_verification(directory, against, as_json=rng.random() < 0.3)


def _diff(directory: Path, seed: Seed, rng: random.Random) -> None:
    a, b = rng.choice(((directory, seed.directory), (seed.directory, directory)))
    print_diff(a, b, None, as_json=rng.random() < 0.3)


def _reshard(directory: Path, seed: Seed, rng: random.Random) -> None:
    grid = {"tp": rng.choice((1, 2)), "pp": 1, "format": rng.choice(_CONTAINERS)}
    result = reshard(checkpoint=str(directory), dry_run=True, **grid)
    show(reshard_summary(result))
    json.dumps(result.as_json())


def _report(directory: Path, seed: Seed, rng: random.Random) -> None:
    if rng.random() < 0.5:
        print_report(directory, None, None, as_json=rng.random() < 0.5)
    else:
        render(gather(directory))


def _record(directory: Path, seed: Seed, rng: random.Random) -> None:
    read_record(directory)


_CHECKPOINT: dict[str, Operation] = {
    "inspect": _inspect,
    "export": _export,
    "verify": _verify,
    "diff": _diff,
    "reshard": _reshard,
    "report": _report,
    "record": _record,
}


# ------------------------------------------------------------------ small files


def _read_recipe(directory: Path, seed: Seed, rng: random.Random) -> None:
    kind = rng.choice((ExportRecipe, ExportRecipe, ReshardRecipe))
    kind.load(directory / "recipe.yaml")


def _read_text(directory: Path, seed: Seed, rng: random.Random) -> None:
    tokenizer = seed.directory.parent / "seeds" / "source"
    token_batches_from(directory / "text.jsonl", tokenizer, vocabulary=VOCABULARY, samples=2, length=8)


def _tokenise(directory: Path, seed: Seed, rng: random.Random) -> None:
    token_batches_from(None, directory, vocabulary=VOCABULARY, samples=1, length=8)


def _plan_gguf(directory: Path, seed: Seed, rng: random.Random) -> None:
    export(model=str(directory), dry_run=True, quant="none", format="gguf", quiet=True)


def _translate(directory: Path, seed: Seed, rng: random.Random) -> None:
    encode_header(dict(read_tokenizer(directory, {"eos_token_id": [1, 2]}, rng.choice((264, ROWS))).values), [])


def _restore(directory: Path, seed: Seed, rng: random.Random) -> None:
    restore_tokenizer(directory / "model.gguf")


def _read_card(directory: Path, seed: Seed, rng: random.Random) -> None:
    read_card_metadata(directory)


def _read_journal(directory: Path, seed: Seed, rng: random.Random) -> None:
    path = directory / "journal.jsonl"
    published_inode(path)
    Journal.join(path).close()
    with contextlib.suppress(OtherExport):
        Journal.open(path, {"a": {"b": 1}}).close()


def _resume(directory: Path, seed: Seed, rng: random.Random) -> None:
    """What is taken up again ends in an error, or in the bytes that an export without a break writes."""
    out = directory.parent / f"{directory.name}-out"
    source = seed.directory.parent.parent / "seeds" / "source"
    home = shutil.copytree(directory, staging_directory(out))
    try:
        export(model=str(source), out=str(out), **RESUMED)
        weights = (source.parent / "int8" / "model.safetensors").read_bytes()
        assert (out / "model.safetensors").read_bytes() == weights, "another checkpoint than without a break"
    finally:
        shutil.rmtree(home, ignore_errors=True)
        shutil.rmtree(out, ignore_errors=True)


@contextlib.contextmanager
def quiet() -> Iterator[io.TextIOWrapper]:
    """What takes up what is printed on stdout, in strict UTF-8."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        yield out
