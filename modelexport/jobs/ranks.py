"""What an export and a resharding have in common: the ranks that do the work, and what is heard of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from modelexport.distributed import launch
from modelexport.distributed.launch import MultiprocessConfig
from modelexport.errors import RankFailedError
from modelexport.jobs.target_directory import Target
from modelexport.system.terminal import note, progress_bar

T = TypeVar("T")
OnEvent = Callable[[int, dict[str, Any]], None]
Results = list[dict[str, Any]]
Heard = tuple[OnEvent, Results]


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
def heard(what: str, sizes: Mapping[str, int], done: Mapping[str, Any], *, quiet: bool) -> Iterator[Heard]:
    """What hears the ranks' events, and the list that it puts the first rank's result into; with a progress bar.

    Args:
        what: names the bar, which is silent where nobody watches.
        sizes: bytes that each step writes.
        done: the steps that an earlier run has finished.
    """
    resumed = sum(size for step, size in sizes.items() if step in done)
    if resumed and not quiet:
        note(f"resuming: {len(done)} of {len(sizes)} steps are done already")
    with progress_bar(
        quiet=quiet, total=sum(sizes.values()), initial=resumed, unit="B", unit_scale=True, desc=what
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


def take_part(
    config: MultiprocessConfig,
    target: Target,
    work: Callable[[dict[str, Any]], None],
    tell: Callable[[dict[str, Any], dict[str, Any]], T],
    hear: Callable[[Mapping[str, Any]], AbstractContextManager[Heard]],
) -> T:
    """The work as one of the ranks that another launcher started; rank 0 opens the target and publishes it.

    Args:
        work: this rank's part, given the steps that are done.
        tell: makes what all ranks are told in the end, of the record and the first rank's result.
        hear: :func:`heard`, given the steps that are done.
    """
    from modelexport.distributed import ranks

    def begin() -> dict[str, Any]:
        with launch.phase_scope("opening the target"):
            return target.begin()

    done = ranks.compute_and_broadcast(begin)
    with hear(done) as (on_event, results), launch.local_status(on_event, config.rank):
        work(done)

    def finish() -> T:
        with launch.phase_scope("publishing the checkpoint"):
            result = single(results)
            return tell(target.finish(result), result)

    return ranks.compute_and_broadcast(finish)
