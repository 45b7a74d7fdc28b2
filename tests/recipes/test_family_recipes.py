"""recipes/FAMILY.py on a tiny model of its family: what it says of formats and of what stays as it is, is so."""

from __future__ import annotations

import fnmatch
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

from modelexport import cli
from modelexport.assets import demo_documents
from modelexport.inspection.diff import diff_checkpoints
from modelexport.inspection.inspect import Inspection, inspect_checkpoint
from modelexport.inspection.verify import verify_checkpoint
from modelexport.recipe import ExportRecipe
from tests.helpers.marks import few
from tests.helpers.models import copy_checkpoint, make_llama
from tests.helpers.tiny_models import tiny_checkpoint
from tests.recipes._running import RECIPES, ROOT, run_apart, run_here, token_lines

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]  # transformers' own, on tiny models


@dataclass(frozen=True)
class Expected:
    """What a recipe is to make of its tiny model.

    Attributes:
        formats: pattern -> number format of every module that it means, None: as it was; the first that matches
            counts. What no pattern means must be stored as it was.
        method: ``quant_method`` of config.json; None: no word of quantisation.
        calibrated: whether text runs through the model.
        also: keys of modelexport.json's recipe.
    """

    formats: dict[str, str | None]
    method: str | None = "compressed-tensors"
    checkpoint: str = "hf"
    calibrated: bool = True
    also: tuple[tuple[str, object], ...] = ()


ATTENTION, MLP = "*self_attn.*_proj", "*mlp.*_proj"
UNTOUCHED = ("bf16", "f32", "-")
EXPECTED = {
    "llama": Expected({ATTENTION: "int4", MLP: "int4"}, also=(("algorithm", "awq+gptq"),)),
    "qwen2": Expected({ATTENTION: "int4", MLP: "int4"}, "gptq", also=(("group_size", 128),)),
    "qwen3": Expected({ATTENTION: "fp8-block", MLP: "fp8-block"}, "fp8", calibrated=False),
    "qwen3_moe": Expected({ATTENTION: "nvfp4", "*experts.*_proj": "nvfp4"}, "modelopt"),
    "mixtral": Expected({ATTENTION: "int4", "*experts.*.w?": "int4"}, also=(("algorithm", "awq"),)),
    "gemma2": Expected({ATTENTION: "fp8", MLP: "fp8"}, calibrated=False),
    "gemma3": Expected(
        {"vision_tower*": None, ATTENTION: "int4", MLP: "int4"}, calibrated=False, also=(("group_size", 32),)
    ),
    "phi3": Expected({ATTENTION: "int4", MLP: "int4"}, None, "gguf"),
    "glm4": Expected({ATTENTION: "fp8", MLP: "int4"}),
    "granite": Expected({ATTENTION: "fp8-static", MLP: "fp8-static"}, also=(("kv_cache", "fp8"),)),
    "olmo2": Expected({ATTENTION: "int4", MLP: "int4"}),
    "cohere2": Expected({ATTENTION: "int4", MLP: "int4"}, also=(("algorithm", "awq"),)),
    "deepseek_v3": Expected(
        {ATTENTION: "fp8-block", "*kv_a_proj_with_mqa": "fp8-block", MLP: "fp8-block"}, "fp8", calibrated=False
    ),
    "gpt_oss": Expected({}, None, calibrated=False),
    "gpt_neox": Expected({"*query_key_value": "int8", "*dense*": "int8"}),
    "starcoder2": Expected({ATTENTION: "int4-asym", "*mlp.c_*": "int4-asym"}, "awq"),
    "gpt2": Expected({}, None, calibrated=False),
}
OURS = ("llama", "qwen2", "qwen3_moe", "mixtral", "phi3", "deepseek_v3")
HELPERS = {"train_demo", "training_to_serving", "convert"}


def tiny(family: str) -> Path:
    """A model of which every linear has whole groups and blocks."""
    if family == "qwen3":
        return make_llama(model_type="qwen3", head_dim=128)
    return make_llama(model_type=family) if family in OURS else tiny_checkpoint(family)


def rows_wrong(found: Inspection, expected: Expected) -> list[str]:
    """Modules whose number format is another than expected."""
    wrong = []
    for row in found.rows:
        wanted = next((f for pattern, f in expected.formats.items() if fnmatch.fnmatchcase(row.name, pattern)), None)
        if wanted is not None and row.kind in ("norm", "embedding", "head", "router"):
            wrong.append(f"a pattern of the test means {row.name}, a {row.kind}")
        if row.number_format not in (UNTOUCHED if wanted is None else (wanted,)):
            wrong.append(f"{row.name}: {row.number_format}, not {wanted or 'as it was'}")
    return wrong


def flags(family: str, directory: Path) -> list[str]:
    """Calibration of a size for tests, where the recipe calibrates."""
    if not EXPECTED[family].calibrated:
        return []
    return ["--calib", str(token_lines(directory / "ids.jsonl")), "--calib-samples", "4", "--calib-length", "24"]


def test_every_family_has_a_script_and_its_yaml() -> None:
    scripts = {path.stem for path in RECIPES.glob("[!_]*.py")} - HELPERS
    assert scripts == set(EXPECTED)
    assert {path.stem for path in RECIPES.glob("*.yaml")} == scripts | {"training_to_serving"}
    readme = (RECIPES / "README.md").read_text()
    for path in RECIPES.iterdir():
        if not path.name.startswith(("_", "README")):
            assert f"`{path.name}`" in readme or f"`{path.stem}.py`" in readme, path.name


@pytest.mark.parametrize("family", few(sorted(EXPECTED), "gemma3", "phi3", "qwen3_moe", "gpt2"))
def test_it_makes_what_it_says(family: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    expected, source, out = EXPECTED[family], tiny(family), tmp_path / "out"
    tp = "1" if expected.calibrated else "2"  # calibration on several ranks has tests of its own
    status = run_here(f"{family}.py", "--model", str(source), "--out", str(out), "--tp", tp, *flags(family, tmp_path))
    said = capfd.readouterr()
    assert status == 0, said.err
    assert f"wrote {out}" in said.out
    found = inspect_checkpoint(out)
    assert rows_wrong(found, expected) == []
    assert found.format == expected.checkpoint
    method = (found.quantization or {}).get("quant_method")
    assert (method == expected.method) or expected.checkpoint == "gguf"
    for format_name in filter(None, expected.formats.values()):
        assert format_name in said.out
    assert found.record is not None
    for key, value in expected.also:
        assert found.record["recipe"][key] == value
    verified = verify_checkpoint(out, source)
    assert verified.ok, verified.problems


@pytest.mark.parametrize("family", sorted(EXPECTED))
def test_its_yaml_alone_is_a_recipe(family: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """``modelexport --recipe recipes/FAMILY.yaml``, and what the script adds to it is said."""
    path = RECIPES / f"{family}.yaml"
    assert ExportRecipe.load(path).out is None
    arguments = ["--model", str(tiny(family)), "--dry-run", *flags(family, tmp_path)]
    assert cli.main(["--recipe", str(path), *arguments]) == 0
    alone = capfd.readouterr()
    assert run_here(f"{family}.py", *arguments) == 0
    script = capfd.readouterr()
    chosen = [line for line in script.err.splitlines() if line.startswith(f"{family}.py: ")]
    assert bool(chosen) == (family in ("qwen2", "glm4"))
    assert script.out == alone.out


def test_it_says_what_it_does_and_with_which_settings() -> None:
    for family in EXPECTED:
        done = run_apart("python", f"recipes/{family}.py", "--help") if family in ("llama", "qwen2") else None
        text = (RECIPES / f"{family}.py").read_text()
        assert f"python recipes/{family}.py --model DIR --out DIR" in text
        assert "Unquantised" in text or family == "gpt2"
        if done is not None:
            assert done.returncode == 0, done.stderr
            assert (RECIPES / f"{family}.yaml").read_text() in done.stdout
            assert done.stdout.startswith(text[3:80])


@pytest.mark.parametrize("family", sorted(EXPECTED))
def test_the_commands_of_its_text_exist(family: str) -> None:
    """Every flag that a script's text names is one of modelexport's (or of the recipe's own, or of the engine's)."""
    text = (RECIPES / f"{family}.py").read_text().split('"""')[1]
    known = set(cli.export_parser()._option_string_actions) | {"--serve-tp"}
    engines = [line for line in text.splitlines() if line.lstrip().startswith(("vllm serve", "llama-cli"))]
    assert engines, "which engine loads it, and how"
    ours = re.sub(r"vllm serve [^)\n]*", "", text)
    assert set(re.findall(r"--[a-z][a-z-]+", ours)) <= known
    (command,) = [line for line in text.splitlines() if line.startswith("    python recipes/")]
    assert shlex.split(command)[1] == f"recipes/{family}.py"


@pytest.mark.extended
def test_as_a_program_with_ranks(tmp_path: Path) -> None:
    """The script's own process, and rank processes of its own; a flag of the user wins over the YAML and the choice."""
    out = tmp_path / "out"
    done = run_apart(
        "python", "recipes/qwen2.py", "--model", str(make_llama(model_type="qwen2")), "--out", str(out), "--tp", "2",
        "--serve-tp", "4", "--algorithm", "rtn", "--format", "hf",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "qwen2.py: group_size 32: intermediate_size 384 on 4 ranks is 3 groups a rank" in done.stderr
    found = inspect_checkpoint(out)
    assert found.quantization is not None
    assert found.quantization["quant_method"] == "compressed-tensors"
    assert 4 in (found.tensor_parallel_sizes or [])


@pytest.mark.parametrize(
    ("family", "width", "serve_tp", "group"),
    [
        ("qwen2", 29568, 1, 128),  # 72B
        ("qwen2", 29568, 4, 32),
        ("qwen2", 18944, 4, 128),  # 7B
        ("qwen2", 18944, 8, 64),
        ("glm4", 13696, 1, 128),  # 9B
        ("glm4", 13696, 2, 64),
        ("glm4", 23040, 4, 128),  # 32B
    ],
)
def test_groups_fit_the_published_models(
    family: str, width: int, serve_tp: int, group: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What the texts say of them, on config.json alone: the choice is made before there is a weight to read."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(f'{{"model_type": "{family}", "intermediate_size": {width}}}')
    run_here(f"{family}.py", "--model", str(model), "--out", str(tmp_path / "out"), "--serve-tp", str(serve_tp))
    said = capfd.readouterr().err
    assert f"{family}.py: group_size {group}: intermediate_size {width} on {serve_tp} ranks" in said
    assert width % (group * serve_tp) == 0
    assert group == 128 or width % (2 * group * serve_tp)


def test_wrong_requests(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    qwen2 = str(make_llama(model_type="qwen2"))
    cases = [
        ("qwen2.py", ["--model", qwen2, "--serve-tp", "8"], "384 is not divisible into groups of 32 on 8 ranks; --ser"),
        ("qwen2.py", ["--model", qwen2, "--serve-tp", "no"], "--serve-tp no: the engine's tensor-parallel size"),
        ("llama.py", ["--model", qwen2, "--serve-tp", "2"], "nothing of llama.py depends on it"),
        (
            "llama.py",
            ["--model", qwen2],
            f"type 'qwen2', and this recipe is for llama, .*use {RECIPES / 'qwen2.py'}",
        ),
        ("mixtral.py", [], "of type 'llama', and this recipe is for mixtral: use"),  # the demo model
        ("llama.py", ["--model", str(tmp_path / "none")], "no such directory"),
        ("llama.py", ["--model", str(tmp_path)], "has no config.json; give the model's: --config DIR"),
        ("qwen3.py", ["--model", str(tiny("qwen3")), "--quannt", "fp8"], "unknown flag --quannt; did you mean --quant"),
    ]
    for script, arguments, message in cases:
        assert run_here(script, *arguments, "--out", out) in (1, 2)
        said = capfd.readouterr().err
        assert re.search(message, said), said
        assert not Path(out).exists()


def test_what_is_in_fp8_already_is_not_rounded_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert run_here("deepseek_v3.py", "--model", str(tiny("deepseek_v3")), "--out", str(first)) == 0
    assert run_here("deepseek_v3.py", "--model", str(first), "--out", str(second), "--tp", "2") == 0
    assert "deepseek_v3.py: quant keep: the source is quantised already" in capfd.readouterr().err
    assert diff_checkpoints(first, second).equal


def test_published_gpt_oss_is_left_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = copy_checkpoint(tiny("gpt_oss"), tmp_path / "m", config={"quantization_config": {"quant_method": "mxfp4"}})
    assert run_here("gpt_oss.py", "--model", str(source), "--out", str(tmp_path / "out")) == 2
    assert "the model's experts are quantised already" in capfd.readouterr().err


def test_the_package_has_text_enough_for_the_settings() -> None:
    """No tokenizer makes fewer tokens than one of 5.5 characters of English: a recipe runs as it is."""
    characters = sum(map(len, demo_documents("calibration")))
    for path in RECIPES.glob("*.yaml"):
        recipe = ExportRecipe.load(path)
        assert 5.5 * recipe.calib_samples * recipe.calib_length < characters, path.name


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_with_no_setting_of_ours(tmp_path: Path) -> None:
    """As its text says, on the demo model and with the text that comes along."""
    done = run_apart("python", "recipes/llama.py", "--out", str(tmp_path / "out"), "--tp", "2", timeout=500)
    assert done.returncode == 0, done.stderr
    assert "calibrated on 100 samples of 512 tokens of modelexport's own text" in done.stdout
    kl = re.search(r"KL ([0-9.]+) nats", done.stdout)
    assert kl is not None
    assert float(kl[1]) < 0.035, "rounded to nearest it is above 0.05"


def test_the_settings_are_explained_where_they_are() -> None:
    for path in RECIPES.glob("*.yaml"):
        first = path.read_text().splitlines()[0]
        assert first.startswith("# "), path.name
        assert not (ROOT / "modelexport" / path.name).exists(), "one source of truth"
