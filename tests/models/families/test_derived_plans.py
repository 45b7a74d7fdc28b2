"""Plans of derived families: what stays is announced, old names are read, models that also see are taken apart."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelexport.checkpoints.safetensors.file import open_checkpoint
from modelexport.errors import PlanError
from modelexport.exporting import export
from modelexport.exporting.plan import ExportPlan, build_plan
from modelexport.models.architecture import family_of, known_model_types
from modelexport.models.opening import open_model
from modelexport.quantization.assignment import Assignment
from modelexport.sharding.plan import Parallelism
from tests.helpers.tiny_models import NOT_MADE, causal_types, model_class, tiny_checkpoint
from tests.helpers.warm import run_warm

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

SOME = ["inkling2_text", "cohere", "granitemoe", "gemma3", "zamba2", "bert", "deepseek_v4", "hrm_text", "phimoe"]


def planned(source: Path) -> ExportPlan:
    assignment = Assignment.parse("int4", group_size=32, observer="amax")
    return build_plan(open_checkpoint(source), assignment, Parallelism())


def linears_of(model_type: str, source: Path) -> dict[str, int]:
    """Name of every Linear that transformers builds for the checkpoint -> address of its weight, tied ones alike."""
    kind = model_class(model_type)
    with torch.device("meta"):
        model = kind(kind.config_class.from_pretrained(source))
    model.tie_weights()
    named = model.named_modules(remove_duplicate=False)
    return {name: id(module.weight) for name, module in named if isinstance(module, torch.nn.Linear)}


def unannounced(model_type: str) -> list[str]:
    """Linears that are neither quantised nor ignored, and such as are both."""
    source = tiny_checkpoint(model_type)
    plan = planned(source)
    ignored = plan.ignored()
    in_memory = set()
    for step in plan.steps:
        for task in step.tasks:
            if task.number_format is not None:
                own = f"{step.layer}.{task.path}" if task.path else step.layer
                in_memory.add(task.module.in_memory.replace("{i}", str(step.index)) or own)
    linears = linears_of(model_type, source)
    quantised = {address for name, address in linears.items() if name in in_memory}
    patterns = [re.compile(name.removeprefix("re:")) for name in ignored if name.startswith("re:")]
    found = []
    for name, address in linears.items():
        kept = name in ignored or any(pattern.match(name) for pattern in patterns)
        if kept == (address in quantised):
            found.append(f"{name} is {'both' if kept else 'neither'}")
    return found


@pytest.mark.parametrize("model_type", SOME)
def test_every_linear_is_quantised_or_ignored(model_type: str) -> None:
    assert unannounced(model_type) == []


@pytest.mark.slow
def test_every_linear_of_every_type_is_quantised_or_ignored() -> None:
    wrong = {kind: unannounced(kind) for kind in sorted(set(causal_types()) - set(NOT_MADE))}
    assert {kind: found for kind, found in wrong.items() if found} == {}


def test_a_type_is_looked_up_by_name_alone() -> None:
    code = (
        "import sys\nfrom modelexport.models.architecture import family_of\n"
        "try:\n    family_of({'model_type': 'coherex'})\n"
        "except Exception as error:\n    print(error)\n"
        "print(sum(name.startswith('transformers.models.') and '.configuration_' in name for name in sys.modules))"
    )
    done = run_warm("-c", code)
    said, imported = done.stdout.strip().splitlines()
    assert "did you mean 'cohere'" in said
    assert int(imported) < 5


@pytest.mark.parametrize("kind", ["vit", "clip", "t5", "wav2vec2"])
def test_what_writes_no_text_is_refused(kind: str) -> None:
    with pytest.raises(PlanError, match=f"'{kind}' is no language model") as caught:
        family_of({"model_type": kind, "architectures": ["ViTForImageClassification"]})
    assert "\n" not in str(caught.value)
    assert kind not in known_model_types()


def without_prefix(source: Path, out: Path, prefix: str) -> Path:
    out.mkdir()
    tensors = load_file(source / "model.safetensors")
    save_file({name.removeprefix(prefix): value for name, value in tensors.items()}, out / "model.safetensors")
    (out / "config.json").write_bytes((source / "config.json").read_bytes())
    return out


@pytest.mark.parametrize(
    ("model_type", "prefix"), [("bloom", "transformer."), ("opt", "model."), ("gptj", "transformer.")]
)
def test_old_names_are_read(model_type: str, prefix: str, tmp_path: Path) -> None:
    source = tiny_checkpoint(model_type)
    old = open_model(without_prefix(source, tmp_path / "old", prefix))
    new = open_model(source)
    assert set(old.infos) == set(new.infos)
    assert {name: info.shape for name, info in old.infos.items()} == {n: i.shape for n, i in new.infos.items()}
    run(tmp_path / "old", tmp_path / "a")
    run(source, tmp_path / "b")
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()


def run(source: Path, out: Path, **settings: Any) -> None:
    export(
        **{"quant": "int4", "group_size": 32, **settings},
        model=str(source),
        out=str(out),
        evaluate=False,
        quiet=True,
        timeout=120.0,
    )


TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
SEEING: dict[str, dict[str, Any]] = {
    "llava": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 32,
            "patch_size": 16,
            "projection_dim": 32,
        },
        "image_token_index": 250,
    },
    "qwen2_5_vl": {
        "text_config": {**TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
        "vision_config": {
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": 64,
            "patch_size": 14,
            "fullatt_block_indexes": [1],
        },
        "image_token_id": 250,
        "video_token_id": 251,
        "vision_start_token_id": 252,
        "vision_end_token_id": 253,
    },
}


@pytest.mark.parametrize("model_type", SEEING)
def test_a_model_that_also_sees_is_exported_and_loaded(model_type: str, tmp_path: Path) -> None:
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**SEEING[model_type])
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).eval()
    model.save_pretrained(tmp_path / "source")
    for tp in (1, 2):
        run(tmp_path / "source", tmp_path / f"int4-{tp}", tp=tp)
    whole = (tmp_path / "int4-1" / "model.safetensors").read_bytes()
    assert whole == (tmp_path / "int4-2" / "model.safetensors").read_bytes()
    record = json.loads((tmp_path / "int4-1" / "modelexport.json").read_text())
    assert any("taken over as they are" in note for note in record["notes"])
    assert any(name.startswith(("visual", "vision_tower")) for name in load_file(tmp_path / "int4-1/model.safetensors"))
    run(tmp_path / "int4-1", tmp_path / "plain", quant="none", group_size=None)
    ids = torch.randint(3, 200, (1, 12))
    loaded, plain = (
        AutoModelForImageTextToText.from_pretrained(tmp_path / name, dtype=torch.bfloat16)
        for name in ("int4-1", "plain")
    )
    with torch.inference_mode():
        assert torch.equal(loaded(input_ids=ids).logits, plain(input_ids=ids).logits)
        assert not torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)


def test_the_experts_of_gpt_oss_are_dealt_out_and_joined_again(tmp_path: Path) -> None:
    from modelexport.resharding import reshard

    source = tiny_checkpoint("gpt_oss")
    reshard(checkpoint=str(source), out=str(tmp_path / "cut"), tp=2, ep=2, quiet=True)
    reshard(checkpoint=str(tmp_path / "cut"), out=str(tmp_path / "back"), quiet=True)
    was, now = load_file(source / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert was.keys() == now.keys()
    assert all(torch.equal(was[name], now[name]) for name in was)
    largest = max(path.stat().st_size for path in (tmp_path / "cut").rglob("*.safetensors"))
    assert largest < 0.75 * (source / "model.safetensors").stat().st_size
