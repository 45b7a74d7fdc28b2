"""autoquant, before there is a plan: the errors of each format in each group of linears, and the choice."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from modelexport.checkpoints.safetensors.file import Checkpoint, Reader, torch_dtype
from modelexport.errors import PlanError, UsageError
from modelexport.exporting.calibrated.samples import forward_reader, samples_of
from modelexport.exporting.plan import full_name
from modelexport.models.architecture import Dimensions, Family, family_of, language_config, read_dimensions
from modelexport.quantization import devices, sensitivity
from modelexport.quantization.algorithms.autoquant import AutoQuant
from modelexport.quantization.calibration.layers import LayerRunner
from modelexport.quantization.formats.base import NumberFormat
from modelexport.quantization.kv_caches import CACHES
from modelexport.quantization.methods import refusal
from modelexport.quantization.methods.base import Method, ModelQuantization
from modelexport.recipe import ExportRecipe

__all__ = ["assigned", "fused_groups"]


def assigned(
    checkpoint: Checkpoint,
    recipe: ExportRecipe,
    tokenizer: Path,
    *,
    budgets: Sequence[float] | None = None,
    method: Method | None = None,
    progress: Callable[[str], None] | None = None,
) -> list[sensitivity.Assigned]:
    """Choose a number format for every group of linears that engines fuse, within each of some budgets.

    The source is run over some of the samples, on this process alone.

    Args:
        recipe: its candidates, bits (per weight of the decoder's linears, scales included) and group size, and the
            samples.
        tokenizer: the directory that holds the model's.
        budgets: bits per weight; None: the recipe's one.
        method: the target's, which must be able to encode the candidates, and all of them in one checkpoint.
        progress: told what is going on.

    Raises:
        UsageError: an unknown format among the candidates, one that the target cannot encode, several that it cannot
            encode beside each other, or fewer than two.
        PlanError: no choice is within the budget, or no candidate fits a linear.
        CheckpointError: a weight, or a hidden state, is not finite.
    """
    config, settings = checkpoint.config or {}, recipe.settings_of(AutoQuant.name)
    family = family_of(config, checkpoint.infos)
    dimensions = read_dimensions(config, family)
    groups, shapes = fused_groups(family, dimensions)
    missing = [name for name in shapes if f"{name}.weight" not in checkpoint.infos]
    if missing:
        raise PlanError(f"{checkpoint.directory}: {missing[0]}.weight is missing, so {AutoQuant.name} cannot weigh it")
    chosen_from = settings.number_formats(recipe.group_size)
    if method is not None:
        _check_encoded(method, chosen_from, set(shapes.values()), settings.candidates_flag)
    dtype = torch_dtype(checkpoint.infos[f"{next(iter(shapes))}.weight"].dtype)

    def on_event(done: int, all_: int) -> None:
        if progress is not None:
            progress(f"{AutoQuant.name}: layer {done} of {all_}")

    reader = Reader(checkpoint)
    try:
        samples = samples_of(checkpoint, recipe, tokenizer, reader).first(sensitivity.TOKENS)
        with LayerRunner(
            language_config(config, checkpoint.infos),
            checkpoint.infos.keys(),
            forward_reader(checkpoint, reader),
            samples.windows,
            embedded=samples.embedded,
            device=devices.of_rank(devices.chosen(recipe.device, calibrated=True), 0),
            alone=True,
            derived=family.is_derived,
        ) as runner:
            return sensitivity.assign(
                runner,
                groups,
                shapes,
                chosen_from,
                [settings.bits] if budgets is None else budgets,
                dtype,
                method=recipe.calib_range,
                cache=None if recipe.kv_cache is None else CACHES[recipe.kv_cache],
                progress=on_event,
            )
    finally:
        reader.close()


def _check_encoded(
    method: Method, candidates: Mapping[str, NumberFormat], shapes: Collection[tuple[int, int]], flag: str
) -> None:
    """Refuse, before the time is spent, candidates that the target cannot encode, or not in one checkpoint."""
    quantised = {name: found for name, found in candidates.items() if found.quantised}
    for name, number_format in quantised.items():
        reasons = [refusal(method, number_format, shape) for shape in sorted(shapes)]
        if all(reasons):
            raise UsageError(f"{flag}: {name}: {reasons[0]}")
    try:
        if quantised:
            method.quantization_files(ModelQuantization(quantised, []))
    except PlanError as error:
        raise UsageError(f"{flag}: any two may be chosen for one checkpoint, but: {error}") from error


def fused_groups(family: Family, dimensions: Dimensions) -> tuple[list[list[list[str]]], dict[str, tuple[int, int]]]:
    """Each layer's groups of linears that engines fuse (all experts' together), and the linears' shapes."""
    layers, shapes = [], {}
    for i in range(dimensions.layers):
        prefix = family.layer_prefix.format(i=i)
        groups: dict[str, list[str]] = {}
        for path, _, module in family.modules_of_layer(dimensions, i):
            if module.kind == "linear" and not module.why:
                name = full_name(prefix, path)
                # Engines have one scheme for all that a layer's experts do.
                together = "experts" if module.is_expert else module.fused_into or module.general_path
                groups.setdefault(together, []).append(name)
                rows, columns = dimensions.weight_shape(module)
                shapes[name] = (rows, columns)
        layers.append(list(groups.values()))
    return layers, shapes
