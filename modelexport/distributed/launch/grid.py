"""The grid of ranks: model (tensor), pipeline and data parallelism.

World ranks lie in ``arange(W).view(dp, pp, mp)``: the ranks of a model-parallel group are neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from modelexport.distributed.config import MultiprocessConfig, check_grid

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass
class ParallelGroup:
    """The ranks that share all coordinates but one with this rank.

    Attributes:
        axis: ``"mp"``, ``"pp"`` or ``"dp"``.
        rank: this rank's coordinate on the axis, which is its place in ``ranks``.
        ranks: world ranks, ascending.
        backend: None for the default group's.
    """

    axis: str
    rank: int
    ranks: tuple[int, ...]
    backend: str | None = None
    _group: ProcessGroup | None = None

    @property
    def world_size(self) -> int:
        """Number of ranks on the axis."""
        return len(self.ranks)

    @property
    def group(self) -> ProcessGroup | None:
        """Its process group, to pass to collectives. None without torch.distributed.

        A group of one rank is made when first asked for, which takes part of nobody else.
        """
        import torch.distributed as dist

        if self._group is None and dist.is_initialized():
            self._group = self._make()
        return self._group

    def _make(self) -> ProcessGroup | None:
        import torch.distributed as dist

        if self.backend is None and self.world_size == dist.get_world_size():
            return dist.group.WORLD
        return dist.new_group(list(self.ranks), backend=self.backend, use_local_synchronization=True)


@dataclass(frozen=True)
class ProcessGrid:
    """This rank's place: ``grid.mp.rank``, ``grid.pp.world_size``, ``grid.dp.group``, ..."""

    mp: ParallelGroup
    pp: ParallelGroup
    dp: ParallelGroup


_grid: ProcessGrid | None = None
_grid_world: ProcessGroup | None = None  # the default group that _grid was laid over


def grid_coordinates(rank: int, model_parallelism: int, pipeline_parallelism: int) -> tuple[int, int, int]:
    """(mp, pp, dp) rank of a world rank."""
    mp, pp = model_parallelism, pipeline_parallelism
    return rank % mp, rank // mp % pp, rank // (mp * pp)


def grid_ranks(
    rank: int, world_size: int, model_parallelism: int, pipeline_parallelism: int
) -> dict[str, tuple[int, ...]]:
    """World ranks of the groups that ``rank`` belongs to, by axis.

    Raises:
        UsageError: ``world_size`` is not a multiple of the two sizes' product.
    """
    check_grid(world_size, model_parallelism, pipeline_parallelism)
    mp, cell = model_parallelism, model_parallelism * pipeline_parallelism
    row, corner = rank - rank % mp, rank - rank % cell
    return {
        "mp": tuple(range(row, row + mp)),
        "pp": tuple(range(corner + rank % mp, corner + cell, mp)),
        "dp": tuple(range(rank % cell, world_size, cell)),
    }


def init_grid(config: MultiprocessConfig) -> ProcessGrid:
    """Lays the grid over the running group and makes the groups along its axes. Collective.

    Raises:
        UsageError: the axes' sizes do not divide the world size.
    """
    _keep(_lay(config))
    assert _grid is not None
    # In the same order on every rank. Groups of one are left until somebody wants them.
    for group in (_grid.mp, _grid.pp, _grid.dp):
        if group.world_size > 1:
            _ = group.group
    return _grid


def get_grid() -> ProcessGrid:
    """The running grid. Without :func:`init_grid`: all ranks are data-parallel; without a group: one rank."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return _lay(MultiprocessConfig(rank=0, world_size=1))
    if _grid is None or _grid_world is not dist.group.WORLD:
        _keep(_lay(MultiprocessConfig(rank=dist.get_rank(), world_size=dist.get_world_size())))
    assert _grid is not None
    return _grid


def forget_grid() -> None:
    """To be called when the process group ends."""
    global _grid, _grid_world
    _grid = _grid_world = None


def _keep(grid: ProcessGrid) -> None:
    import torch.distributed as dist

    global _grid, _grid_world
    _grid, _grid_world = grid, dist.group.WORLD


def _lay(config: MultiprocessConfig) -> ProcessGrid:
    sizes = (config.model_parallelism, config.pipeline_parallelism)
    ranks = grid_ranks(config.rank, config.world_size, *sizes)
    place = dict(zip(("mp", "pp", "dp"), grid_coordinates(config.rank, *sizes), strict=True))
    backends = {
        "mp": config.model_parallel_backend,
        "pp": config.pipeline_parallel_backend,
        "dp": config.data_parallel_backend,
    }
    return ProcessGrid(
        **{axis: ParallelGroup(axis, place[axis], ranks[axis], backends[axis]) for axis in ("mp", "pp", "dp")}
    )
