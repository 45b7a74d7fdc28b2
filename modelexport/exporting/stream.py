"""quantise(): the tensors of a quantised checkpoint one after the other, and no file.

For those who hold a model and an engine at once, and give the engine new weights after each step of training::

    from modelexport import quantise

    engine_model.load_weights(quantise(model=trained, quant="fp8"))
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

from modelexport.distributed import collectives
from modelexport.errors import UsageError
from modelexport.exporting.prepare import PreparedExport, check_early, prepare, quantization_files
from modelexport.exporting.run import fetch_ahead, job_of, opened_of, rank_class_of
from modelexport.layers import LayerConfig
from modelexport.models import checkpoint_formats
from modelexport.models.in_memory import forget_layers, is_in_memory, opened
from modelexport.quantization.methods import QUANTIZATION_KEYS
from modelexport.recipe import ExportRecipe

if TYPE_CHECKING:
    from torch import Tensor

    from modelexport.exporting.plan import ExportStep, TensorTask

__all__ = ["QuantisedTensors", "quantise"]


def quantise(model: Any = None, *, config: Any = None, tokenizer: Any = None, **settings: Any) -> QuantisedTensors:
    """Quantise a model layer by layer, into (name, tensor): what :func:`~modelexport.export` would write.

    Args:
        model: as for :func:`~modelexport.export`: a module of transformers, a dict of tensors, a directory, a hub id.
        config, tokenizer: of a model in memory, as there.
        settings: as for :func:`~modelexport.export`, without ``out``; of one process, and of the formats that have
            Hugging Face's names (``hf``, ``modelopt``, ``awq``, ``gptq``, ``fp8-block``).

    Returns:
        An iterable of (name, tensor), each once, on the CPU, in memory of its own; at no time is more of the model
        in memory than a few layers. It has the ``config`` (config.json) of the quantised checkpoint, too. Of DTensors
        every rank iterates, and gets all of the tensors.

    Raises:
        UsageError, CheckpointError, PlanError: as :func:`~modelexport.export`; some of them while it is iterated.

    Example:
        ::

            >>> import modelexport
            >>> tensors = modelexport.quantise(quant="fp8")
            >>> tensors.config["quantization_config"]["quant_method"]
            'compressed-tensors'
            >>> name, tensor = next(iter(tensors))
            >>> name, tensor.dtype
            ('model.embed_tokens.weight', torch.bfloat16)
    """
    for name in ("out", "push_to_hub", "overwrite", "log"):
        if settings.get(name):
            raise UsageError(f"quantise() writes nothing: leave out {name}, or call modelexport.export()")
    with ExitStack() as stack:
        source = None
        if is_in_memory(model):
            source = stack.enter_context(opened(model, config, tokenizer))
        else:
            settings = {**settings, "model": model, "config": config}
        recipe = ExportRecipe.from_mapping({"quiet": True, **settings}, where="quantise()")
        if recipe.tp > 1 or recipe.target_tp * recipe.target_pp * recipe.target_ep > 1:
            raise UsageError("quantise() gives whole tensors, in one process: leave out tp and target_*")
        if checkpoint_formats.get(recipe.format) is not checkpoint_formats.get("hf"):
            raise UsageError(
                f"quantise() gives tensors by the names of Hugging Face's checkpoints, and --format {recipe.format} "
                "has others: call modelexport.export(), or choose another format"
            )
        check_early(recipe, source)
        if source is None:
            source = stack.enter_context(opened_of(recipe))
        prepared = prepare(recipe, source)
        return QuantisedTensors(prepared, stack.pop_all())


class QuantisedTensors:
    """The tensors of a quantised checkpoint, made while they are asked for; can be iterated several times.

    Attributes:
        config: config.json of the quantised checkpoint.
    """

    def __init__(self, prepared: PreparedExport, files: ExitStack) -> None:
        announced = quantization_files(prepared.plan)
        config = prepared.checkpoint.config or {}
        self.config = {key: value for key, value in config.items() if key not in QUANTIZATION_KEYS}
        if announced is not None:
            self.config["quantization_config"] = announced.config
        self._prepared, self._files = prepared, files

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        if self._prepared.is_calibrated and collectives.get_world_size() > 1:
            raise UsageError(
                f"this process is one of {collectives.get_world_size()} ranks, and quantise() calibrates in one "
                "process: choose what needs no calibration, or call modelexport.export()"
            )
        job = job_of(self._prepared, {})
        fetch_ahead(self._prepared, ())
        with rank_class_of(self._prepared)(job, _NoFiles(), alone=True) as rank:
            rank.begin()
            waiting: dict[str, Tensor] = {}
            for step in rank.steps:
                rank.gather(step)
                quantised = rank.quantise(step, rank.read(step))
                rank.passed(step)
                try:
                    found = list(_whole(quantised.layer, waiting))
                finally:
                    for queue, slot in quantised.slots:
                        queue.put(slot)
                yield from found
        forget_layers()


def _whole(layer: LayerConfig, waiting: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """A layer's tensors, copied; of those that come in several slabs of rows, the last one gives the whole."""
    import torch

    for path, module in layer.modules.items():
        for name, shard in module.tensors.items():
            assert shard.data is not None
            full = layer.tensor_name(path, name)
            if shard.shape == shard.global_shape:
                yield full, shard.data.clone()
                continue
            if full not in waiting:
                waiting[full] = torch.empty(shard.global_shape, dtype=shard.data.dtype)
            start = shard.offset[0]
            waiting[full][start : start + shard.shape[0]] = shard.data
            if start + shard.shape[0] == shard.global_shape[0]:
                yield full, waiting.pop(full)


class _NoFiles:
    """Stands where an export has its writer."""

    wants_errors = False

    def __init__(self) -> None:
        self.records: dict[str, dict[str, Any]] = {}

    def wants_shared(self, task: TensorTask) -> bool:
        return False

    def step(self, step: ExportStep, layer: LayerConfig, note: dict[str, Any] | None = None) -> None:
        raise AssertionError("layers are handed to whoever iterates")

    def gathered(self, payload: Any, first: int = 0) -> AbstractContextManager[list[Any]]:
        return nullcontext([payload])

    def flush(self) -> None:
        pass

    def share_records(self) -> dict[str, dict[str, Any]]:
        return self.records

    def close(self) -> None:
        pass
