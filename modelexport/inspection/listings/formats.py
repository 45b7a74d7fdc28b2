"""``modelexport formats``: number formats, checkpoint formats, algorithms, and what engines were seen to do with them.

Worked out from what the formats themselves say: nothing here has to be kept equal to them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, fields
from typing import Any

from modelexport.errors import UsageError, nearest
from modelexport.models import checkpoint_formats
from modelexport.models.engines import REFUSALS
from modelexport.models.loading import LOADINGS, STAND_IN
from modelexport.quantization import algorithms, mixtures
from modelexport.quantization import formats as number_formats
from modelexport.quantization.kv_caches import CACHES
from modelexport.quantization.methods import refusal
from modelexport.recipe import field_of
from modelexport.system.tables import text_table
from modelexport.system.terminal import show

__all__ = ["describe", "known", "print_formats"]

_SHAPE = (4096, 4096)


def known() -> dict[str, Any]:
    """All of it, JSON-able."""
    numbers = {name: _number_format(name) for name in number_formats.names()}
    return {
        "number_formats": list(numbers.values()),
        "mixtures": [_mixture(name) for name in mixtures.names()],
        "checkpoint_formats": [_checkpoint_format(name) for name in checkpoint_formats.names()],
        "algorithms": [_algorithm(name) for name in algorithms.names()],
        "loaded": [asdict(row) for row in LOADINGS],
        "refused": [asdict(row) for row in REFUSALS],
    }


def describe(name: str) -> dict[str, Any]:
    """One of them by its name, with what engines were seen to do; of a name that two share, both.

    Raises:
        UsageError: there is no such thing; the message has the nearest.
    """
    name = number_formats.canonical(name)
    found: dict[str, Any] = {"name": name}
    if name in number_formats.names():
        found["number_format"] = _number_format(name)
    if name in mixtures.names():
        found["mixture"] = _mixture(name)
    if name in checkpoint_formats.names():
        found["checkpoint_format"] = _checkpoint_format(name)
    if name in algorithms.names():
        found["algorithm"] = _algorithm(name)
    if len(found) == 1:
        names = {*number_formats.names(), *mixtures.names(), *checkpoint_formats.names(), *algorithms.names()}
        raise UsageError(f"unknown format '{name}'{nearest(name, names)}")
    found["loaded"] = [
        asdict(row)
        for row in LOADINGS
        if row.format == name or any(label.partition(":")[0] == name for own in row.ran.values() for label in own)
    ]
    found["refused"] = [asdict(row) for row in REFUSALS if name in row.number_formats or name in row.formats]
    return found


def print_formats(name: str | None, *, as_json: bool) -> int:
    """Print all, or what has that name; returns the exit status, 0."""
    found = known() if name is None else describe(name)
    if as_json:
        show(json.dumps(found, indent=1))
    else:
        show("\n".join(_listed(found) if name is None else _described(found)))
    return 0


def _number_format(name: str) -> dict[str, Any]:
    import torch

    form = number_formats.get(name)
    return {
        "name": name,
        "description": form.description,
        "bits_per_weight": round(form.bits_per_weight(_SHAPE, torch.bfloat16), 4),
        "group_sizes": list(form.group_sizes),
        "default_group_size": form.default_group_size,
        "rounds_activations": form.quantised and form.input_arguments() is not None,
        "checkpoint_formats": [each for each in checkpoint_formats.names() if _holds(each, name)],
        "algorithms": [each for each in algorithms.names() if algorithms.get(each).refusal(form) is None],
    }


def _mixture(name: str) -> dict[str, Any]:
    """A mixture: the block type of most tensors, those that it may give others, and who holds it."""
    found = mixtures.MIXTURES[name]
    return {
        "name": name,
        "block_type": found.block_type,
        "others": [each for each in found.given_types() if each != found.block_type],
        "file_type": found.file_type,
        "checkpoint_formats": [each for each in checkpoint_formats.names() if _holds_mixtures(each)],
    }


def _holds_mixtures(name: str) -> bool:
    return getattr(checkpoint_formats.method_of(name), "HOLDS_MIXTURES", False)


def _checkpoint_format(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "description": checkpoint_formats.description_of(name),
        "quant_method": checkpoint_formats.method_of(name).METHOD,
        "number_formats": [each for each in number_formats.names() if _holds(name, each)],
    }


def _algorithm(name: str) -> dict[str, Any]:
    found = algorithms.get(name)
    settings = {field_of(name, spec.name): spec.default for spec in fields(found.Settings)}
    return {"name": name, "description": found.description, "settings": settings}


def _holds(checkpoint_format: str, number_format: str) -> bool:
    """Returns True if it can hold such linears in at least one group size."""
    if number_format == "none":
        return getattr(checkpoint_formats.get(checkpoint_format), "HOLDS_UNQUANTISED", True)
    if not getattr(checkpoint_formats.get(checkpoint_format), "HOLDS_QUANTISED", True):
        return False
    method = checkpoint_formats.method_of(checkpoint_format)
    sizes = number_formats.get(number_format).group_sizes or (None,)
    found = [number_formats.get(number_format, group_size=size) for size in sizes]
    return any(refusal(method, each, _SHAPE) is None for each in found)


def _listed(found: dict[str, Any]) -> Iterator[str]:
    yield "number formats (--quant NAME, or PATTERN=NAME[:GROUP],...):"
    numbers = [(each["name"], _bits(each), _groups(each), each["description"]) for each in found["number_formats"]]
    yield from text_table(("name", "bits a weight", "groups", "what it is"), numbers, indent="  ")
    yield ""
    yield "mixtures of block types, by what a tensor is (--format gguf --quant NAME):"
    rows = [(each["name"], each["block_type"], ", ".join(each["others"]) or "-") for each in found["mixtures"]]
    yield from text_table(("name", "most tensors", "others, in most models"), rows, indent="  ")
    yield ""
    yield "checkpoint formats (--format NAME):"
    names = number_formats.names()
    containers = found["checkpoint_formats"]
    rows = [(each["name"], _some(each["number_formats"], names), each["description"]) for each in containers]
    yield from text_table(("name", "holds", "what it is"), rows, indent="  ")
    yield ""
    yield "algorithms (--algorithm NAME, several joined by +):"
    rows = [(each["name"], _settings(each), each["description"]) for each in found["algorithms"]]
    yield from text_table(("name", "settings", "what it does"), rows, indent="  ")
    yield ""
    yield "engines that our tests have seen load it (small models; what is not here was not run):"
    yield from text_table(("engine", "format", "kernels", "number formats"), _engines(found["loaded"]), indent="  ")
    yield ""
    yield "stand-ins: plain kernels in place of its own, which need a GPU and were not run"
    yield "modelexport formats NAME says more of one, with what engines are known to refuse"


def _described(found: dict[str, Any]) -> Iterator[str]:
    number, checkpoint, algorithm = (found.get(key) for key in ("number_format", "checkpoint_format", "algorithm"))
    mixture = found.get("mixture")
    if number is not None:
        yield f"--quant {number['name']}: {number['description']}"
        yield f"  bits a weight: {_bits(number)} (4096 x 4096, scales included)"
        yield f"  groups: {_groups(number)}"
        yield f"  held by --format {', '.join(number['checkpoint_formats'])}"
        if len(number["algorithms"]) < len(algorithms.names()):
            yield f"  made by --algorithm {_some(number['algorithms'], list(algorithms.names()))}"
    if mixture is not None:
        yield f"--quant {mixture['name']}: a mixture of llama.cpp's, file type {mixture['file_type']}"
        yield f"  most tensors: {mixture['block_type']}; others, in most models: {', '.join(mixture['others']) or '-'}"
        yield f"  held by --format {', '.join(mixture['checkpoint_formats'])}"
    if checkpoint is not None:
        yield f"--format {checkpoint['name']}: {checkpoint['description']}"
        yield f"  holds --quant {_some(checkpoint['number_formats'], number_formats.names())}"
    if algorithm is not None:
        yield f"--algorithm {algorithm['name']}: {algorithm['description']}"
        yield f"  settings: {_settings(algorithm)}"
    for title, rows in (("seen to load it, in our tests", _seen(found)), ("known to refuse it", _refused(found))):
        if rows:
            yield ""
            yield f"{title}:"
            yield from (f"  {row}" for row in rows)


def _seen(found: dict[str, Any]) -> list[str]:
    whole = "checkpoint_format" in found
    lines = []
    for row in found["loaded"]:
        every = whole and row["format"] == found["name"]
        for model_type, labels in row["ran"].items():
            own = ", ".join(label for label in labels if every or label.partition(":")[0] == found["name"])
            if own:
                cache = "" if row["kv_cache"] is None else f", with a KV cache in {CACHES[row['kv_cache']].in_words}"
                lines.append(f"{row['engine']}: {own} as {row['format']}, {model_type}{cache}: {row['seen']}")
    return lines


def _refused(found: dict[str, Any]) -> list[str]:
    lines = []
    for row in found["refused"]:
        what = ", ".join(row["number_formats"]) or "whatever is quantised"
        if row["caches"]:
            what = f"a KV cache in {', '.join(row['caches'])}"
        only = " (experts)" if row["experts"] else ""
        where = f"{what} as {', '.join(row['formats'])}{only}"
        lines.append(f"{row['engine']}: {where}: {row['why']}; use {row['instead']}")
    return lines


def _engines(loaded: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """One row for each engine, format and kind of kernels: every number format that any model was run with."""
    rows: dict[tuple[str, str, str], dict[str, None]] = {}
    for row in loaded:
        kernels = "stand-ins" if row["seen"] == STAND_IN else "its own"
        names = rows.setdefault((row["engine"], row["format"], kernels), {})
        for labels in row["ran"].values():
            names.update(dict.fromkeys(label.partition(":")[0] for label in labels))
    everything = number_formats.names()
    return [(*row, _some(sorted(names), everything)) for row, names in rows.items()]


def _some(names: list[str], everything: list[str]) -> str:
    """``names``, or what is missing of everything where that is shorter to say."""
    missing = [name for name in everything if name not in names]
    if not missing:
        return "all"
    return f"all but {', '.join(missing)}" if len(missing) < 6 and len(names) > 6 else ", ".join(names)


def _bits(form: dict[str, Any]) -> str:
    return f"{form['bits_per_weight'] + 1e-6:.2f}"  # 4.125 is said as 4.13, as everywhere


def _groups(form: dict[str, Any]) -> str:
    sizes = ["row" if size == -1 else str(size) for size in form["group_sizes"]]
    default = form["default_group_size"]
    return f"{', '.join(sizes)} (default {default})" if len(sizes) > 1 else ", ".join(sizes) or "-"


def _settings(algorithm: dict[str, Any]) -> str:
    flags = [f"--{key.replace('_', '-')} {value}" for key, value in algorithm["settings"].items() if value is not True]
    switches = [f"--no-{key.replace('_', '-')}" for key, value in algorithm["settings"].items() if value is True]
    return ", ".join([*flags, *switches]) or "-"
