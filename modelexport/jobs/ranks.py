"""The ranks that carry out an export or a resharding, and the progress that they report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from modelexport.distributed import launch
from modelexport.distributed.launch import MultiprocessConfig
from modelexport.errors import RankFailedError
from modelexport.jobs.target_directory import TargetDirectory
from modelexport.system.terminal import note, progress_bar

T = TypeVar("T")
OnEvent = Callable[[int, dict[str, Any]], None]
Results = list[dict[str, Any]]
Progress = tuple[OnEvent, Results]


def own_ranks(world: int, timeout: float, preload: Sequence[str], on_event: OnEvent) -> MultiprocessConfig:
    """The group of ranks that this process starts on this machine."""
    return MultiprocessConfig(
        world_size=world,
        local_world_size=world,
        model_parallelism=world,
        backend="gloo",
        timeout=timeout,
        preload=tuple(preload),
        on_event=on_event,
    )


@contextmanager
def show_progress(
    description: str, sizes: Mapping[str, int], done: Mapping[str, Any], *, quiet: bool
) -> Iterator[Progress]:
    """Shows a progress bar inside the ``with``, unless ``quiet`` or stderr is no terminal.

    Args:
        description: the bar's label.
        sizes: bytes that each step writes.
        done: the steps that an earlier run has finished.

    Yields:
        The handler of the ranks' events, which moves the bar, and the list that it appends the first rank's result to.
    """
    resumed = sum(size for step, size in sizes.items() if step in done)
    if resumed and not quiet:
        note(f"resuming: {len(done)} of {len(sizes)} steps are done already")
    with progress_bar(
        quiet=quiet, total=sum(sizes.values()), initial=resumed, unit="B", unit_scale=True, desc=description
    ) as bar:
        results: Results = []

        def on_event(rank: int, event: dict[str, Any]) -> None:
            if event.get("kind") == "step":
                bar.set_postfix_str(event["step"], refresh=False)
                bar.update(event["bytes"])
            elif event.get("kind") == "working":
                bar.set_postfix_str(event["text"])
            elif event.get("kind") == "result":
                results.append(event)

        yield on_event, results


def single(results: Results) -> dict[str, Any]:
    """The one result that the first rank reported.

    Raises:
        RankFailedError: it is not there, or not alone.
    """
    if len(results) != 1:
        raise RankFailedError(0, "reporting the result", f"{len(results)} results arrived instead of 1")
    return results[0]


def run_under_launcher(
    config: MultiprocessConfig,
    target: TargetDirectory,
    work: Callable[[dict[str, Any]], None],
    collect: Callable[[dict[str, Any], dict[str, Any]], T],
    progress: Callable[[Mapping[str, Any]], AbstractContextManager[Progress]],
) -> T:
    """Does this rank's part of the work where another launcher started it; rank 0 opens and publishes the target.

    Args:
        work: this rank's part, given the steps that are done.
        collect: makes the value that every rank returns from the record and the first rank's result; runs on rank 0.
        progress: makes the context manager of :func:`show_progress` from the steps that are done.

    Returns:
        The value of ``collect``, on every rank.
    """
    from modelexport.distributed import ranks

    def begin() -> dict[str, Any]:
        with launch.phase_scope("opening the target"):
            return target.begin()

    done = ranks.compute_and_broadcast(begin)
    with progress(done) as (on_event, results), launch.local_status(on_event, config.rank):
        work(done)

    def finish() -> T:
        with launch.phase_scope("publishing the checkpoint"):
            result = single(results)
            return collect(target.finish(result), result)

    return ranks.compute_and_broadcast(finish)
