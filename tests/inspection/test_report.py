"""report: one page that needs nothing beside itself, whose figures are those of the checkpoint and its record."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from modelexport.cli import main
from modelexport.cli.report import print_report
from modelexport.errors import CheckpointError, UsageError
from modelexport.exporting import export
from modelexport.inspection.inspect import inspect_checkpoint
from modelexport.inspection.report import gather, render, write_page
from modelexport.inspection.report.charts import FormatColours, bar, shown_text
from modelexport.inspection.verify import verify_checkpoint
from modelexport.system.tables import size_text
from tests.helpers.models import make_llama
from tests.inspection._page import Page
from tests.inspection._quantised import save_quantised

pytestmark = pytest.mark.timeout(180)

EVERYWHERE = ["warnings", "size", "modules", "loading"]


def record_of(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "modelexport.json").read_text())
    return found


def change(directory: Path, **keys: Any) -> None:
    """Put keys into a copy's record."""
    (directory / "modelexport.json").write_text(json.dumps({**record_of(directory), **keys}))


def page_of(directory: Path) -> Page:
    page = Page(render(gather(directory)))
    page.check_self_contained()
    return page


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def mixtral(root: Path) -> Path:
    """Experts, in two number formats."""
    out = root / "mixtral"
    rules = "*.self_attn.*=fp8,*.experts.*=int4:32"
    export(model=str(make_llama(model_type="mixtral")), out=str(out), quant=rules, evaluate=False, quiet=True)
    return out


@pytest.fixture(scope="module")
def calibrated(root: Path) -> Path:
    """GPTQ on the samples of a file, with errors of outputs in its record."""
    tokens = torch.randint(0, 200, (8, 48), generator=torch.Generator().manual_seed(0)).tolist()
    ids = root / "ids.jsonl"
    ids.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in tokens))
    settings: dict[str, Any] = {"calib_samples": 8, "calib_length": 48, "evaluate": False, "quiet": True}
    out = root / "calibrated"
    export(model=str(make_llama()), out=str(out), quant="int4", algorithm="gptq", calib=str(ids), **settings)
    return out


@pytest.fixture
def copy(calibrated: Path, tmp_path: Path) -> Path:
    """To be spoiled."""
    return Path(shutil.copytree(calibrated, tmp_path / "copy"))


# --------------------------------------------------------------------- the page


def test_sections(calibrated: Path) -> None:
    page = page_of(calibrated)
    middle = ["error", "outputs", "scales"]
    assert page.sections == [*EVERYWHERE[:2], *middle, *EVERYWHERE[2:], "kept", "recipe"]
    assert [e.attributes["href"] for e in page.all("a")] == [f"#{name}" for name in page.sections]
    assert page.all("html")[0].attributes == {"lang": "en"}
    assert page.all("title")[0].text == "calibrated: modelexport report"
    policy = [e.attributes["content"] for e in page.all("meta") if "http-equiv" in e.attributes]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]
    named = [e for e in page.all("svg") if e.attributes.get("aria-hidden") != "true"]
    assert named
    assert all(e.attributes["role"] == "img" and e.attributes["aria-label"] for e in named)


def test_figures_are_those_of_inspect(mixtral: Path) -> None:
    page, found = page_of(mixtral), inspect_checkpoint(mixtral)
    tiles = {e.text: i for i, e in enumerate(page.all("dt"))}
    notes = [e.text for e in page.all("dd", class_="sub")]
    figures = [e.text for e in page.all("dd") if not e.attributes]
    assert notes[tiles["Parameters"]] == f"{found.parameters:,}"
    assert figures[tiles["Size of the weights"]] == size_text(found.nbytes)
    assert notes[tiles["Size of the weights"]].endswith(f": {found.ratio:.2f} times smaller")
    assert figures[tiles["Bits a parameter"]] == f"{found.bits:.2f}"
    assert found.tensor_parallel_sizes is not None
    assert [e.text for e in page.all("li", "loading")] == list(map(str, found.tensor_parallel_sizes))
    modules = page.rows("modules")[1:]
    assert [row[:3] for row in modules] == [[r.name, str(r.count), r.number_format] for r in found.rows]
    assert [row[4:6] for row in modules] == [[f"{r.bits:.2f}", size_text(r.nbytes)] for r in found.rows]


def test_the_parts_add_up(mixtral: Path) -> None:
    report, found = gather(mixtral), inspect_checkpoint(mixtral)
    assert [part.name for part in report.parts] == ["embedding", "attention", "experts", "router", "norms", "head"]
    assert sum(part.nbytes for part in report.parts) == found.nbytes
    assert sum(part.parameters for part in report.parts) == found.parameters
    by_format = {name: sum(row.nbytes for row in found.rows if row.number_format == name) for name in ("fp8", "int4")}
    assert {part.name: part.formats for part in report.parts if part.name in ("attention", "experts")} == {
        "attention": {"fp8": by_format["fp8"]},
        "experts": {"int4": by_format["int4"]},
    }
    assert len(report.layers) == found.layers
    outside = sum(part.nbytes for part in report.parts if part.name in ("embedding", "head"))
    norm = next(row.nbytes for row in found.rows if row.name == "model.norm")
    assert sum(layer.nbytes for layer in report.layers) == found.nbytes - outside - norm


def test_layers_are_drawn_where_they_differ(root: Path, mixtral: Path) -> None:
    assert "Each of the 2 layers takes" in page_of(mixtral).text("size")
    out = root / "uneven"
    export(model=str(make_llama()), out=str(out), quant="*.layers.0.*=int8,*=fp8", evaluate=False, quiet=True)
    page = page_of(out)
    assert "Each of the" not in page.text("size")
    titles = [e.text for e in page.all("title", "size")]
    assert any(title.startswith("model.layers.0, int8: ") for title in titles)
    assert any(title.startswith("model.layers.1, fp8: ") for title in titles)


def test_the_heat_map_has_every_figure_of_the_record(calibrated: Path) -> None:
    page, record = page_of(calibrated), record_of(calibrated)
    cells = [e for e in page.all("td", "error") if "title" in e.attributes]
    assert {e.attributes["title"] for e in cells} == {f"{name}: {db:.2f} dB" for name, db in record["sqnr_db"].items()}
    assert len(cells) == len(record["sqnr_db"]) == 14
    assert all(e.text == f"{float(e.attributes['title'].split()[-2]):.1f}" for e in cells)
    verified = verify_checkpoint(calibrated, make_llama())
    assert verified.ok
    shown = {e.attributes["title"].split(":")[0]: float(e.attributes["title"].split()[-2]) for e in cells}
    for module in verified.modules:
        assert module.sqnr_db is not None
        assert shown[module.name] == pytest.approx(module.sqnr_db, abs=0.006)


def test_of_many_experts_the_worst_is_shown(mixtral: Path) -> None:
    page, sqnr = page_of(mixtral), record_of(mixtral)["sqnr_db"]
    titles = {e.attributes["title"] for e in page.all("td", "error") if "title" in e.attributes}
    own = {n: db for n, db in sqnr.items() if n.startswith("model.layers.1.block_sparse_moe") and n.endswith("w2")}
    assert len(own) == 4
    worst = min(own, key=lambda name: (own[name], name))
    mean = math.fsum(own.values()) / 4
    assert f"worst of 4, {worst}: {own[worst]:.2f} dB; mean {mean:.2f} dB" in titles
    assert "of many experts, the worst" in page.text("error")
    rows = {row[0]: row for row in page.rows("error")[1:]}
    every = [db for n, db in sqnr.items() if n.endswith(".w2")]
    assert rows["block_sparse_moe.experts.*.w2"][-2:] == [f"{min(every):.1f}", f"{math.fsum(every) / len(every):.1f}"]


def test_errors_of_outputs_are_those_of_the_record(calibrated: Path) -> None:
    report, errors = gather(calibrated), record_of(calibrated)["output_error"]
    assert [row.name for row in report.output_errors][:2] == ["self_attn.q_proj", "self_attn.k_proj"]
    for row in report.output_errors:
        own = [name for name in errors["after"] if name.endswith(row.name)]
        assert row.count == len(own) == 2
        assert row.before == pytest.approx(sum(errors["before"][name] for name in own) / 2)
        assert row.after == pytest.approx(sum(errors["after"][name] for name in own) / 2)
        assert row.worst_after == max(errors["after"][name] for name in own)
    page = page_of(calibrated)
    table = page.rows("outputs")[1 : 1 + len(report.output_errors)]
    assert [cells[2] for cells in table] == [f"{100 * row.before:#.3g} %" for row in report.output_errors]
    name = "model.layers.1.mlp.down_proj"
    titles = {e.attributes.get("title") for e in page.all("td", "outputs")}
    assert f"{name}: {-10 * math.log10(errors['after'][name]):.2f} dB" in titles


def test_what_autoquant_chose_and_from_what(copy: Path) -> None:
    layers = [{**layer, "modules": dict(layer["modules"])} for layer in record_of(copy)["layers"]]
    first = next(layer for layer in layers if layer["index"] == 0)
    first["modules"]["mlp.down_proj"] = {
        **first["modules"]["mlp.down_proj"],
        "number_format": "fp8",
        "group_size": None,
    }
    front = [[4.5, 0.04], [5.0, 0.03], [16.0, 0.0]]
    assignment = {"by": "kl", "bits": 5.0, "error": 0.03, "front": front, "uniform": {"int4:32": [4.5, 0.04]}}
    change(copy, layers=layers, assignment=assignment)
    page = page_of(copy)
    marks = [e.text for e in page.all("title", "assignment")]
    assert marks == [
        *("best: 4.50 bits, 0.04", "best: 5.00 bits, 0.03", "best: 16.00 bits, 0"),
        *("all int4:32: 4.50 bits, 0.04", "chosen: 5.00 bits, 0.03"),
    ]
    cells = {
        e.attributes["title"]: e.attributes["class"] for e in page.all("td", "assignment") if "title" in e.attributes
    }
    assert cells["layer 0: fp8"] not in (cells["layer 1: int4"], "c0")
    change(copy, assignment={**assignment, "bits": "many"})
    assert "assignment" not in page_of(copy).sections


def test_recipe_versions_and_calibration(calibrated: Path) -> None:
    record, rows = record_of(calibrated), page_of(calibrated).rows("recipe")
    assert ["algorithm", "gptq"] in rows
    assert ["torch", record["versions"]["torch"]] in rows
    assert ["samples", "8"] in rows
    assert ["text", "ids.jsonl"] in rows
    assert not [row for row in rows if row[1] == ""]


def test_what_stayed_and_why(mixtral: Path) -> None:
    text = page_of(mixtral).text("kept")
    assert "block_sparse_moe.gate (2): router: it picks experts by small differences" in text
    assert "lm_head: head: its error goes straight into the logits" in text


def test_an_evaluation_is_shown_where_the_record_has_one(copy: Path) -> None:
    assert "Perplexity and KL divergence are not recorded" in page_of(copy).text("warnings")
    sides = {"reference": {"perplexity": 21.178}, "model": {"perplexity": 21.244}}
    differences = {"mean_kl": 0.00602, "kl_standard_error": 0.00011, "loss_difference": 0.003}
    differences |= {"same_top": 0.9732, "worst_kl": 0.0412}
    figures = {"windows": 32, "window": 256, "text": "some text", "comparison": {**sides, **differences}}
    change(copy, evaluation=figures)
    page = page_of(copy)
    assert page.rows("evaluation") == [
        ["Perplexity", "21.18 before, 21.24 after"],
        ["Loss, nats a token", "+0.0030"],
        ["KL divergence, nats a token", "0.0060 \u00b1 0.0001"],
        ["The same in the worst 1 % of tokens", "0.0412"],
        ["Most likely next token is the source's", "97.32 %"],
    ]
    assert "on 32 windows of 256 tokens of some text" in page.text("evaluation")
    assert "not recorded" not in page.text("warnings")
    change(copy, evaluation={"model": {"perplexity": 9.5}, "comparison": None})
    assert page_of(copy).rows("evaluation") == [["Perplexity", "9.50"]]


def test_outliers_and_warnings(copy: Path) -> None:
    sqnr = record_of(copy)["sqnr_db"]
    name = "model.layers.0.self_attn.q_proj"
    other = sqnr[name.replace(".0.", ".1.")]
    experts = [f"model.layers.0.mlp.experts.{n}.w1" for n in range(9)]
    calibration = {"samples": 8, "length": 64, "text": "a text", "unseen_experts": experts}
    change(copy, sqnr_db={**sqnr, name: other - 5}, calibration=calibration, warnings=["an engine refuses it"])
    page = page_of(copy)
    alerts = [e.text for e in page.all("li", "warnings")]
    assert alerts[0] == "an engine refuses it"
    assert f"Outlier. {name}: SQNR {other - 5:.2f} dB, 5.0 dB below the median of its kind" in alerts
    assert (
        "Calibration. No calibration token came to 9 experts, which were rounded to nearest: "
        + ", ".join(experts[:6])
        + " and 3 more."
        in alerts
    )


# ------------------------------------------------------------- other checkpoints


@pytest.mark.parametrize("quant", ["none", "nvfp4", "mxfp8", "int8-static"])
def test_checkpoints_without_a_record(quant: str, tmp_path: Path) -> None:
    out = tmp_path / "foreign"
    if quant == "none":
        out = make_llama()
    else:
        save_quantised(make_llama(), out, quant)
    page = page_of(out)
    text = page.text("warnings")
    assert "There is no modelexport.json: who made the checkpoint" in text
    assert ("verify CKPT --against SOURCE" in text) == (quant != "none")
    sections = [*EVERYWHERE[:2], *([] if quant == "none" else ["scales"]), *EVERYWHERE[2:]]
    assert page.sections == [*sections, *([] if quant == "none" else ["kept"])]


def test_a_method_and_a_model_that_are_not_known(tmp_path: Path) -> None:
    out = save_quantised(make_llama(), tmp_path / "unknown", "int8")
    config = json.loads((out / "config.json").read_text())
    config |= {"model_type": "newest", "quantization_config": {"quant_method": "secret"}}
    (out / "config.json").write_text(json.dumps(config))
    page = page_of(out)
    assert "Tensor-parallel sizes are not known" in page.text("warnings")
    assert ["method", "secret"] in page.rows("loading")


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        gather(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        gather(tmp_path / "nowhere")


# -------------------------------------------------------------------- the command


def test_the_same_checkpoint_gives_the_same_page(calibrated: Path, tmp_path: Path) -> None:
    shutil.copytree(calibrated, tmp_path / "elsewhere" / "calibrated")
    assert render(gather(calibrated)) == render(gather(tmp_path / "elsewhere" / "calibrated"))


def test_print_report(calibrated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    html = tmp_path / "report.html"
    html.write_text("old")
    assert print_report(calibrated, html, None, as_json=False) == 0
    content = html.read_text(encoding="utf-8")
    assert content == render(gather(calibrated))
    assert capsys.readouterr().out == f"wrote {html} ({size_text(len(content.encode()))})\n"
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    (tmp_path / "plain").touch()
    assert html.stat().st_mode == (tmp_path / "plain").stat().st_mode
    print_report(calibrated, None, None, as_json=False)
    text = capsys.readouterr().out
    assert "loads at tensor-parallel sizes: 1" in text
    assert f"worst SQNR: {min(record_of(calibrated)['sqnr_db'].values()):.2f} dB" in text
    assert text.endswith("--html FILE writes all of it as a page, with the errors and the scales drawn\n")
    print_report(calibrated, tmp_path / "other.html", None, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (tmp_path / "other.html").read_text() == content
    assert found["inspection"]["nbytes"] == inspect_checkpoint(calibrated).nbytes
    assert (
        found["sqnr"]["rows"]["mlp.up_proj"][1]["worst"]
        == record_of(calibrated)["sqnr_db"]["model.layers.1.mlp.up_proj"]
    )
    assert all(sum(count for _, _, count in row["histogram"]) == row["seen"] for row in found["scales"])


def test_from_the_command_line(calibrated: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    html = tmp_path / "report.html"
    assert main(["report", str(calibrated), "--html", str(html)]) == 0
    assert capsys.readouterr().out.startswith(f"wrote {html} (")
    assert html.read_text(encoding="utf-8") == render(gather(calibrated))
    assert main(["report", str(calibrated), "--html", str(tmp_path)]) == 2
    assert "is a directory; name a file in it" in capsys.readouterr().err


def test_places_that_a_page_cannot_be_written_to(calibrated: Path, tmp_path: Path) -> None:
    for place, why in ((tmp_path, "is a directory"), (tmp_path / "no" / "page.html", "there is no directory")):
        with pytest.raises(UsageError, match=why):
            print_report(calibrated, place, None, as_json=False)
        with pytest.raises(UsageError, match=why):
            write_page(gather(calibrated), place)
    with pytest.raises(UsageError, match="there is no directory"):  # before the checkpoint is looked for
        print_report(tmp_path / "nowhere", tmp_path / "no" / "page.html", None, as_json=False)
    assert not list(tmp_path.iterdir())


def test_importing_it_is_quick() -> None:
    code = "import modelexport.inspection.report, sys; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


# ----------------------------------------------------------------------- strangers


def test_what_is_not_shown_is_replaced() -> None:
    assert shown_text("a\u202eb\ud800c\x00d\te") == "a\ufffdb\ufffdc\ufffdd\te"
    assert len(shown_text("x" * 10**6)) == 303


def test_labels_of_drawings_are_escaped() -> None:
    (drawing,) = Page(bar({"\"><script>&'": 1}, 1, FormatColours([]))).all("svg")
    assert drawing.attributes["aria-label"] == "\"><script>&' 1 B"


def test_markup_in_every_string_of_a_record_stays_text(copy: Path) -> None:
    markup = "</style></p><script>alert(1)</script>"

    def marked(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: marked(part) for key, part in value.items()} | {markup: markup}
        if isinstance(value, list):
            return [*map(marked, value)]
        return f"{value}{markup}" if isinstance(value, str) else value

    record = record_of(copy) | {"warnings": ["a warning"], "left_out": {"a": "reason"}, "source": "a source"}
    kept = {key: record[key] for key in ("sqnr_db", "output_error", "layers")}  # of figures, shapes and dtypes
    figures = {"text": "a text", "windows": 1, "window": 2, "model": {"perplexity": 2.0}}
    change(copy, **marked({**record, "evaluation": figures}) | kept)
    page = page_of(copy)
    assert "error" in page.sections
    for section, text in (("warnings", "a warning"), ("kept", "reason"), ("recipe", "gptq"), ("evaluation", "a text")):
        assert f"{text}{markup}" in page.text(section)


def test_a_strangers_words_stay_words(copy: Path, tmp_path: Path) -> None:
    evil = "</style><script>alert(1)</script><img src=x onerror=alert(2)>\"'\ud800\u202e"
    config = json.loads((copy / "config.json").read_text())
    config["architectures"] = [evil]
    config["quantization_config"]["ignore"] = [evil, "lm_head"]
    (copy / "config.json").write_text(json.dumps(config))
    record = record_of(copy)
    deep: Any = evil
    for _ in range(150):
        deep = {evil: [deep]}
    change(
        copy,
        source=evil,
        recipe={**record["recipe"], evil: evil, "deep": deep, "long": "x" * 10**6, "many": list(range(10**4))},
        versions={evil: evil},
        producer={"name": evil},
        unquantised={f"{evil}{n}": f"{evil}{n}" for n in range(5000)},
        left_out={evil: evil},
        warnings=[evil, 7, {evil: evil}] * 400,
        sqnr_db={**record["sqnr_db"], evil: 3.0},
        output_error={"before": {evil: 2.0}, "after": {evil: 1.0}},
        evaluation={"comparison": {"mean_kl": evil, "reference": {}, "loss_difference": math.inf}, "windows": evil},
        calibration={"samples": 8, "length": 64, "text": evil, "unseen_experts": [evil], "notes": {evil: evil}},
    )
    hostile = Path(shutil.move(copy, tmp_path / "<script>alert(3)<"))
    content = render(gather(hostile))
    assert len(content.encode()) < 200_000
    page = Page(content)
    page.check_self_contained()
    assert page.all("h1")[0].text == "<script>alert(3)<"
    assert "<script>alert(1)</script><img src=x onerror=alert(2)>\"'\ufffd\ufffd" in page.text("recipe")
    assert "\u202e" not in content
    json.dumps(gather(hostile).as_json(), allow_nan=False)


def test_a_damaged_record_is_a_warning(copy: Path) -> None:
    change(copy, sqnr_db={"model.layers.0.mlp.up_proj": "good"})
    page = page_of(copy)
    assert "no number of decibels" in page.text("warnings")
    assert "error" not in page.sections
    (copy / "modelexport.json").write_text("{")
    assert "is not valid JSON" in page_of(copy).text("warnings")


def test_of_a_damaged_file_the_rest_is_told(copy: Path) -> None:
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError):
        gather(copy)
