"""Low-rank adapters as PEFT saves them: ``adapter_config.json`` and ``adapter_model.safetensors`` (or ``.bin``).

A LoRA adapter (Hu et al., 2021) has for a linear of weight ``W`` ``[out, in]`` two small matrices, ``A`` ``[rank, in]``
and ``B`` ``[out, rank]``; the adapted linear is ``W + scaling * B @ A``. ``scaling`` is ``alpha / rank``, of rsLoRA
(Kalajdzievski, 2023) ``alpha / sqrt(rank)``; DoRA (Liu et al., 2024) then gives every row a length of its own. Here
files are read and checked by themselves; which module of a model they mean is decided elsewhere.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from modelexport.checkpoints.safetensors.header import TensorInfo, read_header
from modelexport.checkpoints.safetensors.placement import Placement
from modelexport.checkpoints.torch_archive.state_dict import read_state_dict
from modelexport.errors import CheckpointError, UsageError, quoted, shown
from modelexport.settings import with_weight
from modelexport.system.dtypes import FLOATS
from modelexport.system.json_values import JsonValues
from modelexport.system.small_files import LARGEST_CONFIG, has_file, read_json

__all__ = ["CONFIG", "WEIGHTS", "Adapter", "AdapterModule", "adapters_in", "parse_setting", "read_adapter"]

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"
_PREFIX = "base_model.model."
_WRAPPERS = re.compile(r"\.(base_layer|modules_to_save)(?=\.)")
_PARTS = {
    "lora_A.weight": "a",
    "lora_B.weight": "b",
    "lora_B.bias": "b_bias",
    "lora_embedding_A": "embedding_a",
    "lora_embedding_B": "embedding_b",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
}
_PART = re.compile(rf"(.+)\.({'|'.join(re.escape(suffix) for suffix in _PARTS)})")
_OTHER = re.compile(r"\.(lora_|ia3_|oft_|hada_|lokr_|vera_|trainable_tokens|token_adapter|prompt_)")
_CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq")
_UNSUPPORTED = {
    "target_parameters": "it adapts parameters that are no linears' weights",
    "layer_replication": "it repeats layers of the model",
    "alora_invocation_tokens": "it works from a certain token on, which no merged weight does",
    "use_qalora": "it adapts groups of input features",
    "use_bdlora": "its matrices are block-diagonal",
    "arrow_config": "it chooses among adapters for every token",
    "trainable_token_indices": "it adapts single rows of the embedding",
}
_LONGEST_PATTERN = 256


@dataclass(frozen=True)
class AdapterModule:
    """The tensors that an adapter has for one module, by what they are; see :data:`_PARTS`."""

    name: str
    parts: Mapping[str, TensorInfo] = field(default_factory=dict)

    @property
    def is_embedding(self) -> bool:
        """True if the module is adapted as an embedding is, whose weight is ``[vocabulary, features]``."""
        return "embedding_a" in self.parts

    @property
    def a(self) -> TensorInfo:
        """``[rank, in]``; of an embedding ``[rank, vocabulary]``."""
        return self.parts["embedding_a" if self.is_embedding else "a"]

    @property
    def b(self) -> TensorInfo:
        """``[out, rank]``; of an embedding ``[features, rank]``."""
        return self.parts["embedding_b" if self.is_embedding else "b"]

    @property
    def rank(self) -> int:
        """The rank, by the shape of A."""
        return self.a.shape[0]


@dataclass(frozen=True)
class Adapter:
    """An adapter, headers read and checked, no data read.

    Attributes:
        directory: where it lies.
        weight: what its changes are multiplied by.
        file: the file that holds its tensors.
        config: ``adapter_config.json``.
        modules: what it adds to, by the module's name in the model that it was trained on.
        replaced: tensors that it has whole (``modules_to_save``, biases), by their names in that model.
        placements: of its tensors that are not contiguous in the file, where their elements are.
    """

    directory: Path
    weight: float
    file: Path
    config: JsonValues
    modules: Mapping[str, AdapterModule]
    replaced: Mapping[str, TensorInfo]
    placements: Mapping[str, tuple[Placement, ...]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of its directory."""
        return self.directory.name

    @property
    def kind(self) -> str:
        """``LoRA``, ``rsLoRA`` or ``DoRA``."""
        return "DoRA" if self.uses_dora else "rsLoRA" if self.config.content.get("use_rslora") else "LoRA"

    @property
    def uses_dora(self) -> bool:
        """True if rows of adapted weights have lengths of their own."""
        return bool(self.config.content.get("use_dora"))

    @property
    def is_transposed(self) -> bool:
        """True if weights that are no linears' lie as ``[in, out]``: GPT-2's."""
        return bool(self.config.content.get("fan_in_fan_out"))

    @property
    def keeps_ties(self) -> bool:
        """True if embedding and head, where the model ties them, were trained as one."""
        return bool(self.config.content.get("ensure_weight_tying"))

    @property
    def rank(self) -> int:
        """The rank of modules that ``rank_pattern`` does not name."""
        return self.config.whole("r", 8)

    @property
    def alpha(self) -> float:
        """The numerator of the scaling of modules that ``alpha_pattern`` does not name."""
        return self.config.number("lora_alpha", 8)

    @property
    def base(self) -> str:
        """The model that it says it was trained on; ``""`` where it says nothing."""
        base = self.config.content.get("base_model_name_or_path")
        return base if isinstance(base, str) else ""

    def scaling(self, module: str) -> float:
        """The factor of ``B @ A`` of a module, in double precision.

        Raises:
            CheckpointError: rank or alpha is no number, or the rank is another than that of the module's tensors.
        """
        rank = int(self._patterned("rank_pattern", module, self.rank))
        alpha = self._patterned("alpha_pattern", module, self.alpha)
        found = self.modules[module].rank
        if rank != found:
            raise CheckpointError(f"{self.directory}: {module} has rank {found}, {CONFIG} says {rank}")
        return alpha / (math.sqrt(rank) if self.config.content.get("use_rslora") else rank)

    def _patterned(self, key: str, module: str, default: float) -> float:
        """The value of the first pattern that the end of the module's name matches."""
        own = self.config.object(key)
        for pattern in own.content:
            try:
                matches = len(pattern) <= _LONGEST_PATTERN and re.match(rf"(.*\.)?({pattern})$", module)
            except re.error as error:
                raise CheckpointError(f"{own.where}: {quoted(pattern)} is no pattern: {error}") from error
            if matches:
                return own.number(pattern) if key == "alpha_pattern" else own.whole(pattern)
        return default

    def facts(self) -> dict[str, Any]:
        """The facts that a record has, but for its file's SHA-256: all that the bytes depend on beside its tensors."""
        patterns = {key: value for key in ("rank_pattern", "alpha_pattern") if (value := self.config.content.get(key))}
        return {
            "name": self.name,
            "kind": self.kind,
            "rank": self.rank,
            "alpha": self.alpha,
            **patterns,
            "weight": self.weight,
            "base_model": self.base or None,
        }


def parse_setting(text: str) -> tuple[Path, float]:
    """The directory and the weight of ``DIR`` or ``DIR=WEIGHT``.

    Raises:
        UsageError: there is no such directory, or the weight is no number.
    """
    name, weight = with_weight(text, "--adapter", lambda name: os.path.exists(os.path.expanduser(name)))
    directory = Path(os.path.expanduser(name))
    if not directory.is_dir():
        found = "is a file; give the directory that holds it" if directory.exists() else "is no directory"
        raise UsageError(f"--adapter {shown(text)}: {directory} {found}")
    return directory.resolve(), weight


def adapters_in(directory: Path) -> list[Path]:
    """The adapters that lie in a model's directory, or in one below it."""
    try:
        below = sorted(Path(entry.path) for entry in os.scandir(directory) if entry.is_dir())
    except OSError:  # whoever opens the model says so
        return []
    return [each for each in (directory, *below) if has_file(each, CONFIG)]


def read_adapter(directory: Path, weight: float = 1.0) -> Adapter:
    """Read and check everything of an adapter but its numbers.

    Args:
        weight: what its changes are to be multiplied by.

    Raises:
        CheckpointError: no LoRA adapter, one of a sort that cannot be merged, or one that contradicts itself.
    """
    if not has_file(directory, CONFIG):
        raise CheckpointError(f"--adapter {directory}: has no {CONFIG}; give a directory that PEFT saved")
    config = JsonValues(read_json(directory / CONFIG, largest=LARGEST_CONFIG), str(directory / CONFIG))
    _check_kind(directory, config)
    file, infos, places = _read_tensors(directory)
    modules, replaced = _sorted_tensors(directory, infos)
    adapter = Adapter(directory, weight, file, config, modules, replaced, places)
    for name, module in modules.items():
        _check_module(adapter, name, module)
    if replaced and weight != 1:
        raise CheckpointError(
            f"{directory}: has {next(iter(replaced))} whole, in place of the model's, to which a weight of {weight:g} "
            "cannot be given: leave the weight out"
        )
    return adapter


def _read_tensors(directory: Path) -> tuple[Path, Mapping[str, TensorInfo], dict[str, tuple[Placement, ...]]]:
    """The file, its tensors by their names in it, and the places of those that are not contiguous, as they are here."""
    if has_file(directory, WEIGHTS):
        return directory / WEIGHTS, read_header(directory / WEIGHTS).infos, {}
    if not has_file(directory, _PICKLED):
        raise CheckpointError(f"--adapter {directory}: has neither {WEIGHTS} nor {_PICKLED}")
    infos, places = read_state_dict(directory / _PICKLED)
    return directory / _PICKLED, infos, {_own_name(directory, key): place for key, place in places.items()}


def _own_name(directory: Path, key: str) -> str:
    """The name of a tensor here: apart from the model's, and from other adapters'."""
    return f"{directory}: {_WRAPPERS.sub('', key.removeprefix(_PREFIX))}"


def _check_kind(directory: Path, config: JsonValues) -> None:
    kind = config.text("peft_type", "")
    if kind != "LORA":
        found = f"is {quoted(kind)}" if kind else "is not said"
        raise CheckpointError(f"--adapter {directory}: peft_type in {CONFIG} {found}; LORA adapters can be merged")
    how = config.content.get("init_lora_weights")
    if isinstance(how, str) and how.lower().startswith(_CHANGES_THE_BASE):
        raise CheckpointError(
            f"--adapter {directory}: init_lora_weights is {quoted(how)}, which changed the model that it was trained "
            "on: save it with PEFT's path_initial_model_for_weight_conversion, which makes a LoRA of it"
        )
    for key, why in _UNSUPPORTED.items():
        if config.content.get(key):
            raise CheckpointError(f"--adapter {directory}: {key} is set in {CONFIG}: {why}, and it cannot be merged")


def _sorted_tensors(
    directory: Path, infos: Mapping[str, TensorInfo]
) -> tuple[dict[str, AdapterModule], dict[str, TensorInfo]]:
    """The tensors of a file by modules, and those that stand for the model's own."""
    parts: dict[str, dict[str, TensorInfo]] = {}
    replaced: dict[str, TensorInfo] = {}
    for key, info in infos.items():
        if not key.startswith(_PREFIX):
            raise CheckpointError(f"{info.path}: {quoted(key)} does not begin with {_PREFIX}, as what PEFT saves does")
        if info.dtype not in (*FLOATS, "F64"):
            raise CheckpointError(f"{info.path}: {quoted(key)} is {info.dtype}; {', '.join(FLOATS)} can be merged")
        name = _WRAPPERS.sub("", key.removeprefix(_PREFIX))
        own = replace(info, name=_own_name(directory, key))
        match = _PART.fullmatch(name)
        if match is not None:
            held, where, part = parts.setdefault(match[1], {}), match[1], _PARTS[match[2]]
            if part in held:
                raise CheckpointError(f"{info.path}: {where} has {part} twice")
            held[part] = own
        elif _OTHER.search(f".{name}"):
            raise CheckpointError(f"{info.path}: {quoted(name)} is no part of a LoRA that can be merged")
        elif name in replaced:
            raise CheckpointError(f"{info.path}: has {quoted(name)} twice")
        else:
            replaced[name] = own
    if not infos:
        raise CheckpointError(f"--adapter {directory}: holds no tensor")
    return {name: AdapterModule(name, held) for name, held in parts.items()}, replaced


def _check_module(adapter: Adapter, name: str, module: AdapterModule) -> None:
    """Refuse what is not whole, or whose shapes do not fit each other."""
    held, where = set(module.parts), f"{adapter.file}: {name}"
    pair = {"embedding_a", "embedding_b"} if module.is_embedding else {"a", "b"}
    if not pair <= held:
        missing = "A" if held & {"b", "embedding_b"} else "B" if held & {"a", "embedding_a"} else "A and B"
        raise CheckpointError(f"{where} has no lora_{missing}")
    if module.is_embedding and held - pair:
        raise CheckpointError(f"{where}: an embedding's DoRA cannot be merged")
    if {len(module.a.shape), len(module.b.shape)} != {2}:
        shapes = f"{list(module.a.shape)} and {list(module.b.shape)}"
        raise CheckpointError(f"{where}: A and B are {shapes}; only matrices can be merged")
    if module.a.shape[0] != module.b.shape[1] or not module.rank:
        raise CheckpointError(f"{where}: the rank is {module.a.shape[0]} by lora_A, {module.b.shape[1]} by lora_B")
    for part in ("magnitude", "b_bias"):
        info = module.parts.get(part)
        if info is not None and math.prod(info.shape) != module.b.shape[0]:
            raise CheckpointError(
                f"{where}: {part} has {math.prod(info.shape)} numbers, lora_B {module.b.shape[0]} rows"
            )
    if adapter.uses_dora and not module.is_embedding and "magnitude" not in held:
        raise CheckpointError(f"{where} has no lora_magnitude_vector, though {CONFIG} says use_dora")
    if not adapter.uses_dora and "magnitude" in held:
        raise CheckpointError(f"{where} has a lora_magnitude_vector, though {CONFIG} does not say use_dora")
    adapter.scaling(name)  # raises
