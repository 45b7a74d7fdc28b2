"""The notebooks run from top to bottom without an error or a warning, and what they show is so.

They are committed with their outputs, for readers who do not run them. After a change to one:
``MODELEXPORT_WRITE_DOCS=1 python -m pytest tests/test_notebooks.py`` runs them and puts the outputs back.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import resource
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.paths import jupyter_runtime_dir
from nbclient import NotebookClient
from nbformat import NotebookNode
from traitlets import default

from tests.helpers.marks import few

DIRECTORY = Path(__file__).parents[1] / "notebooks"
FIGURES = {
    "inspect_an_export": 2,
    "what_quantisation_does": 4,
    "one_export_many_ranks": 3,
    "quality_against_size": 2,
}
CPU_SECONDS = 120  # a minute on two cores
TOTAL_BYTES = 600_000
MACHINE = re.compile(r"/(tmp|home|root|work|Users|var|private)/|\bin \d+(\.\d+)? s\b")
"""What only says where, and how fast, a notebook was run."""

SHOWN = {
    "inspect_an_export": """{
        "drawn": sum(part[2] for parts in blocks.values() for part in parts),
        "written": result.output_bytes,
        "formats": {name: {m["number_format"] for m in parts.values()} for name, parts in layers.items()},
        "bits": inspection.bits,
        "parameters": inspection.parameters,
    }""",
    "what_quantisation_does": """{
        "sqnr": {name: values.tolist() for name, values in sqnr.items()},
        "levels": {name: stems(*found[1:])[2] for name, (_, found) in shown.items()},
        "errors": {name: float((after - before).abs().max()) for name, (_, (before, after, _)) in shown.items()},
        "scales": {name: list(each.shape) for name, each in scales.items()},
    }""",
    "one_export_many_ranks": """{
        "files": of_files,
        "control": hashes(directory("control")),
        "held": {tp: [float(held_bytes(result, rank)) for rank in range(tp)] for tp, result in results.items()},
        "source": results[1].source_bytes,
        "k": [list(map(int, s)) for cut in results[8].cuts if cut.name == "self_attn.k_proj" for s in spans(cut)],
    }""",
    "quality_against_size": """{
        "measured": [[*key, *value] for key, value in measured.items()],
        "front": front,
        "gain": float(gain),
    }""",
}
"""What a notebook has found out, as an expression of its variables."""


class OwnKernel(AsyncKernelManager):
    """A kernel of this very interpreter, whichever kernels the machine knows; reached through files, not ports."""

    @default("transport")
    def _transport_default(self) -> str:
        return "ipc"

    @default("ip")
    def _ip_default(self) -> str:
        return os.path.join(jupyter_runtime_dir(), "kernel")

    @property
    def kernel_spec(self) -> KernelSpec:
        launch = [sys.executable, "-Xfrozen_modules=off", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=launch, display_name="Python 3", language="python")


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Of a kernel: nobody's own settings, and temporary files that go when the test does."""
    import matplotlib.font_manager  # noqa: F401 (it makes a cache once, and warns that this takes time)

    with tempfile.TemporaryDirectory() as short:  # sockets' paths have at most 108 characters
        monkeypatch.setenv("JUPYTER_RUNTIME_DIR", short)
        own = {
            "IPYTHONDIR": str(tmp_path / "ipython"),
            "JUPYTER_RUNTIME_DIR": short,
            "JUPYTER_CONFIG_DIR": str(tmp_path / "jupyter"),
            "MPLBACKEND": "module://matplotlib_inline.backend_inline",
            "TMPDIR": str(tmp_path),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(DIRECTORY.parent), os.environ.get("PYTHONPATH")))),
        }
        yield {**os.environ, **own}


def read(name: str) -> NotebookNode:
    return nbformat.read(DIRECTORY / f"{name}.ipynb", as_version=4)


def code(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook: NotebookNode) -> list[NotebookNode]:
    return [output for cell in code(notebook) for output in cell.outputs]


def pictures(notebook: NotebookNode) -> int:
    return sum("image/png" in output.get("data", {}) for output in outputs(notebook))


def sources_hash(notebook: NotebookNode) -> str:
    sources = [cell.source for cell in code(notebook)] + [(DIRECTORY / "_style.py").read_text(encoding="utf-8")]
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()


def run(name: str, environment: dict[str, str]) -> tuple[NotebookNode, Any]:
    """Executes a notebook in a fresh kernel; returns it, and what ``SHOWN`` says of it."""
    notebook = read(name)
    shown = nbformat.v4.new_code_cell(f"print(json.dumps({SHOWN[name]}, default=sorted))")
    notebook.cells.append(shown)
    client = NotebookClient(
        notebook,
        timeout=540,
        kernel_manager_class=OwnKernel,
        record_timing=False,
        resources={"metadata": {"path": str(DIRECTORY)}},
    )
    client.execute(env=environment)
    assert notebook.cells.pop() is shown
    return notebook, json.loads(shown.outputs[0].text)


def smaller(png: str) -> str:
    """A picture, base64, with 256 colours that none is far from: a third of the bytes."""
    from PIL import Image

    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    # By coverage: the default leaves out what few pixels have, and makes stripes of a colour bar.
    few = picture.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    with io.BytesIO() as buffer:
        few.save(buffer, "PNG", optimize=True)
        return base64.b64encode(buffer.getvalue()).decode() + "\n"


def write_back(name: str, notebook: NotebookNode) -> None:
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "executed": sources_hash(notebook),
    }
    for cell in notebook.cells:
        cell.metadata = {}
    for output in outputs(notebook):
        if "image/png" in output.get("data", {}):
            output.data["image/png"] = smaller(output.data["image/png"])
    nbformat.validate(notebook)
    (DIRECTORY / f"{name}.ipynb").write_text(nbformat.writes(notebook, indent=1) + "\n", encoding="utf-8")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", few(FIGURES, "inspect_an_export"))
def test_a_notebook_runs_and_shows_what_is_so(name: str, environment: dict[str, str]) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    notebook, shown = run(name, environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = [output.text for output in outputs(notebook) if output.get("name") == "stderr"]
    assert not said, f"a cell wrote to stderr: {said}"
    assert pictures(notebook) == FIGURES[name]
    CHECKS[name](shown)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert cpu < CPU_SECONDS, f"{name} took {cpu:.0f} CPU seconds; {CPU_SECONDS} are a minute on two cores"
    if os.environ.get("MODELEXPORT_WRITE_DOCS"):
        write_back(name, notebook)


@pytest.mark.parametrize("name", FIGURES)
def test_committed_outputs_are_whole_and_of_these_sources(name: str) -> None:
    notebook = read(name)
    nbformat.validate(notebook)
    again = "run: MODELEXPORT_WRITE_DOCS=1 python -m pytest tests/test_notebooks.py"
    assert notebook.metadata.get("executed") == sources_hash(notebook), f"{name} was changed after it was run; {again}"
    assert [cell.execution_count for cell in code(notebook)] == list(range(1, len(code(notebook)) + 1))
    assert pictures(notebook) == FIGURES[name]
    for output in outputs(notebook):
        assert output.output_type != "error"
        assert output.get("name") != "stderr"
        text = output.get("text", "") + output.get("data", {}).get("text/plain", "")
        assert not MACHINE.search(text), f"{name} tells of the machine that it was run on: {text}"


def test_every_notebook_is_tested_and_all_are_small() -> None:
    found = {path.stem: path.stat().st_size for path in DIRECTORY.glob("*.ipynb")}
    assert set(found) == set(FIGURES) == set(SHOWN) == set(CHECKS)
    assert sum(found.values()) < TOTAL_BYTES


def check_inspect(shown: dict[str, Any]) -> None:
    assert shown["drawn"] == shown["written"]
    assert set(shown["formats"]["model.layers.0"]) == {"none", "fp8"}
    assert set(shown["formats"]["model.layers.3"]) == {"none", "fp8", "int4"}
    assert shown["bits"] == pytest.approx(8 * shown["written"] / shown["parameters"])


def check_quantisation(shown: dict[str, Any]) -> None:
    import torch
    from safetensors.torch import load_file

    from modelexport.assets import demo_model_path

    weight = load_file(demo_model_path() / "model.safetensors")["model.layers.2.mlp.up_proj.weight"]
    groups = weight.float().view(-1, 128)
    step = (groups.abs().amax(1, keepdim=True) / 7.5).bfloat16().float()
    error = (groups / step).round().clamp(-8, 7) * step - groups
    ratio = 10 * torch.log10(groups.square().sum() / error.square().sum())
    assert shown["sqnr"]["int4"][2][5] == pytest.approx(float(ratio), abs=0.006)
    means = {name: sum(map(sum, values)) / 28 for name, values in shown["sqnr"].items()}
    assert sorted(means, key=means.get, reverse=True) == list(shown["sqnr"])
    levels = {name.split(",")[0]: count for name, count in shown["levels"].items()}
    assert (levels["int8"], levels["int4"], levels["NVFP4"]) == (255, 16, 15)
    assert 200 < levels["FP8"] < 256
    errors = {name.split(",")[0]: value for name, value in shown["errors"].items()}
    assert errors["int8"] == pytest.approx(0.5 / 127.5, rel=0.02)
    assert errors["int4"] == pytest.approx(0.5 / 7.5, rel=0.02)
    assert shown["scales"]["mlp.down_proj"] == [512 // 32, 256]


def check_ranks(shown: dict[str, Any]) -> None:
    files = shown["files"]
    assert set(files) == {"1", "2", "4", "8"}
    assert {"model.safetensors", "modelexport.json", "config.json"} <= set(files["1"])
    assert all(found == files["1"] for found in files.values())
    assert shown["control"]["model.safetensors"] != files["1"]["model.safetensors"]
    held = shown["held"]
    assert held["1"] == [shown["source"]]
    assert max(held["4"]) < shown["source"] / 3.9
    assert sum(held["8"]) > shown["source"]  # key and value heads are held twice
    assert shown["k"] == [[r, 64 * (r // 2), 64 * (r // 2) + 64, r % 2 == 0] for r in range(8)]


def check_quality(shown: dict[str, Any]) -> None:
    found = {(name, algorithm): (bits, kl, error) for name, algorithm, bits, kl, error in shown["measured"]}
    assert all(0 < error < kl for _, kl, error in found.values())
    beaten = {
        key
        for key, (bits, kl, _) in found.items()
        if any(b <= bits and k < kl for other, (b, k, _) in found.items() if other != key)
    }
    assert {tuple(key) for key in shown["front"]} == set(found) - beaten
    for (name, algorithm), (bits, kl, error) in found.items():
        before = found[name, "rtn"]
        assert bits == before[0]
        assert algorithm == "rtn" or kl + 2 * error < before[1] - 2 * before[2]
    assert found["int8-wo", "rtn"][1] < found["fp8", "rtn"][1] < found["int4 g128", "gptq"][1]
    assert 0.2 < shown["gain"] < 0.7


CHECKS = {
    "inspect_an_export": check_inspect,
    "what_quantisation_does": check_quantisation,
    "one_export_many_ranks": check_ranks,
    "quality_against_size": check_quality,
}
