"""EleutherAI's lm-eval harness, which has the tasks and what is counted, with a checkpoint of ours as its model.

Imported only where tasks are asked for: the package ``lm_eval`` is an extra.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy
from lm_eval import __version__, evaluate, utils
from lm_eval.api.model import TemplateLM
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.tasks import TaskManager

from modelexport.errors import ModelExportError, UsageError, error_text, nearest
from modelexport.inspection.evaluate.continuations import ContinuationScorer

__all__ = ["VERSION", "CheckpointModel", "run_tasks"]

VERSION = str(__version__)
"""Of lm-eval."""

_SCORED = ("loglikelihood", "loglikelihood_rolling", "multiple_choice")
"""What tasks may ask of a model that does not write text."""


class CheckpointModel(TemplateLM):
    """A checkpoint as the harness' model: it says how likely texts are.

    Tokens are those that the harness' own model of transformers makes of texts: special tokens as the tokenizer adds
    them by itself, its beginning-of-text token (or end-of-text) before what has no context, and contexts that are too
    long without their beginnings.

    Args:
        scorer: of the checkpoint.
        tokenizer: as transformers loads it.
        longest: the most tokens that are looked at together.
    """

    def __init__(self, scorer: ContinuationScorer, tokenizer: Any, longest: int) -> None:
        super().__init__()
        self.scorer, self.tokenizer, self.longest = scorer, tokenizer, longest

    @property
    def eot_token_id(self) -> int:
        """The token at the end of texts."""
        found: int = self.tokenizer.eos_token_id
        return found

    @property
    def prefix_token_id(self) -> int:
        """The token before what has no context."""
        found: int | None = self.tokenizer.bos_token_id
        return self.eot_token_id if found is None else found

    @property
    def max_length(self) -> int:
        """The most tokens that are looked at together."""
        return self.longest

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Returns the tokens of a text."""
        if add_special_tokens is None and string.startswith(self.tokenizer.decode(self.prefix_token_id)):
            add_special_tokens = False
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        ids: list[int] = self.tokenizer.encode(string, verbose=False, **options)
        return ids

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-likelihood of each whole text, in windows that do not overlap where it is long."""
        windows: list[tuple[list[int], list[int]]] = []
        counts = []
        for request in requests:
            rolling = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.longest,
                context_len=1,
            )
            own = [utils.make_disjoint_window(window) for window in rolling]
            windows += own
            counts.append(len(own))
        scores = iter(self._scores(windows))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Is never called: tasks that write text are refused."""
        raise NotImplementedError

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        return self._scores([(context, behind) for _, context, behind in requests])

    def _scores(self, requests: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        cut = []
        for context, behind in requests:
            kept = self.longest + 1 - len(behind)  # the last token of the continuation is only a target
            if kept < 1:
                raise UsageError(
                    f"a continuation has {len(behind):,} tokens, of which {self.longest:,} are looked at together: "
                    "give a larger --window"
                )
            cut.append((context[-kept:], behind))
        return self.scorer.scores(cut)


def run_tasks(
    models: Sequence[CheckpointModel], names: Sequence[str], path: Path | None, limit: float | None, shots: int | None
) -> list[dict[str, Any]]:
    """Returns what the harness found of each model; with its seeds, and its standard errors.

    Args:
        names: of tasks, groups or tags, ``*`` standing for any letters.
        path: a directory with further tasks, as YAML files.
        limit: the first so many documents of each task; below 1 a part of them; None for all.
        shots: examples before each question; None: as many as the task has by itself.

    Raises:
        UsageError: there is no such task; or it cannot be done here.
    """
    with _quiet(names):
        loaded = _loaded(names, path)
        results = []
        for model in models:
            random.seed(DEFAULT_RANDOM_SEED)
            numpy.random.seed(DEFAULT_OTHER_SEED)  # noqa: NPY002 - the one that tasks use
            for task in loaded["tasks"].values():
                own = task.get_config("num_fewshot")
                # A task that is to have none says so.
                task.set_config(key="num_fewshot", value=(own or 0) if shots is None or own == 0 else shots)
                task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
            results.append(evaluate(lm=model, task_dict=loaded, limit=limit, log_samples=False))
        return results


def _loaded(names: Sequence[str], path: Path | None) -> dict[str, Any]:
    """The tasks of these names, with their data.

    Raises:
        UsageError: there is none of a name; or one has models write text.
    """
    manager = TaskManager(include_path=None if path is None else str(path))
    wanted: list[str] = []
    for name in names:
        matching = manager.match_tasks([name])
        if not matching:
            raise UsageError(
                f"--tasks {name}: the harness has no such task{nearest(name, manager.all_tasks)}; lm-eval ls tasks "
                "lists them, and --tasks-path DIR adds your own"
            )
        wanted += (each for each in matching if each not in wanted)
    loaded: dict[str, Any] = manager.load(wanted)
    for name, task in loaded["tasks"].items():
        if task.OUTPUT_TYPE not in _SCORED:
            raise UsageError(
                f"--tasks {name} has models write text ({task.OUTPUT_TYPE}); eval runs a checkpoint layer by layer and "
                "says how likely given texts are: run this task with an engine (lm-eval run --model vllm)"
            )
    return loaded


@contextmanager
def _quiet(names: Sequence[str]) -> Iterator[None]:
    """Bars and words of the harness and of its libraries go nowhere, but for its errors; what it raises is ours."""
    logger, handler = logging.getLogger("lm_eval"), logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.ERROR)
    logger.addHandler(handler)
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            yield
    except ModelExportError:
        raise
    except Exception as error:  # of any kind: tasks are programs of others, and fetch data
        what = f"{type(error).__name__}: {error_text(error)}"
        raise UsageError(f"--tasks {','.join(names)}: lm-eval cannot run this: {what}") from error
    finally:
        logger.removeHandler(handler)
