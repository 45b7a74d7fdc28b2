"""``modelexport eval``: perplexity, and KL divergence from the source, on a text; or tasks of lm-eval's harness."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelexport.errors import UsageError
from modelexport.inspection.evaluate.record import HELD_OUT, check_record_is_there, save_evaluation
from modelexport.inspection.evaluate.tasks import evaluate_tasks
from modelexport.inspection.evaluate.text import WINDOW, DTypeName, evaluate_on_text
from modelexport.quantization.calibration.text import DATASET
from modelexport.quantization.devices import AUTO
from modelexport.system.terminal import progress_bar, show

if TYPE_CHECKING:
    from modelexport.inspection.evaluate.streaming import Progress

_OF_TEXTS = ("text", "windows", "save")
_OF_TASKS = ("tasks", "tasks_path", "limit", "num_fewshot")


def run(given: Namespace) -> int:
    """Runs the command; returns its exit status."""
    settings = vars(given)
    by_tasks = settings["tasks"] is not None
    for name in _OF_TEXTS if by_tasks else _OF_TASKS:
        value, flag = settings.pop(name), f"--{name.replace('_', '-')}"
        if value is not None and value is not False:
            raise UsageError(
                f"{flag} is for texts: leave it out, or --tasks" if by_tasks else f"{flag} is for --tasks NAMES"
            )
    command = print_tasks if by_tasks else print_evaluation
    return command(settings.pop("checkpoint"), as_json=settings.pop("json"), **settings)


def print_tasks(checkpoint: Path, against: Path | None = None, *, as_json: bool = False, **settings: Any) -> int:
    """Prints the result of :func:`evaluate_tasks`; returns 0."""
    with _bar(quiet=as_json) as progress:
        result = evaluate_tasks(checkpoint, against, progress=progress, **settings)
    show(json.dumps(result.as_json(), indent=1) if as_json else "\n".join(result.lines()))
    return 0


def print_evaluation(
    checkpoint: Path,
    against: Path | None = None,
    text: Path | None = None,
    *,
    windows: int | None = None,
    window: int | None = None,
    config: Path | None = None,
    dtype: DTypeName = "float32",
    device: str = AUTO,
    save: bool = False,
    as_json: bool = False,
) -> int:
    """Prints the result of :func:`evaluate_on_text`, and with ``save`` keep it in the checkpoint; returns 0."""
    if save:
        check_record_is_there(checkpoint)
    with _bar(quiet=as_json) as progress:
        result = evaluate_on_text(
            checkpoint,
            against,
            text,
            windows=windows,
            window=WINDOW if window is None else window,
            config=config,
            dtype=dtype,
            device=device,
            progress=progress,
        )
    if save:
        name = HELD_OUT if text is None else str(text) if str(text).startswith(DATASET) else text.name  # without a path
        save_evaluation(checkpoint, {**result.as_json(), "text": name})
    show(
        json.dumps(result.as_json(), indent=1) if as_json else "\n".join(result.lines()),
        stands=f"the figures are in {checkpoint}" if save else "",
    )
    return 0


@contextmanager
def _bar(*, quiet: bool) -> Iterator[Progress]:
    """A progress bar of layers, silent where stderr is no terminal."""
    with progress_bar(quiet=quiet, unit="layer", desc="evaluating") as bar:

        def progress(done: int, layers: int) -> None:
            bar.total = layers
            bar.update(done - bar.n)

        yield progress
