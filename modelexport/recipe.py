"""ExportRecipe: the one place where an export's settings are named.

A field here is a command-line flag (``--group-size``), a YAML key (``group_size``) and a keyword argument of
:func:`modelexport.exporter.export`. Whatever is not a field does not exist.
"""

from __future__ import annotations

from dataclasses import dataclass

from modelexport.errors import UsageError
from modelexport.settings import Settings, check_choice, check_common, check_sizes, setting

GATHERS = ("shm", "nfs", "direct")
ALGORITHMS = ("rtn", "mse")
KV_CACHES = ("fp8",)


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
        "how scales are chosen: from the largest magnitude, or the one of a grid with the least squared error",
        choices=ALGORITHMS,
    )
    kv_cache: str | None = setting(None, "number format of the KV cache (default: not quantised)", choices=KV_CACHES)
    calib: str | None = setting(
        None, "text or JSON lines for static scales (default: the text that comes with the package)", metavar="FILE"
    )
    calib_samples: int = setting(64, "samples of it", metavar="N")
    calib_length: int = setting(256, "tokens of each sample", metavar="N")
    calib_seed: int = setting(0, "which samples", metavar="N")
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
    dry_run: bool = setting(False, "print the plan, sizes and memory; write nothing")
    quiet: bool = setting(False, "no progress bar and no summary")
    json: bool = setting(False, "print the result as JSON")

    def __post_init__(self) -> None:
        if self.gather is not None:
            check_choice("gather", self.gather, GATHERS)
        check_sizes(tp=self.tp, target_tp=self.target_tp, target_pp=self.target_pp, target_ep=self.target_ep)
        check_choice("algorithm", self.algorithm, ALGORITHMS)
        if self.kv_cache is not None:
            check_choice("kv-cache", self.kv_cache, KV_CACHES)
        for name, value in (("samples", self.calib_samples), ("length", self.calib_length)):
            if value < 1:
                raise UsageError(f"--calib-{name} {value}: at least 1 is needed")
        if self.group_size is not None and self.group_size < 1 and self.group_size != -1:
            raise UsageError(f"--group-size {self.group_size}: choose 32, 64 or 128, or -1 for a whole row")
        check_common(self.timeout, self.max_shard_bytes)
        if self.gather == "nfs" and self.workspace is None:
            raise UsageError("--gather nfs needs a directory that every rank sees: add --workspace DIR")
        if self.workspace is not None and self.gather == "shm":
            raise UsageError("--workspace is of no use to --gather shm: drop one of the two")

    @property
    def observer(self) -> str:
        """How number formats choose scales: ``amax`` or ``mse``."""
        return {"rtn": "amax", "mse": "mse"}[self.algorithm]

    @property
    def transport(self) -> str:
        """The gather in force: ``shm``, ``nfs`` or ``direct``."""
        if self.gather is not None:
            return self.gather
        return "nfs" if self.workspace is not None else "direct"
