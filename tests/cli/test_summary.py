"""The report of an export: numbers that add up, and nothing left out without a word."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelexport.cli.summary import summary
from modelexport.exporting import export
from modelexport.exporting.result import ExportResult, SummaryRow
from modelexport.system.tables import size_text, table

ROWS = [
    SummaryRow("model.embed_tokens", 1, "bf16", 27008, 54016, 16.0, None, None),
    SummaryRow("self_attn.q_proj", 12, "int4", 196608, 102000, 4.15, 18.987, "model.layers.3.self_attn.q_proj"),
]
RESULT = ExportResult(
    source="org/name",
    out="ckpt",
    quant="int4",
    tp=4,
    rows=ROWS,
    source_bytes=447_232,
    output_bytes=156_016,
    files=["model.safetensors"],
    peak_rank_bytes=2_500_000,
    tensor_parallel_sizes=[1, 2, 4],
    unquantised={"lm_head": "head", "model.embed_tokens": "embedding"},
    left_out={},
    seconds=1.26,
)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1536, "1.54 kB"),
        (99_949, "99.9 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (7_354_000, "7.35 MB"),
        (2_471_645_608, "2.47 GB"),
        (5 * 10**12, "5 TB"),
        (1234 * 10**12, "1.23e+03 TB"),
    ],
)
def test_sizes(nbytes: int, text: str) -> None:
    assert size_text(nbytes) == text


@given(st.integers(0, 10**15))
def test_sizes_are_right_to_three_digits(nbytes: int) -> None:
    number, unit = size_text(nbytes).split()
    scale = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}[unit]
    assert float(number) * scale == pytest.approx(nbytes, rel=0.005)
    assert float(number) < 1000 or unit == "TB"


def test_a_table_is_aligned() -> None:
    lines = list(table(("module", "n"), [("a", "10"), ("longer name", "7")]))
    assert lines == ["module        n", "a            10", "longer name   7"]
    assert list(table(("module", "n"), [])) == ["module  n"]


def test_the_whole_report() -> None:
    assert summary(RESULT).splitlines() == [
        "module              count  format  bits/weight    size  worst SQNR",
        "model.embed_tokens      1    bf16        16.00   54 kB           -",
        "self_attn.q_proj       12    int4         4.15  102 kB    18.99 dB",
        "",
        "weights: 447 kB -> 156 kB (2.87 times smaller) in 1 file",
        "not quantised: lm_head (head)",
        "not quantised: model.embed_tokens (embedding)",
        "loads at tensor-parallel sizes: 1, 2, 4",
        "wrote ckpt in 1.3 s",
    ]


def test_a_dry_run_says_that_nothing_is_written() -> None:
    text = summary(replace(RESULT, out=None, files=["a", "b", "c"], seconds=0.0))
    assert "in 3 files" in text
    assert "wrote" not in text
    assert "dry run, nothing written: 4 ranks, buffers of at most 2.5 MB each" in text
    assert "1 rank, buffers" in summary(replace(RESULT, out=None, tp=1))


def test_reasons_are_said_once_with_names_and_a_count() -> None:
    left_out = {f"t{i}": "a buffer" for i in range(5)} | {"x.bin": "weights in another format"}
    lines = summary(replace(RESULT, left_out=left_out, unquantised={})).splitlines()
    assert "not written: t0, t1, t2 and 2 more (a buffer)" in lines
    assert "not written: x.bin (weights in another format)" in lines
    assert not any(line.startswith("not quantised") for line in lines)
    exactly_three = summary(replace(RESULT, left_out={f"t{i}": "a buffer" for i in range(3)}))
    assert "not written: t0, t1, t2 (a buffer)" in exactly_three


def test_every_reason_is_in_the_report() -> None:
    notes = {f"module{i}": f"reason {i}" for i in range(20)}
    text = summary(replace(RESULT, unquantised=notes))
    assert all(f"not quantised: {name} ({reason})" in text for name, reason in notes.items())


def test_a_dry_run_says_who_reads_what() -> None:
    """Eight ranks on four key/value heads: every second rank holds a head that its neighbour reads."""
    text = summary(export(tp=8, dry_run=True))
    plan = {line.split()[0]: line for line in text.partition("who reads what")[2].splitlines() if line}
    assert plan["self_attn.k_proj"].split("]")[1].split() == ["64", "(64)"] * 4
    assert plan["model.embed_tokens"].split("]")[1].split() == ["256"] * 8
    assert plan["input_layernorm"].split()[1:] == ["whole", "all", *["-"] * 7]
    assert "in brackets" in text
    many = summary(export(tp=9, dry_run=True))
    assert many.partition("model.embed_tokens        dim")[2].split("]")[1].split()[:2] == ["227", "228"]


def test_a_narrow_table_fits_and_says_what_it_leaves_out() -> None:
    header = ("module", "count", "format", "size")
    rows = [("model.layers.0.self_attn.q_proj", "12", "int4", "102 kB"), ("model.norm", "1", "bf16", "5 kB")]
    assert list(table(header, rows, width=80, optional=("count",))) == list(table(header, rows))
    for width, said in ((40, ""), (32, "(no room: count)")):
        lines = list(table(header, rows, width=width, optional=("count", "size")))
        assert all(len(line) <= width for line in lines), lines
        assert lines[1].split()[0].startswith("..")
        assert lines[1].split()[0].endswith("attn.q_proj")
        assert lines[3:] == ([said] if said else [])


def test_the_summary_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelexport.cli.summary.columns", lambda: 40)
    head = summary(RESULT).split("\n")[: len(ROWS) + 2]
    assert all(len(line) <= 40 for line in head[:-1]), head
    assert "int4" in head[2]
    assert "102 kB" in head[2]
    assert head[-1].startswith("(no room: count, bits/weight")


@pytest.mark.parametrize("algorithm", ["gptq", "rotation+gptq"])
def test_what_was_out_of_the_ordinary_is_said_by_the_algorithm_that_rounds(algorithm: str) -> None:
    calibration = {"samples": 4, "length": 32, "text": "a text", "unseen_experts": [], "notes": {"a.b": "its inputs"}}
    text = summary(replace(RESULT, algorithm=algorithm, calibration=calibration))
    assert "\ngptq: a.b (its inputs)\n" in text
