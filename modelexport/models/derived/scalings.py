"""Scalings of a derived family, found and proved by function on a small random model of the type.

A declared family's file says which norm is read by which linears. Of a derived one nobody has said it, and no name
tells: so a small model of the same structure is run, one decoder layer of each kind. A norm's weight, or rows of a
linear, are multiplied by a number for each feature; linears whose inputs then are what they were, times these numbers,
read it. It is a scaling if with the rows divided and the readers' columns multiplied (by the code that an export folds
with) the layer gives what it gave: then nothing else reads them, and nothing in between minds. All that was found
is then folded at once, and the layers are run one after the other: what a layer hands to later ones in secret shows.

Scales are powers of two, so that what is equal is nearly equal to the bit, and the same experts are chosen.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from modelexport.errors import ModelExportError, PlanError
from modelexport.models.derived import derive, skeleton_of
from modelexport.models.derived.skeleton import Skeleton, completed
from modelexport.models.derived.small import small_configs
from modelexport.models.families.base import Family, Module, Scaling

if TYPE_CHECKING:
    from torch import Tensor

    from modelexport.models.folds import LayerFold
    from modelexport.quantization.calibration.layers import FilledLayer, LayerRunner

__all__ = ["Proofs", "prove", "with_scalings"]

_SCALED = ("norm", "linear", "router")  # a router's other tensors may be of its name, too
_MOST = 1 << 26  # elements of one layer: larger ones are not filled with random numbers for a proof
_TOKENS = 48
_LARGE = 1024.0  # times what random weights give: beyond what models clip at
_TOLERANCE = 2e-4  # of float32, through a layer; what is wrong is off by as much as there is
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")

Kind = frozenset[tuple[str, str]]
"""What decoder layers of the same structure have: modules and tensors, by name, and their class or shape."""


@dataclass(frozen=True)
class Proofs:
    """The scalings of a model.

    Attributes:
        scalings: what scales into what, each with the layers that it holds for.
        refused: general path of a norm -> why nothing is scaled into what reads it.
    """

    scalings: tuple[Scaling, ...]
    refused: Mapping[str, str]

    def lines(self) -> Iterator[str]:
        """Yields what a user should know, a line each."""
        sources = dict.fromkeys(scaling.source for scaling in self.scalings)
        if sources:
            yield f"scales may be moved out of {', '.join(sources)}: proved on a small random model of the type"
        for path, why in self.refused.items():
            yield f"no scales are moved out of {path}: {why}"


def with_scalings(family: Family, config: Mapping[str, Any]) -> Family:
    """A derived family with the scalings that hold for its model, and with notes of them.

    Args:
        config: of its language model, see :func:`~modelexport.models.architecture.language_config`.

    Raises:
        PlanError: none could be proved; the message says why.
    """
    found = prove(family, config)
    if not found.scalings:
        reasons = "; ".join(f"{path}: {why}" for path, why in found.refused.items()) or "no norm is read by linears"
        raise PlanError(f"nothing can be scaled into other weights of a {family.name} model: {reasons}")
    return replace(family, scalings=found.scalings, notes=(*family.notes, *found.lines()))


def prove(family: Family, config: Mapping[str, Any]) -> Proofs:
    """Find the scalings of a model of a derived family, see the module. They are known for the next call.

    Args:
        config: of its language model.

    Raises:
        PlanError: no small model of the type can be made or run.
        CheckpointError: transformers does not accept config.json.
    """
    small, proofs = _proved(json.dumps(config, sort_keys=True, default=str))
    return _carried_over(small, family, config, proofs)


# ---------------------------------------------------------------- kinds of layers


def _kinds(skeleton: Skeleton) -> list[Kind]:
    """The structure of each decoder layer."""
    found: list[set[tuple[str, str]]] = [set() for _ in range(skeleton.layers)]
    named = {**skeleton.modules, **{name: f"{len(shape)} dims" for name, shape in skeleton.shapes.items()}}
    for name, what in named.items():
        number, _, path = name.removeprefix(f"{skeleton.stack}.").partition(".")
        if name.startswith(f"{skeleton.stack}.") and number.isdecimal():
            found[int(number)].add((_NUMBER.sub("0", f".{path}"), what))
    return [frozenset(each) for each in found]


def _firsts(kinds: Sequence[Kind]) -> dict[Kind, int]:
    """Each kind -> the first layer of it."""
    found: dict[Kind, int] = {}
    for number, kind in enumerate(kinds):
        found.setdefault(kind, number)
    return found


# ---------------------------------------------------------------- the small model


@dataclass(frozen=True)
class _Small:
    """A small model: its config, the family of it, and what its layers are."""

    config: dict[str, Any]
    skeleton: Skeleton
    family: Family
    kinds: tuple[Kind, ...]


def _small_model(config: Mapping[str, Any]) -> _Small:
    """The smallest model that has every kind of layer that the whole one has.

    Raises:
        PlanError: there is none that is small enough.
    """
    whole = skeleton_of(config, part=True)
    kinds = _firsts(_kinds(whole))
    # What a config.json leaves out has values, too.
    complete = {**completed(config), "architectures": [whole.architecture], "tie_word_embeddings": whole.tied}
    for small in small_configs(complete, max(kinds.values()) + 1):
        try:
            skeleton = skeleton_of(small, part=True)
            own = tuple(_kinds(skeleton))
            if set(own) != set(kinds) or _largest_layer(skeleton) > _MOST:
                continue
            return _Small(small, skeleton, derive(small, part=True), own)
        except ModelExportError:  # numbers that do not go together
            continue
    raise PlanError(
        f"no model of transformers' {whole.architecture} with the structure of this one is small enough to be run "
        f"(at most {_MOST:,} numbers a layer)"
    )


def _largest_layer(skeleton: Skeleton) -> int:
    import math

    sizes = [0] * skeleton.layers
    for name, shape in skeleton.shapes.items():
        number = name.removeprefix(f"{skeleton.stack}.").partition(".")[0]
        if name.startswith(f"{skeleton.stack}.") and number.isdecimal():
            sizes[int(number)] += math.prod(shape)
    return max(sizes, default=0)


def _runner(small: _Small) -> LayerRunner:
    """Its layers, filled with the same random numbers in every process."""
    import torch

    from modelexport.quantization.calibration.cut import ForwardShard
    from modelexport.quantization.calibration.layers import LayerRunner

    shapes = small.skeleton.tensors

    def read(name: str, share: ForwardShard) -> Tensor:
        shape = shapes[name]
        if share.dim == 0:
            shape = (sum(stop - start for start, stop in share.spans), *shape[1:])
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        value = torch.randn(shape, generator=generator)
        if len(shape) > 1:
            return value if name == f"{small.skeleton.embedding}.weight" else value * shape[-1] ** -0.5
        return value * 0.1 + (0 if name.endswith("bias") else 1)

    vocabulary = shapes.get(f"{small.skeleton.embedding}.weight", (_TOKENS,))[0]
    tokens = torch.randint(0, vocabulary, (1, _TOKENS), generator=torch.Generator().manual_seed(0))
    return LayerRunner(small.config, list(shapes), read, tokens, threads=1, alone=True, derived=True)


# ---------------------------------------------------------------- the proof


@lru_cache(maxsize=16)
def _proved(config: str) -> tuple[_Small, tuple[tuple[Kind, Proofs], ...]]:
    """Of the language model with that config.json: what was proved on a small one of each kind of layer."""
    small = _small_model(json.loads(config))
    with _silent(), _runner(small) as runner:
        if runner.hands_over:  # a layer alone needs what those before it have handed over
            _advanced(small, runner, {})
        found = {kind: _Layer(small, runner, number).proofs() for kind, number in _firsts(small.kinds).items()}
        if not _all_at_once(small, runner, found):
            # A linear's outputs may go to other layers by ways that one alone does not show; a norm's hardly.
            found = {kind: _norms_alone(small, each) for kind, each in found.items()}
            if not _all_at_once(small, runner, found):
                why = "what its layers hand to each other changes"
                found = {
                    kind: Proofs((), {**each.refused, **{scaling.source: why for scaling in each.scalings}})
                    for kind, each in found.items()
                }
    return small, tuple(found.items())


@contextmanager
def _silent() -> Iterator[None]:
    """Without transformers' warnings of kernels that are not installed: ranks give them, where they matter."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _norms_alone(small: _Small, proofs: Proofs) -> Proofs:
    norms = {module.general_path for module in small.family.layer if module.kind == "norm"}
    return replace(proofs, scalings=tuple(each for each in proofs.scalings if each.source in norms))


def _all_at_once(small: _Small, runner: LayerRunner, proofs: Mapping[Kind, Proofs]) -> bool:
    """Returns whether all layers, one after the other, give the same with everything folded."""
    import torch

    first = runner.hidden[0]
    ends = [_advanced(small, runner, folded) for folded in (proofs, {})]
    return bool(torch.isfinite(ends[1]).all()) and _close(ends[1], ends[0], _spread(ends[1], first))


def _advanced(small: _Small, runner: LayerRunner, proofs: Mapping[Kind, Proofs]) -> Tensor:
    """Returns the output of all layers, one after the other, with that folded; the runner then has the first one's
    input again."""
    first = runner.hidden[0].clone()
    for number, kind in enumerate(small.kinds):
        with runner.filled(number) as filled:
            layer = _Layer(small, runner, number, filled)
            for scaling in proofs[kind].scalings if kind in proofs else ():
                layer.fold(scaling)
            runner.advance(filled)
    end, runner.hidden[0] = runner.hidden[0], first
    return end


class _Layer:
    """One decoder layer of the small model, in which scalings are looked for.

    Args:
        filled: it, where it is filled already.
    """

    def __init__(self, small: _Small, runner: LayerRunner, number: int, filled: FilledLayer | None = None) -> None:
        self.runner, self.number, self.filled = runner, number, filled
        self.family, self.prefix = small.family, f"{small.family.layer_prefix.format(i=number)}."
        assert small.family.dimensions is not None
        self.dims = small.family.dimensions
        self.modules: dict[str, list[tuple[str, Module]]] = {}  # general path -> (path, module) of each
        for path, _, module in self.family.modules_of_layer(self.dims, number):
            known = self.modules.setdefault(module.general_path, [])
            if not known or known[0][1] is module:  # the first of what has a path is its weight
                known.append((path, module))

    def proofs(self) -> Proofs:
        """Its scalings: out of linears first, so that rows that read a norm are no larger merely because what reads
        them is small."""
        with self.runner.filled(self.number) as self.filled:
            self.before = {name: value.clone() for name, value in self.filled.tensors.items()}
            self.out, self.inputs = self._run()
            spread = _spread(self.out, self.runner.hidden[0])
            linears: list[Scaling] = []
            norms: list[Scaling] = []
            refused: dict[str, str] = {}
            for path, own in self.modules.items():
                kind = own[0][1].kind
                if kind not in ("norm", "linear") or f"{self.prefix}{own[0][0]}.weight" not in self.before:
                    continue
                tried = [scaling for scaling in self._candidates(path, own[0][1]) if scaling.into]
                right = [scaling for scaling in tried if self._holds(scaling, spread)]
                (norms if kind == "norm" else linears).extend(right[:1] if kind == "norm" else right)
                if kind == "norm" and tried and not right:
                    refused[path] = self._why_not(tried[0])
        return Proofs((*linears, *norms), refused)

    # ------------------------------------------------------------ what reads it

    def _candidates(self, path: str, module: Module) -> Iterator[Scaling]:
        """Scalings out of a module, with the linears that were seen to read it."""
        if module.kind == "norm":
            for offset in (0.0, 1.0):
                scaling = Scaling(source=path, into=(), offset=offset)
                yield replace(scaling, into=self._readers(scaling))
            return
        whole = Scaling(source=path, into=())
        tries = [whole, *(replace(whole, part=role) for role, _ in module.parts)]
        if not module.parts:
            tries += [replace(whole, share=(number, 2)) for number in (0, 1)]
        for scaling in tries:
            yield replace(scaling, into=self._readers(scaling))

    def _readers(self, scaling: Scaling) -> tuple[str, ...]:
        """General paths of the linears whose inputs are multiplied by what its source is multiplied by."""
        module = self.modules[scaling.source][0][1]
        readers = [path for path, own in self.modules.items() if own[0][1].kind in ("linear", "router")]
        found: list[str] = []
        if module.kind == "linear":  # a norm in a module of its own is read by whatever stands there, too
            readers = [path for path in readers if path != scaling.source]
        folds = {path: self._folds(replace(scaling, into=(path,))) for path in readers if self._fits(scaling, path)}
        folds = {path: each for path, each in folds.items() if each}
        if not folds:
            return ()
        scale = _scale(next(iter(folds.values()))[0].fold.features)
        for fold in next(iter(folds.values())):
            self._multiply(fold, scale)
        _, after = self._run()
        self._restore()
        for path, own in folds.items():
            columns = own[0].fold.columns
            factor = scale if columns is None else scale[columns]
            names = {name for fold in own for name in (linear.name for linear in fold.fold.linears)}
            seen = [name for name in names if name in after and name in self.inputs]
            if seen and all(self._is_times(name, after[name], factor) for name in seen):
                found.append(path)
        return tuple(found)

    def _fits(self, scaling: Scaling, path: str) -> bool:
        """Returns whether a linear has as many inputs as the source has features, or several for each."""
        source, reader = self.modules[scaling.source][0][1], self.modules[path][0][1]
        shape = self.dims.weight_shape(source)
        if reader.shape is None or len(shape) != (1 if source.kind == "norm" else 2):
            return False
        if source.is_expert and not reader.is_expert:
            return False
        features = shape[0]
        if scaling.part:
            features = self.dims.axis_size(dict(source.axes)[scaling.part])
        elif scaling.share is not None:
            features, left = divmod(features, scaling.share[1])
            if left:
                return False
        inputs = self.dims.weight_shape(reader)[1]
        if inputs == features or (source.kind == "norm" and inputs % features == 0):
            return True
        axis = dict(source.axes).get(scaling.part or source.role)
        heads = axis is not None and self.dims.axis_heads(axis)
        unit = self.dims.axis_unit(axis) if heads and axis is not None else self.dims.head_dim
        return scaling.share is None and inputs % features == 0 and features % unit == 0

    def _is_times(self, name: str, after: Tensor, factor: Tensor) -> bool:
        """Returns whether a linear's inputs are the former ones, times ``factor``; of an expert, to which other tokens
        may come then: some of those that it or others were given."""
        import torch

        before, back = self.inputs[name], after / factor
        size = before.abs().amax()
        if not bool(torch.isfinite(after).all()) or not float(size):
            return False
        if back.shape == before.shape and bool((back - before).abs().amax() <= 1e-3 * size):
            return True
        if ".experts." not in name:
            return False
        known = torch.cat([x for x in self.inputs.values() if x.shape[1] == back.shape[1]])
        return bool((torch.cdist(back, known, p=float("inf")).amin(dim=1) <= 1e-3 * size).all())

    def _why_not(self, scaling: Scaling) -> str:
        others = [
            path
            for path, own in self.modules.items()
            if own[0][1].kind == "other" and len(own[0][1].shape or ()) > 1 and path not in scaling.into
        ]
        named = f" (perhaps {', '.join(others)})" if others else ""
        return f"it is read by {', '.join(scaling.into)}, and by something that is no linear{named}"

    # ------------------------------------------------------------ whether it holds

    def _holds(self, scaling: Scaling, spread: float) -> bool:
        """Returns whether the layer gives the same with it folded, and something else without one side of it.

        A linear's outputs are tried when they are large, too: some models clip them.
        """
        for size in (1.0, _LARGE) if self.modules[scaling.source][0][1].kind == "linear" else (1.0,):
            out = self.out
            if size > 1:
                self._enlarge(scaling, size)
                out = self._run()[0]
                spread = _spread(out, self.runner.hidden[0])
            self.fold(scaling)
            same = _close(self._run()[0], out, spread)
            self._restore()
            if not same:
                return False
        for fold in self._folds(scaling):
            self._multiply(fold, _scale(fold.fold.features))
        other = not _close(self._run()[0], self.out, _spread(self.out, self.runner.hidden[0]))
        self._restore()
        return other

    def _enlarge(self, scaling: Scaling, size: float) -> None:
        for fold in self._folds(scaling):
            self._multiply(fold, _scale(fold.fold.features).fill_(size))

    def fold(self, scaling: Scaling) -> None:
        """Fold it, as an export does."""
        from modelexport.models.folds import apply_fold

        assert self.filled is not None
        for fold in self._folds(scaling):
            apply_fold(self.filled.tensors, {}, fold, _scale(fold.fold.features))

    def _folds(self, scaling: Scaling) -> list[LayerFold]:
        """One in this layer; of experts one each."""
        import torch

        from modelexport.models.folds import folds_of_layer
        from modelexport.quantization import formats
        from modelexport.quantization.algorithms.base import CalibratedLinear

        assert self.filled is not None
        tensors, linears = self.filled.tensors, {}
        for path in (scaling.source, *scaling.into):
            for name, module in self.modules[path]:
                weight = tensors.get(f"{self.prefix}{name}.weight")
                if module.kind not in ("linear", "router") or weight is None or weight.dim() != 2:
                    continue
                full = f"{self.prefix}{name}"
                linears[full] = CalibratedLinear(
                    full,
                    module.role,
                    formats.get("int8"),
                    weight,
                    (0, len(weight)),
                    (len(weight), weight.shape[1]),
                    None,
                )
        wanted = [f"{self.prefix}{name}" for path in scaling.into for name, _ in self.modules[path]]
        if not all(name in linears for name in wanted):
            return []
        family = replace(self.family, scalings=(replace(scaling, layers=None),))
        return folds_of_layer(family, self.dims, self.number, linears, tensors, lambda name: torch.float32)

    def _multiply(self, fold: LayerFold, scale: Tensor) -> None:
        """Multiply a source, and nothing that reads it."""
        assert self.filled is not None
        tensors, name = self.filled.tensors, fold.fold.source
        weight, bias = tensors[f"{name}.weight"], tensors.get(f"{name}.bias")
        if fold.rows is None:
            weight.copy_((weight + fold.offset) * scale - fold.offset)
            if bias is not None:
                bias.mul_(scale)
            return
        weight[slice(*fold.rows)].mul_(scale.unsqueeze(1))
        if bias is not None:
            bias[slice(*fold.rows)].mul_(scale)

    # ------------------------------------------------------------ running

    def _run(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Its output, and the inputs of its linears."""
        assert self.filled is not None
        out, inputs = self.runner.look(self.filled)
        return out, {name: x for x, names in inputs for name in names}

    def _restore(self) -> None:
        assert self.filled is not None
        for name, value in self.before.items():
            self.filled.tensors[name].copy_(value)


def _scale(features: int) -> Tensor:
    """Powers of two, the same for every module of so many features."""
    import torch

    return 2.0 ** torch.randint(-3, 4, (features,), generator=torch.Generator().manual_seed(features)).float()


def _spread(out: Tensor, given: Tensor) -> float:
    """The largest number that a layer adds to what it is given."""
    return float((out - given).abs().max())


def _close(one: Tensor, other: Tensor, size: float) -> bool:
    return bool((one - other).abs().max() <= _TOLERANCE * size)


# ---------------------------------------------------------------- the whole model


def _carried_over(
    small: _Small, family: Family, config: Mapping[str, Any], proofs: Iterable[tuple[Kind, Proofs]]
) -> Proofs:
    """The scalings that were proved, by the names that the family of the whole model has, for its layers."""
    kinds = _kinds(skeleton_of(config, part=True))
    own = {_in_memory(module): module.general_path for module in family.layer if module.kind in _SCALED}
    theirs = {
        module.general_path: own.get(_in_memory(module)) for module in small.family.layer if module.kind in _SCALED
    }
    layers: dict[Scaling, set[int]] = {}
    refused: dict[str, str] = {}
    for kind, found in proofs:
        numbers = {number for number, each in enumerate(kinds) if each == kind}
        for scaling in found.scalings:
            source, into = theirs[scaling.source], [theirs[path] for path in scaling.into]
            if source is None or None in into:
                refused[source or scaling.source] = "this checkpoint calls what reads it by other names"
                continue
            named = replace(scaling, source=source, into=tuple(path for path in into if path is not None))
            layers.setdefault(named, set()).update(numbers)
        refused.update({theirs.get(path) or path: why for path, why in found.refused.items()})
    is_norm = {module.general_path for module in family.layer if module.kind == "norm"}
    ordered = sorted(layers, key=lambda scaling: scaling.source in is_norm)
    return Proofs(tuple(replace(each, layers=frozenset(layers[each])) for each in ordered), refused)


def _in_memory(module: Module) -> str:
    """A module's name within its layer, as transformers has it."""
    name = module.in_memory.partition(".{i}.")[2] or module.path
    return name.replace("{e}", "*")
