"""ExportPlan: everything an export decides before it reads a weight.

A pure function of the checkpoint's headers, its family, the number format and the parallelism. It says which
tensors there are, who reads and emits which part of each, in which order they are written, and what the
result will weigh. Every violation found is listed at once.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from modelexport.checkpoints.safetensors_file import Checkpoint, TensorInfo
from modelexport.contents.ties import check_tied
from modelexport.errors import CheckpointError, PlanError, nearest
from modelexport.export_steps import ExportPlan, OutputTensor, Step, TensorTask, full_name
from modelexport.families import Dimensions, Family, Module, family_of, read_dimensions
from modelexport.sharding.plan import (
    Cut,
    Parallelism,
    cut_along,
    even_cut,
    group_query_cut,
    replicated,
)

if TYPE_CHECKING:
    from modelexport.quantization.formats.base import NumberFormat

__all__ = ["ExportPlan", "OutputTensor", "Step", "TensorTask", "build_plan", "full_name"]

SLAB_BYTES = 64 << 20  # an embedding larger than this is exported in slabs of rows, to bound memory
QUANTISABLE = ("BF16", "F16", "F32")


def build_plan(checkpoint: Checkpoint, number_format: NumberFormat, parallelism: Parallelism) -> ExportPlan:
    """Plan the export of ``checkpoint``.

    Raises:
        CheckpointError: config.json is missing or contradicts the tensors, or tensors are missing or unknown.
        PlanError: the architecture is unknown, or a dimension does not suit the number format.
    """
    config = checkpoint.config
    if config is None:
        raise CheckpointError(
            f"{checkpoint.directory} has no config.json; copy the model's config.json beside its weights"
        )
    quantization = config.get("quantization_config") or config.get("compression_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise PlanError(
            f"{checkpoint.directory} is already quantised (quant_method '{method}'); "
            "give the unquantised checkpoint that it was made from"
        )
    family = family_of(config)
    return _Planner(checkpoint, family, read_dimensions(config, family), number_format, parallelism).plan()


class _Planner:
    """Builds an :class:`ExportPlan`, collecting what is wrong on the way."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        family: Family,
        dimensions: Dimensions,
        number_format: NumberFormat,
        parallelism: Parallelism,
    ) -> None:
        self.checkpoint = checkpoint
        self.infos = dict(checkpoint.infos)
        self.config = checkpoint.config or {}
        self.directory = checkpoint.directory
        self.family = family
        self.dims = dimensions
        self.format = number_format
        self.tp = parallelism.tp
        self.parallelism = parallelism
        self.left_out = dict(checkpoint.left_out)
        self.unquantised: dict[str, str] = {}
        self.units: dict[str, int] = {}  # axis -> what a cut keeps together there
        self.missing: list[str] = []
        self.problems: list[str] = []
        self.format_problems: dict[str, dict[str, None]] = {}  # what is wrong -> the modules where it is

    def plan(self) -> ExportPlan:
        layers, experts = self.dims.layers, self.dims.experts
        if self.dims.most_blocks > len(self.infos):  # before any loop over a number that a stranger wrote
            each = f" of {experts} experts" if experts else ""
            raise CheckpointError(
                f"{self.directory}: config.json says {layers} layers{each}, but there are only "
                f"{len(self.infos)} tensors"
            )
        self._drop_buffers()
        tied = self._drop_tied_head()
        steps: list[Step] = []
        for module in self.family.before:
            steps += self._single(module)
        for i in range(self.dims.layers):
            layer = self.family.layer_prefix.format(i=i)
            modules = self.family.modules_of_layer(self.dims, i)
            tasks = [task for path, _, module in modules for task in self._module_tasks(layer, path, module)]
            steps.append(Step(layer, layer, i, tuple(tasks)))
        for module in self.family.after:
            steps += self._single(module)
        self.problems[:0] = [f"{name} is missing{nearest_hint(name, self.infos)}" for name in self.missing]
        if self.infos:
            names = sorted(self.infos)
            self.problems.append(
                f"{len(names)} tensor(s) are not part of a {self.family.name} model of "
                f"{self.dims.layers} layers: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
            )
        if self.problems:
            more = f"; and {len(self.problems) - 8} more" if len(self.problems) > 8 else ""
            raise CheckpointError(f"{self.directory}: {'; '.join(self.problems[:8])}{more}")
        if self.format_problems:
            raise PlanError("; ".join(f"{', '.join(paths)}: {text}" for text, paths in self.format_problems.items()))
        if tied is not None:  # last: the one check that reads weights
            check_tied(self.checkpoint, *tied)
        return ExportPlan(
            self.family,
            self.dims,
            self.parallelism,
            self.format,
            tuple(steps),
            self.left_out,
            self.unquantised,
        )

    def _drop_buffers(self) -> None:
        for name in list(self.infos):
            reason = self.family.left_out(name, self.dims)
            if reason is not None:
                del self.infos[name]
                self.left_out[name] = reason

    def _drop_tied_head(self) -> tuple[TensorInfo, TensorInfo] | None:
        """Tied embeddings are written once; returns the head dropped and the embedding that it must equal."""
        if not self.dims.tied_embeddings:
            return None
        head, embedding = (
            next((f"{m.path}.weight" for m in modules if m.kind == kind), "")
            for modules, kind in ((self.family.after, "head"), (self.family.before, "embedding"))
        )
        if head not in self.infos or embedding not in self.infos:
            return None
        self.left_out[head] = f"tied to {embedding}, written once"
        return self.infos.pop(head), self.infos[embedding]

    def _single(self, module: Module) -> list[Step]:
        """Steps of a module outside the decoder layers, in slabs of rows if it is large."""
        tasks = self._module_tasks(module.path, "", module)
        if not tasks:
            return []
        weight = tasks[0].info
        row_bytes = max(1, weight.nbytes // max(1, weight.shape[0]))
        rows_per_slab = max(1, SLAB_BYTES // row_bytes)
        if len(tasks) > 1 or weight.nbytes <= SLAB_BYTES:
            return [Step(module.path, module.path, None, tuple(tasks))]
        steps = []
        for start in range(0, weight.shape[0], rows_per_slab):
            rows = (start, min(start + rows_per_slab, weight.shape[0]))
            held = tuple((a + start, b + start) for a, b in even_cut(rows[1] - start, 1, self.tp))
            # The owned ranges tile the slab, not the tensor.
            task = TensorTask(
                weight,
                module,
                "",
                "weight",
                rows,
                Cut(0, held, held),
                tasks[0].quantised,
                tasks[0].outputs,
            )
            steps.append(Step(f"{module.path}[{rows[0]}:{rows[1]}]", module.path, None, (task,)))
        return steps

    def _module_tasks(self, layer: str, path: str, module: Module) -> list[TensorTask]:
        name = full_name(layer, path)
        weight = self.infos.pop(f"{name}.{module.parameter}", None)
        if weight is None:
            if not (module.kind == "head" and self.dims.tied_embeddings):
                self.missing.append(f"{name}.{module.parameter}")
            return []
        if not self._shape_is_right(weight, module):
            return []
        quantised = module.kind == "linear" and self.format.quantised
        self._note_unquantised(name, module, quantised)
        cut = self._cut(module, weight.shape)
        tasks = [
            TensorTask(
                weight,
                module,
                path,
                module.parameter,
                (0, weight.shape[0]),
                cut,
                quantised,
                self._outputs(weight, quantised),
            )
        ]
        bias = self.infos.pop(f"{name}.bias", None)
        if bias is None and module.has_bias(self.config):
            why = f"config.json says {module.bias}" if isinstance(module.bias, str) else f"{self.family.name} has one"
            self.problems.append(f"{name}.bias is missing, though {why}")
        if bias is not None:
            tasks.append(self._bias(bias, module, path, cut, weight.shape[0]))
        return tasks

    def _bias(self, bias: TensorInfo, module: Module, path: str, cut: Cut, rows: int) -> TensorTask:
        """A column-parallel bias is cut like its weight's rows; a row-parallel one stays whole."""
        if bias.shape != (rows,):
            self.problems.append(f"{bias.name} is {list(bias.shape)} but its weight has {rows} rows")
        own = cut if cut.dim == 0 else replicated(rows, self.tp)
        return TensorTask(bias, module, path, "bias", (0, rows), own, False, self._outputs(bias, False))

    def _shape_is_right(self, weight: TensorInfo, module: Module) -> bool:
        expected = self.dims.weight_shape(module)
        if weight.shape != expected:
            self.problems.append(f"{weight.name} is {list(weight.shape)} but config.json makes it {list(expected)}")
            return False
        if module.kind == "linear" and self.format.quantised:
            if weight.dtype not in QUANTISABLE:
                self.problems.append(
                    f"{weight.name} is {weight.dtype}; only {', '.join(QUANTISABLE)} weights can be quantised"
                )
                return False
            pattern = f"*.{module.general_path}"
            try:
                self.format.check_shape(pattern, (weight.shape[0], weight.shape[1]))
            except PlanError as error:
                self.format_problems.setdefault(str(error).removeprefix(f"{pattern}: "), {})[pattern] = None
        return True

    def _note_unquantised(self, name: str, module: Module, quantised: bool) -> None:
        if quantised or module.kind in ("norm", "vector"):
            return
        if module.kind == "linear":
            self.unquantised[name] = "--quant none"
        elif module.kind == "embedding":
            tied = " (and serves as the head)" if self.dims.tied_embeddings else ""
            self.unquantised[name] = f"embedding{tied}: engines look rows up in the model's dtype"
        elif module.kind == "router":
            self.unquantised[name] = "router: it picks experts by small differences"
        else:
            self.unquantised[name] = "head: its error goes straight into the logits"

    def _cut(self, module: Module, shape: tuple[int, ...]) -> Cut:
        if module.partition == "replicated":
            return replicated(shape[0], self.tp)
        dim = 0 if module.partition == "column" else 1
        if module.axis is None:  # fused on disk: any rows will do to quantise it
            return cut_along(dim, even_cut(shape[dim], 1, self.tp))
        axis = "heads" if module.axis == "kv_heads" else module.axis
        if axis not in self.units:
            self.units[axis] = self._cut_unit(axis)
        unit = self.units[axis]
        if module.axis == "kv_heads":
            heads, size = self.dims.heads, self.dims.head_dim
            return cut_along(dim, group_query_cut(heads, self.dims.kv_heads, size, self.tp, unit=unit // size))
        return cut_along(dim, even_cut(shape[dim], unit, self.tp))

    def _cut_unit(self, axis: str) -> int:
        """Features along ``axis`` that stay together in every module, so that a rank's modules fit each other.

        What one module must keep whole (a group of o_proj's inputs) is kept whole in those that feed it; where the
        heads of one axis are those of another, though of another size, in heads.
        """
        own = self.dims.axis(axis)
        units = 1  # heads, or features where there are none
        for module in self.family.layer:
            if module.kind != "linear" or module.axis is None or not self.format.quantised:
                continue
            other = self.dims.axis(module.axis)
            if module.axis == axis or (own.heads and other.heads == own.heads and module.axis != "kv_heads"):
                aligned = math.lcm(other.unit, self.format.alignment[0 if module.partition == "column" else 1])
                units = math.lcm(units, aligned // other.unit)
        whole = (own.heads or own.size) % units == 0  # else reported by check_shape; any cut will do to go on looking
        return own.unit * (units if whole else 1)

    def _outputs(self, info: TensorInfo, quantised: bool) -> tuple[OutputTensor, ...]:
        if not quantised:
            name = info.name.rsplit(".", 1)[-1]
            units = (1,) * len(info.shape)
            return (OutputTensor(name, info.dtype, info.shape, units, info.nbytes),)
        from modelexport.checkpoints.safetensors_file import dtype_name, torch_dtype

        specs = self.format.specs((info.shape[0], info.shape[1]), torch_dtype(info.dtype))
        return tuple(
            OutputTensor(s.suffix, dtype_name(s.dtype), s.shape, s.units, math.prod(s.shape) * s.dtype.itemsize)
            for s in specs
        )


def nearest_hint(name: str, names: dict[str, Any]) -> str:
    """``"; did you mean ..."`` for a missing tensor, or ``""`` where none of ``names`` is close."""
    hint = nearest(name, names)
    return hint.split(" known:")[0] if "did you mean" in hint else ""
