"""ExportRecipe and ReshardRecipe: the one place where the settings of the two jobs are named.

A field here is a command-line flag (``--group-size``), a YAML key (``group_size``) and a keyword argument of
:func:`modelexport.export` or :func:`modelexport.reshard`. Whatever is not a field does not exist.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from modelexport.errors import UsageError, shown
from modelexport.settings import Settings, check_choice, check_common, check_sizes, setting

GATHERS = ("shm", "nfs", "direct")
ALGORITHMS = ("rtn", "mse", "smoothquant", "awq", "gptq", "rotation", "autoquant")
_KINDS = {"rotation": 0, "autoquant": 1, "smoothquant": 2, "awq": 2, "rtn": 3, "mse": 3, "gptq": 3}
"""When an algorithm's turn comes; of those that round there is one at most."""
ALGORITHM_SETTINGS = {
    "smoothquant": ("alpha",),
    "awq": ("grid",),
    "gptq": ("damping", "block_size", "act_order"),
    "autoquant": ("bits", "candidates"),
}
CALIBRATION = tuple(f"calib{part}" for part in ("", "_samples", "_length", "_seed", "_range", "_experts", "_memory"))
RANGES = ("max", "percentile", "mse")
EXPERTS = ("routed", "all")
KV_CACHES = ("fp8",)
_PART = r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9_])?"
_REPO_ID = re.compile(f"{_PART}/{_PART}", re.ASCII)
_LONGEST_REPO_ID = 96


def check_repo_id(repo_id: str) -> None:
    """Raise a UsageError for what cannot be the name of a repository of the hub."""
    if not _REPO_ID.fullmatch(repo_id) or len(repo_id) > _LONGEST_REPO_ID or ".." in repo_id or "--" in repo_id:
        raise UsageError(
            f"'{shown(repo_id)}' is no repository of the hub: ORGANISATION/NAME is needed, e.g. me/model-fp8"
        )


@dataclass(frozen=True, kw_only=True)
class ExportRecipe(Settings):
    """What to export, how, and where to. Fields marked with * decide the bytes that are written."""

    model: str | None = setting(
        None, "checkpoint directory or hub id (default: the embedded demo model)", metavar="DIR|ID"
    )
    revision: str | None = setting(None, "branch, tag or commit of a hub id", metavar="REV")
    out: str | None = setting(None, "target directory; must not exist (see --overwrite)", metavar="DIR")
    quant: str = setting(
        "fp8",
        "number format of the decoder's linears, or PATTERN=FORMAT[:GROUP],... of which the first that matches counts",
        pairs=True,
    )
    group_size: int | None = setting(
        None, "weights that share a scale, for formats with groups; -1: a whole row (default: 128)", metavar="N"
    )
    algorithm: str = setting(
        "rtn",
        f"how weights are rounded: {', '.join(ALGORITHMS)}, or several joined by '+', e.g. rotation+gptq",
        metavar="NAME[+NAME]",
    )
    alpha: float = setting(0.5, "smoothquant: how much of an outlier goes into the weights, 0 to 1", metavar="A")
    grid: int = setting(20, "awq: scales tried for each module", metavar="N")
    damping: float = setting(0.01, "gptq: added to the Hessian's diagonal, as a part of its mean", metavar="D")
    block_size: int = setting(128, "gptq: columns whose errors are handed on together", metavar="N")
    act_order: bool = setting(True, "gptq: columns in the order of their inputs' energy (--no-act-order: as they are)")
    bits: float = setting(5.0, "autoquant: bits per weight that the decoder's linears may take", metavar="B")
    candidates: str = setting("int4,fp8,none", "autoquant: number formats to choose from", metavar="NAMES")
    kv_cache: str | None = setting(None, "number format of the KV cache (default: not quantised)", choices=KV_CACHES)
    calib: str | None = setting(
        None,
        "text, JSON lines, or a data set as hf:NAME:SPLIT, to calibrate with (default: the package's text)",
        metavar="FILE",
    )
    calib_samples: int = setting(64, "samples of it", metavar="N")
    calib_length: int = setting(256, "tokens of each sample", metavar="N")
    calib_seed: int = setting(0, "which samples, and the signs of rotation", metavar="N")
    calib_range: str = setting(
        "mse",
        "what static scales reach: the largest magnitude, 99.99 percent of all, or the least squared error",
        choices=RANGES,
    )
    calib_experts: str = setting(
        "routed", "which tokens an expert's statistics are of: those routed to it, or all", choices=EXPERTS
    )
    calib_memory: int | None = setting(
        None, "bytes of hidden states to keep in memory; what is beyond goes to the disk (default: all)", metavar="N"
    )
    config: str | None = setting(
        None, "the model's config.json (or its directory), where --model lacks one (DCP, Megatron)", metavar="PATH"
    )
    format: str = setting("hf", "checkpoint format", metavar="NAME")
    target_tp: int = setting(1, "tensor-parallel ranks that the checkpoint is written for", metavar="N")
    target_pp: int = setting(1, "pipeline stages that the checkpoint is written for", metavar="N")
    target_ep: int = setting(1, "expert-parallel ranks that the checkpoint is written for", metavar="N")
    tp: int = setting(1, "tensor-parallel rank processes", metavar="N")
    gather: str | None = setting(
        None,
        "how ranks hand over their tensors: shared memory, files in --workspace, or each rank writes its own "
        "pieces into the checkpoint (default: direct; nfs where --workspace is given)",
        choices=GATHERS,
    )
    workspace: str | None = setting(
        None, "directory that all ranks see, for --gather nfs and for ranks on several machines", metavar="DIR"
    )
    max_shard_bytes: int = setting(5_000_000_000, "largest weight file, in bytes", metavar="N")
    overwrite: bool = setting(False, "replace --out if it exists, in one step, when the new one is complete")
    evaluate: bool = setting(
        True, "perplexity and a sentence, before and after (demo model only; --no-evaluate skips it)"
    )
    timeout: float = setting(1800.0, "seconds without progress after which a rank counts as hung", metavar="S")
    push_to_hub: str | None = setting(
        None, "repository of the Hugging Face hub to upload the finished checkpoint to", metavar="ORG/NAME"
    )
    private: bool = setting(False, "the repository of --push-to-hub is to be private")
    dry_run: bool = setting(False, "print the plan, sizes and memory; write nothing")
    quiet: bool = setting(False, "no progress bar and no summary")
    json: bool = setting(False, "print the result as JSON")

    def __post_init__(self) -> None:
        if self.gather is not None:
            check_choice("gather", self.gather, GATHERS)
        check_sizes(tp=self.tp, target_tp=self.target_tp, target_pp=self.target_pp, target_ep=self.target_ep)
        self._check_algorithm()
        if self.kv_cache is not None:
            check_choice("kv-cache", self.kv_cache, KV_CACHES)
        for name, value in (("samples", self.calib_samples), ("length", self.calib_length)):
            if value < 1:
                raise UsageError(f"--calib-{name} {value}: at least 1 is needed")
        if self.group_size is not None and self.group_size < 1 and self.group_size != -1:
            raise UsageError(f"--group-size {self.group_size}: choose 32, 64 or 128, or -1 for a whole row")
        check_common(self.timeout, self.max_shard_bytes)
        if self.push_to_hub is not None:
            check_repo_id(self.push_to_hub)
        elif self.private:
            raise UsageError("--private is for --push-to-hub ORG/NAME: add it, or leave out --private")
        if self.gather == "nfs" and self.workspace is None:
            raise UsageError("--gather nfs needs a directory that every rank sees: add --workspace DIR")
        if self.workspace is not None and self.gather == "shm":
            raise UsageError("--workspace is of no use to --gather shm: drop one of the two")

    def _check_algorithm(self) -> None:
        for name in self.algorithms:
            check_choice("algorithm", name, ALGORITHMS)
        kinds = [_KINDS[name] for name in self.algorithms]
        if kinds != sorted(kinds) or len(set(self.algorithms)) != len(kinds) or kinds.count(3) > 1:
            order = "rotation, then autoquant, then smoothquant and awq, then one of rtn, mse and gptq"
            raise UsageError(f"--algorithm {self.algorithm}: the order is {order}, each once")
        check_choice("calib-range", self.calib_range, RANGES)
        check_choice("calib-experts", self.calib_experts, EXPERTS)
        if not 0 <= self.alpha <= 1:
            raise UsageError(f"--alpha {self.alpha:g}: a number from 0 to 1 is needed, e.g. --alpha 0.5")
        if self.grid < 1:
            raise UsageError(f"--grid {self.grid}: at least 1 is needed, e.g. --grid 20")
        if not 0 < self.damping < 1:
            raise UsageError(f"--damping {self.damping:g}: a number between 0 and 1 is needed, e.g. --damping 0.01")
        if self.block_size < 1:
            raise UsageError(f"--block-size {self.block_size}: at least 1 is needed, e.g. --block-size 128")
        if self.calib_memory is not None and self.calib_memory < 0:
            raise UsageError(f"--calib-memory {self.calib_memory}: a number of bytes is needed, e.g. 4000000000")
        if not 0 < self.bits <= 32:
            raise UsageError(f"--bits {self.bits:g}: a number above 0, at most 32, is needed, e.g. --bits 5")

    @property
    def algorithms(self) -> tuple[str, ...]:
        """The names in ``algorithm``."""
        return tuple(name.strip() for name in self.algorithm.split("+"))

    @property
    def algorithm_settings(self) -> dict[str, Any]:
        """The settings of the algorithms that are used."""
        used = {name for algorithm in self.algorithms for name in ALGORITHM_SETTINGS.get(algorithm, ())}
        return {name: getattr(self, name) for name in sorted(used)}

    @property
    def is_calibrated(self) -> bool:
        """Whether layers are quantised one by one while samples run through them."""
        return not {"rotation", "smoothquant", "awq", "gptq"}.isdisjoint(self.algorithms)

    @property
    def observer(self) -> str:
        """How number formats choose scales: ``amax`` or ``mse``."""
        return "amax" if {"mse", "gptq"}.isdisjoint(self.algorithms) else "mse"

    @property
    def transport(self) -> str:
        """The gather in force: ``shm``, ``nfs`` or ``direct``."""
        if self.gather is not None:
            return self.gather
        return "nfs" if self.workspace is not None else "direct"


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
