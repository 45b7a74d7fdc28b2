"""The matcher: which tensor of a checkpoint is which parameter of which module of its model, and what does not fit.

The one answer to that question. Plans (:mod:`modelexport.exporting.plan`), rules of cuts
(:mod:`modelexport.models.rules`) and verification (:mod:`modelexport.inspection.verify.structure`) are made from it.
Works on headers and config.json alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from typing import Any, Literal, NamedTuple, NoReturn

from modelexport.checkpoints.safetensors.file import Checkpoint, TensorInfo, dtype_names
from modelexport.errors import CheckpointError, PlanError, did_you_mean
from modelexport.models.architecture import Dimensions, Family, Module, family_of, has_part, read_dimensions
from modelexport.models.draft_layers import DraftModule, draft_modules
from modelexport.quantization import kv_caches
from modelexport.quantization.methods import (
    QuantizationConfig,
    Scheme,
    StoredTensorSpec,
    extras,
    methods,
    read_quantization_config,
    tensor_specs,
)
from modelexport.system.dtypes import FLOATS

Stages = tuple[Literal["first", "last"], ...]

KV_SCALES = ("q_scale", "k_scale", "v_scale", "k_zero_point", "v_zero_point")
"""Names of the scales of a KV cache within a layer's attention, as engines have them."""

PLAIN_DTYPES = (*FLOATS, "F64")

_NOT_KNOWN = "of a part of the model that is not known: it is taken over as it is"
_LISTED = 8
_WITHOUT_DRAFTS = " (of a draft layer: --draft drop exports the model without them)"
_CACHE = "_cache"


@dataclass(frozen=True)
class Place:
    """One module of a model, where it stands.

    Attributes:
        name: in full, ``"model.layers.3.mlp.experts.7.up_proj"``; ``""`` of the model itself.
        module: its declaration, whose ``path`` has ``{e}`` for the expert's number.
        path: its name within its layer; ``""`` outside of the layers.
        stages: outside of the layers, the ends of a pipeline that need it.
        draft: of a draft layer, which stands outside of the layers: see :class:`DraftModule`.
    """

    name: str
    module: Module
    path: str = ""
    layer: int | None = None
    expert: int | None = None
    stages: Stages = ()
    draft: DraftModule | None = None

    @property
    def part(self) -> str:
        """The name of the part of the model that it is written with: its layer, or itself where it is in none."""
        return self.name.removesuffix(f".{self.path}") if self.path else self.name

    def tensor(self, suffix: str) -> str:
        """The name of a tensor of the module; parameters of the model itself have no module in front."""
        return f"{self.name}.{suffix}" if self.name else suffix

    @property
    def is_cache_scale(self) -> bool:
        """True for the scale of a layer's cached keys or values; see :func:`cache_place`."""
        return self.module.role.endswith(_CACHE)


def cache_place(prefix: str, path: str, parameter: str, layer: int) -> Place:
    """The place of a scale of a layer's KV cache, ``parameter`` (``k_scale``) of the module ``path``."""
    module = Module(path=path, kind="vector", role=f"attention.{parameter[0]}{_CACHE}", parameter=parameter)
    return Place(f"{prefix}.{path}", module, path, layer)


def places(family: Family, dimensions: Dimensions) -> Iterator[Place]:
    """Every module of a model in its order: before the layers, layer by layer, behind them; no head that is tied."""
    for module in family.before:
        tied = dimensions.tied_embeddings and module.kind == "embedding"
        yield Place(module.path, module, stages=("first", "last") if tied else ("first",))
    for i in range(dimensions.layers):
        prefix = family.layer_prefix.format(i=i)
        for path, expert, module in family.modules_of_layer(dimensions, i):
            yield Place(f"{prefix}.{path}" if path else prefix, module, path, i, expert)
    for module in family.after:
        if not (module.kind == "head" and dimensions.tied_embeddings):
            yield Place(module.path, module, stages=("last",))


@dataclass(frozen=True)
class ExpectedModule:
    """The tensors of a module by suffix: those that it must have, and those that it may have."""

    scheme: Scheme | None
    required: Mapping[str, StoredTensorSpec]
    optional: Mapping[str, StoredTensorSpec]


@dataclass(frozen=True)
class ModelDescription:
    """A model as its config.json describes it, and the modules of its draft layers as its tensors do."""

    config: Mapping[str, Any]
    family: Family
    dimensions: Dimensions
    quantization: QuantizationConfig | None
    drafts: tuple[DraftModule, ...] = ()
    _expected: dict[tuple[int, int], ExpectedModule] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def read(cls, config: Mapping[str, Any], where: str, names: Collection[str] = ()) -> ModelDescription:
        """Reads a config.json's content.

        Args:
            names: every tensor of the checkpoint, as :func:`modelexport.models.architecture.family_of` has it.

        Raises:
            CheckpointError: it lacks a number, or contradicts itself.
            PlanError: an unknown architecture, or a method of quantisation whose tensors are not known.
        """
        family = family_of(config, names)
        quantization = read_quantization_config(config)
        if quantization is not None and quantization.method not in methods():
            raise PlanError(
                f"{where}: the model is quantised (quant_method '{quantization.method}'), and the tensors of such "
                f"models are known for {', '.join(methods())} only; give a checkpoint of these, or an unquantised one"
            )
        return cls(family.complete(config), family, read_dimensions(config, family), quantization)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> ModelDescription:
        """Reads the config.json of a checkpoint.

        Raises:
            CheckpointError: there is none, or as :meth:`read`; or it has more layers than there are tensors.
            PlanError: as :meth:`read`.
        """
        directory = checkpoint.directory
        if checkpoint.config is None:
            raise CheckpointError(
                f"{directory} has no config.json; give --config DIR, the directory or file of the model's config.json"
            )
        model = cls.read(checkpoint.config, str(directory), checkpoint.infos)
        if absurd := too_many_blocks(model.dimensions, len(checkpoint.infos)):
            raise CheckpointError(f"{directory}: {absurd}")
        return model.with_drafts(checkpoint)

    def with_drafts(self, checkpoint: Checkpoint) -> ModelDescription:
        """The same with the draft layers that a checkpoint of the model has."""
        drafts = draft_modules(self.family, self.dimensions, checkpoint.infos)
        return replace(self, drafts=tuple(drafts), _expected={}) if drafts else self

    def places(self) -> Iterator[Place]:
        """Every module of the model, in its order; draft layers last."""
        yield from places(self.family, self.dimensions)
        for each in self.drafts:
            yield Place(each.name, each.module, each.path, None, each.expert, ("last",), each)

    def expected(self, place: Place) -> ExpectedModule:
        """The tensors of a module.

        Raises:
            CheckpointError: nothing here knows those of its quantisation scheme.
        """
        module, scheme = place.module, None
        if self.quantization is not None:
            if (stack := self._quantised_stack(place, self.quantization)) is not None:
                return stack
            scheme = self.quantization.scheme_of_kind(place.name, module.kind)
        return self._known(module, scheme)

    def _quantised_stack(self, place: Place, quantization: QuantizationConfig) -> ExpectedModule | None:
        """The tensors of a stack of experts by methods that quantise stacks; None: it is no stack, or they do not."""
        module = place.module
        if module.experts is None or module.experts.parameter != "weight":
            return None
        method = methods()[quantization.method]
        specs_of, scaled_of = getattr(method, "stack_specs", None), getattr(method, "scaled_stack_specs", None)
        if scaled_of is not None and module.experts.transposed:
            scheme = quantization.scheme_of(place.name)
            scaled = None if scheme is None else scaled_of(scheme, self.dimensions.weight_shape(module))
            named = {f"{module.parameter}{ending}": spec for ending, spec in (scaled or {}).items()}
            return ExpectedModule(scheme, named, {}) if named else None
        if specs_of is None:
            return None
        experts, *sizes = module.experts.by_expert(self.dimensions.weight_shape(module))
        rows, columns = reversed(sizes) if module.experts.transposed else sizes
        specs = specs_of(experts, rows, columns)
        return ExpectedModule(None, {f"{module.parameter}{ending}": spec for ending, spec in specs.items()}, {})

    def unquantised(self, module: Module) -> ExpectedModule:
        """The tensors of a module that is not quantised, whatever config.json says."""
        return self._known(module, None)

    def _known(self, module: Module, scheme: Scheme | None) -> ExpectedModule:
        key = (id(module), id(scheme))  # one object each for all layers and experts
        if key not in self._expected:
            self._expected[key] = self._expect(module, scheme)
        return self._expected[key]

    def _expect(self, module: Module, scheme: Scheme | None) -> ExpectedModule:
        shape = self.dimensions.weight_shape(module)
        optional: dict[str, StoredTensorSpec] = {}
        if scheme is None:
            dtypes = dtype_names() if module.kind == "other" else PLAIN_DTYPES
            axes = tuple((dim, 1) for dim in range(len(shape)))
            required = {module.parameter: StoredTensorSpec(dtypes, self.dimensions.stored_shapes(module), axes)}
        else:
            required = dict(tensor_specs(scheme, (shape[0], shape[1])))
            optional |= extras(scheme, (shape[0], shape[1]))
        if module.kind != "other":
            bias = StoredTensorSpec(PLAIN_DTYPES, ((shape[0] if shape else 1,),), ((0, 1),))
            (required if module.has_bias(self.config) else optional)["bias"] = bias
        return ExpectedModule(scheme, required, optional)

    def left_out(self, names: Iterator[str] | Sequence[str] | Mapping[str, Any]) -> dict[str, str]:
        """The tensors among ``names`` that are no part of the model -> why; a second copy of tied embeddings is one."""
        family, dimensions = self.family, self.dimensions
        found = {name: why for name in names if (why := family.left_out(name, dimensions)) is not None}
        if dimensions.tied_embeddings:
            embedding = next((m.path for m in family.before if m.kind == "embedding"), "")
            heads = tuple(f"{m.path}." for m in family.after if m.kind == "head")
            own = {f"{m.path}.{m.parameter}" for m in family.before if m.kind == "other"}  # a tied head's bias
            for name in names:
                if name.startswith(heads) and name not in own:
                    found.setdefault(name, f"tied to {embedding}.weight, written once")
        return found


@dataclass(frozen=True)
class MatchedModule:
    """A module of the model with its tensors, by suffix: all that it must have, and what it may have besides."""

    place: Place
    scheme: Scheme | None
    specs: Mapping[str, StoredTensorSpec]
    tensors: Mapping[str, TensorInfo]


@dataclass(frozen=True)
class Matched:
    """The tensors of a checkpoint, matched with the modules of its model.

    Attributes:
        modules: every module whose tensors are as they must be, in the model's order; the scales of a layer's KV cache
            (:attr:`Place.is_cache_scale`) behind its modules.
        left_out: tensors that are no part of the model -> why.
        missing: tensors that must be there and are not, and what they would have to be, one line each.
        unfit: tensors of another dtype or shape than config.json says, or that nothing here knows; one line each.
        unknown: tensors that no module has -> why not.
        plain: modules that config.json makes quantised, and whose weight is there in floating point -> their scheme in
            words. They are unquantised: lists of what is kept are often incomplete, and engines know it by themselves.
    """

    model: ModelDescription
    modules: tuple[MatchedModule, ...]
    left_out: Mapping[str, str]
    missing: tuple[str, ...]
    unfit: tuple[str, ...]
    unknown: Mapping[str, str]
    plain: Mapping[str, str]

    def problems(self) -> list[str]:
        """Everything that is wrong: what is missing first, what is unknown last and in one line."""
        found = [*self.missing, *self.unfit]
        if self.unknown:
            names = sorted(self.unknown)
            found.append(
                f"{len(names)} tensor(s) are not part of {describe(self.model.family, self.model.dimensions)}: "
                f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
            )
        return found


def match(checkpoint: Checkpoint, model: ModelDescription | None = None) -> Matched:
    """Match every tensor of a checkpoint with the module that it belongs to.

    Args:
        model: the model, if its config.json has been read already.

    Raises:
        CheckpointError, PlanError: as :meth:`ModelDescription.of`. That tensors are missing, unknown or unfit is a
            result.
    """
    model = model or ModelDescription.of(checkpoint)
    left_out = model.left_out(checkpoint.infos)
    infos = {name: info for name, info in checkpoint.infos.items() if name not in left_out}
    modules: list[MatchedModule] = []
    schemes: dict[str, Scheme | None] = {}  # of the modules that are there
    missing: dict[str, str] = {}
    unfit: list[str] = []
    plain: dict[str, str] = {}
    undescribed: set[str] = set()
    outside = _Outside(model)
    for layer, group in groupby(model.places(), key=lambda place: place.layer):
        for place in group:
            try:
                expected = model.expected(place)
            except CheckpointError as error:
                unfit.append(str(error))
                undescribed.add(place.name)
                continue
            if expected.scheme is not None and _is_plain(place, expected, infos):
                plain[place.name] = _in_words(expected.scheme)
                expected = model.unquantised(place.module)
            module = fit(place.tensor, expected, infos.pop)
            if outside.has(place.tensor("")) and (module.missing or module.unfit):
                outside.note(module)
                infos |= {info.name: info for info in module.tensors.values()}
                continue
            schemes[place.name] = expected.scheme
            hint = "" if place.draft is None else _WITHOUT_DRAFTS
            missing |= {name: f"{text}{hint}" for name, text in module.missing.items()}
            unfit += (f"{text}{hint}" for text in module.unfit)
            if (bias := place.tensor("bias")) in module.missing:
                announced = place.module.bias
                said = f"config.json says {announced}" if isinstance(announced, str) else f"{model.family.name} has one"
                missing[bias] += f", though {said}"
            if not module.missing and not module.unfit:
                modules.append(MatchedModule(place, expected.scheme, module.specs, module.tensors))
        if layer is not None:
            modules += _take_cache_scales(model, layer, infos, unfit)
    modules += outside.carried(infos)
    missing |= outside.missing
    for name in list(missing)[:_LISTED]:  # each looks at all names
        if name.rpartition(".")[2] != "bias":
            missing[name] += did_you_mean(name, infos)
    unknown = {}
    for name in infos:
        module_name = name.rpartition(".")[0]
        if module_name not in undescribed:
            if module_name in schemes:
                unknown[name] = no_further(schemes[module_name], model.quantization)
            else:
                unknown[name] = f"{describe(model.family, model.dimensions)} has no such module"
    return Matched(
        model, tuple(modules), left_out, tuple(missing.values()), tuple(dict.fromkeys(unfit)), unknown, plain
    )


class _Outside:
    """The parts of a model beside its language model, which makers may have otherwise than transformers has.

    They are taken over as they are, where something of them is there by a name or of a shape that nothing here knows.

    Attributes:
        missing: tensors that must be there all the same, in words.
    """

    def __init__(self, model: ModelDescription) -> None:
        self._family, self._has_parts = model.family, has_part(model.config)
        modules = (*(m for m in self._family.before if m.kind == "embedding"), *self._family.after)
        self._own = {"", *(_root(self._family, f"{module.path}.weight") for module in modules)}
        self._partly: set[str] = set()
        self._strange = False
        self.missing: dict[str, str] = {}

    def has(self, name: str) -> bool:
        """Returns whether a tensor is of such a part."""
        if any(re.search(pattern, name) for pattern in self._family.carried):
            return True
        return self._has_parts and _root(self._family, name) not in self._own

    def note(self, module: FittedTensors) -> None:
        """Notes a module of such a part that is not there as it is known."""
        self._strange |= bool(module.unfit)
        self._partly.update(info.name for info in module.tensors.values())
        self.missing |= module.missing

    def carried(self, infos: dict[str, TensorInfo]) -> Iterator[MatchedModule]:
        """Takes what is left of such parts out of ``infos``."""
        left = [name for name in infos if self.has(name) and infos[name].dtype in (*FLOATS, "I64", "BOOL")]
        if not self._strange and self._partly.issuperset(left):  # files of a tower that transformers knows are missing
            for name in left:
                del infos[name]
            return
        self.missing = {}
        for name in left:
            info = infos.pop(name)
            path, _, parameter = name.rpartition(".")
            why = _NOT_KNOWN if len(info.shape) > 1 else ""
            module = Module(
                path=path, kind="other", role=name, parameter=parameter, bias=False, shape=info.shape, why=why
            )
            spec = StoredTensorSpec((info.dtype,), (info.shape,))
            place = Place(path, module, stages=("first",))
            yield MatchedModule(place, None, {parameter: spec}, {parameter: info})


def _root(family: Family, name: str) -> str:
    """A tensor's name up to its first part that leads away from the decoder layers; ``""`` of theirs."""
    above, parts = family.layer_prefix.split(".")[:-1], name.split(".")
    apart = next((n for n, (own, other) in enumerate(zip(parts, above, strict=False)) if own != other), len(above))
    return ".".join(parts[: apart + 1]) if apart < len(above) else ""


def _is_plain(place: Place, expected: ExpectedModule, infos: Mapping[str, TensorInfo]) -> bool:
    """Returns whether a module has a floating-point weight, and nothing that its scheme would have besides."""
    parameter = place.module.parameter
    weight = infos.get(place.tensor(parameter))
    others = {*expected.required, *expected.optional} - {parameter, "bias"}
    return weight is not None and weight.dtype in FLOATS and not any(place.tensor(each) in infos for each in others)


class FittedTensors(NamedTuple):
    """The tensors of one module beside those that it must have; ``missing`` by the tensor's full name, in words."""

    specs: Mapping[str, StoredTensorSpec]
    tensors: Mapping[str, TensorInfo]
    missing: Mapping[str, str]
    unfit: Sequence[str]


def fit(
    name_of: Callable[[str], str], expected: ExpectedModule, take: Callable[[str, None], TensorInfo | None]
) -> FittedTensors:
    """Compare the tensors of one module with those that it must have.

    Args:
        name_of: the full name of a tensor by its suffix.
        take: the tensor of that name, or its second argument.
    """
    specs, tensors, missing, unfit = dict(expected.required), {}, {}, []
    for suffix, spec in chain(expected.required.items(), expected.optional.items()):
        name, scheme = name_of(suffix), None if suffix == "bias" else expected.scheme
        info = take(name, None)
        if info is None:
            if suffix in expected.required:
                missing[name] = f"{name} is missing{'' if scheme is None else f': {_in_words(scheme)} needs {spec}'}"
            continue
        specs[suffix], tensors[suffix] = spec, info
        has_dtype = info.dtype in spec.dtypes
        if not has_dtype or not spec.has_shape(info.shape):
            plain = scheme is None and has_dtype  # where any float will do, the shape alone is wrong
            found, made = (f"{list(info.shape)}", spec.shapes_text) if plain else (_of(info), str(spec))
            why = "" if scheme is None else f" ({_in_words(scheme)})"
            unfit.append(f"{name} is {found} but config.json makes it {made}{why}")
    return FittedTensors(specs, tensors, missing, unfit)


def no_further(scheme: Scheme | None, quantization: QuantizationConfig | None) -> str:
    """The reason why a module has no other tensors than those expected."""
    if scheme is not None:
        return f"{_in_words(scheme)} has no such tensor"
    return "config.json has no quantization_config" if quantization is None else "config.json does not quantise it"


def describe(family: Family, dimensions: Dimensions) -> str:
    """``"a llama model of 2 layers"``."""
    return f"a {family.name} model of {dimensions.layers} layers"


def too_many_blocks(dimensions: Dimensions, tensors: int) -> str:
    """The refusal of more layers or experts than there are tensors, or ""; to be asked before any loop over them."""
    if dimensions.most_blocks <= tensors:
        return ""
    return f"config.json says {blocks(dimensions)}, but there are only {tensors} tensors"


def blocks(dimensions: Dimensions) -> str:
    """``"32 layers"`` or ``"32 layers of 8 experts"``."""
    return f"{dimensions.layers} layers{f' of {dimensions.experts} experts' if dimensions.experts else ''}"


def refuse(where: str, problems: Sequence[str]) -> NoReturn:
    """Raise with the first of the problems, the others counted.

    Raises:
        CheckpointError: always.
    """
    problems = list(dict.fromkeys(problems))
    more = f"; and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
    raise CheckpointError(f"{where}: {'; '.join(problems[:_LISTED])}{more}")


def _of(info: TensorInfo) -> str:
    return f"{info.dtype} {list(info.shape)}"


def _in_words(scheme: Scheme) -> str:
    return f"{scheme.name} ({scheme.describe()})"


def _take_cache_scales(
    model: ModelDescription, layer: int, infos: dict[str, TensorInfo], unfit: list[str]
) -> Iterator[MatchedModule]:
    """Takes the scales of a layer's KV cache, one number each or one for each head, out of ``infos``; notes those that
    are not."""
    quantization = model.quantization
    if quantization is None or quantization.kv_cache_scheme is None:
        return
    own = methods()[quantization.method].KV_SCALES.values() if quantization.method in methods() else ()
    cache = kv_caches.of_scheme(quantization.kv_cache_scheme)
    by_head = cache is not None and cache.by_head
    prefix = model.family.layer_prefix.format(i=layer)
    for where in dict.fromkeys((*KV_SCALES, *own)):
        path, _, parameter = f"{model.family.attention or 'self_attn'}.{where}".rpartition(".")
        place = cache_place(prefix, path, parameter, layer)
        info = infos.pop(place.tensor(parameter), None)
        heads = model.dimensions.heads if parameter.startswith("q") else model.dimensions.kv_heads
        if info is not None and math.prod(info.shape) != (heads if by_head else 1):
            wanted = f"a number for each of {heads} heads" if by_head else "one number"
            unfit.append(f"{info.name} is {_of(info)}: a KV cache's scale is {wanted}")
        elif info is not None:
            spec = StoredTensorSpec((info.dtype,), (info.shape,))
            yield MatchedModule(place, None, {parameter: spec}, {parameter: info})
