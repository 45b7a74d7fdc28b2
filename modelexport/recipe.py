"""ExportRecipe and ReshardRecipe: the one place where the settings of the two jobs are named.

A field here is a command-line flag (``--group-size``), a YAML key (``group_size``) and a keyword argument of
:func:`modelexport.export` or :func:`modelexport.reshard`. Whatever is not a field does not exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from modelexport.errors import PlanError, UsageError, shown
from modelexport.quantization import algorithms, devices, kv_caches
from modelexport.quantization.algorithms.base import KINDS, Algorithm, Kind
from modelexport.settings import Settings, check_choice, check_common, check_sizes, decides_bytes, setting

if TYPE_CHECKING:
    from modelexport.quantization.formats.base import NumberFormat

GATHERS = ("shm", "nfs", "direct")
RANGES = ("max", "percentile", "mse")
EXPERTS = ("routed", "all")
KV_CACHES = tuple(kv_caches.CACHES)
UNKNOWN_ARCHITECTURES = ("refuse", "structure")
DRAFTS = ("keep", "quantise", "drop")
_PART = r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9_])?"
_REPO_ID = re.compile(f"{_PART}/{_PART}", re.ASCII)
_LONGEST_REPO_ID = 96


def check_repo_id(repo_id: str) -> None:
    """Raise a UsageError for what cannot be the name of a repository of the hub."""
    if not _REPO_ID.fullmatch(repo_id) or len(repo_id) > _LONGEST_REPO_ID or ".." in repo_id or "--" in repo_id:
        raise UsageError(
            f"'{shown(repo_id)}' is no repository of the hub: ORGANISATION/NAME is needed, e.g. me/model-fp8"
        )


S = TypeVar("S")


def field_of(algorithm: str, name: str) -> str:
    """Returns the name of the recipe's field for a setting of an algorithm: ``gptq_damping``."""
    return f"{algorithm.replace('-', '_')}_{name}"


def is_calibration(name: str) -> bool:
    """Returns whether a field of the recipe is a setting of calibration."""
    return name.startswith("calib")


def calibration_key(name: str) -> str:
    """Returns the key of a setting of calibration in a record's "calibration"."""
    return "text" if name == "calib" else name.removeprefix("calib_")


def recorded_names(used: Iterable[str]) -> dict[str, str]:
    """Returns the recipe's fields of the settings of some algorithms, by the keys that they have in a record.

    That is the setting's own name (``damping``), but where two of the algorithms have one of the same name. Algorithms
    that are not known here are left out.
    """
    found: dict[str, str] = {}
    for name in used:
        for spec in fields(algorithms.get(name).Settings) if name in algorithms.names() else ():
            own = field_of(name, spec.name)
            found[own if spec.name in found else spec.name] = own
    return found


def _turns() -> Iterator[str]:
    """The algorithms by the turns that they come in, for a sentence."""
    for kind in KINDS:
        own = [name for name, algorithm in algorithms.registered().items() if algorithm.kind == kind]
        text = " and ".join([", ".join(own[:-1]), own[-1]]) if own[1:] else "".join(own)
        yield text if kind == "fold" or len(own) < 2 else f"one of {text}"


def _with_settings_of_algorithms(cls: type[S]) -> type[S]:
    """Inserts, behind ``algorithm``, a field for every setting of every algorithm, before a dataclass is made."""
    annotations = {}
    for own, annotation in cls.__annotations__.items():
        annotations[own] = annotation
        for name, algorithm in algorithms.registered().items() if own == "algorithm" else ():
            for spec in fields(algorithm.Settings):
                kind = spec.type if isinstance(spec.type, str) else getattr(spec.type, "__name__", str(spec.type))
                about = {"decides_bytes": True, "algorithm": name, "setting": spec.name, "former": spec.name}
                annotations[field_of(name, spec.name)] = kind
                own_field = field(default=spec.default, metadata={**spec.metadata, **about})
                setattr(cls, field_of(name, spec.name), own_field)
    cls.__annotations__ = annotations
    return cls


@dataclass(frozen=True, kw_only=True)
@_with_settings_of_algorithms
class ExportRecipe(Settings):
    """The settings of an export; those that decide the bytes are marked so.

    The settings of each algorithm are fields that carry its name (``gptq_damping``), see :meth:`settings_of`.
    """

    model: str | None = setting(
        None, "checkpoint directory or hub id (default: the embedded demo model)", metavar="DIR|ID"
    )
    revision: str | None = setting(None, "branch, tag or commit of a hub id", metavar="REV")
    download: bool = setting(
        False, "bring all of a hub id to the hub's cache first, instead of reading it layer by layer"
    )
    adapter: tuple[str, ...] = setting(
        (),
        "LoRA adapter, as PEFT saves it, to merge first, perhaps with a weight; may be given several times",
        metavar="DIR[=W]",
        several=True,
        decides_bytes=True,
    )
    out: str | None = setting(None, "target directory; must not exist (see --overwrite)", metavar="DIR")
    quant: str = setting(
        "fp8",
        "number format of the decoder's linears, or PATTERN=FORMAT[:GROUP],... of which the first that matches counts; "
        "with --format gguf a mixture of llama.cpp's, too (modelexport formats lists them)",
        pairs=True,
        decides_bytes=True,
    )
    group_size: int | None = setting(
        None,
        "weights that share a scale, for formats with groups; -1: a whole row (default: 128)",
        metavar="N",
        decides_bytes=True,
    )
    algorithm: str = setting(
        "rtn",
        f"how weights are rounded: {', '.join(algorithms.names())}, or several joined by '+', e.g. rotation+gptq",
        metavar="NAME[+NAME]",
        decides_bytes=True,
    )
    kv_cache: str | None = setting(
        None, "number format of the KV cache (default: not quantised)", choices=KV_CACHES, decides_bytes=True
    )
    draft: str = setting(
        "keep",
        "what becomes of draft layers (multi-token prediction): written as they are, or their decoder layer's linears "
        "quantised as the model's, or left out",
        choices=DRAFTS,
        decides_bytes=True,
    )
    unknown_architecture: str = setting(
        "refuse",
        "what becomes of a model_type that transformers does not know: refused, or exported by the names and shapes of "
        "its tensors",
        choices=UNKNOWN_ARCHITECTURES,
        decides_bytes=True,
    )
    format: str = setting("hf", "checkpoint format", metavar="NAME", decides_bytes=True)
    max_shard_bytes: int | None = setting(
        None, "largest weight file, in bytes (default: 5 GB; of gguf, one file)", metavar="N", decides_bytes=True
    )
    target_tp: int = setting(
        1, "tensor-parallel ranks that the checkpoint is written for", metavar="N", decides_bytes=True
    )
    target_pp: int = setting(1, "pipeline stages that the checkpoint is written for", metavar="N", decides_bytes=True)
    target_ep: int = setting(
        1, "expert-parallel ranks that the checkpoint is written for", metavar="N", decides_bytes=True
    )
    calib: tuple[str, ...] = setting(
        (),
        "text, JSON lines, or a data set as hf:NAME:SPLIT, to calibrate with (default: the package's text); may be "
        "given several times, each with the weight of its share of the samples",
        metavar="FILE[=W]",
        several=True,
        decides_bytes=True,
    )
    calib_seed: int = setting(0, "which samples, and the signs of rotation", metavar="N", decides_bytes=True)
    calib_range: str = setting(
        "mse",
        "what static scales reach: the largest magnitude, 99.99 percent of all, or the least squared error",
        choices=RANGES,
        decides_bytes=True,
    )
    calib_experts: str = setting(
        "routed",
        "which tokens an expert's statistics are of: those routed to it, or all",
        choices=EXPERTS,
        decides_bytes=True,
    )
    calib_samples: int = setting(64, "samples of it", metavar="N", decides_bytes=True)
    calib_length: int = setting(256, "tokens of each sample", metavar="N", decides_bytes=True)
    calib_memory: int | None = setting(
        None, "bytes of hidden states to keep in memory; what is beyond goes to the disk (default: all)", metavar="N"
    )
    config: str | None = setting(
        None, "the model's config.json (or its directory), where --model lacks one (DCP, Megatron)", metavar="PATH"
    )
    device: str = setting(
        "auto",
        "what computes: auto (a GPU where torch sees one and samples run through the model), cpu, cuda or cuda:N",
        metavar="NAME",
        decides_bytes=True,
    )
    device_memory: int | None = setting(
        None, "bytes that a rank may take on its GPU while samples run (default: 9 tenths of what is free)", metavar="N"
    )
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
    overwrite: bool = setting(False, "replace --out if it exists, in one step, when the new one is complete")
    evaluate: bool = setting(
        True, "perplexity and a sentence, before and after (demo model only; --no-evaluate skips it)"
    )
    timeout: float = setting(1800.0, "seconds without progress after which a rank counts as hung", metavar="S")
    push_to_hub: str | None = setting(
        None, "repository of the Hugging Face hub to upload the finished checkpoint to", metavar="ORG/NAME"
    )
    private: bool = setting(False, "the repository of --push-to-hub is to be private")
    log: str | None = setting(
        None, "file to append to, as JSON lines, what each rank does and how much it has moved", metavar="FILE"
    )
    dry_run: bool = setting(False, "print the plan, sizes and memory; write nothing")
    quiet: bool = setting(False, "no progress bar and no summary")
    json: bool = setting(False, "print the result as JSON")

    def __post_init__(self) -> None:
        for name in ("adapter", "calib"):
            given = getattr(self, name)
            object.__setattr__(self, name, (given,) if isinstance(given, str) else tuple(given or ()))
        if self.gather is not None:
            check_choice("gather", self.gather, GATHERS)
        check_sizes(tp=self.tp, target_tp=self.target_tp, target_pp=self.target_pp, target_ep=self.target_ep)
        self._check_algorithm()
        if self.kv_cache is not None:
            check_choice("kv-cache", self.kv_cache, KV_CACHES)
        check_choice("draft", self.draft, DRAFTS)
        devices.check_name(self.device)
        if self.device_memory is not None and self.device_memory < 1:
            raise UsageError(f"--device-memory {self.device_memory}: a number of bytes is needed, e.g. 20000000000")
        check_choice("unknown-architecture", self.unknown_architecture, UNKNOWN_ARCHITECTURES)
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
            check_choice("algorithm", name, algorithms.names())
        kinds = [algorithms.get(name).kind for name in self.algorithms]
        single = all(kinds.count(kind) < 2 for kind in KINDS if kind != "fold")
        if kinds != sorted(kinds, key=KINDS.index) or len(set(self.algorithms)) != len(kinds) or not single:
            raise UsageError(f"--algorithm {self.algorithm}: the order is {', then '.join(_turns())}, each once")
        check_choice("calib-range", self.calib_range, RANGES)
        check_choice("calib-experts", self.calib_experts, EXPERTS)
        for name in algorithms.names():
            self.settings_of(name)
        for spec in fields(self):
            owner = spec.metadata.get("algorithm", self.algorithms[0])
            if owner not in self.algorithms and getattr(self, spec.name) != spec.default:
                raise UsageError(
                    f"--{spec.name.replace('_', '-')} is a setting of {owner}, and --algorithm is {self.algorithm}: "
                    f"add --algorithm {self._joined_with(owner)}, or leave the setting out"
                )
        if self.calib_memory is not None and self.calib_memory < 0:
            raise UsageError(f"--calib-memory {self.calib_memory}: a number of bytes is needed, e.g. 4000000000")

    def _joined_with(self, added: str) -> str:
        """The value of ``--algorithm`` with one more, in place of what it cannot be joined with, and of the default."""
        kind = algorithms.get(added).kind
        used = self.of_kind(*KINDS)
        left = [own.name for own in used if (kind == "fold" or own.kind != kind) and own.name != type(self).algorithm]
        return "+".join(name for name in algorithms.names() if name in (*left, added))

    def check_number_formats(self, number_formats: Iterable[NumberFormat]) -> None:
        """Raise a PlanError for one that an algorithm cannot work with."""
        for algorithm, number_format in product(self.of_kind(*KINDS), dict.fromkeys(number_formats)):
            refusal = algorithm.refusal(number_format)
            if refusal is not None:
                raise PlanError(f"--algorithm {self.algorithm}: {refusal}: choose another of the two")

    @property
    def algorithms(self) -> tuple[str, ...]:
        """The names in ``algorithm``."""
        return tuple(name.strip() for name in self.algorithm.split("+"))

    def settings_of(self, algorithm: str) -> Any:
        """Returns the settings of an algorithm, used or not: an instance of its ``Settings``."""
        kind = algorithms.get(algorithm).Settings
        return kind(**{spec.name: getattr(self, field_of(algorithm, spec.name)) for spec in fields(kind)})

    @property
    def algorithm_settings(self) -> dict[str, Any]:
        """The settings of the algorithms that are used, as a record has them; see :func:`recorded_names`."""
        return {key: getattr(self, own) for key, own in sorted(recorded_names(self.algorithms).items())}

    def deciding(self) -> dict[str, Any]:
        """See the base; without the settings of algorithms that are not used."""
        of_others = (spec for spec in fields(self) if spec.metadata.get("algorithm") not in (None, *self.algorithms))
        idle = {spec.name for spec in of_others}
        if devices.kind_of(self.device) in (devices.AUTO, devices.CPU):
            idle.add("device")
        return {name: value for name, value in super().deciding().items() if name not in idle}

    def recorded(self) -> dict[str, Any]:
        """Returns the "recipe" of a checkpoint's record: the deciding settings but those of calibration.

        The settings of the algorithms used have their short names; parallelism and adapters are left out where there
        are none, and of adapters their directories' names are kept.
        """
        found: dict[str, Any] = {}
        for spec in fields(self):
            value = getattr(self, spec.name)
            elsewhere = is_calibration(spec.name) or "algorithm" in spec.metadata
            # Said only where they are otherwise.
            usual = spec.name in ("adapter", "draft", "unknown_architecture") or spec.name.startswith("target_")
            idle = spec.name not in self.deciding()
            if not decides_bytes(spec) or elsewhere or idle or (usual and value == spec.default):
                continue
            found[spec.name] = [Path(text).absolute().name for text in value] if isinstance(value, tuple) else value
            if spec.name == "algorithm":
                found |= self.algorithm_settings
        return found

    def recorded_calibration(self) -> dict[str, Any]:
        """Returns the settings of calibration as they stand in a checkpoint's record."""
        return {calibration_key(name): value for name, value in self.deciding().items() if is_calibration(name)}

    def of_kind(self, *kinds: Kind) -> list[type[Algorithm]]:
        """Returns the algorithms used that are of one of these kinds."""
        return [found for name in self.algorithms if (found := algorithms.get(name)).kind in kinds]

    @property
    def rounding(self) -> type[Algorithm]:
        """The algorithm that rounds weights: the one that is named, or the one that follows on what is."""
        named = self.of_kind("round")
        if named:
            return named[0]
        return algorithms.get(next((own for stage in self.of_kind("fold") if (own := stage.followed_by)), "rtn"))

    @property
    def reads_samples(self) -> bool:
        """True if an algorithm needs samples."""
        return any(algorithms.get(name).needs_samples for name in self.algorithms)

    @property
    def is_calibrated(self) -> bool:
        """True if layers are quantised one by one while samples run through them."""
        return any(algorithm.needs_samples for algorithm in self.of_kind("rotate", "fold", "round"))

    @property
    def observer(self) -> str:
        """The observer by which number formats choose scales: ``amax`` or ``mse``."""
        return self.rounding.observer

    @property
    def transport(self) -> str:
        """The gather in force: ``shm``, ``nfs`` or ``direct``."""
        if self.gather is not None:
            return self.gather
        return "nfs" if self.workspace is not None else "direct"


EXCHANGES = ("direct", "auto", "p2p", "shared_memory")


@dataclass(frozen=True, kw_only=True)
class ReshardRecipe(Settings):
    """The settings of a resharding: the checkpoint, the parallelism, the target."""

    checkpoint: str = setting("", "the checkpoint: any format, any parallelism", metavar="CKPT")
    out: str | None = setting(None, "target directory; must not exist (see --overwrite)", metavar="DIR")
    tp: int = setting(1, "tensor-parallel ranks that the checkpoint is written for", metavar="N", decides_bytes=True)
    pp: int = setting(1, "pipeline stages that the checkpoint is written for", metavar="N", decides_bytes=True)
    ep: int = setting(1, "expert-parallel ranks that the checkpoint is written for", metavar="N", decides_bytes=True)
    format: str = setting("hf", "checkpoint format to write", metavar="NAME", decides_bytes=True)
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
    max_shard_bytes: int | None = setting(
        None,
        "largest weight file, in bytes, where the format has several (default: 5 GB; of gguf, one file)",
        decides_bytes=True,
    )
    overwrite: bool = setting(False, "replace --out if it exists, in one step, when the new one is complete")
    timeout: float = setting(1800.0, "seconds without progress after which a process counts as hung", metavar="S")
    log: str | None = setting(
        None, "file to append to, as JSON lines, what each rank does and how much it has moved", metavar="FILE"
    )
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
