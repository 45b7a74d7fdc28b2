"""Exports of derived families that run the model: calibrated ones, and what is refused in words."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from modelexport.cli.summary import summary
from modelexport.errors import PlanError
from modelexport.exporting import export
from modelexport.exporting.result import ExportResult
from modelexport.inspection.verify import verify_checkpoint
from tests.helpers.marks import extended, few
from tests.helpers.tiny_models import tiny_checkpoint

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "ids.jsonl"
    ids = torch.randint(3, 200, (8, 16), generator=torch.Generator().manual_seed(3)).tolist()
    path.write_text("\n".join(json.dumps({"input_ids": line}) for line in ids))
    return path


def run(model_type: str, out: Path, algorithm: str, samples: Path, tp: int = 1, quant: str = "int4") -> ExportResult:
    return export(
        model=str(tiny_checkpoint(model_type)),
        out=str(out),
        quant=quant,
        group_size=32 if quant == "int4" else None,
        tp=tp,
        algorithm=algorithm,
        calib=str(samples),
        calib_samples=8,
        calib_length=16,
        evaluate=False,
        quiet=True,
        timeout=120.0,
    )


def hashes(directory: Path) -> dict[str, str]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize(
    "model_type",
    [extended("glm4_moe"), "bloom", *(pytest.param(name, marks=pytest.mark.slow) for name in ("opt", "cohere"))],
)
def test_gptq_is_the_same_on_any_number_of_ranks_and_better_than_nearest(
    tmp_path: Path, model_type: str, samples: Path
) -> None:
    result = run(model_type, tmp_path / "1", "gptq", samples)
    run(model_type, tmp_path / "2", "gptq", samples, tp=2)
    assert hashes(tmp_path / "1") == hashes(tmp_path / "2")
    rows = [row for row in result.rows if row.error_after is not None and row.error_before is not None]
    assert rows
    assert sum(row.error_after or 0 for row in rows) < 0.5 * sum(row.error_before or 0 for row in rows)
    assert f"note: {model_type}: derived from transformers'" in summary(result)
    assert json.loads((tmp_path / "1" / "modelexport.json").read_text())["notes"] == result.notes


HYBRIDS = ["granitemoehybrid", "nemotron_h", "falcon_h1", "qwen3_next", "qwen3_5_text", "qwen3_5", "jamba"]
FOLDED = [(kind, *how) for kind in [*HYBRIDS, "cohere", "gemma3"] for how in (("int4", "awq"), ("int8", "smoothquant"))]


@pytest.mark.parametrize(("model_type", "quant", "algorithm"), few(FOLDED, FOLDED[0]))
def test_what_is_folded_is_the_same_on_any_number_of_ranks(
    tmp_path: Path, model_type: str, quant: str, algorithm: str, samples: Path
) -> None:
    """Hybrids' layers of every kind, whose places for scales are proved, not declared."""
    result = run(model_type, tmp_path / "1", algorithm, samples, quant=quant)
    run(model_type, tmp_path / "2", algorithm, samples, tp=2, quant=quant)
    assert hashes(tmp_path / "1") == hashes(tmp_path / "2")
    assert verify_checkpoint(tmp_path / "1").ok
    changed = json.loads((tmp_path / "1" / "modelexport.json").read_text())["changed"]
    assert any("norm" in name for name in changed), "a norm was divided"
    if algorithm == "awq":
        rows = [row for row in result.rows if row.error_after is not None and row.error_before is not None]
        assert sum(row.error_after or 0 for row in rows) < sum(row.error_before or 0 for row in rows)
    assert any(note.startswith("scales may be moved out of") for note in result.notes)


@pytest.mark.parametrize(
    ("model_type", "algorithm", "says"),
    [
        ("falcon", "awq", "no norm is read by linears. autoround, gptq, imatrix, mse, rtn move none"),
        ("cohere", "rotation", "leave rotation out"),
    ],
)
def test_what_needs_more_than_a_plan_is_refused_in_words(
    tmp_path: Path, model_type: str, algorithm: str, says: str, samples: Path
) -> None:
    with pytest.raises(PlanError, match=says):
        run(model_type, tmp_path / "out", algorithm, samples)
    assert not (tmp_path / "out").exists()


def test_autoquant_leaves_out_what_is_never_quantised(tmp_path: Path, samples: Path) -> None:
    """Mamba's dt_proj, whose weight its kernels take as it is: no choice among formats is spent on it."""
    export(
        model=str(tiny_checkpoint("mamba")),
        out=str(tmp_path / "out"),
        algorithm="autoquant",
        autoquant_candidates="int4:32,int8",
        autoquant_bits=6.0,
        calib=str(samples),
        calib_samples=4,
        calib_length=16,
        evaluate=False,
        quiet=True,
    )
    record = json.loads((tmp_path / "out" / "modelexport.json").read_text())
    assert "dt_proj" not in json.dumps(record["recipe"])
    assert {name.rpartition(".")[2] for name in record["sqnr_db"]} == {"in_proj", "out_proj", "x_proj"}
    assert "kernels" in record["unquantised"]["backbone.layers.0.mixer.dt_proj"]
