"""``--adapter``: the bytes that merging adapters first and exporting after gives, whatever the number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import modelexport
from modelexport.checkpoints.adapters import parse_setting, read_adapter
from modelexport.checkpoints.safetensors.file import Reader
from modelexport.errors import CheckpointError, UsageError
from modelexport.models.adapted import adapted
from modelexport.models.decoded import decoded
from modelexport.models.opening import open_model
from tests.helpers.adapters import PREFIX, difference, lora, merged, numbers, save_adapter
from tests.helpers.models import make_llama

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
SHAPES = {Q: (128, 128), DOWN: (128, 384)}


def export(model: Path, out: Path, **settings: Any) -> Path:
    modelexport.export(model=str(model), out=str(out), quiet=True, evaluate=False, **settings)
    return out


def read_all(model: Path, *adapters: Path | str) -> dict[str, Tensor]:
    checkpoint, _ = adapted(decoded(open_model(model)), [read_adapter(*parse_setting(str(each))) for each in adapters])
    with Reader(checkpoint) as reader:
        return {name: reader.read(info) for name, info in checkpoint.infos.items()}


def test_bytes_are_those_of_merging_first(tmp_path: Path) -> None:
    """On two ranks as on one."""
    model, tensors = make_llama(), lora(SHAPES)
    adapter = save_adapter(tmp_path / "tuned", tensors)
    weights = load_file(model / "model.safetensors")
    plain = merged(
        model,
        tmp_path / "plain",
        {f"{n}.weight": weights[f"{n}.weight"].float() + difference(tensors, n) for n in SHAPES},
    )
    once = export(model, tmp_path / "once", adapter=str(adapter), quant="int4", tp=2)
    twice = export(plain, tmp_path / "twice", quant="int4")
    assert (once / "model.safetensors").read_bytes() == (twice / "model.safetensors").read_bytes()


def test_any_rectangle_of_an_adapted_weight(tmp_path: Path) -> None:
    """Of numbers whose sums depend on their order."""
    random = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(value.shape, generator=random) for name, value in lora(SHAPES).items()}
    magnitude = torch.rand(128, generator=random)
    dora = {**tensors, **{f"{PREFIX}{name}.lora_magnitude_vector": magnitude.clone() for name in SHAPES}}
    adapters = [
        read_adapter(save_adapter(tmp_path / "one", tensors)),
        read_adapter(save_adapter(tmp_path / "two", dora, use_dora=True), 0.3),
    ]
    checkpoint, _ = adapted(open_model(make_llama()), adapters)
    info = checkpoint.infos[f"{DOWN}.weight"]
    with Reader(checkpoint) as reader:
        whole = reader.read(info)
        for rows, cols in (((0, 64), (0, 384)), ((0, 128), (192, 384)), ((5, 6), (3, 100))):
            assert torch.equal(reader.read(info, rows=rows, cols=cols), whole[slice(*rows), slice(*cols)])


def test_scaling_by_the_root_of_the_rank(tmp_path: Path) -> None:
    tensors = lora({Q: SHAPES[Q]})
    found = read_all(make_llama(), save_adapter(tmp_path / "a", tensors, use_rslora=True))[f"{Q}.weight"]
    base = load_file(make_llama() / "model.safetensors")[f"{Q}.weight"]
    assert torch.equal(found, (base.float() + difference(tensors, Q, root=True)).bfloat16())


def test_ranks_and_alphas_by_pattern(tmp_path: Path) -> None:
    tensors = {**lora({Q: SHAPES[Q]}), **lora({DOWN: SHAPES[DOWN]}, rank=2)}
    patterns = {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {r".*layers\.1\..*": 4}}
    found = read_all(make_llama(), save_adapter(tmp_path / "a", tensors, **patterns))
    base = load_file(make_llama() / "model.safetensors")
    for name, alpha in ((Q, 8), (DOWN, 4)):
        wanted = base[f"{name}.weight"].float() + difference(tensors, name, alpha=alpha)
        assert torch.equal(found[f"{name}.weight"], wanted.bfloat16())


def test_dora_gives_rows_their_lengths(tmp_path: Path) -> None:
    model = make_llama(dtype="float32")
    magnitude = numbers(128).abs() + 1
    tensors = {**lora({DOWN: SHAPES[DOWN]}), f"{PREFIX}{DOWN}.lora_magnitude_vector": magnitude}
    found = read_all(model, save_adapter(tmp_path / "a", tensors, use_dora=True))[f"{DOWN}.weight"]
    base = load_file(model / "model.safetensors")[f"{DOWN}.weight"]
    summed = base + difference(tensors, DOWN)
    torch.testing.assert_close(found, magnitude.unsqueeze(1) * summed / summed.norm(dim=1, keepdim=True))
    torch.testing.assert_close(found.norm(dim=1), magnitude)


def test_several_adapters_add_their_differences(tmp_path: Path) -> None:
    first, second = lora({Q: SHAPES[Q]}), lora({Q: SHAPES[Q]}, seed=9)
    save_adapter(tmp_path / "one", first)
    save_adapter(tmp_path / "two", second)
    found = read_all(make_llama(), f"{tmp_path / 'one'}=0.5", tmp_path / "two")[f"{Q}.weight"]
    base = load_file(make_llama() / "model.safetensors")[f"{Q}.weight"]
    wanted = base.float() + difference(first, Q) * 0.5 + difference(second, Q)
    assert torch.equal(found, wanted.bfloat16())


def test_experts(tmp_path: Path) -> None:
    name = "model.layers.1.block_sparse_moe.experts.2.w2"
    model = make_llama(model_type="mixtral")
    base = load_file(model / "model.safetensors")
    tensors = lora({name: tuple(base[f"{name}.weight"].shape)})
    found = read_all(model, save_adapter(tmp_path / "a", tensors))
    assert torch.equal(found[f"{name}.weight"], (base[f"{name}.weight"].float() + difference(tensors, name)).bfloat16())
    other = name.replace("experts.2", "experts.1")
    assert torch.equal(found[f"{other}.weight"], base[f"{other}.weight"])


def test_linears_that_lie_transposed(tmp_path: Path) -> None:
    """GPT-2's ``[in, out]``; a square one, where only the setting tells."""
    from tests.helpers.tiny_models import save_tiny

    model = save_tiny("gpt2", tmp_path / "gpt2")
    name = "transformer.h.0.attn.c_proj"
    base = load_file(model / "model.safetensors")[f"{name}.weight"]
    tensors = lora({name: (base.shape[1], base.shape[0])})
    found = read_all(model, save_adapter(tmp_path / "a", tensors, fan_in_fan_out=True))[f"{name}.weight"]
    assert torch.equal(found, (base.float() + difference(tensors, name).t()).to(base.dtype))


@pytest.mark.parametrize("model_type", ["llava", pytest.param("gemma3", marks=pytest.mark.extended)])
def test_names_in_memory_are_not_those_on_disk(tmp_path: Path, model_type: str) -> None:
    """An adapter has the names of the model that transformers builds; of a tied head, too, which parts."""
    from tests.helpers.tiny_models import save_tiny

    model = save_tiny(model_type, tmp_path / "model")
    base = load_file(model / "model.safetensors")
    saved = next(name for name in base if "language_model" in name and name.endswith("layers.0.mlp.down_proj.weight"))
    name, head = "model.language_model.layers.0.mlp.down_proj", "lm_head"
    embedding = next(name for name in base if name.endswith("embed_tokens.weight"))
    tensors = lora({name: tuple(base[saved].shape), head: tuple(base[embedding].shape)})
    found = read_all(model, save_adapter(tmp_path / "a", tensors))
    assert torch.equal(found[saved], (base[saved].float() + difference(tensors, name)).to(base[saved].dtype))
    (own,) = (name for name in found if name.endswith("lm_head.weight"))
    before = base.get(own, base[embedding])
    assert torch.equal(found[own], (before.float() + difference(tensors, head)).to(before.dtype))
    assert torch.equal(found[embedding], base[embedding])


def test_biases_and_saved_modules_take_the_models_place(tmp_path: Path) -> None:
    model = make_llama(attention_bias=True)
    bias, norm = numbers(128), numbers(128, seed=1)
    tensors = {
        **lora({Q: SHAPES[Q]}),
        f"{PREFIX}{Q}.base_layer.bias": bias,
        f"{PREFIX}model.norm.modules_to_save.weight": norm,
        f"{PREFIX}{Q}.lora_B.bias": numbers(128, seed=2),
    }
    found = read_all(model, save_adapter(tmp_path / "a", tensors, bias="all"))
    assert torch.equal(found[f"{Q}.bias"], (bias + 2 * numbers(128, seed=2)).bfloat16())
    assert torch.equal(found["model.norm.weight"], norm.bfloat16())


def test_an_embedding_that_is_adapted_parts_from_its_head(tmp_path: Path) -> None:
    model = make_llama(tied=True)
    a, b = numbers(4, 211), numbers(128, 4, seed=1)
    name = "model.embed_tokens"
    tensors = {f"{PREFIX}{name}.lora_embedding_A": a, f"{PREFIX}{name}.lora_embedding_B": b}
    out = export(model, tmp_path / "out", adapter=str(save_adapter(tmp_path / "a", tensors)), quant="none", tp=2)
    base, found = (load_file(path / "model.safetensors") for path in (model, out))
    assert torch.equal(found["lm_head.weight"], base[f"{name}.weight"])
    assert torch.equal(found[f"{name}.weight"], (base[f"{name}.weight"].float() + (b @ a * 2).t()).bfloat16())
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False


def test_a_quantised_source(tmp_path: Path) -> None:
    tensors = lora(SHAPES)
    adapter = save_adapter(tmp_path / "a", tensors)
    source = export(make_llama(), tmp_path / "source", quant="int8-wo")
    plain = export(source, tmp_path / "plain", quant="none")
    assert torch.equal(read_all(source, adapter)[f"{Q}.weight"], read_all(plain, adapter)[f"{Q}.weight"])


def test_record_and_card_name_the_adapter(tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "tuned", lora(SHAPES))
    out = export(make_llama(), tmp_path / "out", adapter=[f"{adapter}=0.5"], quant="fp8")
    record = json.loads((out / "modelexport.json").read_text())
    (told,) = record["adapters"]
    assert {key: told[key] for key in ("name", "kind", "rank", "alpha", "weight", "base_model")} == {
        "name": "tuned",
        "kind": "LoRA",
        "rank": 4,
        "alpha": 8.0,
        "weight": 0.5,
        "base_model": "me/base",
    }
    assert record["recipe"]["adapter"] == ["tuned=0.5"]
    assert record["notes"] == [
        "adapter tuned is merged: LoRA of rank 4, alpha 8, added to 2 weights, times 0.5; trained on me/base"
    ]
    assert f"SHA-256 of its file `{told['sha256']}`" in (out / "README.md").read_text()
    checked = modelexport.verify(out, against=make_llama(), adapters=[f"{adapter}=0.5"])
    assert checked.ok, checked.problems
    with pytest.raises(UsageError, match=r"made with tuned, weight 0.5: give the same with --adapter"):
        modelexport.verify(out, against=make_llama())


def test_an_adapter_beside_the_weights_is_not_lost(tmp_path: Path) -> None:
    model = merged(make_llama(), tmp_path / "model", {})
    save_adapter(model / "tuned", lora(SHAPES))
    (model / "adapter_config.json").write_text("{}")
    out = export(model, tmp_path / "out", quant="none")
    notes = json.loads((out / "modelexport.json").read_text())["notes"]
    assert [
        f"an adapter lies in {path}, and is not merged" in note
        for path, note in zip((model, model / "tuned"), notes, strict=True)
    ] == [True, True]
    assert not (out / "adapter_config.json").exists()


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (lora({"model.layers.9.mlp.up_proj": (384, 128)}), {}, "9.mlp.up_proj', and a llama model of 2 layers has"),
        (lora({Q: (128, 96)}), {}, r"q_proj of \[128, 96\].*the model's is \[128, 128\]"),
        (lora({Q: (128, 128)}), {"r": 8}, "has rank 4, adapter_config.json says 8"),
        (lora({Q: (128, 128)}), {"peft_type": "IA3"}, "peft_type in adapter_config.json is 'IA3'; LORA adapters"),
        (lora({Q: (128, 128)}), {"use_dora": True}, "no lora_magnitude_vector"),
        (lora({Q: (128, 128)}), {"init_lora_weights": "pissa"}, "path_initial_model_for_weight_conversion"),
        (lora({Q: (128, 128)}), {"target_parameters": ["x"]}, "target_parameters is set"),
        ({f"{PREFIX}{Q}.lora_A.weight": numbers(4, 128)}, {}, "has no lora_B"),
        ({f"{PREFIX}{Q}.ia3_l": numbers(4, 128)}, {}, "is no part of a LoRA"),
        ({"x.lora_A.weight": numbers(4, 128)}, {}, "does not begin with base_model.model."),
    ],
)  # fmt: skip
def test_refused(tmp_path: Path, tensors: dict[str, Tensor], config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_all(make_llama(), save_adapter(tmp_path / "a", tensors, **config))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("nowhere", "nowhere is no directory"),
        ("{a}=much", "'much' is no weight|much is no weight"),
        ("{a}=0", "is no weight"),
    ],
)
def test_a_setting_that_names_no_adapter(tmp_path: Path, given: str, message: str) -> None:
    adapter = save_adapter(tmp_path / "a", lora(SHAPES))
    with pytest.raises(UsageError, match=message):
        parse_setting(given.format(a=adapter))


def test_kept_numbers_take_no_adapter() -> None:
    with pytest.raises(UsageError, match="--quant keep keeps the source's numbers"):
        modelexport.export(adapter="a", quant="keep", dry_run=True)


def test_a_pickled_adapter_is_read_without_running_it(tmp_path: Path) -> None:
    tensors = lora(SHAPES)
    named = f"{PREFIX}{Q}.lora_A.weight"
    tensors[named] = tensors[named].t().contiguous().t()  # not contiguous, as views may be saved
    adapter = save_adapter(tmp_path / "a", {name: value.contiguous() for name, value in tensors.items()})
    wanted = read_all(make_llama(), adapter)
    (adapter / "adapter_model.safetensors").unlink()
    torch.save(tensors, adapter / "adapter_model.bin")
    found = read_all(make_llama(), adapter)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
