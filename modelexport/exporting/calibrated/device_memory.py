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
from typing import Any

from modelexport.checkpoints.safetensors.file import tensor_nbytes
from modelexport.errors import PlanError
from modelexport.exporting.calibrated.forward import forward_cut
from modelexport.exporting.plan import ExportPlan, ExportStep, TensorTask
from modelexport.quantization import devices
from modelexport.quantization.algorithms.base import Algorithm, Folding
from modelexport.quantization.algorithms.rtn import RoundToNearest
from modelexport.quantization.calibration import static_ranges, statistics
from modelexport.quantization.calibration.cut import ForwardCut
from modelexport.quantization.calibration.layers import BATCH_TOKENS
from modelexport.recipe import ExportRecipe
from modelexport.system.tables import size_text

__all__ = ["DeviceMemory", "budget_of", "fitted"]

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
_CHOSEN = re.compile(r"experts?_per_tok|moe_top_?k|top_k_experts")
"""The keys of config.json that say how many experts a token goes to."""


@dataclass(frozen=True)
class DeviceMemory:
    """The device memory of a rank, and what is done for it to suffice.

    Attributes:
        predicted: bytes, of the rank and the layer that take most.
        budget: bytes there are; None where that is not known.
        step: the layer.
        parts: what the bytes are of -> how many.
    """

    predicted: int
    budget: int | None
    step: str
    parts: Mapping[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """JSON-able form."""
        return {**vars(self), "parts": dict(self.parts)}


@dataclass(frozen=True)
class _Linear:
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


def budget_of(recipe: ExportRecipe, rank: int = 0, ranks_here: int | None = None) -> int | None:
    """The device memory that a rank may take, in bytes; None where the device does not say.

    Args:
        rank: the rank's number on this machine.
        ranks_here: the ranks of this machine; by default all.
    """
    if recipe.device_memory is not None:
        return recipe.device_memory
    return devices.free_memory(recipe.device, rank, recipe.tp if ranks_here is None else ranks_here)


def fitted(plan: ExportPlan, recipe: ExportRecipe, config: Mapping[str, Any], budget: int | None) -> DeviceMemory:
    """The prediction for all ranks, within a budget.

    Args:
        config: config.json of the language model.

    Raises:
        PlanError: it does not fit.
    """
    found = _largest(plan, recipe, config)
    if budget is not None and found.predicted > budget:
        most = max(found.parts, key=lambda name: found.parts[name])
        raise PlanError(
            f"{found.step} needs {size_text(found.predicted)} of device memory, {size_text(found.parts[most])} of it "
            f"for {most}, and there are {size_text(budget)}: type --device-memory {found.predicted} where the device "
            f"has that, or --device {devices.CPU}"
        )
    return replace(found, budget=budget)


def _largest(plan: ExportPlan, recipe: ExportRecipe, config: Mapping[str, Any]) -> DeviceMemory:
    """What the rank and the layer take that take most."""
    worst = DeviceMemory(0, None, "")
    for rank in range(plan.parallelism.tp):
        cut = forward_cut(plan.family, plan.dimensions, rank, plan.parallelism.tp)
        seen = set()
        for step in plan.steps:
            if step.index is None:
                continue
            alike = tuple((task.module.general_path, task.info.shape, task.number_format) for task in step.tasks)
            if alike in seen:
                continue
            seen.add(alike)
            for parts in _Layer(plan, recipe, config, step, cut, rank).moments():
                total = sum(parts.values())
                if total > worst.predicted:
                    worst = DeviceMemory(total, None, step.id, {name: size for name, size in parts.items() if size})
    return worst


class _Layer:
    """A rank's part of a layer on the device."""

    def __init__(
        self,
        plan: ExportPlan,
        recipe: ExportRecipe,
        config: Mapping[str, Any],
        step: ExportStep,
        cut: ForwardCut,
        rank: int,
    ) -> None:
        self.plan, self.recipe, self.config, self.step = plan, recipe, config, step
        self.rank, self.world = rank, plan.parallelism.tp
        self.samples = max(1, BATCH_TOKENS // recipe.calib_length)
        self.tokens = min(self.samples, recipe.calib_samples) * recipe.calib_length
        self.linears = [self._linear(task, cut) for task in step.tasks if _multiplies(task)]
        self.others = sum(
            _FLOAT * math.prod(task.info.shape) for task in step.tasks if task.cached is None and not _multiplies(task)
        )
        self.stages = [*recipe.of_kind("fold"), *(recipe.of_kind("round") or [RoundToNearest])]

    def _linear(self, task: TensorTask, cut: ForwardCut) -> _Linear:
        module, (rows, columns), share = task.module, task.full_shape, cut.share(task.path)
        part = sum(stop - start for start, stop in share.spans)
        held = {None: (rows, columns), 0: (part, columns), 1: (rows, part)}[share.dim]
        box = task.owned_box(self.rank)
        # Transformers stacks experts, which static ranges read as they are stored.
        stored = module.is_expert and not self.plan.calibrated
        above = task.path.rpartition(".")[0]
        return _Linear(
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
        held = self.others + sum(x.held * x.itemsize for x in self.linears)
        weights = {"the layer's weights": held, "what layers share": self._shared()}
        yield {"the embeddings of the samples": self._embeddings()}
        if not self.plan.calibrated:
            seen = self._statistics(static_ranges.wants(self.recipe.calib_range))
            yield weights | seen | self._forward(seen=True)
            yield {"a linear while it is rounded": max(map(self._rounding, self.quantised), default=0)}
            return
        if self.world > 1:
            weights["its rows that this rank rounds"] = sum(_FLOAT * x.rows * x.given for x in self.linears)
        clipped = False
        for stage in self.stages:
            seen = self._statistics(stage.wanted(self.recipe.settings_of(stage.name)) | self._always())
            yield weights | seen | self._forward(seen=True)
            work = max((self._work(stage, x) for x in self.quantised), default=0)
            if issubclass(stage, Folding):
                yield weights | seen | {f"a linear while {stage.name} looks at it": work}
                clipped = clipped or stage.clip is not Folding.clip
            else:
                yield weights | seen | self._made(clipped) | {"a linear while it is rounded": work}
        yield weights | seen | self._made(clipped) | self._forward(seen=False)

    @property
    def quantised(self) -> list[_Linear]:
        """Those of the linears that are."""
        return [x for x in self.linears if x.task.quantised]

    def _always(self) -> frozenset[str]:
        """The statistics that are taken whatever the algorithm."""
        static = self.plan.kv_cache or any(
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
        inputs = {x.inputs: x.given for x in self.linears}
        sizes = [statistics.nbytes(each, wants, self.rank, self.world) for each in inputs.values()]
        cached = 2 * statistics.nbytes(self.plan.dimensions.hidden, {"amax", "histogram"}) if self.plan.kv_cache else 0
        return {"statistics of its linears' inputs": sum(sizes) + cached}

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
        features = _BUSY * dims.hidden + max(blocks, default=0)
        if seen:  # the inputs are kept, and when the batch has run, copied for their magnitudes
            kept = sum(others.values()) + math.ceil(routed * sum(experts.values()))
            features = kept + max(features, 2 * widest)
        else:
            features += self._copies_of_input() * widest
        if self.world > 1:  # what ranks tell each other
            features += (self.world + 2) * max((x.gives for x in self.linears), default=0)
        found = {"a batch's activations": _FLOAT * self.tokens * features + self._routing()}
        if any(x.attends for x in self.linears):
            heads = -(-dims.heads // self.world)
            scores = self.samples * heads * self.recipe.calib_length**2
            found["its attention scores"] = _FLOAT * _SCORES * scores
        return found

    def _blocks(self) -> list[list[_Linear]]:
        """The linears that run together: those of an attention, of an MLP, of one expert."""
        blocks: dict[object, list[_Linear]] = {}
        for linear in self.linears:
            key = linear.name.rpartition(".")[0] if linear.is_expert else linear.block
            blocks.setdefault(key, []).append(linear)
        return list(blocks.values())

    def _busy(self, block: Sequence[_Linear], *, seen: bool) -> int:
        """Numbers of each token while a block runs: outputs, and what is made of them, but for inputs that are kept."""
        heads = max((x.gives for x in block if x.attends), default=0)
        inner = {x.inputs: x.given for x in block if x.inputs != block[0].inputs}
        return 2 * sum(x.gives for x in block) + 2 * heads - (sum(inner.values()) if seen else 0)

    def _experts(self) -> int:
        return len({x.name.rpartition(".")[0] for x in self.linears if x.is_expert}) or 1

    def _times_routed(self) -> float:
        """The experts that a token goes to, as a part of all of them."""
        if self.recipe.calib_experts == "all":
            return 1.0
        chosen = [int(x) for key, x in self.config.items() if _CHOSEN.search(key) and isinstance(x, int)]
        return min(1.0, max(chosen) / self._experts()) if chosen else 1.0

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

    def _made(self, clipped: bool) -> dict[str, int]:
        """What is to be written of the layer, and narrowed copies of weights."""
        written = sum(out.nbytes for task in self.step.tasks for out in task.outputs) // self.world
        narrowed = sum(_FLOAT * x.rows * x.given for x in self.quantised) if clipped else 0
        return {"what is written of it": written, "its weights within narrower ranges": narrowed}

    def _work(self, stage: type[Algorithm], linear: _Linear) -> int:
        settings = self.recipe.settings_of(stage.name)
        return max(stage.device_bytes(linear.rows, linear.given, settings), self._rounding(linear))

    def _rounding(self, linear: _Linear) -> int:
        number_format = linear.task.number_format
        assert number_format is not None
        whole = number_format.searches_whole and self.recipe.observer != "amax"
        return (_SEARCHING if whole else _ROUNDING) * _FLOAT * linear.rows * linear.given


def _multiplies(task: TensorTask) -> bool:
    return task.cached is None and task.parameter == "weight" and task.module.kind in ("linear", "router")
