"""The checkpoint formats: every module of :mod:`modelexport.checkpoints.formats`, or of a plugin, with a ``NAME``.

``hf`` itself, a directory of safetensors files with whole tensors, is what :mod:`modelexport.checkpoints` reads and
writes without a format module; sharded, it is one like the others.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from modelexport import plugins
from modelexport.errors import UsageError, nearest

if TYPE_CHECKING:  # --help needs the names alone
    from modelexport.checkpoints.safetensors.file import Checkpoint, Layout
    from modelexport.quantization.methods import Method
    from modelexport.sharding.rules import TensorRule
    from modelexport.sharding.shard_plan import ShardPlan

    Rules = Callable[..., list[TensorRule]]

_NEEDED_TO_READ = ("DESCRIPTION", "SIDE_FILES", "recognises", "open")
_NEEDED = (*_NEEDED_TO_READ, "lay_out", "side_files")


class SourceFormat(Protocol):
    """The interface of the module of a checkpoint format that is read; with ``READS``, its name, and not written."""

    DESCRIPTION: str
    """One line for people."""
    SIDE_FILES: tuple[str, ...]
    """Files that belong to the format and not to the model: they do not come along into another format."""

    def recognises(self, directory: Path) -> bool:
        """Returns whether the directory holds a checkpoint of this format."""

    def open(self, directory: Path, config: dict[str, Any] | None, rules: Rules) -> Checkpoint:
        """Read and check everything but the weights."""


class CheckpointFormat(SourceFormat, Protocol):
    """The interface of a checkpoint format's module."""

    NAME: str
    """As ``--format`` has it."""

    def lay_out(self, plan: ShardPlan, config: dict[str, Any], *, max_shard_bytes: int) -> Layout:
        """Returns the layout: the files, and the place of every tensor in them.

        A module with ``READS_SOURCE`` true also takes ``source``, the directory of the model's tokenizer.
        """

    def side_files(self, plan: ShardPlan, config: dict[str, Any], layout: Layout) -> Mapping[str, bytes]:
        """The files beside the weights that belong to the format: name -> content."""


@cache
def containers() -> dict[str, str]:
    """Returns the containers' names, in order, and their modules."""
    found = dict(plugins.declared("modelexport.checkpoints.formats", "NAME"))
    for plugin in plugins.modules().values():
        if hasattr(plugin, "NAME"):
            plugins.require(plugin, plugin, _NEEDED, kind="a checkpoint format")
            plugins.register(found, plugin.NAME, plugin.__name__, kind="a checkpoint format", module=plugin)
    return dict(sorted(found.items()))


@cache
def formats() -> dict[str, CheckpointFormat]:
    """Format modules by name, in the order of their names."""
    return {name: cast(CheckpointFormat, importlib.import_module(module)) for name, module in containers().items()}


@cache
def _sources() -> dict[str, str]:
    """Names of all formats that are read, and their modules; those that are not written last, in order."""
    only_read = dict(plugins.declared("modelexport.checkpoints.formats", "READS"))
    for plugin in plugins.modules().values():
        if hasattr(plugin, "READS"):
            plugins.require(plugin, plugin, _NEEDED_TO_READ, kind="a checkpoint format")
            plugins.register(only_read, plugin.READS, plugin.__name__, kind="a checkpoint format", module=plugin)
    return {**containers(), **dict(sorted(only_read.items()))}


def recognised(directory: Path) -> SourceFormat | None:
    """The module of the first format that recognises a directory; None: it may be Hugging Face's own.

    Of a format with an ``EXTENSION`` nothing is imported where no file has it.

    Raises:
        OSError: the directory cannot be read.
    """
    names = os.listdir(directory)
    extensions = {module: word for word, module in _extensions().items()}
    for module in _sources().values():
        word = extensions.get(module)
        if word is None or any(name.endswith(f".{word}") for name in names):
            found = cast(SourceFormat, importlib.import_module(module))
            if found.recognises(directory):
                return found
    return None


@cache
def _extensions() -> dict[str, str]:
    return plugins.declared("modelexport.checkpoints.formats", "EXTENSION")


def source(name: str) -> SourceFormat:
    """The module of the format that a checkpoint was read from."""
    module = _sources().get(name)
    return get(name) if module is None else cast(SourceFormat, importlib.import_module(module))


def names() -> list[str]:
    """The names that ``--format`` takes: containers, and quantisation methods in Hugging Face's."""
    return sorted({*containers(), *plugins.declared("modelexport.quantization.methods", "FORMAT")})


def get(name: str) -> CheckpointFormat:
    """The container of that name's files.

    Raises:
        UsageError: there is none; the message has the nearest.
    """
    if name not in names():
        raise UsageError(f"--format {name}: unknown{nearest(name, names())}")
    module = containers()[name if name in containers() else "hf"]
    return cast(CheckpointFormat, importlib.import_module(module))


@dataclass(frozen=True)
class CardFacts:
    """The facts of a checkpoint format that a model card has, declared by its module, or its method's.

    Attributes:
        hub_library: the library by which the Hub loads it, ``HUB_LIBRARY``; None where there is none.
        tag: by which the Hub finds it, ``HUB_TAG``, by default its name; None: that of the quantisation method.
        loads_tensor_parallel: True if engines divide it among tensor-parallel ranks, ``LOADS_TENSOR_PARALLEL``.
    """

    hub_library: str | None
    tag: str | None
    loads_tensor_parallel: bool

    @classmethod
    def of(cls, name: str) -> CardFacts:
        """The facts of a ``--format``; of one that is not known here, its name."""
        found = _described(name)
        return cls(
            getattr(found, "HUB_LIBRARY", None),
            getattr(found, "HUB_TAG", name),
            getattr(found, "LOADS_TENSOR_PARALLEL", True),
        )


def description_of(name: str) -> str:
    """Returns the line that describes a ``--format`` to people."""
    found = _described(name)
    assert found is not None
    return found.DESCRIPTION


def _described(name: str) -> CheckpointFormat | Method | None:
    from modelexport.quantization.methods import of_format

    return get(name) if name in containers() else of_format(name)


def why_no_drafts(name: str, config: Mapping[str, Any] | None) -> str:
    """The reason why a ``--format`` cannot hold a model's draft layers; ``""`` where it can.

    Its module's ``HOLDS_DRAFTS`` says it of all models; ``draft_refusal(config)``, where there is one, of each.

    Raises:
        UsageError: there is no such format; the message has the nearest.
    """
    module = get(name)
    if not getattr(module, "HOLDS_DRAFTS", False):
        return f"--format {name} has no place for them"
    refusal = getattr(module, "draft_refusal", None)
    return "" if refusal is None or config is None else refusal(config)


def wants_experts_apart(name: str) -> bool:
    """Returns whether a ``--format`` is given each expert's linears, and not stacks: its module's ``EXPERTS_APART``.

    Raises:
        UsageError: there is no such format; the message has the nearest.
    """
    return bool(getattr(get(name), "EXPERTS_APART", False))


def has_experts_apart(name: str) -> bool:
    """Returns whether checkpoints of the format that one was read from have each expert's linears where their model's
    own have stacks: its module's ``EXPERTS_APART``."""
    return bool(getattr(source(name), "EXPERTS_APART", False))


def wants_multiplied(name: str) -> bool:
    """Returns whether a ``--format`` is given weights with config.json's multipliers in them: its module's
    ``FOLDS_MULTIPLIERS``.

    Raises:
        UsageError: there is no such format; the message has the nearest.
    """
    return bool(getattr(get(name), "FOLDS_MULTIPLIERS", False))


def wants_language_part(name: str) -> bool:
    """Returns whether a ``--format`` is given the language model alone of a model that also sees or hears: its module's
    ``LANGUAGE_PART``.

    Raises:
        UsageError: there is no such format; the message has the nearest.
    """
    return bool(getattr(get(name), "LANGUAGE_PART", False))


def method_of(name: str) -> Method:
    """The quantisation method by which a ``--format`` encodes quantised linears.

    Raises:
        UsageError: there is no such format; the message has the nearest.
    """
    from modelexport.quantization.methods import of_format, of_method

    own = getattr(get(name), "QUANT_METHOD", None)
    return of_format(name) or of_method(own or "compressed-tensors")
