"""Plugins: one of each kind from outside the package, the files being those of docs/extending.md."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from modelexport.assets import demo_model_path
from tests.helpers.models import copy_checkpoint, make_llama
from tests.helpers.warm import run_warm

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^File `(\w+\.py)`:\n\n```python\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL))
ENTRY_POINTS = dict(
    re.findall(r'^([\w-]+) = "(\w+)"$', DOCUMENT.partition("```toml")[2].partition("```")[0], re.MULTILINE)
)
WORDLESS = (  # a layout that gptq's checkpoints cannot be made from, though they hold such numbers
    FILES["fp8_wo.py"]
    .replace('"fp8-wo"', '"int8-bytes"')
    .replace('"type": "float"', '"type": "int"')
    .replace('"strategy": "channel"', '"strategy": "group"')
    .replace('"group_size": None', '"group_size": 16')
    .replace("float-quantized", "int-quantized")
)
QUANT = ("--quant", "*.self_attn.*=fp8-wo,*.mlp.*=int4:32")
ALGORITHM = ("--algorithm", "best-scale", "--best-scale-margin", "0.9", "--calib-samples", "4", "--calib-length", "32")


def install(directory: Path, files: dict[str, str], points: dict[str, str]) -> Path:
    """What an installer leaves of a distribution: its modules, and its metadata beside them."""
    metadata = directory / "extensions-0.1.dist-info"
    metadata.mkdir(parents=True)
    for name, content in files.items():
        (directory / name).write_text(content)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: extensions\nVersion: 0.1\n")
    lines = [f"{name} = {module}\n" for name, module in points.items()]
    (metadata / "entry_points.txt").write_text("[modelexport.plugins]\n" + "".join(lines))
    return directory


def run(plugins: Path | None, *arguments: str, status: int = 0) -> str:
    """Runs modelexport with the plugins on the path; returns what it printed."""
    path = os.pathsep.join(str(place) for place in (plugins, ROOT) if place is not None)
    result = run_warm("-m", "modelexport", *arguments, env={**os.environ, "PYTHONPATH": path})
    assert result.returncode == status, result.stderr
    return result.stdout if status == 0 else result.stderr


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("plugins"), FILES, ENTRY_POINTS)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama, as a model of the plugin's family."""
    changed = {"model_type": "ernie4_5", "architectures": ["Ernie4_5ForCausalLM"], "use_bias": False}
    directory = copy_checkpoint(make_llama(vocab=2048), tmp_path_factory.mktemp("source") / "model", config=changed)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model_path() / name, directory)
    return directory


@pytest.fixture(scope="module")
def exported(plugins: Path, source: Path) -> Path:
    out = source.parent / "flat"
    settings = (*QUANT, *ALGORITHM, "--format", "flat", "--tp", "2", "--quiet")
    run(plugins, "--model", str(source), *settings, "--out", str(out))
    return out


def record_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "modelexport.json").read_text())


def test_the_document_has_a_file_of_each_kind() -> None:
    assert [f"{module}.py" for module in ENTRY_POINTS.values()] == list(FILES)
    assert all(
        any(f"\n{word} = " in text for text in FILES.values()) for word in ("FORMAT", "ALGORITHM", "NAME", "FAMILY")
    )


@pytest.mark.timeout(400)
def test_an_export_with_all_of_them_reads_back(plugins: Path, source: Path, exported: Path) -> None:
    assert {path.name for path in exported.glob("weights.*")} == {"weights.bin", "weights.json"}
    verified = json.loads(run(plugins, "verify", str(exported), "--against", str(source), "--json"))
    assert {module["number_format"] for module in verified["modules"]} == {"fp8-wo", "int4"}
    assert not verified["problems"]
    run(plugins, "reshard", str(exported), "--out", str(exported.parent / "hf"), "--quiet")
    run(plugins, "diff", str(exported), str(exported.parent / "hf"))
    recipe = record_of(exported)["recipe"]
    assert (recipe["algorithm"], recipe["margin"], recipe["format"]) == ("best-scale", 0.9, "flat")


@pytest.mark.timeout(400)
def test_the_card_has_a_recipe_that_makes_the_same_bytes(plugins: Path, source: Path, exported: Path) -> None:
    """On one rank, where it was made on two."""
    recipe = re.search(r"```yaml\n(.*?)```", (exported / "README.md").read_text(), re.DOTALL)
    assert recipe is not None
    assert yaml.safe_load(recipe[1])["best_scale_margin"] == 0.9
    path, again = exported.parent / "recipe.yaml", exported.parent / "again"
    path.write_text(recipe[1])
    run(plugins, "--recipe", str(path), "--model", str(source), "--quiet", "--out", str(again))
    assert (again / "weights.bin").read_bytes() == (exported / "weights.bin").read_bytes()


def test_they_are_listed(plugins: Path) -> None:
    text = " ".join(run(plugins, "--help").split())
    assert "--best-scale-margin M" in text
    assert "|fp8-wo|" in text
    assert "|flat|" in text
    known = json.loads(run(plugins, "formats", "--json"))
    found = {
        key: {each["name"] for each in known[key]} for key in ("number_formats", "checkpoint_formats", "algorithms")
    }
    assert "fp8-wo" in found["number_formats"]
    assert "flat" in found["checkpoint_formats"]
    assert "best-scale" in found["algorithms"]
    assert "transformers" not in run(plugins, "models", "ernie4_5"), "declared, not derived"


def test_one_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    path = install(tmp_path / "plugins", {"broken.py": "import nothing_of_that_name\n"}, {"mine": "broken"})
    said = run(path, "--help", status=2)
    assert said == (
        "modelexport: plugin mine of extensions: broken cannot be imported: No module named "
        "'nothing_of_that_name': mend or uninstall it\n"
    )


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    path = install(tmp_path / "plugins", {"mine.py": FILES["flat.py"].replace('"flat"', '"gguf"')}, {"mine": "mine"})
    said = run(path, "--help", status=2)
    assert said == "modelexport: plugin mine: there is a checkpoint format 'gguf' already: give it another name\n"


@pytest.mark.parametrize(
    ("content", "arguments", "said"),
    [
        ("SOMETHING = 1\n", ["--help"], "plugin mine: mine defines none of FORMAT, ALGORITHM, FAMILY, NAME"),
        (
            FILES["best_scale.py"].replace("    wants:", "    needs_samples = False\n    wants:"),
            ["--help"],
            "algorithm best-scale: its quantise() is called only where samples run through the model",
        ),
        (
            FILES["fp8_wo.py"].replace('"type": "float"', '"type": "int"').replace("float-quantized", "int-quantized"),
            ["formats", "fp8-wo"],
            "number format fp8-wo has the weight_arguments() and input_arguments() of int8-wo",
        ),
        (
            FILES["flat.py"].replace("def lay_out(", "def _lay_out("),
            ["--help"],
            "plugin mine: a checkpoint format needs lay_out, which it does not define: see docs/extending.md",
        ),
        (
            FILES["fp8_wo.py"].replace("def _fill(", "def fill(").replace('description: ClassVar[str] = "FP8', 'x = "'),
            ["formats", "fp8-wo"],
            "plugin mine: a number format needs description, _fill, which it does not define: see docs/extending.md",
        ),
        (
            FILES["fp8_wo.py"].replace("def grid(", "def values("),
            ["--quant", "fp8-wo", "--algorithm", "gptq", "--out", "never"],
            "--algorithm gptq: gptq rounds to the values that a number format's grid has, and fp8-wo (mine) does not "
            "define grid: choose another of the two",
        ),
        (
            WORDLESS,
            ["--quant", "int8-bytes", "--format", "gptq", "--out", "never"],
            "checkpoint format gptq holds 4- and 8-bit integers with activations as they are (--quant int4, int4-asym, "
            "int8-wo or int8-wo-asym), not int8-bytes: choose one of these, or --format hf",
        ),
    ],
    ids=["nothing", "never called", "taken for another", "no layout", "no method", "no grid", "no words"],
)
def test_what_could_not_work_is_refused(content: str, arguments: list[str], said: str, tmp_path: Path) -> None:
    path = install(tmp_path / "plugins", {"mine.py": content}, {"mine": "mine"})
    assert said in run(path, *arguments, status=1 if "--out" in arguments else 2)
