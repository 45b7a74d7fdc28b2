"""``modelexport eval``: perplexity of a checkpoint on a text, and what it computes beside its source.

Of any format, quantised or not, and of any size: both run layer by layer, see
:mod:`~modelexport.inspection.evaluate.streaming`. Which text, and how much of it, is settled here.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from modelexport.assets import demo_model_path
from modelexport.checkpoints.source import directory_of
from modelexport.errors import CheckpointError, PlanError, UsageError
from modelexport.models.architecture import language_config, why_no_language_model
from modelexport.models.opening import open_model
from modelexport.models.tokenizers import tokenizer_of
from modelexport.quantization import devices
from modelexport.quantization.calibration.text import TokenDocuments, has_tokenizer
from modelexport.quantization.kv_caches import CACHES, NOT_ROUNDED
from modelexport.quantization.methods import read_quantization_config
from modelexport.system.small_files import read_small
from modelexport.system.tables import table

if TYPE_CHECKING:
    from modelexport.checkpoints.safetensors.file import Checkpoint
    from modelexport.inspection.evaluate.losses import Comparison, Perplexity
    from modelexport.inspection.evaluate.streaming import Progress

__all__ = ["CACHE_NOTES", "DEMO", "TextEvaluation", "evaluate_on_text", "opened_model"]

DEMO = "demo"
"""Names the embedded model, where there is no directory of that name."""
WINDOWS, WINDOW = 64, 256
POOL = 16
"""Windows are spread over the first tokens of a file, this many times what is needed: it may be a whole corpus."""

CACHE_NOTES = {
    **{
        cache.name: (f"keys and values rounded to {cache.in_words}, as engines keep them",) for cache in CACHES.values()
    },
    NOT_ROUNDED: ("the KV cache was not rounded, as engines will round this checkpoint's",),
}
"""Lines about a checkpoint's KV cache, by what was done."""
DTypeName = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class TextEvaluation:
    """A checkpoint on a text, and its source.

    Attributes:
        checkpoint, against: directories; ``against`` is None where there was no source to compare with.
        text: which text it was, in words.
        documents: how many documents of it were looked at; before each stands a beginning-of-text token, if the
            tokenizer has one, so that a text in one piece gives another perplexity.
        windows, window: how many windows of how many tokens.
        windows_in_text: of how many they were chosen, evenly spread.
        all_of_text: whether that is the whole text; False where it is longer, and only its beginning was looked at.
        dtype: of the arithmetic.
        device: the kind of device that computed, ``cpu`` or ``cuda``.
        model: the checkpoint's losses.
        comparison: with the source; None without one.
        kv_cache: the number format that keys and values were rounded to, as engines do to keep them; ``"not rounded"``
            where engines round them, and that was not done; None where engines do not.
        seconds: all that was run.
    """

    checkpoint: str
    against: str | None
    text: str
    documents: int
    windows: int
    window: int
    windows_in_text: int
    all_of_text: bool
    dtype: str
    device: str
    model: Perplexity
    comparison: Comparison | None
    kv_cache: str | None
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """JSON-able form: a number that is none (a standard error of one window) is null."""
        value = asdict(self)
        if self.device == devices.CPU:  # said only where it is another, as in records
            del value["device"]
        for side in (value["model"], *((value["comparison"] or {}).get(key) for key in ("reference", "model"))):
            if side is not None:
                del side["window_losses"]
        value["model"]["standard_error"] = self.model.standard_error
        finite: dict[str, Any] = _finite(value)
        return finite

    def lines(self) -> Iterator[str]:
        """The printed lines."""
        chosen = f"{self.windows} of {'' if self.all_of_text else 'the first '}{self.windows_in_text:,}"
        if self.windows == self.windows_in_text:
            chosen = f"{'all' if self.all_of_text else 'the first'} {self.windows}"
        chosen += f" windows of {self.window} tokens"
        where = "" if self.device == devices.CPU else f" on {self.device}"
        documents = "1 document" if self.documents == 1 else f"{self.documents:,} documents, each begun anew"
        yield f"{self.text} ({documents}): {chosen}, {self.dtype}{where}"
        rows = [] if self.comparison is None else [_row(str(self.against), self.comparison.reference)]
        yield from table(("", "perplexity", "loss, nats a token"), [*rows, _row(self.checkpoint, self.model)])
        if self.comparison is not None:
            c = self.comparison
            yield (
                f"loss {c.loss_difference:+.4f} +- {_error(c.loss_standard_error)}, "
                f"mean KL {c.mean_kl:.4f} +- {_error(c.kl_standard_error)} nats a token"
            )
            same, error = 100 * c.same_top, 100 * c.same_top_standard_error
            yield (
                f"same top token {same:.2f} % +- {_error(error, '.2f')}; mean KL of the worst 1 % of tokens "
                f"{c.worst_kl:.4f}"
            )
            parts = ", ".join(f"{name} % {value:.4f}" for name, value in c.kl_percentiles.items())
            yield f"KL percentiles: {parts}; maximum {c.max_kl:.4f}"
        yield from CACHE_NOTES.get(self.kv_cache or "", ())
        tokens = self.windows * self.window * (1 if self.comparison is None else 2)
        yield f"{self.seconds:.1f} s, {tokens / self.seconds:,.0f} tokens/s"


def evaluate_on_text(
    checkpoint: str | os.PathLike[str],
    against: str | os.PathLike[str] | None = None,
    text: str | os.PathLike[str] | None = None,
    *,
    windows: int | None = None,
    window: int = WINDOW,
    config: str | os.PathLike[str] | None = None,
    dtype: DTypeName = "float32",
    device: str = devices.AUTO,
    threads: int | None = None,
    progress: Progress | None = None,
) -> TextEvaluation:
    """Run a checkpoint over a text, and the one that it was made from; one decoder layer at a time is in memory.

    Args:
        checkpoint: directory of a checkpoint of any format, quantised or not; or ``"demo"``.
        against: the same of its source; None: only the checkpoint's perplexity.
        text: a text in UTF-8, or ``.jsonl`` with ``"text"`` or ``"input_ids"`` on each line; None: the text of the
            package that the demo model has not seen. Tokenised by the source's tokenizer, or the checkpoint's.
        windows: how many, spread evenly over the text. None: all of the package's text for the demo model (and what
            was made of it), 64 otherwise.
        window: tokens of each.
        config: the model's config.json, where the checkpoint has none of its own.
        dtype: of weights and arithmetic.
        device: what computes: ``auto`` (a GPU where torch sees one), ``cpu``, ``cuda`` or one of several: ``cuda:1``.
        threads, progress: see :func:`~modelexport.inspection.evaluate.compare_checkpoints`.

    Raises:
        UsageError: no such text, no tokenizer, fewer tokens than one window has, or no such device.
        CheckpointError: a checkpoint that is damaged, cannot be decoded, or is no model; vocabularies that differ.
        PlanError: transformers has no such model.

    Example:
        ::

            >>> result = modelexport.evaluate("ckpt", against="demo", windows=2, window=64)
            >>> 0 < result.comparison.mean_kl < 0.2
            True
    """
    for name, value in (("windows", windows), ("window", window)):
        if value is not None and value < 1:
            raise UsageError(f"--{name} {value}: at least 1 is needed")
    devices.check_name(device)
    opened = opened_model(checkpoint, config)
    source = None if against is None else opened_model(against, None)
    documents = _documents(opened, source, text)
    documents.check()
    import torch

    from modelexport.inspection.evaluate import compare_checkpoints, perplexity_of_checkpoint
    from modelexport.inspection.evaluate.losses import cut_windows
    from modelexport.inspection.evaluate.models import cache_kind

    if windows is None and not (text is None and _is_demos(documents.directory)):
        windows = WINDOWS
    most = sys.maxsize if windows is None or text is None else POOL * windows * window + 1
    found = documents.first(most if most == sys.maxsize else most + 1)
    ids = found[:most]
    if len(ids) <= window:
        raise UsageError(
            f"{documents.label} has {len(ids):,} tokens; a window of {window} and what follows it need {window + 1:,}: "
            "give a longer text with --text, or a shorter --window"
        )
    cut = cut_windows(torch.tensor(ids, dtype=torch.int64), window, windows)
    place = devices.of_rank(devices.chosen(device, calibrated=True), 0)
    began = time.perf_counter()
    options: dict[str, Any] = {
        "dtype": getattr(torch, dtype),
        "device": place,
        "threads": threads,
        "progress": progress,
    }
    comparison = None if source is None else compare_checkpoints(source, opened, cut, **options)
    model = perplexity_of_checkpoint(opened, cut, **options) if comparison is None else comparison.model
    return TextEvaluation(
        checkpoint=os.fspath(checkpoint),
        against=None if against is None else os.fspath(against),
        text=documents.label,
        documents=documents.documents,
        windows=cut.inputs.shape[0],
        window=window,
        windows_in_text=cut.in_text,
        all_of_text=len(found) == len(ids),
        dtype=dtype,
        device=place.type,
        model=model,
        comparison=comparison,
        kv_cache=cache_kind(opened.config, read_quantization_config(opened.config)),
        seconds=time.perf_counter() - began,
    )


def opened_model(path: str | os.PathLike[str], config: str | os.PathLike[str] | None) -> Checkpoint:
    """Returns the checkpoint that somebody named, or the embedded model; of which the headers have been read.

    Raises:
        UsageError: there is no such directory.
        CheckpointError: it has no config.json, or is damaged.
        PlanError: it is no language model.
    """
    directory = directory_of(path)
    if os.fspath(path) == DEMO and not directory.exists():
        directory = demo_model_path()
    if not directory.is_dir():
        found = "a file" if directory.exists() else "no such directory"
        raise UsageError(f"{directory}: {found}; give the directory of a checkpoint, or '{DEMO}'")
    opened = open_model(directory, config)
    if opened.config is None:
        raise CheckpointError(f"{directory} has no config.json, so that it is no model: give --config PATH")
    refusal = why_no_language_model(opened.config)
    if refusal:
        raise PlanError(
            f"{directory} cannot be evaluated: {refusal}: eval runs language models only; modelexport verify "
            f"{directory} --against SOURCE compares weights"
        )
    return opened


def _documents(
    checkpoint: Checkpoint, source: Checkpoint | None, text: str | os.PathLike[str] | None
) -> TokenDocuments:
    """The text, tokenised as the source does, or the checkpoint where only that one can."""
    candidates = [tokenizer_of(opened) for opened in (source, checkpoint) if opened is not None]
    known = filter(has_tokenizer, candidates)
    vocabulary = language_config(checkpoint.config or {}, checkpoint.infos)["vocab_size"]
    return TokenDocuments(text, next(known, candidates[0]), vocabulary, split="heldout", flag="--text")


def _is_demos(directory: Path) -> bool:
    """Returns whether a tokenizer is the demo model's: the model then is the demo model, or was made of it."""
    own, other = demo_model_path() / "tokenizer.json", directory / "tokenizer.json"
    return other.is_file() and other.stat().st_size == own.stat().st_size and read_small(other) == read_small(own)


def _row(name: str, losses: Perplexity) -> tuple[str, str, str]:
    return name, f"{losses.perplexity:.2f}", f"{losses.loss:.4f} +- {_error(losses.standard_error)}"


def _error(value: float, digits: str = ".4f") -> str:
    return "?" if math.isnan(value) else format(value, digits)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
