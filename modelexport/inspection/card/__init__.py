"""The model card of a checkpoint: README.md, made of its modelexport.json and of nothing else.

Equal records give equal texts: there is no path, time, machine or number of ranks in it. What it claims was measured,
or run by the conformance tests. Front matter as the Hub expects it (https://huggingface.co/docs/hub/model-cards);
names in a record are escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from modelexport.inspection.card.loading import loading_lines
from modelexport.inspection.card.markdown import code, plain, table
from modelexport.inspection.card.recipe import recipe_lines
from modelexport.inspection.record.reading import EvaluationFigures, ExportRecord
from modelexport.inspection.record.rows import RecordRow, rows_of, stored_of
from modelexport.models.checkpoint_formats import CardFacts, method_of
from modelexport.quantization import algorithms
from modelexport.system.tables import size_text

__all__ = ["model_card"]

_TAG = re.compile(r"[\w.-]{1,64}", re.ASCII)
_MOST_NAMES = 3


def model_card(content: Mapping[str, Any]) -> str:
    """Returns the text of README.md.

    Args:
        content: of modelexport.json.

    Raises:
        CheckpointError: it is not what an export writes.
    """
    record = ExportRecord.of(content)
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


def _front_matter(record: ExportRecord) -> Iterator[str]:
    import yaml

    stored, known = stored_of(record), record.model.card
    quantised = stored.number_formats != ("none",)
    fields: dict[str, Any] = {}
    if known.get("base_model"):
        fields["base_model"] = known["base_model"][0]
        if quantised:
            fields["base_model_relation"] = "quantized"
    facts = CardFacts.of(stored.format)
    if facts.hub_library is not None and not stored.sharded:
        fields["library_name"] = facts.hub_library
    fields |= {key: known[key] for key in ("license", "license_name", "license_link", "language") if key in known}
    architecture = record.model.architecture or ""
    if not architecture.endswith("ForConditionalGeneration"):  # the inputs that it takes besides are not known here
        fields["pipeline_tag"] = "text-generation"
    names = {label.partition(":")[0] for label in stored.number_formats} if quantised else set()
    if facts.tag is not None or quantised:
        names.add(facts.tag or method_of(stored.format).METHOD)
    tags = {"modelexport", *names, *_algorithms(record)}
    fields["tags"] = sorted(tag for tag in tags if _TAG.fullmatch(tag))
    text = yaml.safe_dump(fields, sort_keys=True, allow_unicode=True, width=10**6)
    yield from ("---", *text.rstrip("\n").split("\n"), "---")


def _algorithms(record: ExportRecord) -> list[str]:
    """Names of the algorithms for which samples ran through the layers."""
    used = algorithms.used(record.recipe.get("algorithm"))
    return [algorithm.name for algorithm in used if algorithm.needs_samples and algorithm.kind != "assign"]


def _title(record: ExportRecord) -> Iterator[str]:
    stored, model = stored_of(record), record.model
    formats = ", ".join(stored.number_formats) if stored.number_formats != ("none",) else "not quantised"
    yield f"# {plain(record.source or 'a model')}, {plain(formats)}"
    yield ""
    done = "Written" if stored.number_formats == ("none",) else "Quantised after training and written"
    if record.recipe.get("quant") == "keep":
        done = "Written in another format, its numbers as they were,"
    of = f" ({code(model.model_type)})" if model.model_type else ""
    yield f"{done} by modelexport {plain(record.producer.get('version', '?'))} from {code(record.source or '?')}{of}."
    if model.revision:
        yield f"The source is at revision {code(model.revision)}."
    if "license" in model.card:
        yield f"Licence, as the source's card has it: {code(model.card.get('license_name') or model.card['license'])}."
    else:
        yield "The source's files name no licence that could be copied here: look at the source itself."


def _contents(record: ExportRecord, rows: list[RecordRow]) -> Iterator[str]:
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
    source, smaller = record.model.source_bytes, ""
    if source is not None and nbytes:
        ratio = f" ({source / nbytes:.2f} times smaller)" if source > 1.005 * nbytes else ""
        smaller = f", of {size_text(source)} before{ratio}"
    yield f"- {weights:,} weights in {size_text(nbytes)}{smaller}: {8 * nbytes / max(1, weights):.2f} bits a weight."
    if any(row.quantised for row in rows):
        yield from _notes("Not quantised", record.unquantised)
    yield from _notes("Not written", record.left_out)
    if record.recipe.get("kv_cache") is not None:
        yield f"- Scales for a KV cache in {code(record.recipe['kv_cache'])} are in it."


def _quality(record: ExportRecord, rows: list[RecordRow]) -> Iterator[str]:
    if not any(row.quantised for row in rows) and not record.evaluation:
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
    yield from (f"- {plain(note[:1].upper() + note[1:])}." for note in record.rounded_before)
    yield from _output_errors(record)
    if record.evaluation:
        yield from _evaluation(record.evaluation_figures)
    else:
        yield (
            "- Perplexity and KL divergence were not measured. `modelexport eval CKPT --against SOURCE --save` "
            "measures them and writes them here."
        )


def _output_errors(record: ExportRecord) -> Iterator[str]:
    """Yields the error of the linears' outputs on the calibration samples, of calibrated exports."""
    before, after = record.output_error_before, record.output_error_after
    pairs = [(before[name], after[name]) for name in after if name in before]
    if pairs:
        first, last = (sum(values) / len(pairs) for values in zip(*pairs, strict=True))
        yield (
            f"- Mean squared error of {len(pairs)} linears' outputs on the calibration samples, as a part of the "
            f"outputs' own square: {last:.2e} on average; rounded to nearest it would be {first:.2e}."
        )


def _evaluation(figures: EvaluationFigures) -> Iterator[str]:
    windows = f"{figures.windows} windows of {figures.window} tokens"
    yield f"- Measured on {plain(figures.text)}, {plain(windows)}, {plain(figures.dtype)}:"
    if not figures.has_reference:
        yield f"  perplexity {_number(figures.perplexity, '.2f')}."
        return
    yield (
        f"  perplexity {_number(figures.reference_perplexity, '.2f')} before, {_number(figures.perplexity, '.2f')} "
        f"after; loss {_number(figures.loss_difference, '+.4f')} +- {_number(figures.loss_standard_error, '.4f')}, "
        f"mean KL divergence {_number(figures.mean_kl, '.4f')} +- {_number(figures.kl_standard_error, '.4f')} nats a "
        "token (+- one standard error)."
    )
    if figures.same_top is not None:
        yield (
            f"  The most likely next token is the source's after {100 * figures.same_top:.2f} % of the tokens; in the "
            f"1 % where it is largest, KL divergence is {_number(figures.worst_kl, '.4f')} nats on average."
        )


def _checking(record: ExportRecord) -> Iterator[str]:
    yield "## Checking it"
    yield ""
    errors = " and each linear's error" if record.sqnr_db else ""
    yield (
        f"`modelexport.json` has the SHA-256 of {len(record.sha256):,} tensors and of the files beside them, the "
        f"recipe and the versions{errors}. `CKPT` is the directory that this card is in:"
    )
    yield ""
    yield from ("```", "modelexport verify CKPT                     # hashes, structure, no NaN or Inf")
    if errors:
        yield "modelexport verify CKPT --against SOURCE    # error of every linear as well"
    yield "```"


def _notes(title: str, reasons: Mapping[str, str]) -> Iterator[str]:
    """Yields one line for each reason, with the first names that it holds for."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        yield f"- {title}: {', '.join(map(code, names[:_MOST_NAMES]))}{more} ({plain(reason)})."


def _number(value: float | None, form: str) -> str:
    return "?" if value is None else format(value, form)
