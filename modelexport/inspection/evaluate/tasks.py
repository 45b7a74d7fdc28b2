"""``modelexport eval --tasks``: what people compare models by, beside the source, through lm-eval's harness."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelexport.errors import UsageError, error_text
from modelexport.inspection.evaluate.text import CACHE_NOTES, DTypeName, opened_model
from modelexport.inspection.record.reading import is_figure
from modelexport.models.architecture import language_config
from modelexport.models.tokenizers import tokenizer_of
from modelexport.quantization import devices
from modelexport.quantization.calibration.text import TokenizerFiles, has_tokenizer, load_tokenizer
from modelexport.quantization.methods import read_quantization_config
from modelexport.system.tables import table

if TYPE_CHECKING:
    from modelexport.checkpoints.safetensors.file import Checkpoint
    from modelexport.inspection.evaluate.streaming import Progress

__all__ = ["TaskEvaluation", "TaskResult", "evaluate_tasks"]

_HARNESS = "lm-eval 0.4.13 or later"
_LENGTHS = ("n_positions", "max_position_embeddings", "n_ctx")
"""Keys of config.json that say how many tokens a model takes, in the order in which the harness asks."""
_LONGEST = 2048
_UNSET = 1 << 40  # a tokenizer without a limit has a number far beyond this


@dataclass(frozen=True)
class TaskResult:
    """One figure of one task.

    Attributes:
        task, metric, filter: as the harness names them.
        shots: examples before each question.
        documents: how many were asked.
        value, standard_error: of the checkpoint; the error is the harness' own. None where they are no finite number.
        source, source_standard_error: the same of the source; None without one.
        higher_is_better: None where the task does not say.
    """

    task: str
    metric: str
    filter: str
    shots: int | None
    documents: int | None
    value: float | None
    standard_error: float | None
    source: float | None
    source_standard_error: float | None
    higher_is_better: bool | None


@dataclass(frozen=True)
class TaskEvaluation:
    """A checkpoint's results in tasks, and its source's.

    Attributes:
        checkpoint, against: directories; ``against`` is None where there was no source to compare with.
        results: one after the other, in the harness' order.
        limit: how many documents of each task, or which part; None: all.
        window: the most tokens that were looked at together.
        dtype: of the arithmetic.
        device: the kind of device that computed, ``cpu`` or ``cuda``.
        kv_cache: the number format that keys and values were rounded to, as engines do to keep them; ``"not rounded"``
            where engines round them, and that was not done; None where engines do not.
        harness: version of lm-eval.
        seconds: all that was run.
    """

    checkpoint: str
    against: str | None
    results: tuple[TaskResult, ...]
    limit: float | None
    window: int
    dtype: str
    device: str
    kv_cache: str | None
    harness: str
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """JSON-able form."""
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """The printed lines."""
        limit = "" if self.limit is None else f", --limit {self.limit:g}"
        where = "" if self.device == devices.CPU else f" on {self.device}"
        yield f"lm-eval {self.harness}{limit}, contexts of up to {self.window:,} tokens, {self.dtype}{where}"
        sides = () if self.against is None else (self.against,)
        rows = [
            (
                result.task,
                result.metric if result.filter == "none" else f"{result.metric} ({result.filter})",
                "" if result.shots is None else str(result.shots),
                "" if result.documents is None else f"{result.documents:,}",
                *(_cell(result.source, result.source_standard_error) for _ in sides),
                _cell(result.value, result.standard_error),
            )
            for result in self.results
        ]
        yield from table(("task", "metric", "shots", "documents", *sides, self.checkpoint), rows)
        yield from CACHE_NOTES.get(self.kv_cache or "", ())
        yield f"{self.seconds:.1f} s"


def evaluate_tasks(
    checkpoint: str | os.PathLike[str],
    against: str | os.PathLike[str] | None = None,
    *,
    tasks: Sequence[str],
    tasks_path: str | os.PathLike[str] | None = None,
    limit: float | None = None,
    num_fewshot: int | None = None,
    window: int | None = None,
    config: str | os.PathLike[str] | None = None,
    dtype: DTypeName = "float32",
    device: str = devices.AUTO,
    threads: int | None = None,
    progress: Progress | None = None,
) -> TaskEvaluation:
    """Run a checkpoint through tasks of EleutherAI's lm-eval harness, and the one that it was made from.

    One decoder layer at a time is in memory, decoded, its activations rounded as engines round them. Tasks that have
    models write text are refused.

    Args:
        checkpoint: directory of a checkpoint of any format, quantised or not; or ``"demo"``.
        against: the same of its source; None: only the checkpoint's results.
        tasks: names of tasks, groups or tags: ``hellaswag``, ``arc_easy``, ``mmlu``.
        tasks_path: a directory with further tasks, as the harness' YAML files.
        limit: the first so many documents of each task; below 1 a part of them; None: all.
        num_fewshot: examples before each question; None: as many as a task has by itself.
        window: the most tokens that are looked at together; None: as many as config.json says.
        config: the model's config.json, where the checkpoint has none of its own.
        dtype: of weights and arithmetic.
        device: what computes: ``auto`` (a GPU where torch sees one), ``cpu``, ``cuda`` or one of several: ``cuda:1``.
        threads, progress: see :func:`~modelexport.inspection.evaluate.compare_checkpoints`.

    Raises:
        UsageError: the harness is not installed, or has no such task; no tokenizer; or no such device.
        CheckpointError: a checkpoint that is damaged, cannot be decoded, or is no model.
        PlanError: transformers has no such model.
    """
    _check(tasks, tasks_path, limit, num_fewshot, window)
    devices.check_name(device)
    harness = _harness()
    opened = opened_model(checkpoint, config)
    source = None if against is None else opened_model(against, None)
    tokenizer = load_tokenizer(_with_tokenizer(opened, source, config))
    import torch

    from modelexport.inspection.evaluate.continuations import ContinuationScorer
    from modelexport.inspection.evaluate.models import cache_kind

    longest = window or _longest(opened, tokenizer)
    place = devices.of_rank(devices.chosen(device, calibrated=True), 0)
    began = time.perf_counter()
    models = []
    for each in (opened,) if source is None else (opened, source):
        scorer = ContinuationScorer(each, getattr(torch, dtype), place, threads, progress)
        models.append(harness.CheckpointModel(scorer, tokenizer, longest))
    found = harness.run_tasks(models, tasks, None if tasks_path is None else Path(tasks_path), limit, num_fewshot)
    return TaskEvaluation(
        checkpoint=os.fspath(checkpoint),
        against=None if against is None else os.fspath(against),
        results=tuple(_results(*found)),
        limit=limit,
        window=longest,
        dtype=dtype,
        device=place.type,
        kv_cache=cache_kind(opened.config, read_quantization_config(opened.config)),
        harness=harness.VERSION,
        seconds=time.perf_counter() - began,
    )


def _check(
    tasks: Sequence[str],
    tasks_path: str | os.PathLike[str] | None,
    limit: float | None,
    num_fewshot: int | None,
    window: int | None,
) -> None:
    """Refuses what cannot be asked for.

    Raises:
        UsageError: with the flag and what to type.
    """
    if not tasks:
        raise UsageError("--tasks: name at least one task: --tasks hellaswag,arc_easy")
    if limit is not None and limit <= 0:
        raise UsageError(f"--limit {limit:g}: a number of documents, or a part of them below 1, is needed")
    if num_fewshot is not None and num_fewshot < 0:
        raise UsageError(f"--num-fewshot {num_fewshot}: at least 0 is needed")
    if window is not None and window < 1:
        raise UsageError(f"--window {window}: at least 1 is needed")
    if tasks_path is not None and not Path(tasks_path).is_dir():
        raise UsageError(f"--tasks-path {os.fspath(tasks_path)}: no such directory; give the one with the YAML files")


def _harness() -> Any:
    """Returns the module that runs lm-eval.

    Raises:
        UsageError: that is not installed, or another version of it than is known here.
    """
    try:
        return importlib.import_module("modelexport.inspection.evaluate.harness")
    except ImportError as error:
        raise UsageError(
            f"--tasks runs EleutherAI's harness: pip install 'modelexport[eval]', which is {_HARNESS} "
            f"({error_text(error)})"
        ) from error


def _with_tokenizer(
    checkpoint: Checkpoint, source: Checkpoint | None, config: str | os.PathLike[str] | None
) -> Path | TokenizerFiles:
    """Returns the place of the tokenizer: the source's, or the checkpoint's own, or beside ``--config``.

    Raises:
        UsageError: there is none.
    """
    places = [tokenizer_of(opened) for opened in (source, checkpoint) if opened is not None]
    places += [] if config is None else [Path(config)]
    found = next(filter(has_tokenizer, places), None)
    if found is None:
        raise UsageError(
            f"{checkpoint.directory} has no tokenizer, which is needed to read the tasks: give the source that has one "
            "with --against DIR"
        )
    return found


def _longest(checkpoint: Checkpoint, tokenizer: Any) -> int:
    """Returns how many tokens a model takes, as the harness finds it."""
    config = language_config(checkpoint.config or {}, checkpoint.infos)
    said = [config.get(key) for key in _LENGTHS] + [getattr(tokenizer, "model_max_length", None)]
    return next((int(size) for size in said if isinstance(size, int) and 0 < size < _UNSET), _LONGEST)


def _results(found: dict[str, Any], source: dict[str, Any] | None = None) -> Iterator[TaskResult]:
    """Yields each figure of what the harness found of the checkpoint, with the source's."""
    for task, figures in found["results"].items():
        others = {} if source is None else source["results"].get(task, {})
        better = found.get("higher_is_better", {}).get(task, {})
        count = found.get("n-samples", {}).get(task, {}).get("effective")
        for key, value in figures.items():
            metric, comma, kind = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            error = f"{metric}_stderr,{kind}"
            yield TaskResult(
                task=task,
                metric=metric,
                filter=kind,
                shots=found.get("n-shot", {}).get(task),
                documents=count,
                value=_figure(value),
                standard_error=_figure(figures.get(error)),
                source=_figure(others.get(key)),
                source_standard_error=_figure(others.get(error)),
                higher_is_better=better.get(metric),
            )


def _figure(value: Any) -> float | None:
    return float(value) if is_figure(value) else None


def _cell(value: float | None, error: float | None) -> str:
    if value is None:
        return "?"
    return f"{value:.4f}" + ("" if error is None else f" +- {error:.4f}")
