"""ReshardRecipe: the settings of ``modelexport reshard``, which are the arguments of ``resharder.reshard()``."""

from __future__ import annotations

from dataclasses import dataclass

from modelexport.errors import UsageError
from modelexport.settings import Settings, check_choice, check_common, check_sizes, setting

EXCHANGES = ("direct", "auto", "p2p", "shared_memory")


@dataclass(frozen=True, kw_only=True)
class ReshardRecipe(Settings):
    """What to reshard, for which parallelism, and where to."""

    checkpoint: str = setting("", "the checkpoint: any format, any parallelism", metavar="CKPT")
    out: str | None = setting(None, "target directory; must not exist (see --overwrite)", metavar="DIR")
    tp: int = setting(1, "tensor-parallel ranks that the checkpoint is written for", metavar="N")
    pp: int = setting(1, "pipeline stages that the checkpoint is written for", metavar="N")
    ep: int = setting(1, "expert-parallel ranks that the checkpoint is written for", metavar="N")
    format: str = setting("hf", "checkpoint format to write", metavar="NAME")
    config: str | None = setting(
        None, "the model's config.json (or its directory), where CKPT lacks one (DCP, Megatron)", metavar="PATH"
    )
    ranks: int | None = setting(
        None, "processes that do it (default: 1, or as many as torchrun and the like started)", metavar="N"
    )
    exchange: str | None = setting(
        None,
        "direct: who reads a part writes it wherever it belongs. Otherwise each file is written by one process, "
        "which gets what it needs by this algorithm (default: direct; auto for ranks on several machines)",
        choices=EXCHANGES,
    )
    max_shard_bytes: int = setting(5_000_000_000, "largest weight file, in bytes, where the format has several")
    overwrite: bool = setting(False, "replace --out if it exists, in one step, when the new one is complete")
    timeout: float = setting(1800.0, "seconds without progress after which a process counts as hung", metavar="S")
    dry_run: bool = setting(False, "print who holds and reads what; write nothing")
    quiet: bool = setting(False, "no progress bar and no summary")
    json: bool = setting(False, "print the result as JSON")

    def __post_init__(self) -> None:
        if self.exchange is not None:
            check_choice("exchange", self.exchange, EXCHANGES)
        check_sizes(tp=self.tp, pp=self.pp, ep=self.ep, **({} if self.ranks is None else {"ranks": self.ranks}))
        check_common(self.timeout, self.max_shard_bytes)
        if not self.checkpoint:
            raise UsageError("no checkpoint given: modelexport reshard CKPT --tp N --out DIR")
