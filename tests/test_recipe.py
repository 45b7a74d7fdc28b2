"""Settings: one name each for flag, YAML key and argument, checked where they enter."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from modelexport.errors import UsageError
from modelexport.recipe import GATHERS, ExportRecipe
from modelexport.settings import parse_assignments

FIELDS = {field.name: field for field in dataclasses.fields(ExportRecipe)}


def recipe_file(tmp_path: Path, content: str | bytes | dict[str, Any]) -> Path:
    path = tmp_path / "recipe.yaml"
    if isinstance(content, dict):
        content = yaml.safe_dump(content)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory for all examples of a property."""
    return tmp_path_factory.mktemp("recipe")


def test_defaults_are_the_main_job() -> None:
    recipe = ExportRecipe()
    assert (recipe.model, recipe.quant, recipe.format, recipe.tp) == (None, "fp8", "hf", 1)
    assert recipe.transport == "direct"
    assert recipe.max_shard_bytes is None


def test_every_field_says_what_it_is() -> None:
    for field in FIELDS.values():
        assert field.metadata["help"], field.name
        takes_value = not str(field.type).startswith("bool")
        assert not takes_value or field.metadata["metavar"] or field.metadata["choices"] or field.name == "quant"


# Values of the right type for every field, together free of contradictions.
valid: dict[str, st.SearchStrategy[Any]] = {
    "model": st.none() | st.text(min_size=1),
    "revision": st.none() | st.text(min_size=1),
    "download": st.booleans(),
    "adapter": st.lists(st.text(min_size=1)).map(tuple),
    "out": st.none() | st.text(min_size=1),
    "quant": st.sampled_from(["none", "int8", "fp8", "int4", "*.mlp.*=int4:32,*=fp8"]),
    "group_size": st.none() | st.integers(1, 4096) | st.just(-1),
    "algorithm": st.sampled_from(["rtn", "mse", "gptq", "autoround", "rotation+autoquant+smoothquant+awq+gptq"]),
    "smoothquant_alpha": st.floats(0, 1),
    "awq_grid": st.integers(1, 100),
    "gptq_damping": st.floats(0.0, 0.5),
    "gptq_block_size": st.integers(1, 1024),
    "gptq_act_order": st.booleans(),
    "gptq_asymmetry": st.floats(0, 1),
    "autoround_steps": st.integers(1, 10_000),
    "autoround_batch_size": st.integers(1, 512),
    "autoround_rate": st.floats(0, 1),
    "autoquant_bits": st.floats(1, 16),
    "autoquant_candidates": st.sampled_from(["int4,fp8", "int4:32,none"]),
    "calib_range": st.sampled_from(["max", "percentile", "mse"]),
    "calib_experts": st.sampled_from(["routed", "all"]),
    "calib_memory": st.none() | st.integers(0, 2**40),
    "device_memory": st.none() | st.integers(1, 2**40),
    "kv_cache": st.sampled_from([None, "fp8", "fp8-head", "int8", "nvfp4"]),
    "draft": st.sampled_from(["keep", "quantise", "drop"]),
    "unknown_architecture": st.sampled_from(["refuse", "structure"]),
    "device": st.sampled_from(["auto", "cpu", "cuda", "cuda:1"]),
    "calib": st.lists(st.text(min_size=1)).map(tuple),
    "calib_samples": st.integers(1, 10_000),
    "calib_length": st.integers(1, 10_000),
    "calib_seed": st.integers(0, 2**31),
    "format": st.sampled_from(["hf", "trtllm"]),
    "config": st.none() | st.text(min_size=1),
    "target_tp": st.integers(1, 100),
    "target_pp": st.integers(1, 100),
    "target_ep": st.integers(1, 100),
    "tp": st.integers(1, 10_000),
    "gather": st.sampled_from([None, "nfs"]),
    "workspace": st.text(min_size=1),
    "max_shard_bytes": st.none() | st.integers(1, 2**50),
    "overwrite": st.booleans(),
    "evaluate": st.booleans(),
    "timeout": st.floats(1e-3, 1e9) | st.integers(1, 10**9),
    "push_to_hub": st.none() | st.sampled_from(["me/model", "org_1/a.b-c"]),
    "private": st.booleans(),
    "dry_run": st.booleans(),
    "quiet": st.booleans(),
    "log": st.none() | st.text(min_size=1),
    "json": st.booleans(),
}


def test_the_strategies_cover_every_field() -> None:
    assert set(valid) == set(FIELDS)


@given(st.fixed_dictionaries({}, optional=valid), st.booleans())
def test_yaml_and_arguments_say_the_same(scratch: Path, keys: dict[str, Any], kebab: bool) -> None:
    if keys.get("gather") == "nfs":
        keys.setdefault("workspace", "/shared")
    used = str(keys.get("algorithm", "rtn")).split("+")
    keys = {key: value for key, value in keys.items() if FIELDS[key].metadata.get("algorithm", used[0]) in used}
    if keys.get("private") and keys.get("push_to_hub") is None:
        keys["push_to_hub"] = "me/model"
    spelled = {key.replace("_", "-") if kebab else key: value for key, value in keys.items()}
    path = recipe_file(scratch, spelled)
    loaded = ExportRecipe.load(path)
    assert loaded == ExportRecipe(**keys) == ExportRecipe.from_mapping(spelled)
    assert dataclasses.replace(loaded) == loaded


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"algorithm": "gtpq"}, "did you mean 'gptq'"),
        ({"algorithm": "gptq+rotation"}, "the order is rotation"),
        ({"algorithm": "gptq+rtn"}, "one of autoround, gptq, imatrix, mse and rtn"),
        ({"algorithm": "awq+awq"}, "each once"),
        (
            {"gptq_damping": 0.1},
            "--gptq-damping is a setting of gptq, and --algorithm is rtn: add --algorithm gptq",
        ),
        ({"algorithm": "awq+mse", "gptq_act_order": False}, "add --algorithm awq+gptq, or leave"),
        ({"algorithm": "gptq", "awq_grid": 3}, "add --algorithm awq+gptq, or leave"),
        ({"autoquant_bits": 0.0}, "--autoquant-bits 0"),
        ({"smoothquant_alpha": 1.5}, "--smoothquant-alpha 1.5"),
        ({"awq_grid": 0}, "--awq-grid 0"),
        ({"gptq_damping": 1.0}, "--gptq-damping 1"),
        ({"gptq_asymmetry": 1.5}, "--gptq-asymmetry 1.5"),
        ({"autoround_steps": 0}, "--autoround-steps 0"),
        ({"autoround_rate": 2.0}, "--autoround-rate 2"),
        ({"gptq_block_size": 0}, "--gptq-block-size 0"),
        ({"calib_memory": -1}, "--calib-memory -1"),
        ({"calib_range": "least"}, "--calib-range least"),
        ({"calib_experts": "some"}, "--calib-experts some"),
        ({"private": True}, "--private is for --push-to-hub ORG/NAME"),
        ({"push_to_hub": "model"}, "ORGANISATION/NAME is needed"),
        ({"push_to_hub": "me/../model"}, "ORGANISATION/NAME is needed"),
        ({"push_to_hub": "me/model--x"}, "ORGANISATION/NAME is needed"),
        ({"push_to_hub": "me/model\n"}, "'me/model\\n' is no repository"),
    ],
)
def test_settings_of_algorithms_are_checked(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        ExportRecipe(**settings)
    assert said in str(caught.value)


def test_the_names_in_an_algorithm() -> None:
    recipe = ExportRecipe(algorithm="rotation+autoquant + gptq", autoquant_bits=5)
    assert recipe.algorithms == ("rotation", "autoquant", "gptq")
    assert recipe.is_calibrated
    assert recipe.algorithm_settings == {
        "act_order": True,
        "asymmetry": 0.0,
        "bits": 5,
        "block_size": 128,
        "candidates": "int4,fp8,none",
        "damping": 0.0,
    }
    assert not ExportRecipe(algorithm="mse").is_calibrated


def test_an_empty_recipe_is_the_default(tmp_path: Path) -> None:
    assert ExportRecipe.load(recipe_file(tmp_path, "# nothing yet\n")) == ExportRecipe()


@pytest.mark.parametrize(
    ("first", "second", "third"),
    [("group_size",) * 3, ("group-size",) * 3, ("group_size", "group-size", "group_size")],
)
def test_flags_win_over_set_and_set_over_the_file(tmp_path: Path, first: str, second: str, third: str) -> None:
    """Whichever of its two spellings each of them uses for the key."""
    path = recipe_file(tmp_path, {first: 32, "tp": 2})
    assigned = parse_assignments([f"{second}=64"])
    assert ExportRecipe.load(path).group_size == 32
    assert ExportRecipe.load(path, assigned).group_size == 64
    both = ExportRecipe.load(path, {**assigned, third: 128})
    assert (both.group_size, both.tp) == (128, 2)


def test_a_flag_can_take_a_setting_back(tmp_path: Path) -> None:
    path = recipe_file(tmp_path, {"group_size": 32, "evaluate": True})
    recipe = ExportRecipe.load(path, parse_assignments(["group_size=null", "evaluate=false"]))
    assert recipe.group_size is None
    assert recipe.evaluate is False


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            "quantt: int4",
            "unknown key 'quantt'; did you mean 'quant' or 'autoquant_bits'? modelexport --help lists all ",
        ),
        ("tpp: 4", "unknown key 'tpp'; did you mean 'tp'?"),
        ("Q: 4", "unknown key 'Q'; modelexport --help lists all "),
        ("1: 2", "unknown key '1'"),
        ("tp: '4'", "tp must be int, found '4'"),
        ("tp: 4.0", "tp must be int, found 4.0"),
        ("tp: true", "tp must be int, found True"),
        ("tp: null", "tp must be int, found None"),
        ("quant: [int4]", "quant must be a name, or a list of [pattern, name], found 'int4'"),
        ("revision: 1234567", "revision must be str or None, found 1234567"),
        ("overwrite: 1", "overwrite must be bool, found 1"),
        ("- tp", "expected 'key: value' lines, found list"),
        ("just words", "expected 'key: value' lines, found str"),
        ("a: b: c", "is not YAML"),
        ("!!python/object/apply:os.getcwd []", "is not YAML"),
        (b"quant: \xff\xfe", "is not YAML"),
    ],
)
def test_what_a_recipe_may_not_say(tmp_path: Path, content: str | bytes, words: str) -> None:
    path = recipe_file(tmp_path, content)
    with pytest.raises(UsageError) as caught:
        ExportRecipe.load(path)
    assert str(caught.value).startswith(f"recipe {path}")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wrong_flag_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    path = recipe_file(tmp_path, {"tp": 2})
    with pytest.raises(UsageError, match=r"^command line: unknown key 'outt'; did you mean 'out'\?"):
        ExportRecipe.load(path, {"outt": "x"})


def test_a_recipe_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"missing\.yaml: cannot be read: No such file"):
        ExportRecipe.load(tmp_path / "missing.yaml")
    with pytest.raises(UsageError, match="is a directory; a regular file is needed"):
        ExportRecipe.load(tmp_path)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"tp": 0}, "--tp 0: at least 1 rank"),
        ({"tp": -2}, "--tp -2"),
        ({"group_size": 0}, "--group-size 0: choose 32, 64 or 128"),
        ({"timeout": 0}, "--timeout 0: a positive number"),
        ({"timeout": float("nan")}, "--timeout nan"),
        ({"timeout": float("inf")}, "--timeout inf"),
        ({"max_shard_bytes": 0}, "--max-shard-bytes 0"),
        ({"gather": "smh"}, "--gather smh: unknown; did you mean 'shm'? known: direct, nfs, shm"),
        ({"gather": "nfs"}, "add --workspace DIR"),
        ({"gather": "shm", "workspace": "/w"}, "of no use to --gather shm: drop one"),
        ({"target_tp": 0}, "--target-tp 0: at least 1 rank is needed, e.g. --target-tp 4"),
    ],
)
def test_values_that_cannot_be(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        ExportRecipe.from_mapping(keys)
    assert words in str(caught.value)


def test_the_transport_follows_from_what_is_given() -> None:
    assert ExportRecipe(workspace="/w").transport == "nfs"
    assert ExportRecipe(gather="nfs", workspace="/w").transport == "nfs"
    for gather in set(GATHERS) - {"nfs"}:
        assert ExportRecipe(gather=gather).transport == gather


def test_assignments_are_typed_like_yaml() -> None:
    items = ["tp=4", "group-size = 64", "timeout=2.5", "overwrite=true", "out=a=b", "model=~", "quant="]
    assert parse_assignments(items) == {
        "tp": 4,
        "group_size": 64,
        "timeout": 2.5,
        "overwrite": True,
        "out": "a=b",
        "model": None,
        "quant": None,
    }
    assert parse_assignments(["tp=1", "tp=2"]) == {"tp": 2}


@pytest.mark.parametrize("item", ["tp", "=4", " =4", ""])
def test_an_assignment_without_its_half(item: str) -> None:
    with pytest.raises(UsageError, match=r"expected KEY=VALUE, e\.g\. --set quant=int4"):
        parse_assignments([item])


def test_an_assignment_that_is_not_yaml() -> None:
    with pytest.raises(UsageError, match=r"--set out=\[: the value is not YAML"):
        parse_assignments(["out=["])
