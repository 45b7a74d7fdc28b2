"""The model card of a checkpoint: README.md, made of its modelexport.json and of nothing else.

The same record gives the same text: there is no path, time, machine or number of ranks in it. What it claims was
measured, or run by the conformance tests; what was not is said so. Front matter as the Hub expects it
(https://huggingface.co/docs/hub/model-cards); names that strangers wrote are escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from modelexport.checkpoints.card_metadata import known_fields
from modelexport.inspection.card.loading import loading_lines
from modelexport.inspection.card.markdown import code, plain, table
from modelexport.inspection.card.recipe import recipe_lines
from modelexport.inspection.record.rows import Row, rows_of, stored_of
from modelexport.quantization import algorithms
from modelexport.system.tables import size_text

__all__ = ["model_card"]

_LIBRARIES = {"hf": "transformers", "awq": "transformers", "gptq": "transformers", "gguf": "gguf"}
_TAGS = {"hf": "compressed-tensors", "fp8-block": "fp8", "vllm-sharded": "vllm", "trtllm": "tensorrt-llm"}
_TAG = re.compile(r"[\w.-]{1,64}", re.ASCII)
_MOST_NAMES = 3


def model_card(record: Mapping[str, Any]) -> str:
    """The text of README.md.

    Args:
        record: modelexport.json's content; of an older one, or a stranger's, what is missing is left out.
    """
    rows = rows_of(record)
    parts = [
        _front_matter(record),
        _title(record),
        _contents(record, rows),
        recipe_lines(record),
        _quality(record, rows),
        loading_lines(record),
        _checking(record),
    ]
    text = "\n".join(line for part in parts for line in (*part, ""))
    return re.sub(r"\n{3,}", "\n\n", text).rstrip("\n") + "\n"


def _front_matter(record: Mapping[str, Any]) -> Iterator[str]:
    import yaml

    model, stored = _mapping(record.get("model")), stored_of(record)
    quantised = stored.number_formats != ("none",)
    known = known_fields(model)
    fields: dict[str, Any] = {}
    if known.get("base_model"):
        fields["base_model"] = known["base_model"][0]
        if quantised:
            fields["base_model_relation"] = "quantized"
    if stored.format in _LIBRARIES and not stored.sharded:
        fields["library_name"] = _LIBRARIES[stored.format]
    fields |= {key: known[key] for key in ("license", "license_name", "license_link", "language") if key in known}
    if not str(model.get("architecture")).endswith("ForConditionalGeneration"):  # what else it takes is not known here
        fields["pipeline_tag"] = "text-generation"
    names = {label.partition(":")[0] for label in stored.number_formats} if quantised else set()
    method = _TAGS.get(stored.format, stored.format)
    spelled = [] if stored.format == "hf" and not quantised else [method]
    tags = {"modelexport", *spelled, *names, *_algorithms(record)}
    fields["tags"] = sorted(tag for tag in tags if _TAG.fullmatch(tag))
    text = yaml.safe_dump(fields, sort_keys=True, allow_unicode=True, width=10**6)
    yield from ("---", *text.rstrip("\n").split("\n"), "---")


def _algorithms(record: Mapping[str, Any]) -> list[str]:
    """Those that samples ran through the layers for."""
    used = algorithms.used(_mapping(record.get("recipe")).get("algorithm"))
    return [algorithm.name for algorithm in used if algorithm.needs_samples and algorithm.kind != "assign"]


def _title(record: Mapping[str, Any]) -> Iterator[str]:
    stored, model = stored_of(record), _mapping(record.get("model"))
    quantised = stored.number_formats != ("none",)
    formats = ", ".join(stored.number_formats) if quantised else "not quantised"
    yield f"# {plain(record.get('source', 'a model'))}, {plain(formats)}"
    yield ""
    version = _mapping(record.get("producer")).get("version", "?")
    done = "Quantised after training and written" if quantised else "Written"
    if _mapping(record.get("recipe")).get("quant") == "keep":
        done = "Written in another format, its numbers as they were,"
    of = f" ({code(model['model_type'])})" if model.get("model_type") else ""
    yield f"{done} by modelexport {plain(version)} from {code(record.get('source', '?'))}{of}."
    revision = model.get("revision")
    if revision:
        yield f"The source is at revision {code(revision)}."
    if model.get("license"):
        yield f"Licence, as the source's card has it: {code(model.get('license_name') or model['license'])}."
    else:
        yield "The source's files name no licence that could be copied here: look at the source itself."


def _contents(record: Mapping[str, Any], rows: list[Row]) -> Iterator[str]:
    yield "## What is in it"
    yield ""
    yield from table(
        ("module", "count", "format", "bits a weight", "size", "worst SQNR"),
        [
            (
                code(row.name),
                str(row.count),
                code(row.number_format),
                f"{row.bits:.2f}" if row.weights else "-",
                size_text(row.nbytes),
                "-" if row.sqnr_db is None else f"{row.sqnr_db:.2f} dB",
            )
            for row in rows
        ],
    )
    yield ""
    nbytes, weights = sum(row.nbytes for row in rows), sum(row.weights for row in rows)
    source = _mapping(record.get("model")).get("source_bytes")
    smaller = ""
    if isinstance(source, int) and nbytes:
        ratio = f" ({source / nbytes:.2f} times smaller)" if source > 1.005 * nbytes else ""
        smaller = f", of {size_text(source)} before{ratio}"
    yield f"- {weights:,} weights in {size_text(nbytes)}{smaller}: {8 * nbytes / max(1, weights):.2f} bits a weight."
    if any(row.quantised for row in rows):
        yield from _notes("Not quantised", record.get("unquantised"))
    yield from _notes("Not written", record.get("left_out"))
    if stored_of(record).kv_cache:
        yield f"- Scales for a KV cache in {code(_mapping(record['recipe'])['kv_cache'])} are in it."


def _quality(record: Mapping[str, Any], rows: list[Row]) -> Iterator[str]:
    if not any(row.quantised for row in rows) and not record.get("evaluation"):
        return
    yield "## Quality"
    yield ""
    rounded = [row for row in rows if row.sqnr_db is not None]
    if rounded:
        worst = min(rounded, key=lambda row: row.sqnr_db or 0.0)
        yield (
            f"- Each linear's weights, as written and read back, against the source's: SQNR of the worst "
            f"{worst.sqnr_db:.2f} dB ({code(worst.worst)}). All are in `modelexport.json`."
        )
    yield from _output_errors(record)
    evaluation = _mapping(record.get("evaluation"))
    if evaluation:
        yield from _evaluation(evaluation)
    else:
        yield (
            "- Perplexity and KL divergence were not measured. `modelexport eval CKPT --against SOURCE --save` "
            "measures them and writes them here."
        )


def _output_errors(record: Mapping[str, Any]) -> Iterator[str]:
    """The output errors of the linears on the calibration samples; of calibrated exports alone."""
    errors = _mapping(record.get("output_error"))
    before, after = _mapping(errors.get("before")), _mapping(errors.get("after"))
    pairs = [(before[name], after[name]) for name in after if _is_number(before.get(name)) and _is_number(after[name])]
    if pairs:
        first, last = (sum(values) / len(pairs) for values in zip(*pairs, strict=True))
        yield (
            f"- Mean squared error of {len(pairs)} linears' outputs on the calibration samples, as a part of the "
            f"outputs' own square: {last:.2e} on average; rounded to nearest it would be {first:.2e}."
        )


def _evaluation(evaluation: Mapping[str, Any]) -> Iterator[str]:
    comparison = _mapping(evaluation.get("comparison"))
    model = _mapping(comparison.get("model") or evaluation.get("model"))
    windows = f"{evaluation.get('windows')} windows of {evaluation.get('window')} tokens"
    text, dtype = plain(evaluation.get("text", "a text")), plain(evaluation.get("dtype", "float32"))
    yield f"- Measured on {text}, {plain(windows)}, {dtype}:"
    if not comparison:
        yield f"  perplexity {_number(model.get('perplexity'), '.2f')}."
        return
    reference = _mapping(comparison.get("reference"))
    yield (
        f"  perplexity {_number(reference.get('perplexity'), '.2f')} before, {_number(model.get('perplexity'), '.2f')} "
        f"after; loss {_number(comparison.get('loss_difference'), '+.4f')} +- "
        f"{_number(comparison.get('loss_standard_error'), '.4f')}, mean KL divergence "
        f"{_number(comparison.get('mean_kl'), '.4f')} +- {_number(comparison.get('kl_standard_error'), '.4f')} nats a "
        "token (+- one standard error)."
    )


def _checking(record: Mapping[str, Any]) -> Iterator[str]:
    yield "## Checking it"
    yield ""
    hashes = _mapping(record.get("sha256"))
    errors = " and each linear's error" if _mapping(record.get("sqnr_db")) else ""
    yield (
        f"`modelexport.json` has the SHA-256 of {len(hashes):,} tensors and of the files beside them, the recipe and "
        f"the versions{errors}. `CKPT` is the directory that this card is in:"
    )
    yield ""
    yield from ("```", "modelexport verify CKPT                     # hashes, structure, no NaN or Inf")
    if errors:
        yield "modelexport verify CKPT --against SOURCE    # error of every linear as well"
    yield "```"


def _notes(title: str, notes: object) -> Iterator[str]:
    """One line for each reason, with the first names that it holds for."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in _mapping(notes).items():
        by_reason.setdefault(str(reason), []).append(name)
    for reason, names in by_reason.items():
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        yield f"- {title}: {', '.join(map(code, names[:_MOST_NAMES]))}{more} ({plain(reason)})."


def _number(value: object, form: str) -> str:
    return format(float(value), form) if isinstance(value, (int, float)) and _is_number(value) else "?"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
