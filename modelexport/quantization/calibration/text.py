"""The tokens that a model is calibrated on: windows of a text, the same ones whenever they are asked for again."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TextIO

from modelexport.assets import Split, demo_documents
from modelexport.errors import CheckpointError, UsageError, error_text, quoted
from modelexport.quantization.calibration.images import shows_images
from modelexport.quantization.calibration.rows import COLUMNS, Chat, read_row
from modelexport.settings import with_weight
from modelexport.system.json_values import JsonValues
from modelexport.system.small_files import LARGEST_JSON, check_regular, has_file, open_regular, read_json, write_small

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "DATASET",
    "LENGTH",
    "OWN_TEXT",
    "SAMPLES",
    "TOKENIZER_FILES",
    "TextShare",
    "TokenDocuments",
    "TokenizerFiles",
    "file_of",
    "has_tokenizer",
    "load_tokenizer",
    "rendered",
    "shares",
    "token_batches_from",
]

SAMPLES, LENGTH = 64, 256

_POOL = 8
"""Windows are drawn from the first tokens of a text, this many times what is needed: a text may be a whole corpus."""
_TOKENIZER_CLASS = re.compile("Tokenizer|Backend")
_BLOCK = 1 << 18  # characters of a plain text that are tokenised at a time
_LONGEST_LINE = 1 << 22
_LONGEST_OBJECT = 1 << 28
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")
_LINES, _TABLE = ".jsonl", ".parquet"
_ROWS_AT_ONCE = 64
CALIBRATION = "--calib"
_THINK, _THOUGHT = "<think>", "</think>"
_REASONING = ("reasoning_content", "reasoning", "thinking")
DATASET = "hf:"
"""What the name of a data set begins with: ``hf:NAME``, ``hf:NAME:SPLIT`` or ``hf:NAME:CONFIGURATION:SPLIT``."""
OWN_TEXT = "modelexport's own text"
"""The name that records have for the text of the package."""


@dataclass(frozen=True)
class TokenizerFiles:
    """A tokenizer whose files are on no disk: made from what is known of it.

    Attributes:
        directory: of the model.
        files: name -> content; none where it could not be made.
        missing: why it could not.
    """

    directory: Path
    files: Mapping[str, bytes]
    missing: str = ""


@dataclass(frozen=True)
class TextShare:
    """One of the texts that a model is calibrated on.

    Attributes:
        text: as :func:`file_of` takes it.
        weight: of all texts' weights.
        samples: windows or rows with images that are taken from it.
        of: samples of all texts together.
    """

    text: str | None
    weight: float
    samples: int
    of: int

    @property
    def name(self) -> str:
        """The name in records: of a file its own, without its directory."""
        if self.text is None:
            return OWN_TEXT
        return self.text if self.text.startswith(DATASET) else Path(self.text).name


def shares(texts: Sequence[str], samples: int) -> list[TextShare]:
    """Divides samples among texts by their weights.

    Each has the whole part of its share; what is left over goes, one each, to the largest fractions, and of equal ones
    to the text that is named first.

    Args:
        texts: ``FILE`` or ``FILE=WEIGHT``, weights above 0; none: the text of the package.
        samples: of all together.

    Raises:
        UsageError: a weight is no number above 0, a text is named twice, or there is no sample for it.
    """
    if not texts:
        return [TextShare(None, 1.0, samples, samples)]
    given = [with_weight(text, CALIBRATION, lambda name: os.path.lexists(os.path.expanduser(name))) for text in texts]
    names = [name for name, _ in given]
    for name, weight in given:
        if weight < 0:
            raise UsageError(f"{CALIBRATION} {name}={weight:g}: a weight above 0 is needed, e.g. {name}=0.5")
        if names.count(name) > 1:
            raise UsageError(f"{CALIBRATION} {name} is given twice: give it once, with a weight: {name}=2")
    total = math.fsum(weight for _, weight in given)
    parts = [weight / total * samples for _, weight in given]
    counts = [math.floor(part) for part in parts]
    fractions = sorted(range(len(parts)), key=lambda place: counts[place] - parts[place])
    for place in fractions[: samples - sum(counts)]:
        counts[place] += 1
    for (name, weight), count in zip(given, counts, strict=True):
        if count == 0:
            raise UsageError(
                f"{CALIBRATION} {name}: with a weight of {weight:g} among {total:g} it has none of {samples} samples: "
                f"give --calib-samples {math.ceil(total / weight)} or more, or leave it out"
            )
    return [TextShare(name, weight, count, samples) for (name, weight), count in zip(given, counts, strict=True)]


def file_of(text: str | os.PathLike[str] | None, flag: str = CALIBRATION) -> Path | None:
    """The file that a text is in; None for a data set and for the text of the package.

    Raises:
        UsageError: there is no such file, or nothing in it; or it is a data set, and the package that reads these is
            not installed.
    """
    if text is None:
        return None
    if str(text).startswith(DATASET):
        _dataset(str(text), flag)
        _require("datasets", "data sets", f"{flag} {text}")
        return None
    path = Path(os.path.expanduser(text))
    what = "no such file"
    if os.path.lexists(path):
        check_regular(path, label=f"{flag} {path}", error=UsageError)
        what = "is empty" if path.stat().st_size == 0 else ""
    if what:
        raise UsageError(
            f'{flag} {path}: {what}; give a text, a .jsonl or .parquet file with "text", "messages" or "input_ids", or '
            f"a data set of the hub as {DATASET}NAME:SPLIT"
        )
    if path.suffix == _TABLE:
        _require("pyarrow", "parquet", f"{flag} {path}")
    return path


def _require(package: str, what: str, label: str) -> None:
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        raise UsageError(f"{label}: the package that reads {what} is missing: pip install {package}")


def _dataset(text: str, flag: str) -> tuple[str, str | None, str]:
    """Name, configuration and split of a data set."""
    name, *further = text.removeprefix(DATASET).split(":")
    if not name or len(further) > 2 or not all(further):
        spelled = ", or ".join(DATASET + form for form in ("NAME", "NAME:SPLIT", "NAME:CONFIGURATION:SPLIT"))
        raise UsageError(f"{flag} {text}: a data set is {spelled}")
    return name, further[0] if len(further) == 2 else None, further[-1] if further else "train"


def token_batches_from(
    text: str | os.PathLike[str] | None,
    tokenizer: str | os.PathLike[str] | TokenizerFiles,
    *,
    vocabulary: int,
    samples: int = SAMPLES,
    length: int = LENGTH,
    seed: int = 0,
    share: float = 1.0,
) -> Tensor:
    """Windows of a text that do not overlap, drawn by a seed: int64 ``[samples, length]``.

    Args:
        text: a plain text in UTF-8; a ``.jsonl`` file with an object a line that has ``"text"``, a chat or
            ``"input_ids"`` (see :mod:`~modelexport.quantization.calibration.rows`); a ``.parquet`` file, or a data set
            (see :data:`DATASET`), with such rows, of which no more is read than is needed; None: the text that comes
            with the package.
        tokenizer: directory that holds the model's tokenizer, or its files; not opened where every line gives
            ``input_ids``. Before each document stands its beginning-of-text token, or its end-of-text token, if it has
            one.
        vocabulary: rows of the model's embedding. Tokens of a text beyond it (tokenizers may know more than the model)
            are folded into it; ``input_ids`` beyond it are refused.
        samples, length: how many windows, of how many tokens.
        seed: which windows; the same whenever text, tokenizer and numbers are.
        share: of all samples that these are, for the message that there are too few tokens.

    Raises:
        UsageError: no such file or data set, a line that is not as above, no tokenizer, or fewer tokens than asked
            for.
        CheckpointError: a tokenizer that cannot be loaded.
    """
    import torch

    for name, value in (("samples", samples), ("length", length)):
        if value < 1:
            raise UsageError(f"--calib-{name} {value}: at least 1 is needed")
    needed = samples * length
    place = tokenizer if isinstance(tokenizer, TokenizerFiles) else Path(tokenizer)
    documents = TokenDocuments(text, place, vocabulary)
    ids = documents.first(_POOL * needed)
    if len(ids) < needed:
        raise UsageError(
            f"{documents.label} has {len(ids):,} tokens, but {samples} samples of {length} are {needed:,}: give a "
            f"longer text with --calib, or ask for fewer samples (--calib-samples {int(len(ids) // length / share)})"
            if len(ids) >= length
            else f"{documents.label} has {len(ids):,} tokens, but a single sample of {length} needs as many: give a "
            f"longer text with --calib, or shorter samples with --calib-length"
        )
    windows = torch.tensor(ids[: len(ids) // length * length], dtype=torch.int64).view(-1, length)
    chosen = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))[:samples]
    return windows[chosen.sort().values]


class TokenDocuments:
    """The token ids of one document, or of one block of a long one, after the other.

    Arguments as for :func:`token_batches_from`; ``split`` is which text of the package, ``flag`` names ``text`` to
    people.

    Attributes:
        directory: of the tokenizer, or of the model that its files were made for.
        label: what the text is, for people.
        documents: how many have been begun so far.
    """

    def __init__(
        self,
        text: str | os.PathLike[str] | None,
        tokenizer: Path | TokenizerFiles,
        vocabulary: int,
        *,
        split: Split = "calibration",
        flag: str = CALIBRATION,
    ) -> None:
        self.path = file_of(text, flag)
        self.dataset = str(text) if text is not None and self.path is None else None
        kind = {"calibration": "calibration", "heldout": "held-out"}[split]
        self.label = f"the {kind} text of the package" if text is None else f"{flag} {self.path or text}"
        self.split, self.flag = split, flag
        self.place = tokenizer
        self.directory = tokenizer.directory if isinstance(tokenizer, TokenizerFiles) else tokenizer
        self.vocabulary = vocabulary
        self.documents = 0
        self._tokenizer: Any = None

    def check(self) -> None:
        """Refuse, before anything heavy is imported, a text that is plainly to be tokenised where nothing can do so.

        Raises:
            UsageError: there is no tokenizer.
        """
        is_plain = self.dataset is None and (self.path is None or self.path.suffix not in (_LINES, _TABLE))
        if is_plain and not has_tokenizer(self.place):
            raise self._no_tokenizer()

    def _no_tokenizer(self) -> UsageError:
        missing = self.place.missing if isinstance(self.place, TokenizerFiles) else ""
        why = f" ({missing})" if missing else ""
        return UsageError(
            f"{self.directory} has no tokenizer{why}, which is needed to read {self.label}: copy the model's tokenizer "
            f'files there, or give {self.flag} FILE.jsonl with a list of "input_ids" on each line'
        )

    def first(self, tokens: int) -> list[int]:
        """The documents in a row, until there are so many tokens, or some more."""
        ids: list[int] = []
        for document in self:
            ids += document
            if len(ids) >= tokens:
                break
        return ids

    def __iter__(self) -> Iterator[list[int]]:
        """Tokenised as they are asked for."""
        table = self.path if self.path is not None and self.path.suffix == _TABLE else None
        if table is not None or self.dataset is not None:
            for number, row in enumerate(self._table(table) if table is not None else self._streamed(), 1):
                where = f"{self.label}, row {number}"
                if table is not None and shows_images(row):
                    raise UsageError(f"{where} shows images, which are read of {_LINES} files: leave out such rows")
                yield self._row(row, where)
            return
        if self.path is None:
            for document in demo_documents(self.split):
                yield self._tokenise(document)
            return
        try:
            with TextIOWrapper(open_regular(self.path, label=self.label, error=UsageError), encoding="utf-8") as file:
                yield from self._objects(file) if self.path.suffix == _LINES else self._blocks(file)
        except UnicodeDecodeError as error:
            raise UsageError(f"{self.label} is not UTF-8 text: {error}") from error
        except OSError as error:
            raise UsageError(f"{self.label} cannot be read: {error.strerror or error}") from error

    def _blocks(self, file: TextIO) -> Iterator[list[int]]:
        first = True
        while block := _whole_lines(file):
            yield self._tokenise(block, begins=first)
            first = False

    def _objects(self, file: TextIO) -> Iterator[list[int]]:
        number = 0
        while line := file.readline(_LONGEST_OBJECT):
            number += 1
            where = f"{self.label}, line {number}"
            if len(line) == _LONGEST_OBJECT:
                raise UsageError(f"{where} has {_LONGEST_OBJECT:,} characters or more: one document a line is needed")
            if line.strip():
                yield self._line(line, where)

    def _line(self, line: str, where: str) -> list[int]:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{where} is not JSON: {error}") from error
        return self._row(value, where)

    def _streamed(self) -> Iterator[Any]:
        """Rows of the data set as they are asked for: it may be larger than the disk."""
        name, configuration, split = _dataset(str(self.dataset), self.flag)
        datasets: Any = importlib.import_module("datasets")
        if hasattr(datasets, "config"):  # older versions run what a data set brings along, or ask whether to
            datasets.config.HF_DATASETS_TRUST_REMOTE_CODE = False
        try:
            yield from datasets.load_dataset(name, configuration, split=split, streaming=True)
        except Exception as error:  # of any kind: the hub's, the network's, a parser's
            raise UsageError(f"{self.label}: cannot be read: {type(error).__name__}: {error_text(error)}") from error

    def _table(self, path: Path) -> Iterator[Any]:
        """Rows of a parquet file, some at a time, of the columns that say something; of all where none does."""
        parquet: Any = importlib.import_module("pyarrow.parquet")
        with open_regular(path, label=self.label, error=UsageError) as file:
            try:
                table = parquet.ParquetFile(file)
                columns = [name for name in table.schema_arrow.names if name in COLUMNS]
                for batch in table.iter_batches(batch_size=_ROWS_AT_ONCE, columns=columns or None):
                    yield from batch.to_pylist()
            except Exception as error:  # of any kind: pyarrow has its own
                what = f"{type(error).__name__}: {error_text(error)}"
                raise UsageError(f"{self.label}: cannot be read as parquet: {what}") from error

    def _row(self, value: Any, where: str) -> list[int]:
        if shows_images(value) and not isinstance(value.get("text"), str):
            if self.flag != CALIBRATION:
                raise UsageError(f"{where} shows images, and {self.flag} is of text alone: leave out such rows")
            return []  # a sample of its own
        row = read_row(value, where)
        if isinstance(row, str):
            return self._tokenise(row)
        if isinstance(row, Chat):
            return self._chat(row, where)
        wrong = [token for token in row if not 0 <= token < self.vocabulary]
        if wrong:
            raise UsageError(f"{where}: token {wrong[0]} is not in the model's vocabulary of {self.vocabulary}")
        self.documents += 1
        return row

    def _chat(self, chat: Chat, where: str) -> list[int]:
        """A chat of text alone, as the model's template has it, and with its thoughts: see :func:`rendered`."""
        if self._tokenizer is None:
            self._tokenizer = self._load()
        if not getattr(self._tokenizer, "chat_template", None):
            if chat.plain is not None:
                return self._tokenise(chat.plain)
            raise UsageError(f"{where} is a chat, and the tokenizer in {self.directory} has no chat template")
        self.documents += 1
        try:
            texts = list(rendered(self._tokenizer, chat.messages, chat.tools))
        except Exception as error:  # of any kind: templates have their own
            raise UsageError(f"{where}: the chat template refuses it: {error_text(error)}") from error
        # The template writes what a text begins with; verbose as in _tokenise.
        encoded = [self._tokenizer.encode(text, add_special_tokens=False, verbose=False) for text in texts]
        return [token % self.vocabulary for ids in encoded for token in ids]

    def _tokenise(self, text: str, *, begins: bool = True) -> list[int]:
        self.documents += begins
        if self._tokenizer is None:
            self._tokenizer = self._load()
        start = self._tokenizer.bos_token_id
        if start is None:
            start = self._tokenizer.eos_token_id
        ids = [] if start is None or not begins else [start]
        # verbose=False: that the text exceeds the model's context is why it is cut into windows.
        ids += self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return [token % self.vocabulary for token in ids]

    def _load(self) -> Any:
        if not has_tokenizer(self.place):
            raise self._no_tokenizer()
        return load_tokenizer(self.place)


def rendered(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
) -> Iterator[str]:
    """Yields a chat as a model sees it: by its template, and up to each answer whose thoughts the template leaves out.

    Templates leave out the thoughts of earlier answers, or of all: that is what a model is given when it goes on. What
    it writes itself begins with its thoughts, between ``<think>`` and ``</think>``, and has to be calibrated on too.

    Args:
        messages: of a chat; thoughts are in an answer's content, or in its ``reasoning_content``, ``reasoning`` or
            ``thinking``.
        tools: JSON schemas of what the assistant may call.
    """
    given = {"tools": tools} if tools else {}
    whole = tokenizer.apply_chat_template(messages, tokenize=False, **given)
    yield whole
    for number, message in enumerate(messages):
        thoughts, answer = _thoughts(message)
        if not thoughts or thoughts in whole:
            continue
        ended = tokenizer.apply_chat_template(messages[: number + 1], tokenize=False, **given)
        if thoughts in ended:
            yield ended
            continue
        begun = tokenizer.apply_chat_template(messages[:number], tokenize=False, add_generation_prompt=True, **given)
        begins = "" if begun.rstrip().endswith(_THINK) else f"{_THINK}\n"
        yield f"{begun}{begins}{thoughts}\n{_THOUGHT}\n\n{answer}"


def _thoughts(message: Mapping[str, Any]) -> tuple[str, str]:
    """The thoughts of an answer, and the rest of it; nothing where there are none, or not in words."""
    content = message.get("content")
    if message.get("role") != "assistant":
        return "", ""
    answer = content if isinstance(content, str) else ""
    apart = next((message[key] for key in _REASONING if isinstance(message.get(key), str)), "")
    if apart:
        return apart.strip(), answer
    before, mark, after = answer.partition(_THOUGHT)
    return (before.replace(_THINK, "", 1).strip(), after.strip()) if mark else ("", answer)


def _whole_lines(file: TextIO) -> str:
    """The next lines of a text, ``_BLOCK`` characters and the rest of a line, so that no word is cut in two.

    Of a line that is longer than ``_LONGEST_LINE`` a part: some texts are a single line.
    """
    lines: list[str] = []
    length = 0
    while length <= _BLOCK and (line := file.readline(_LONGEST_LINE)):
        lines.append(line)
        length += len(line)
    return "".join(lines)


def has_tokenizer(place: Path | TokenizerFiles) -> bool:
    """Returns whether one of the files that a tokenizer is kept in is there."""
    if isinstance(place, TokenizerFiles):
        return bool(place.files)
    return any(has_file(place, name) for name in TOKENIZER_FILES)


def load_tokenizer(place: Path | TokenizerFiles) -> Any:
    """A model's tokenizer, as transformers loads it; no code of the model's is run.

    Args:
        place: its directory, or its files.

    Raises:
        CheckpointError: a file of it is missing, damaged, no regular file, or larger than any tokenizer is.
    """
    if isinstance(place, TokenizerFiles):
        with TemporaryDirectory(prefix="modelexport-tokenizer-") as temporary:
            for name, content in place.files.items():
                write_small(Path(temporary) / name, content)
            return _loaded(Path(temporary), str(place.directory))
    return _loaded(place, str(place))


def _loaded(directory: Path, label: str) -> Any:
    from transformers import AutoTokenizer

    for name in TOKENIZER_FILES:
        if has_file(directory, name):
            check_regular(directory / name, largest=LARGEST_JSON)
    for name in filter(partial(has_file, directory), ("tokenizer_config.json", "config.json")):
        said = JsonValues(read_json(directory / name, largest=LARGEST_JSON), str(directory / name))
        kind = said.text("tokenizer_class", "Tokenizer")
        if not _TOKENIZER_CLASS.search(kind):  # of a model's class transformers would load the model
            raise CheckpointError(f"{said.where}: tokenizer_class {quoted(kind)} is no tokenizer's")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
        # Some damage shows only in use: a limit of lengths that is no number, a text that is no token.
        tokenizer.encode("some text", add_special_tokens=False, verbose=False)
        return tokenizer
    except Exception as error:  # of any kind: what a damaged file leads to is not foreseen there
        what = f"{type(error).__name__}: {error_text(error)}"
        raise CheckpointError(f"{label}: its tokenizer cannot be loaded ({what})") from error
