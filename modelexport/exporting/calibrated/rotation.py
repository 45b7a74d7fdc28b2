"""The rotated model, read from the source: which tensor changes how follows from the family's data.

See :mod:`modelexport.quantization.algorithms.rotation` for what is done, and why the function stays the same.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from modelexport.checkpoints.safetensors.file import Checkpoint, Reader, TensorInfo, torch_dtype
from modelexport.errors import PlanError
from modelexport.exporting.plan.steps import full_name
from modelexport.models.architecture import Dimensions, Family, Module, family_of, read_dimensions
from modelexport.quantization.algorithms.rotation import Balance, Change, Factors, Rotation, Turn, balanced
from modelexport.quantization.kernels.searching import sum_in_halves

__all__ = ["RotatedReader", "rotation_changes"]

Range = tuple[int, int]

_SLAB = 1 << 22  # numbers at a time
_READERS = ("linear", "router", "head")
_INSTEAD = "leave rotation out of --algorithm"


def rotation_changes(source: Checkpoint) -> dict[str, Change]:
    """Every tensor of the rotated model that is not the source's own -> how it is made.

    The head is always among them: one that is tied to the embedding is a tensor of its own in the rotated model.

    Raises:
        PlanError: the architecture is unknown, or not one that can be rotated.
        CheckpointError: config.json contradicts itself.
    """
    config = source.config or {}
    family = family_of(config, source.infos)
    return dict(_Table(source, family, read_dimensions(config, family)).changes())


class RotatedReader:
    """Reads the rotated model as if it lay in the source's place: the same bits, whichever rectangles are asked for.

    Args:
        source: an unquantised checkpoint.
        options: the seed is looked at.
        quantised: the linears, by their modules' names, whose weights will be; None: all. These are given in float32,
            everything else rounded to the source's dtype, as it will be written.

    Attributes:
        changes: see :func:`rotation_changes`.
        infos: every tensor of the rotated model, in the source's dtype; a tied head among them.
    """

    def __init__(
        self, source: Checkpoint, rotation: Rotation | None = None, *, quantised: Collection[str] | None = None
    ) -> None:
        self.changes = rotation_changes(source)
        self._source = source
        self._reader = Reader(source)
        self._rotation = Rotation() if rotation is None else rotation
        self._offset = family_of(source.config or {}, source.infos).norm_offset
        self._norms: dict[str, Tensor] = {}
        self._balances: dict[Balance, Tensor] = {}
        self._linears = _linear_weights(source) if quantised is None else {f"{name}.weight" for name in quantised}
        self.infos = {
            **source.infos,
            **{name: replace(source.infos[change.source], name=name) for name, change in self.changes.items()},
        }

    def tensor_dtype(self, name: str) -> torch.dtype:
        """The dtype in which :meth:`read` returns a tensor unless ``out`` has another."""
        return torch.float32 if name in self._linears else torch_dtype(self.infos[name].dtype)

    def read(
        self,
        info: TensorInfo,
        rows: Range | None = None,
        cols: Range | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """A rectangle of a tensor of the rotated model.

        Args:
            info: one of ``infos``; only its name counts.
            rows, cols: ranges along dim 0 and dim 1; None: all.
            out: what to fill: of the rectangle's shape, in float32 or the source's dtype (rounded to nearest).

        Raises:
            CheckpointError: the file cannot be read or has become shorter.
            ValueError: a rectangle outside the tensor, or an ``out`` that does not fit.
        """
        change = self.changes.get(info.name)
        if change is None:
            return self._reader.read(self._source.infos[info.name], rows=rows, cols=cols, out=out)
        asked = [_within(info.name, size, span) for size, span in zip(change.shape, (rows, cols), strict=False)]
        shape = tuple(stop - start for start, stop in asked)
        if out is None:
            out = torch.empty(shape, dtype=self.tensor_dtype(info.name))
        elif tuple(out.shape) != shape or not out.is_floating_point():
            raise ValueError(f"tensor {info.name!r}: the rectangle is {list(shape)}, out is {list(out.shape)}")
        if change.ones:
            return out.fill_(1 - self._offset)
        matrix = out if len(shape) == 2 else out.unsqueeze(1)
        read = functools.partial(self._original, self._source.infos[change.source])
        cols_asked = asked[1] if len(asked) == 2 else (0, 1)
        self._rotation.rectangle(change, asked[0], cols_asked, read, matrix, self._factors(change))
        return out

    def _original(self, info: TensorInfo, rows: Range, cols: Range) -> Tensor:
        if len(info.shape) == 1:
            return self._reader.read(info, rows=rows).unsqueeze(1)
        return self._reader.read(info, rows=rows, cols=cols)

    def _norm(self, name: str) -> Tensor:
        if name not in self._norms:
            self._norms[name] = self._reader.read(self._source.infos[name]).float() + self._offset
        return self._norms[name]

    def _factors(self, change: Change) -> Factors:
        rows = cols = None
        if change.gives is not None:
            start, stop = change.gives.span
            rows = torch.ones(change.shape[0])
            rows[start:stop] = 1 / self._balance(change.gives)
        if change.norm is not None:
            cols = self._norm(change.norm)
        if change.takes is not None:
            own = change.takes.of_columns(self._balance(change.takes), change.shape[1])
            cols = own if cols is None else cols * own
        return rows, cols

    def _balance(self, balance: Balance) -> Tensor:
        if balance not in self._balances:
            self._balances[balance] = balanced(*self._energies(balance))
        return self._balances[balance]

    def _energies(self, balance: Balance) -> tuple[Tensor, Tensor]:
        """The sums of squares of each feature's row, and of the columns that read it; added in a fixed order."""
        info = self._source.infos[balance.source]
        norm = 1.0 if balance.norm is None else self._norm(balance.norm)
        step = max(1, _SLAB // info.shape[1])
        given = [
            sum_in_halves((self._reader.read(info, rows=rows).float() * norm).square_().t())
            for rows in _pieces(balance.span, step)
        ]
        features = balance.span[1] - balance.span[0]
        read = torch.zeros(features)
        for name in balance.readers:
            info = self._source.infos[name]
            step = max(1, _SLAB // info.shape[0])
            columns = [
                sum_in_halves(self._reader.read(info, cols=cols).float().square_())
                for cols in _pieces((0, info.shape[1]), step)
            ]
            heads = torch.cat(columns).view(features // balance.unit, -1, balance.unit)
            read += sum_in_halves(heads.movedim(1, 0)).flatten()
        return torch.cat(given), read

    def close(self) -> None:
        """Close the source's files. Reading afterwards is an error."""
        self._reader.close()

    def __enter__(self) -> RotatedReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Table:
    """Makes the changes of one model's tensors."""

    def __init__(self, source: Checkpoint, family: Family, dimensions: Dimensions) -> None:
        self.source, self.family, self.dims = source, family, dimensions
        self.residual = Turn("residual", dimensions.hidden, (0, dimensions.hidden))
        modules = (*family.before, *family.layer, *family.after)
        self.norms = {module.role for module in modules if module.kind == "norm" and _writes(module)}
        self.feeds = {
            reader: scaling.source
            for scaling in family.scalings
            if scaling.source in self.norms
            for reader in scaling.into
        }
        self.turned = self._values()
        self._check()

    def _check(self) -> None:
        """Every norm of the residual stream must have a weight and nothing else, and stand before all that reads it.

        Raises:
            PlanError: one is otherwise.
        """
        name = self.family.name
        if self.family.norms_centre:
            raise PlanError(f"rotation: norms of {name} models take the mean away, which no rotation keeps: {_INSTEAD}")
        inside = {module.role for module in self.family.layer if module.role in self.norms}
        if idle := sorted(inside - set(self.feeds.values())):
            raise PlanError(
                f"rotation: {name} models have a norm ({idle[0]}) whose weight goes into no linear, as behind a block: "
                f"{_INSTEAD}"
            )
        final = [module.role for module in self.family.after if module.role in self.norms]
        if len(final) != 1:
            raise PlanError(f"rotation: {name} models have {len(final)} norms before the head, not 1: {_INSTEAD}")
        for module in self.family.layer:
            if module.kind in _READERS and _reads(module) != (module.role in self.feeds):
                state = "no norm feeds it" if _reads(module) else "a norm feeds it, but it does not read all features"
                raise PlanError(f"rotation: {module.path} of {name} models: {state}: {_INSTEAD}")
            if module.kind == "other":
                raise PlanError(f"rotation: {module.path} of {name} models stays as it is: {_INSTEAD}")
            if module.kind == "vector" and not module.axes:
                raise PlanError(f"rotation: {module.path} of {name} models scales single features: {_INSTEAD}")

    def _values(self) -> dict[str, Turn]:
        """Role of what is rotated head by head -> how: values, and the linears that read sums of them."""
        found: dict[str, Turn] = {}
        for scaling in self.family.scalings:
            for module in self.family.layer:
                start = 0
                for role, axis in module.axes:
                    size, unit = self.dims.axis_size(axis), self.dims.axis_unit(axis)
                    if role == scaling.source and self.dims.axis_heads(axis):
                        found[module.role] = Turn("values", unit, (start, start + size))
                        found.update(self._take_back(scaling.into, unit))
                    start += size
        return found

    def _take_back(self, roles: Collection[str], unit: int) -> Iterator[tuple[str, Turn]]:
        for module in self.family.layer:
            if module.role in roles:
                size = self.dims.axis_size(module.axis or "")
                assert module.partition == "row"
                assert self.dims.axis_unit(module.axis or "") == unit
                yield module.role, Turn("values", unit, (0, size))

    def changes(self) -> Iterator[tuple[str, Change]]:
        """(tensor, change) of every tensor that is there."""
        for module in self.family.before:
            name = f"{module.path}.weight"
            if module.kind == "embedding" and name in self.source.infos:
                yield name, Change(name, self.source.infos[name].shape, inputs=self.residual)
        for i in range(self.dims.layers):
            layer = self.family.layer_prefix.format(i=i)
            modules = [
                (full_name(layer, path), expert, module)
                for path, expert, module in self.family.modules_of_layer(self.dims, i)
            ]
            norms = {module.role: f"{name}.weight" for name, _, module in modules if module.role in self.norms}
            fed = {role: norms[norm] for role, norm in self.feeds.items()}
            gives, takes = self._balances(modules, fed)
            for name, _, module in modules:
                yield from self._module(name, module, fed.get(module.role), gives.get(name), takes.get(name))
        yield from self._behind()

    def _balances(
        self, modules: Collection[tuple[str, int | None, Module]], norms: Mapping[str, str]
    ) -> tuple[dict[str, Balance], dict[str, Balance]]:
        """Of one layer: the linears that give features to others, and those that take them."""
        gives: dict[str, Balance] = {}
        takes: dict[str, Balance] = {}
        for scaling in self.family.scalings:
            for name, expert, module in modules:
                start = 0
                for role, axis in module.axes:
                    span = (start, start + self.dims.axis_size(axis))
                    start = span[1]
                    if role != scaling.source or module.kind != "linear":
                        continue
                    readers = [each for each, e, reader in modules if e == expert and reader.role in scaling.into]
                    weights = tuple(f"{each}.weight" for each in readers)
                    if not {f"{name}.weight", *weights} <= self.source.infos.keys():
                        continue  # the plan says what is missing
                    unit = self.dims.axis_unit(axis) if self.dims.axis_heads(axis) else span[1] - span[0]
                    gives[name] = Balance(f"{name}.weight", span, norms.get(module.role), weights, unit)
                    takes.update(dict.fromkeys(readers, gives[name]))
        return gives, takes

    def _behind(self) -> Iterator[tuple[str, Change]]:
        norm = next(f"{module.path}.weight" for module in self.family.after if module.role in self.norms)
        embedding = next(f"{module.path}.weight" for module in self.family.before if module.kind == "embedding")
        for module in self.family.after:
            name = f"{module.path}.weight"
            own = embedding if self.dims.tied_embeddings and name not in self.source.infos else name
            if module.kind != "head":
                yield from self._module(module.path, module)
            elif own in self.source.infos:
                yield name, Change(own, self.source.infos[own].shape, norm=norm, inputs=self.residual)

    def _module(
        self,
        name: str,
        module: Module,
        norm: str | None = None,
        gives: Balance | None = None,
        takes: Balance | None = None,
    ) -> Iterator[tuple[str, Change]]:
        weight, bias = (self.source.infos.get(f"{name}.{suffix}") for suffix in ("weight", "bias"))
        if module.role in self.norms:
            if bias is not None:
                raise PlanError(
                    f"rotation: {bias.name} is there, so the norm takes the mean away, which no rotation keeps: "
                    f"{_INSTEAD}"
                )
            if weight is not None:
                yield weight.name, Change(weight.name, weight.shape, ones=True)
        if module.kind not in _READERS:
            return
        turn = self.turned.get(module.role)
        outputs = self.residual if _writes(module) else turn if module.partition == "column" else None
        inputs = self.residual if _reads(module) else turn if module.partition == "row" else None
        if weight is not None and (norm or outputs or inputs or gives or takes):
            change = Change(weight.name, weight.shape, norm, outputs, inputs, gives=gives, takes=takes)
            yield weight.name, change
        if bias is not None and (outputs or gives):
            yield bias.name, Change(bias.name, bias.shape, outputs=outputs, gives=gives)


def _reads(module: Module) -> bool:
    """Returns whether the module's input is the residual stream, after a norm."""
    return not module.axes if module.partition == "row" else module.across is None


def _writes(module: Module) -> bool:
    """Returns whether the module's output is as wide as the residual stream (a norm or vector: whether it lies along
    it)."""
    return module.across is None if module.partition == "row" else not module.axes


def _linear_weights(source: Checkpoint) -> set[str]:
    config = source.config or {}
    family = family_of(config, source.infos)
    dimensions = read_dimensions(config, family)
    return {
        f"{full_name(family.layer_prefix.format(i=i), path)}.weight"
        for i in range(dimensions.layers)
        for path, _, module in family.modules_of_layer(dimensions, i)
        if module.kind == "linear"
    }


def _pieces(span: Range, step: int) -> Iterator[Range]:
    for start in range(*span, step):
        yield start, min(start + step, span[1])


def _within(name: str, size: int, span: Range | None) -> Range:
    start, stop = (0, size) if span is None else span
    if not 0 <= start <= stop <= size:
        raise ValueError(f"tensor {name!r}: {span} is outside its {size:,} rows or columns")
    return start, stop
