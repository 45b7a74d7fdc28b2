"""The memory of a device that calibration takes: predicted from the plan, and cut to a budget.

A bound from above, at the moments when most lies on the device: while samples run through a layer and statistics are
taken, while a linear is rounded, and while samples run through the rounded layer. What torch's kernels take for
themselves, and what its allocator keeps, is not known; attention is taken to write all its scores down.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from modelexport.checkpoints.safetensors.file import tensor_nbytes
from modelexport.errors import PlanError
from modelexport.exporting.calibrated.forward import batch_tokens, layer_cut
from modelexport.exporting.plan import ExportPlan, ExportStep, TensorTask
from modelexport.models.architecture import experts_of_token
from modelexport.quantization import devices
from modelexport.quantization.algorithms.base import Algorithm, Folding
from modelexport.quantization.algorithms.rtn import RoundToNearest
from modelexport.quantization.calibration import static_ranges, statistics
from modelexport.quantization.calibration.cut import ROWS, ForwardCut
from modelexport.quantization.kv_caches import CACHES
from modelexport.recipe import ExportRecipe
from modelexport.system.tables import size_text

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceMemory", "budget_of", "fitted", "memory_of"]

_FLOAT = 4
_ROUNDING = 4
"""Times a weight in float32: what rounding it to nearest, and decoding it, takes beside it; the most is 3.4."""
_SEARCHING = 6
"""The same where one scale of a whole weight is searched for."""
_SCORES = 3
"""Copies of the attention's scores that are there at once."""
_BUSY = 5
"""Hidden states of a batch that a layer has at once, beside what its linears are given and give."""
_ROUNDED_INPUT, _PACKED_INPUT = 4, 9
"""Copies of a linear's input while it is rounded as engines round it: to 8 bits, to fewer."""
_CLAMPED = 5
"""Times the outputs of an MLP's linears that it has at once where its gate is clamped, as gpt-oss' is; else 2."""
_TOGETHER = ("llama4_text",)
"""Models of which transformers computes all experts at once, for all tokens."""
_CHUNK = re.compile(r"(mamba_)?chunk_size")
_STATE = re.compile(r"mamba_d_state|(ssm_)?state_size")
"""The keys that say how many tokens a Mamba layer scans together, and how many numbers a channel's state has."""


@dataclass(frozen=True)
class DeviceMemory:
    """The device memory of a rank, and what is done for it to suffice.

    Attributes:
        predicted: bytes, of the rank and the layer that take most.
        budget: bytes there are; None where that is not known.
        step: the layer.
        parts: what the bytes are of -> how many.
        experts_apart: whether experts lie in the host's memory, and on the device one at a time.
        rows_at_once: rows of a linear that an algorithm rounds at a time, where it can; None for all.
    """

    predicted: int
    budget: int | None
    step: str
    parts: Mapping[str, int] = field(default_factory=dict)
    experts_apart: bool = False
    rows_at_once: int | None = None

    def cuts(self) -> Iterator[str]:
        """Yields what is done for it to suffice, in words."""
        if self.experts_apart:
            yield "experts lie in the host's memory, one at a time on the device"
        if self.rows_at_once is not None:
            yield f"{self.rows_at_once} rows of a linear are rounded at a time"

    def as_json(self) -> dict[str, Any]:
        """JSON-able form."""
        return {**vars(self), "parts": dict(self.parts)}


@dataclass(frozen=True)
class _HeldLinear:
    """A linear of a layer as a rank has it.

    Attributes:
        inputs: the key of those that are given the same.
        held: numbers of its weight that the forward pass has; ``itemsize`` bytes each.
        given, gives: input features of the whole, and output features that the rank computes.
        rows: output features that the rank rounds.
        block: the part of the layer that it belongs to, which runs at once: an attention, an MLP.
    """

    name: str
    inputs: object
    held: int
    itemsize: int
    given: int
    gives: int
    rows: int
    block: str
    is_expert: bool
    attends: bool
    task: TensorTask


def budget_of(recipe: ExportRecipe) -> int | None:
    """The device memory that each rank may take, in bytes; None where the device does not say."""
    if recipe.device_memory is not None:
        return recipe.device_memory
    return devices.free_memory(recipe.device, recipe.tp)


def memory_of(device: torch.device, plan: ExportPlan, recipe: ExportRecipe, config: Mapping[str, Any]) -> DeviceMemory:
    """The memory of the device that a rank computes on, and how it is made do with. Nothing is cut on the CPU.

    Each rank asks its own device: cuts do not change what is computed.

    Raises:
        PlanError: as :func:`fitted`.
    """
    if device.type == devices.CPU:
        return DeviceMemory(0, None, "")
    return fitted(plan, recipe, config, budget_of(recipe))


def fitted(plan: ExportPlan, recipe: ExportRecipe, config: Mapping[str, Any], budget: int | None) -> DeviceMemory:
    """The prediction for all ranks, within a budget: if need be with experts one at a time, then with fewer rows.

    Batches of samples stay what they are, since sums over their tokens depend on them.

    Args:
        config: config.json of the language model.

    Raises:
        PlanError: it does not fit.
    """
    steps = {_likeness(step): step for step in plan.steps if step.index is not None}
    for experts_apart, rows_at_once in _ways(plan):
        found = _largest(plan, recipe, config, list(steps.values()), experts_apart, rows_at_once)
        if budget is None or found.predicted <= budget:
            break
    else:
        assert budget is not None
        most = max(found.parts, key=lambda name: found.parts[name])
        raise PlanError(
            f"{found.step} needs {size_text(found.predicted)} of device memory, {size_text(found.parts[most])} of it "
            f"for {most}, and there are {size_text(budget)}: type --device-memory {found.predicted} where the device "
            f"has that, or --device {devices.CPU}"
        )
    return replace(found, budget=budget)


def _ways(plan: ExportPlan) -> Iterator[tuple[bool, int | None]]:
    """Yields what can be done for a layer to fit, the least first: whether experts are apart, rows at a time."""
    yield False, None
    apart = any(task.module.is_expert for step in plan.steps for task in step.tasks)
    if apart:
        yield True, None
    if plan.calibrated:
        yield from ((apart, rows * ROWS) for rows in (32, 16, 8, 4, 2, 1))


def _likeness(step: ExportStep) -> object:
    """Equal for layers that take the same memory."""
    return tuple((task.module.general_path, task.info.shape, task.number_format) for task in step.tasks)


def _largest(
    plan: ExportPlan,
    recipe: ExportRecipe,
    config: Mapping[str, Any],
    steps: Sequence[ExportStep],
    experts_apart: bool,
    rows_at_once: int | None,
) -> DeviceMemory:
    """The memory of the rank and the layer that take most."""
    worst = DeviceMemory(0, None, "", {}, experts_apart, rows_at_once)
    for rank in range(plan.parallelism.tp):
        cut = layer_cut(plan, rank, learns=recipe.rounding.learns)
        for step in steps:
            layer = _LayerMemory(plan, recipe, config, step, cut, rank, experts_apart, rows_at_once)
            for parts in layer.moments():
                total = sum(parts.values())
                if total > worst.predicted:
                    parts = {name: size for name, size in parts.items() if size}
                    worst = replace(worst, predicted=total, step=step.id, parts=parts)
    return worst


class _LayerMemory:
    """A rank's part of a layer on the device."""

    def __init__(
        self,
        plan: ExportPlan,
        recipe: ExportRecipe,
        config: Mapping[str, Any],
        step: ExportStep,
        cut: ForwardCut,
        rank: int,
        experts_apart: bool,
        rows_at_once: int | None,
    ) -> None:
        self.experts_apart, self.rows_at_once = experts_apart, rows_at_once
        self.plan, self.recipe, self.config, self.step = plan, recipe, config, step
        self.rank, self.world = rank, plan.parallelism.tp
        self.samples = max(1, batch_tokens(learns=recipe.rounding.learns) // recipe.calib_length)
        self.tokens = min(self.samples, recipe.calib_samples) * recipe.calib_length
        self.linears = [self._linear(task, cut) for task in step.tasks if _multiplies(task)]
        self.others = sum(
            _FLOAT * math.prod(task.info.shape) for task in step.tasks if task.cached is None and not _multiplies(task)
        )
        self.stages = [*recipe.of_kind("fold"), recipe.rounding]

    def _linear(self, task: TensorTask, cut: ForwardCut) -> _HeldLinear:
        module, (rows, columns), share = task.module, task.full_shape, cut.share(task.path)
        part = sum(stop - start for start, stop in share.spans)
        held = {None: (rows, columns), 0: (part, columns), 1: (rows, part)}[share.dim]
        box = task.owned_box(self.rank)
        # Transformers stacks experts, which static ranges read as they are stored.
        stored = module.is_expert and not self.plan.calibrated
        above = task.path.rpartition(".")[0]
        return _HeldLinear(
            name=task.path,
            inputs=(above, module.fused_into) if module.fused_into else task.path,
            held=held[0] * held[1],
            itemsize=tensor_nbytes(task.info.dtype, (1,)) if stored else _FLOAT,
            given=columns,
            gives=held[0],
            rows=0 if box is None else box[0][1] - box[0][0],
            block=task.path.partition(".")[0],
            is_expert=module.is_expert,
            attends=module.role.startswith("attention"),
            task=task,
        )

    # ------------------------------------------------------------ moments

    def moments(self) -> Iterator[dict[str, int]]:
        """Yields what lies on the device at each of the moments at which that may be most: what for -> bytes."""
        held = self.others + sum(x.held * x.itemsize for x in self.staying)
        weights = {"the layer's weights": held, "what layers share": self._shared()}
        yield {"the embeddings of the samples": self._embeddings()}
        if not self.plan.calibrated:
            seen = self._statistics(static_ranges.wants(self.recipe.calib_range))
            yield weights | seen | self._forward(seen=True)
            yield self._work(RoundToNearest)
            return
        if self.world > 1:
            weights["its rows that this rank rounds"] = sum(_FLOAT * x.rows * x.given for x in self.staying)
        for stage in self.stages:
            seen = self._statistics(stage.wanted(self.recipe.settings_of(stage.name)) | self._always())
            yield weights | seen | self._forward(seen=True)
            if issubclass(stage, Folding):
                yield weights | seen | self._work(stage)
            elif stage.learns:
                yield weights | seen | self._learning(self.recipe.settings_of(stage.name))
            else:
                yield weights | seen | self._made() | self._work(stage)
        yield weights | seen | self._made() | self._forward(seen=False)

    @property
    def staying(self) -> list[_HeldLinear]:
        """The linears that are on the device all the time."""
        return [x for x in self.linears if not (x.is_expert and self.experts_apart)]

    @property
    def quantised(self) -> list[_HeldLinear]:
        """Those of the linears that are."""
        return [x for x in self.linears if x.task.quantised]

    def _always(self) -> frozenset[str]:
        """The statistics that are taken whatever the algorithm."""
        static = self.plan.kv_cache is not None or any(
            x.task.number_format is not None and x.task.number_format.has_static_inputs for x in self.quantised
        )
        return frozenset({"sample"}) | (static_ranges.wants(self.recipe.calib_range) if static else frozenset())

    # ------------------------------------------------------------ parts

    def _shared(self) -> int:
        """Positions and masks, and a batch that is on its way from the host's memory or back."""
        positions = 4 * self.plan.dimensions.head_dim + 2 * self.recipe.calib_length
        return _FLOAT * self.tokens * (self.plan.dimensions.hidden + positions)

    def _embeddings(self) -> int:
        tokens = self.recipe.calib_samples * self.recipe.calib_length
        rows = min(int(self.config.get("vocab_size") or tokens), tokens)
        return _FLOAT * self.plan.dimensions.hidden * (rows + 2 * _BUSY * self.tokens)

    def _statistics(self, wants: Collection[str]) -> dict[str, int]:
        inputs = {x.inputs: x for x in self.linears}
        staying = {x.inputs for x in self.staying}
        sizes = [
            statistics.nbytes(x.given, wants, self.rank, self.world, at_rest=key not in staying)
            for key, x in inputs.items()
        ]
        return {"statistics of its linears' inputs": sum(sizes) + self._cache_statistics()}

    def _cache_statistics(self) -> int:
        """Of keys and values, whose heads may each have a histogram."""
        if self.plan.kv_cache is None:
            return 0
        dims = self.plan.dimensions
        heads = dims.kv_heads if CACHES[self.plan.kv_cache].by_head else 1
        return 2 * heads * statistics.nbytes(-(-dims.hidden // heads), {"amax", "histogram"})

    def _forward(self, *, seen: bool) -> dict[str, int]:
        """Of a batch on its way through the layer.

        Args:
            seen: whether the inputs of linears are kept, and statistics taken of them.
        """
        dims = self.plan.dimensions
        routed = self._times_routed()
        experts = {x.inputs: x.given for x in self.linears if x.is_expert}
        others = {x.inputs: x.given for x in self.linears if not x.is_expert}
        widest = max((x.given for x in self.linears), default=0)
        blocks = [self._busy(block, seen=seen) for block in self._blocks()]
        streams = int(self.config.get("altup_num_inputs") or self.config.get("hc_mult") or 1)
        features = _BUSY * streams * dims.hidden + max(*blocks, self._scan(), 0)
        if seen:  # the inputs are kept, and when the batch has run, copied for their magnitudes
            kept = sum(others.values()) + math.ceil(routed * sum(experts.values()))
            features = kept + max(features, 2 * widest)
        else:
            features += self._copies_of_input() * widest
            features = max(features, _BUSY * streams * dims.hidden + self._rounded_cache())
        if self.world > 1:  # what ranks tell each other
            features += (self.world + 2) * max((x.gives for x in self.linears), default=0)
        found = {"a batch's activations": _FLOAT * self.tokens * features + self._routing()}
        if self.experts_apart:
            found["an expert"] = self._expert()
        if any(x.attends for x in self.linears):
            found["its attention scores"] = self._scores()
        return found

    def _rounded_cache(self) -> int:
        """Numbers of each token while keys and values are rounded as they are in the KV cache, before attention."""
        if self.plan.kv_cache is None or not any(x.attends for x in self.linears):
            return 0
        dims = self.plan.dimensions
        copies = _PACKED_INPUT if CACHES[self.plan.kv_cache].group else _ROUNDED_INPUT
        return 2 * dims.axis_size("heads") + (2 + copies) * dims.axis_size("kv_heads")

    def _blocks(self) -> list[list[_HeldLinear]]:
        """The linears that run together: those of an attention, of an MLP, of one expert."""
        blocks: dict[object, list[_HeldLinear]] = {}
        for linear in self.linears:
            apart = linear.is_expert and self.config.get("model_type") not in _TOGETHER
            key = linear.name.rpartition(".")[0] if apart else linear.block
            blocks.setdefault(key, []).append(linear)
        return list(blocks.values())

    def _busy(self, block: Sequence[_HeldLinear], *, seen: bool) -> int:
        """Numbers of each token while a block runs: outputs, and what is made of them, but for inputs that are kept."""
        heads = max((x.gives for x in block if x.attends), default=0)
        inner = {x.inputs: x.given for x in block if x.inputs != block[0].inputs}
        times = 2 if any(x.attends for x in block) or not self.config.get("swiglu_limit") else _CLAMPED
        return times * sum(x.gives for x in block) + 3 * heads - (sum(inner.values()) if seen else 0)

    def _scan(self) -> int:
        """Numbers of each token while a Mamba layer's states are scanned by torch's own operations.

        Mamba-2 (Dao and Gu, 2024) has scores between the tokens of a chunk, by head, and a head's own copy of what
        goes in and out of its state; Mamba-1 (Gu and Dao, 2023) a state of each channel at each token.
        """
        shapes = [task.info.shape for task in self.step.tasks if task.parameter == "A_log"]
        chunk, state = (
            next((int(x) for key, x in self.config.items() if found.fullmatch(key) and x), 0)
            for found in (_CHUNK, _STATE)
        )
        if not shapes or not state:
            return 0
        inner = max((x.given for x in self.linears if x.name.endswith("out_proj")), default=0)
        if len(shapes[0]) == 2:
            return 3 * math.prod(shapes[0]) + 10 * inner
        return 4 * shapes[0][0] * (chunk + state) + 8 * inner

    def _expert(self) -> int:
        """The weights of the largest expert, in float32, or the widest panel of a Hessian of its inputs."""
        sizes: dict[str, int] = {}
        for x in self.linears:
            if x.is_expert:
                above = x.name.rpartition(".")[0]
                sizes[above] = sizes.get(above, 0) + _FLOAT * max(x.held, x.rows * x.given)
        panels = [statistics.widest_panel(x.given) for x in self.linears if x.is_expert]
        return max([*sizes.values(), *panels], default=0)

    def _experts(self) -> int:
        return len({x.name.rpartition(".")[0] for x in self.linears if x.is_expert}) or 1

    def _times_routed(self) -> float:
        """The experts that a token goes to, as a part of all of them."""
        if self.recipe.calib_experts == "all":
            return 1.0
        chosen = experts_of_token(self.config)
        return min(1.0, chosen / self._experts()) if chosen else 1.0

    def _routing(self) -> int:
        """Masks of which token goes to which expert, int64."""
        if not any(x.is_expert for x in self.linears):
            return 0
        return 16 * math.ceil(self.tokens * self._times_routed() * self._experts() ** 2)

    def _copies_of_input(self) -> int:
        """Of an input that is rounded as engines round it."""
        bits = [
            arguments["num_bits"]
            for x in self.quantised
            if x.task.number_format is not None and (arguments := x.task.number_format.input_arguments())
        ]
        return 0 if not bits else _ROUNDED_INPUT if min(bits) >= 8 else _PACKED_INPUT

    def _made(self) -> dict[str, int]:
        """The tensors to be written of the layer."""
        apart = [task.module.is_expert and self.experts_apart for task in self.step.tasks]
        tasks = [task for task, away in zip(self.step.tasks, apart, strict=True) if not away]
        written = sum(out.nbytes for task in tasks for out in task.outputs) // self.world
        return {"what is written of it": written}

    def _work(self, stage: type[Algorithm]) -> dict[str, int]:
        """Of the linear that takes most while an algorithm works on it."""

        settings = self.recipe.settings_of(stage.name)

        def size(x: _HeldLinear) -> int:
            own = stage.device_bytes(x.rows, x.given, self.rows_at_once, settings)
            return max(own, self._rounding(x)) + (self._expert() if x.is_expert and self.experts_apart else 0)

        largest = max(self.quantised, key=size, default=None)
        if largest is None:
            return {}
        what = f"{largest.name} and its Hessian" if "hessian" in stage.wants else largest.name
        return {f"{what}, on which {stage.name} works": size(largest)}

    def _learning(self, settings: Any) -> dict[str, int]:
        """Of gradients that are followed: a batch on its way through the layer and back, what its linears' weights were
        and are, and the sums of gradients that wait for others."""
        batches = -(-max(1, settings.batch_size // self.samples) // self.world)
        gradients = sum(x.held for x in self.quantised) * (2 + math.ceil(math.log2(batches)))
        own = sum(x.rows * x.given for x in self.quantised)
        most = max((max(x.held, x.rows * x.given) for x in self.quantised), default=0)
        copies, widest = self._copies_of_input(), max((x.given for x in self.linears), default=0)
        routed, kept = (
            self._times_routed(),
            2 * _BUSY * self.plan.dimensions.hidden + 2 * self._scan() + copies * widest,
        )
        for block in self._blocks():
            inputs = sum({x.inputs: x.given for x in block}.values())
            numbers = self._busy(block, seen=False) + inputs * (2 if copies else 1)
            kept += math.ceil(numbers * (routed if block[0].is_expert else 1))
        found = {
            "a batch's activations": _FLOAT * self.tokens * kept + self._routing(),
            "gradients": _FLOAT * gradients,
            "what is learnt": _FLOAT * (2 * own + _ROUNDING * most),
        }
        if any(x.attends for x in self.linears):
            found["its attention scores"] = self._scores()
        return found

    def _scores(self) -> int:
        """Bytes of the attention's scores, of which there are several copies at once."""
        heads = -(-self.plan.dimensions.heads // self.world)
        return _FLOAT * _SCORES * self.samples * heads * self.recipe.calib_length**2

    def _rounding(self, linear: _HeldLinear) -> int:
        number_format = linear.task.number_format
        assert number_format is not None
        whole = number_format.searches_whole and self.recipe.observer != "amax"
        return (_SEARCHING if whole else _ROUNDING) * _FLOAT * linear.rows * linear.given


def _multiplies(task: TensorTask) -> bool:
    return task.cached is None and task.parameter == "weight" and task.module.kind in ("linear", "router")
