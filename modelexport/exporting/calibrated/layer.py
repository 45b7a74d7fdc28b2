"""One decoder layer of a calibrated export: looked at, folded, rounded. All ranks go through it together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from modelexport.checkpoints.safetensors.file import torch_dtype
from modelexport.distributed.launch import phase
from modelexport.errors import ValuesError
from modelexport.exporting.calibrated.gradients import SharedGradients
from modelexport.exporting.calibrated.recut import from_rows, to_rows
from modelexport.exporting.plan import ExportStep, full_name
from modelexport.exporting.scales import ScaleAgreement
from modelexport.models.folds import apply_fold, folds_of_layer
from modelexport.quantization.algorithms.base import CalibratedLinear, Folding, Rounding
from modelexport.quantization.algorithms.rtn import RoundToNearest
from modelexport.quantization.calibration import static_ranges
from modelexport.quantization.calibration.cut import WHOLE, ForwardShard
from modelexport.quantization.calibration.statistics import InputStatistics
from modelexport.quantization.kv_caches import CACHES, CacheRounding
from modelexport.quantization.output_errors import OutputErrors, input_tensors, some_rows
from modelexport.system.allocator import return_freed_memory

if TYPE_CHECKING:
    from modelexport.exporting.rank import RankJob
    from modelexport.quantization.calibration.layers import FilledLayer, LayerRunner, Observed

NOT_RUN = "text does not pass through its layer, which attends to images: rounded to nearest"
RARE = 64
"""Tokens below which an expert's statistics are reported as those of too few."""


@dataclass
class LayerReport:
    """The calibration figures of one quantised layer.

    Attributes:
        before, after: linear -> squared error of its outputs, as a part of their own square (see
            :mod:`~modelexport.quantization.output_errors`), rounded to nearest, and as written.
        changed: modules and tensors whose values are not the source's: what was folded into or out of them.
        unseen: linears of experts to which no token came.
        rare: linears of experts to which fewer than :data:`RARE` came -> how many.
        notes: linear -> what was out of the ordinary when it was rounded.
    """

    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    rare: dict[str, int] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """JSON-able form."""
        return dict(vars(self))

    @property
    def mean(self) -> float:
        """Mean error of the linears as written; NaN where there is none."""
        return math.fsum(self.after.values()) / len(self.after) if self.after else math.nan


@dataclass
class QuantisedLayer:
    """A layer's tensors, as far as this rank emits them.

    Attributes:
        native: number of a quantised task -> the native tensors of its rows on this rank.
        plain: number of any other task -> what is written of it, in the source's dtype.
        activations: linear -> what rounds its inputs, of those whose inputs are rounded.
        errors: number of a quantised task -> noise and signal of its rows on this rank, of those that only rounding
            has changed.
        keys, values: layer -> the largest magnitudes that its KV cache's scales are to cover.
        cache: what rounds keys and values by these scales, as engines do before later layers see anything of them.
    """

    native: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    plain: dict[int, Tensor] = field(default_factory=dict)
    errors: dict[int, tuple[float, float]] = field(default_factory=dict)
    activations: dict[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    keys: dict[int, tuple[float, ...]] = field(default_factory=dict)
    values: dict[int, tuple[float, ...]] = field(default_factory=dict)
    cache: CacheRounding | None = None
    report: LayerReport = field(default_factory=LayerReport)


class CalibratedLayer:
    """A filled layer on its way to :class:`QuantisedLayer`: :meth:`fold` for each algorithm that folds, then
    :meth:`round`.

    Args:
        advance: the samples go on to the next layer as the unrounded layer leaves them, when they are looked at: once.
    """

    def __init__(
        self,
        job: RankJob,
        step: ExportStep,
        runner: LayerRunner,
        filled: FilledLayer,
        scales: ScaleAgreement,
        rank: int,
        *,
        advance: bool = False,
    ) -> None:
        self.job, self.step, self.runner, self.filled, self.scales = job, step, runner, filled, scales
        self.advance = advance
        self.report = LayerReport()
        self.cache = None if job.plan.kv_cache is None else CACHES[job.plan.kv_cache]
        self.numbers = {
            full_name(step.layer, task.path, task.parameter): number
            for number, task in enumerate(step.tasks)
            if task.cached is None
        }
        self.tasks = {name: step.tasks[number] for name, number in self.numbers.items()}
        modules = {name.rpartition(".")[0] for name in self.tasks}
        self.shares = {name: filled.share(name) for name in modules}
        self.rows = to_rows(self.tasks, filled.tensors, self.share)
        self.linears = self._linears(rank)
        self.roundings: dict[object, Callable[[Tensor], Tensor]] = {}
        self.seen: frozenset[str] = frozenset()
        self.observed: Observed | None = None
        self.before: OutputErrors | None = None

    def share(self, tensor: str) -> ForwardShard:
        """The part of a tensor that this rank's forward pass holds."""
        module, _, parameter = tensor.rpartition(".")
        share = self.shares.get(module, WHOLE)
        return share if parameter == "weight" or share.dim == 0 else WHOLE  # a row-parallel linear's bias is whole

    def _linears(self, rank: int) -> dict[str, CalibratedLinear]:
        """Module -> its linear, of those that multiply: routers too."""
        found = {}
        for name, task in self.tasks.items():
            if task.parameter != "weight" or task.module.kind not in ("linear", "router"):
                continue
            box, number_format = task.owned_box(rank), task.number_format
            if number_format is not None:  # nothing is searched while it is folded
                scales = number_format.scale_dtype or torch_dtype(task.info.dtype)
                number_format = replace(number_format, scale_dtype=scales, observer="amax")
            module = name.removesuffix(".weight")
            rows = (0, 0) if box is None else box[0]
            found[module] = CalibratedLinear(
                module,
                task.module.role,
                number_format,
                self.rows[name],
                rows,
                task.full_shape,
                None,
                device=self.runner.device,
            )
        return found

    @property
    def quantised(self) -> dict[str, CalibratedLinear]:
        """Those of the linears that are."""
        return {name: linear for name, linear in self.linears.items() if linear.number_format is not None}

    # ------------------------------------------------------------ looking

    def look(self, wants: frozenset[str], what: str) -> None:
        """Run the samples through the layer as it is now, unless all that is wanted of them is known."""
        ranged = any(x.number_format is not None and x.number_format.has_static_inputs for x in self.linears.values())
        method = self.job.recipe.calib_range
        ranged = ranged or self.cache is not None
        wants = wants | {"sample"} | (static_ranges.wants(method) if ranged else frozenset())
        if wants <= self.seen:
            return
        assert self.step.index is not None
        assert not (self.advance and self.seen), "the samples are beyond the layer"
        if ranged:
            self.runner.check_ranges(self.step.index)
        phase(f"{self.step.id}: samples through the layer, for {what}")
        self.observed = None  # lets go of what is known, before more is gathered
        for linear in self.linears.values():
            linear.inputs = None
        self.observed = self.runner.observe(
            self.filled,
            wants,
            all_experts=self.job.recipe.calib_experts == "all",
            by_head=self.cache is not None and self.cache.by_head,
            advance=self.advance,
        )
        return_freed_memory()  # activations of samples, before copies of weights are made beside them
        self.seen = wants
        for name, linear in self.linears.items():
            linear.inputs = self.observed.inputs.get(name)
        self._check_finite()
        if self.before is None:
            self.report.unseen = [
                name for name, linear in self.quantised.items() if linear.inputs is None and self._is_expert(name)
            ]
            self.report.rare = {
                name: count
                for name, count in self.observed.tokens.items()
                if 0 < count < RARE and name in self.quantised and self._is_expert(name)
            }
            self.before = self._errors_to_nearest()

    def _is_expert(self, module: str) -> bool:
        return self.tasks[f"{module}.weight"].module.is_expert

    def _check_finite(self) -> None:
        for name, linear in self.linears.items():
            if linear.inputs is not None and not linear.inputs.finite:
                held = self.filled.tensors.items()
                broken = next((each for each, x in held if not bool(torch.isfinite(x).all())), None)
                if broken is not None:
                    raise ValuesError(f"{broken} holds NaN or Inf: check the model")
                raise ValuesError(
                    f"the inputs of {name} are not finite on the calibration text: there is NaN or Inf in a weight "
                    "before it, or it overflows; check the model, or choose --algorithm "
                    f"{RoundToNearest.name} with --quant fp8 or int8"
                )

    def _errors_to_nearest(self) -> OutputErrors:
        """The output errors that rounding to nearest would cause, with nothing folded; of large weights by some rows:
        the search for scales takes as long as it does for what is stored."""
        errors = OutputErrors()
        self._agree(search=False)
        for linear in map(CalibratedLinear.computing, self.quantised.values()):
            some = some_rows(linear)
            told = linear if some is None else replace(linear, weight=linear.weight[some.to(linear.weight.device)])
            errors.add(linear, told.nearest(), some=some)
        return errors

    def _agree(self, *, search: bool = True) -> None:
        """Give every quantised linear what its scales depend on beyond this rank's rows."""
        numbers = {self.numbers[f"{name}.weight"]: linear for name, linear in self.quantised.items()}
        weights = {number: linear.weight for number, linear in numbers.items() if len(linear.weight)}
        amax = self.scales.agree(self.step, weights, search=search)
        reaches = self._reaches()
        for number, linear in numbers.items():
            linear.amax, linear.input_amax = amax.get(number), reaches.get(linear.name)

    def _reaches(self) -> dict[str, float]:
        """Linear -> the largest input that its static scale covers. Experts have one together."""
        static = {name: x for name, x in self.quantised.items() if x.number_format.has_static_inputs}  # type: ignore[union-attr]
        groups: dict[object, list[CalibratedLinear]] = {}
        for name, linear in static.items():
            module = self.tasks[f"{name}.weight"].module
            groups.setdefault(
                (linear.number_format, module.path if module.is_expert else id(linear.inputs)), []
            ).append(linear)
        found: dict[str, float] = {}
        for group in groups.values():
            parts = list({id(x.inputs): x.inputs for x in group if x.inputs is not None}.values())
            found.update(dict.fromkeys((linear.name for linear in group), self._reach(group[0], parts)))
        return found

    def _reach(self, linear: CalibratedLinear, parts: Sequence[InputStatistics]) -> float:
        if not parts:  # no token came to any expert
            return 0.0
        together = parts[0] if len(parts) == 1 else static_ranges.together(parts)
        if together.histogram is None and self.job.recipe.calib_range != "max":
            return static_ranges.choose(together, "max", linear.number_format)
        return static_ranges.choose(together, self.job.recipe.calib_range, linear.number_format)

    # ------------------------------------------------------------ changing

    def fold(self, folding: Folding) -> None:
        """Move scales from activations into weights, where the family has places for them."""
        self.look(frozenset(folding.wants), folding.name)
        phase(f"{self.step.id}: {folding.name}")
        changed = dict.fromkeys(self.report.changed)
        dims, index = self.job.plan.dimensions, self.step.index
        assert index is not None
        folds = folds_of_layer(self.job.plan.family, dims, index, self.linears, self.filled.tensors, self._dtype)
        for fold in folds:
            scale = folding.scales(fold.fold)
            if scale is None:
                continue
            apply_fold(self.filled.tensors, self.shares, fold, scale)
            # What is known of inputs was divided, as far as that goes; what the cache is given was not.
            self.seen = frozenset() if self.cache is not None else self.seen - {"histogram", "hessian"}
            if fold.rows is None:
                own = (f"{fold.fold.source}.{parameter}" for parameter in ("weight", "bias"))
                changed.update(dict.fromkeys(name for name in own if name in self.tasks))
            else:
                changed[fold.fold.source] = None
            changed.update(dict.fromkeys(linear.name for linear in fold.fold.linears))
        self.report.changed = list(changed)
        # A fold divides the forward pass's biases. On several ranks the rows that leave are other memory, and of
        # biases nothing else follows.
        biases = {f"{name}.bias": self.tasks[f"{name}.bias"] for name in changed if f"{name}.bias" in self.tasks}
        if biases:
            self.rows.update(to_rows(biases, self.filled.tensors, self.share))

    def _dtype(self, tensor: str) -> torch.dtype:
        return torch_dtype(self.tasks[tensor].info.dtype)

    def round(self, rounding: Rounding) -> QuantisedLayer:
        """Round the linears; the layer's tensors are then those that are written, decoded."""
        self.look(frozenset(rounding.wants), rounding.name)
        phase(f"{self.step.id}: {rounding.name}")
        for linear in self.quantised.values():
            assert linear.number_format is not None
            linear.number_format = replace(linear.number_format, observer=rounding.observer)
        self._agree()
        made = QuantisedLayer(report=self.report)
        self._cached(made)
        after = OutputErrors()
        groups = [list(self.quantised.values())] if rounding.learns else self._groups()
        for number, group in enumerate(groups, 1):
            if number > 1:  # a layer of many experts takes its time: that is no hang
                phase(f"{self.step.id}: {rounding.name} (linears {number} of {len(groups)})")
            computing = [linear.computing() for linear in group]
            native = self._learn(rounding, computing, made.cache) if rounding.learns else rounding.quantise(computing)
            for linear in group:
                tensors = native[linear.name] if len(linear.weight) else linear.rounded()
                self._take(made, linear, tensors, after)
        self._take_others(made)
        from_rows(self.tasks, self.rows, self.filled.tensors, self.share)
        assert self.before is not None
        self.report.before, self.report.after = self.before.ratios(), after.ratios()
        self.report.notes = {name: note for name, note in rounding.notes.items() if name in self.linears}
        self.report.notes |= self._not_run()
        return made

    def _learn(
        self, rounding: Rounding, linears: Sequence[CalibratedLinear], cache: CacheRounding | None
    ) -> Mapping[str, dict[str, Tensor]]:
        """Rounds all linears by the gradients of the layer."""
        weights = {linear.name: linear.weight for linear in linears}
        ranks = range(self.job.plan.parallelism.tp)
        boxes = {name: [self.tasks[f"{name}.weight"].owned_box(rank) for rank in ranks] for name in weights}
        spans = {name: [(0, 0) if box is None else box[0] for box in each] for name, each in boxes.items()}
        activations = {
            linear.name: self._rounding_of(linear)
            for linear in self.quantised.values()
            if linear.number_format is not None and linear.number_format.input_arguments() is not None
        }
        with SharedGradients(self.runner, self.filled, weights, spans, activations, cache) as layer:
            own = [replace(linear, weight=layer.unrounded[linear.name]) for linear in linears]
            return rounding.learn(own, layer)

    def _not_run(self) -> dict[str, str]:
        """Linear -> why no sample came to it, of a layer that text does not pass through."""
        assert self.step.index is not None
        return dict.fromkeys(self.quantised, NOT_RUN) if self.runner.skips(self.step.index) else {}

    def _groups(self) -> list[list[CalibratedLinear]]:
        """The quantised linears, those together that are given the same."""
        groups: dict[int, list[CalibratedLinear]] = {}
        for linear in self.quantised.values():
            groups.setdefault(id(linear if linear.inputs is None else linear.inputs), []).append(linear)
        return list(groups.values())

    def _take(
        self, made: QuantisedLayer, linear: CalibratedLinear, native: dict[str, Tensor], after: OutputErrors
    ) -> None:
        name, number_format = f"{linear.name}.weight", linear.number_format
        assert number_format is not None
        target = self.rows[name]
        decoded = number_format.dequantise(native) if len(target) else linear.weight
        changed = linear.name in self.report.changed
        after.add(linear.computing(), decoded, None if changed else self.before)
        if len(target):
            if not changed:
                original = target.to(next(iter(native.values())).device)  # experts may be in the host's memory
                made.errors[self.numbers[name]] = number_format.error_sums(original, native)
            target.copy_(decoded)
            made.native[self.numbers[name]] = {suffix: value.to(target.device) for suffix, value in native.items()}
        if number_format.input_arguments() is not None:
            made.activations[linear.name] = self._rounding_of(linear)

    def _rounding_of(self, linear: CalibratedLinear) -> Callable[[Tensor], Tensor]:
        """The function that rounds a linear's inputs; the same one for all linears that share and round their inputs
        alike."""
        number_format = linear.number_format
        assert number_format is not None
        key = (number_format.name, id(linear.inputs), linear.input_amax)
        if key not in self.roundings:
            small = input_tensors(number_format, linear)
            self.roundings[key] = partial(number_format.fake_quantise_activations, tensors=small)
        return self.roundings[key]

    def _take_others(self, made: QuantisedLayer) -> None:
        """Takes the tensors that are not quantised, in the source's dtype: they may have been folded, or rotated."""
        for name, task in self.tasks.items():
            value = self.rows[name]
            if self.numbers[name] in made.native or task.quantised or not value.numel():
                continue
            made.plain[self.numbers[name]] = stored = value.to(torch_dtype(task.info.dtype))
            value.copy_(stored)  # what is written is what runs

    def _cached(self, made: QuantisedLayer) -> None:
        """Finds the scales of the KV cache, by what the layer is given as it was before it is rounded."""
        observed, index = self.observed, self.step.index
        assert observed is not None
        assert index is not None
        if self.cache is not None and observed.keys:
            method = self.job.recipe.calib_range
            made.keys[index] = static_ranges.choose_cache(observed.keys, method, self.cache)
            made.values[index] = static_ranges.choose_cache(observed.values, method, self.cache)
            if not self.runner.is_latent:
                made.cache = self.cache.rounding(made.keys[index], made.values[index])
