"""What becomes of one model type: exported at every parallelism and format, compared, loaded by transformers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from modelexport.checkpoints.safetensors.file import Reader
from modelexport.exporting import export
from modelexport.inspection.diff import diff_checkpoints
from modelexport.inspection.evaluate.models import PlainTensors
from modelexport.models.opening import open_model
from modelexport.models.stacked import apart_as, experts_apart
from tests.helpers.tiny_models import model_class, tiny_checkpoint, tiny_inputs

QUANTS = ("none", "int8", "int4")
SIZES = (1, 2, 4)
GROUP = 32
SHARDED = 2  # tensor-parallel ranks that a checkpoint is also written for
LEAST_SQNR = {"int8": 30.0, "int4": 14.0}  # in dB; of random weights, 40 and 19 are usual
LOGITS = {"int8": 0.3, "int4": 0.05}  # of their standard deviation, for half of the tokens
DIFFERENT = 0.01  # how much the logits of different tokens differ, at least
FLOAT32 = (
    "ctrl",
    "hy_v4",
    "inkling2_text",
    "reformer",
    "xlnet",
    "xlstm",
)  # transformers' code for them mixes dtypes otherwise


class Mismatch(AssertionError):
    """Something that was to be equal is not."""


@dataclass
class Outcome:
    """What was found of one type.

    Attributes:
        sizes: tensor-parallel sizes whose directories were equal to the byte.
        share: of the bytes, what each of two ranks holds of a checkpoint written for two, at most.
        quantised: names of the quantised linears, with stars for numbers.
        kept: name of a module that is not -> why.
        loads: number format -> whether transformers loads it to the same weights and logits: ``yes``, ``on loading``
            (where it decodes all weights while it loads them), or ``no: `` and what it says.
    """

    model_type: str
    sizes: tuple[int, ...] = ()
    share: float = 1.0
    quantised: tuple[str, ...] = ()
    kept: dict[str, str] = field(default_factory=dict)
    loads: dict[str, str] = field(default_factory=dict)


def examine(
    model_type: str, work: Path, quants: Sequence[str] = QUANTS, sizes: Sequence[int] = SIZES, *, sharded: bool = True
) -> Outcome:
    """Export, compare and load one type.

    Raises:
        Mismatch: bytes, weights or logits are not what they must be.
        ModelExportError: it cannot be exported.
    """
    outcome = Outcome(model_type, tuple(sizes))
    source = tiny_checkpoint(model_type)
    for quant in quants:
        out = _same_bytes(source, work, quant, sizes)
        outcome.loads[quant] = check_loaded(model_type, source, out, quant, work)
    record = json.loads((work / quants[-1] / "modelexport.json").read_text())
    outcome.quantised = starred(record["sqnr_db"])
    outcome.kept = {name: record["unquantised"][name] for name in record["unquantised"]}
    if sharded:
        outcome.share = _check_sharded(source, work, quants[-1])
    return outcome


def _same_bytes(source: Path, work: Path, quant: str, sizes: Sequence[int]) -> Path:
    """The export by one process, after those by more were found to be equal to it."""
    alone = work / quant
    exported(source, alone, quant)
    wanted = directory_hashes(alone)
    for tp in sizes:
        if tp == 1:
            continue
        target = work / f"{quant}-{tp}"
        exported(source, target, quant, tp=tp)
        found = directory_hashes(target)
        differ = sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name))
        if differ:
            raise Mismatch(f"{quant}: tp 1 and tp {tp} differ in {', '.join(differ)}")
        shutil.rmtree(target)
    return alone


def _check_sharded(source: Path, work: Path, quant: str) -> float:
    """Write for several ranks, and compare; returns the largest share of the weights that one of them holds."""
    target = work / f"{quant}-sharded"
    exported(source, target, quant, target_tp=SHARDED)
    result = diff_checkpoints(work / quant, target)
    if not result.equal:
        raise Mismatch(f"for {SHARDED} ranks: {result.differences[0].text}")
    held: dict[str, int] = {}
    for path in target.rglob("*.safetensors"):
        rank = re.search(r"rank-?(\d+)|shard-?(\d+)", str(path.relative_to(target)))
        held[rank[0] if rank else path.name] = held.get(rank[0] if rank else path.name, 0) + path.stat().st_size
    return max(held.values()) / sum(path.stat().st_size for path in (work / quant).glob("*.safetensors"))


def exported(source: Path, out: Path, quant: str, **settings: Any) -> Path:
    """Export in process; its ranks come from the fork server."""
    if quant == "int4":
        settings["group_size"] = GROUP
    fixed = {"gather": "direct", "evaluate": False, "quiet": True, "timeout": 120.0}
    export(model=str(source), out=str(out), quant=quant, **fixed, **settings)
    return out


def directory_hashes(directory: Path) -> dict[str, str]:
    """SHA-256 of every file."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def starred(names: Iterable[str]) -> tuple[str, ...]:
    """Names with stars for numbers, each once."""
    return tuple(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names))


def check_loaded(model_type: str, source: Path, out: Path, quant: str, work: Path) -> str:
    """Compare what transformers loads with what we decode; returns one of the answers of :class:`Outcome`."""
    reference = decode(source, out, work / f"{quant}-decoded", quant)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' and compressed-tensors' own, many and changing
        wanted = load(model_type, reference)
        expected = logits(wanted)
        if not bool(torch.isfinite(expected).all()):
            raise Mismatch(f"{quant}: the logits are not finite")
        if float(expected.std(-2).mean()) < DIFFERENT:
            raise Mismatch(f"{quant}: the logits hardly depend on the tokens: the model tells nothing apart")
        reasons = []
        ways = {"yes": {}} if quant == "none" else {"yes": {}, "on loading": decoding()}
        for answer, settings in ways.items():
            try:
                found = load(model_type, out, **settings)
                got = logits(found)  # the first run decodes what is decoded late
            except (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
                reasons.append(f"{type(error).__name__}: {str(error).strip() or 'without a word'}")
                continue
            wrong = compare(wanted, found, expected, got, quant)
            if not wrong:
                return answer
            reasons.append(wrong)
    if quant == "none":
        raise Mismatch(f"none: {reasons[0]}")
    check_decoded(reference, exported(out, work / f"{quant}-plain", "none"))
    return f"no: {'; '.join(reasons)}"


def decoding() -> dict[str, Any]:
    """Has transformers decode all weights while it loads them, and not in the first forward pass."""
    from transformers import CompressedTensorsConfig

    return {"quantization_config": CompressedTensorsConfig(dequantize=True)}


def check_decoded(reference: Path, plain: Path) -> None:
    """The export of a quantised checkpoint with ``--quant none`` is what its numbers stand for."""
    expected, found = apart_as_in(reference, plain), tensors_of(plain)
    if expected.keys() != found.keys():
        raise Mismatch(f"decoded: tensors that only one side has: {sorted(expected.keys() ^ found.keys())[:4]}")
    for name, tensor in expected.items():
        if not torch.equal(tensor, found[name]):
            raise Mismatch(f"decoded: {name} differs")


def compare(wanted: Any, found: Any, expected: torch.Tensor, got: torch.Tensor, quant: str) -> str:
    """What differs, or "": weights must not, logits not more than the rounding of inputs allows."""
    parameters = dict(found.named_parameters())
    for name, parameter in wanted.named_parameters():
        if name not in parameters and (stack := stack_of(name, parameters)) is not None:
            parameters[name] = stack
        if name not in parameters:
            return f"{name} is missing"
        if not torch.equal(parameters[name].bfloat16(), parameter.bfloat16()):
            return f"{name} is not what we decode"
    difference, scale = (got - expected).abs(), float(expected.std())
    if quant == "none":
        return "" if torch.equal(got, expected) else f"logits differ by {float(difference.max()):.3g} at most"
    worst = float(difference.amax(-1).median())  # of tokens: one or two may go to another expert
    allowed = LOGITS[quant] * scale
    return "" if worst <= allowed else f"logits differ by {worst:.3g}, more than {allowed:.3g}"


def stack_of(name: str, parameters: dict[str, Any]) -> torch.Tensor | None:
    """A stack of experts of Llama 4, of which transformers makes linears where a checkpoint is quantised."""
    root, _, leaf = name.rpartition(".")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(leaf, ())
    experts = []
    while parts and f"{root}.{len(experts)}.{parts[0]}.weight" in parameters:
        own = [parameters[f"{root}.{len(experts)}.{part}.weight"].t() for part in parts]
        experts.append(torch.cat(own, dim=1))
    return torch.stack(experts) if experts else None


def load(model_type: str, directory: Path, **settings: Any) -> Any:
    """transformers' model of a checkpoint; every tensor has found its place, and every place its tensor.

    Raises:
        ValueError: not so; or whatever transformers raises.
    """
    dtype = torch.float32 if model_type in FLOAT32 else torch.bfloat16
    with _reports() as reports:
        try:
            model, info = model_class(model_type).from_pretrained(
                directory, dtype=dtype, output_loading_info=True, **settings
            )
        except RuntimeError as error:
            raise RuntimeError(f"{error} {' '.join(reports)}") from error
    wrong = {kind: sorted(names)[:3] for kind, names in info.items() if names}
    if wrong:
        raise ValueError(f"does not fit: {wrong}")
    return model.eval()


@contextlib.contextmanager
def _reports() -> Iterator[list[str]]:
    """What transformers logs of conversions that failed: its exception only refers to that."""
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.extend(re.findall(r"^Error: .*", record.getMessage(), re.MULTILINE))

    handler = Handler()
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def logits(model: Any) -> torch.Tensor:
    """Of a fixed sequence."""
    return model(**tiny_inputs(model)).logits.float()


def decode(source: Path, out: Path, directory: Path, quant: str) -> Path:
    """The source with its weights replaced by what the export stands for, as our own reader decodes them.

    Raises:
        Mismatch: a tensor is missing, one that is not quantised differs from the source's or stays without a word,
            or one that is quantised is further from it than its number format explains.
    """
    replaced: dict[str, torch.Tensor] = {}
    originals = apart_as_in(source, out)
    record = json.loads((out / "modelexport.json").read_text())
    left_out = record["left_out"]
    with PlainTensors(open_model(out)) as plain:
        odd = sorted(set(plain.names) ^ (set(originals) - set(left_out)))
        if odd:
            raise Mismatch(f"{quant}: tensors that only one side has: {odd[:4]}")
        for name in plain.names:
            original, value = originals[name], plain.read(name)
            if not plain.is_decoded(name) and not torch.equal(value, original):
                raise Mismatch(f"{quant}: {name} is not quantised and yet not the source's")
            if plain.is_decoded(name) and sqnr(original, value) < LEAST_SQNR[quant]:
                raise Mismatch(f"{quant}: {name} has {sqnr(original, value):.1f} dB")
            if not plain.is_decoded(name) and is_matrix(original) and not is_told(name, record["unquantised"]):
                raise Mismatch(f"{quant}: {name} {list(original.shape)} is not quantised, and nothing says why")
            replaced[name] = value.to(original.dtype)
    weights = shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json")
    shutil.copytree(source, directory, ignore=weights)
    replaced = restacked(source, replaced, directory / "numbered")
    save_file(replaced, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def apart_as_in(source: Path, out: Path) -> dict[str, torch.Tensor]:
    """All of a source's tensors, those of stacked experts one by one where an export has them so."""
    checkpoint = apart_as(open_model(source), open_model(out))
    with Reader(checkpoint) as reader:
        return {name: reader.read(info) for name, info in checkpoint.infos.items()}


def restacked(source: Path, tensors: dict[str, torch.Tensor], work: Path) -> dict[str, torch.Tensor]:
    """The tensors with experts in the stacks of the source, as transformers reads them.

    Where each element of a stack goes is seen from a copy whose elements are numbered.
    """
    stacks = {name: tensor for name, tensor in tensors_of(source).items() if name not in tensors}
    if not stacks:
        return tensors
    shutil.copytree(source, work, ignore=shutil.ignore_patterns("*.safetensors", "*.safetensors.index.json"))
    kept = {name: tensor for name, tensor in tensors_of(source).items() if name not in stacks}
    numbered = {name: torch.arange(tensor.numel()).view(tensor.shape) for name, tensor in stacks.items()}
    save_file({**kept, **numbered}, work / "model.safetensors", metadata={"format": "pt"})
    checkpoint = open_model(work)
    found = dict(tensors)
    for name, stack in stacks.items():
        others = [other for other in stacks if other != name]
        alone = experts_apart(replace(checkpoint, infos=without(checkpoint.infos, others)))
        whole = torch.empty(stack.numel(), dtype=stack.dtype)
        with Reader(alone) as reader:
            for linear in alone.infos.keys() - checkpoint.infos.keys():
                whole[reader.read(alone.infos[linear]).flatten()] = found.pop(linear).flatten()
        found[name] = whole.view(stack.shape)
    shutil.rmtree(work)
    return found


def without(infos: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """A dictionary without some of its keys."""
    return {name: info for name, info in infos.items() if name not in set(names)}


def is_matrix(tensor: torch.Tensor) -> bool:
    """Whether quantising it would save anything."""
    return tensor.ndim >= 2 and sorted(tensor.shape)[-2] >= GROUP


def is_told(name: str, unquantised: Iterable[str]) -> bool:
    """Whether a tensor belongs to one of the modules that are said to stay as they are."""
    return any(name == module or name.startswith(f"{module}.") for module in unquantised)


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """All of a checkpoint's."""
    files = sorted(directory.glob("*.safetensors"))
    return {name: tensor for path in files for name, tensor in load_file(path).items()}


def sqnr(original: torch.Tensor, decoded: torch.Tensor) -> float:
    """In dB."""
    signal, noise = original.double().square().sum(), (original.double() - decoded.double()).square().sum()
    return float(10 * torch.log10(signal / noise.clamp_min(1e-30)))
