"""The rotated model computes what the source does, for every family, and is read the same in whatever parts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from modelexport.assets import demo_model_path
from modelexport.checkpoints.safetensors.file import Checkpoint, Reader, TensorInfo
from modelexport.errors import PlanError
from modelexport.exporting.calibrated.rotation import RotatedReader, rotation_changes
from modelexport.exporting.plan import build_plan
from modelexport.models.architecture import Family, Module, Scaling, family_of
from modelexport.models.opening import open_model
from modelexport.models.ties import untie
from modelexport.quantization.algorithms.rotation import Rotation
from modelexport.sharding.plan import Parallelism
from tests.helpers.hard_model import make_hard
from tests.helpers.models import copy_checkpoint, headers_only, make_llama
from tests.helpers.tiny_models import tiny_checkpoint

MODELS: dict[str, dict[str, Any]] = {
    "llama with biases, 3 * 64": {"hidden": 192, "head_dim": 24, "attention_bias": True, "mlp_bias": True},
    "qwen2, tied": {"model_type": "qwen2", "tied": True},
    "phi3": {"model_type": "phi3"},
    "mixtral": {"model_type": "mixtral"},
    "deepseek_v3": {"model_type": "deepseek_v3", "attention_bias": True, "mlp_bias": True},
    "deepseek_v2": {"model_type": "deepseek_v2", "query_rank": None},
}
TINY = ("gemma", "granite", "smollm3", "qwen3_moe")  # gemma: norms multiply by 1 + their weights


def write_rotated(source: Path, target: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    """The rotated model as a checkpoint of its own."""
    target.mkdir()
    checkpoint = open_model(source)
    with RotatedReader(checkpoint) as reader:
        tensors = {name: reader.read(info).to(dtype) for name, info in reader.infos.items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = {**(checkpoint.config or {}), "tie_word_embeddings": False, "dtype": str(dtype).removeprefix("torch.")}
    (target / "config.json").write_text(json.dumps(config))
    return target


def logits(directory: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokens = torch.randint(3, 200, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(tokens).logits


def write_in_float32(source: Path, target: Path) -> Path:
    """A copy in float32, of which the rotated embedding and head are not rounded."""
    target.mkdir()
    checkpoint = open_model(source)
    with Reader(checkpoint) as reader:
        tensors = {name: reader.read(info).float() for name, info in checkpoint.infos.items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps({**(checkpoint.config or {}), "dtype": "float32"}))
    return target


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("gemma2", "have a norm (attention.post_norm) whose weight goes into no linear"),
        ("glm4", "have a norm (attention.post_norm) whose weight goes into no linear"),
        ("olmo2", "have a norm (attention.post_norm) whose weight goes into no linear"),
        ("cohere2", "norms of cohere2 models take the mean away"),
        ("starcoder2", "norms of starcoder2 models take the mean away"),
        ("gpt_neox", "norms of gpt_neox models take the mean away"),
        ("gpt_oss", "have a norm (mlp.norm) whose weight goes into no linear"),
    ],
)
def test_what_cannot_be_rotated_is_refused(model_type: str, why: str) -> None:
    with pytest.raises(PlanError) as caught:
        rotation_changes(open_model(tiny_checkpoint(model_type)))
    assert why in str(caught.value)
    assert str(caught.value).endswith("leave rotation out of --algorithm")


@pytest.mark.parametrize("name", ["demo", *MODELS, *TINY])
def test_the_function_stays_the_same(name: str, tmp_path: Path) -> None:
    if name in TINY:
        saved = tiny_checkpoint(name)
    else:
        saved = demo_model_path() if name == "demo" else make_llama(**MODELS[name])
    source = write_in_float32(saved, tmp_path / "source")
    rotated = write_rotated(source, tmp_path / "rotated")
    before, after = logits(source), logits(rotated)
    assert (after - before).abs().max() < 1e-4 * before.abs().max()
    weights = open_model(rotated).infos
    assert "lm_head.weight" in weights  # also where it was tied


@pytest.mark.parametrize("name", MODELS)
def test_what_is_rotated(name: str) -> None:
    """All matrices but those between the nonlinearities; norms of the residual stream become ones, others stay."""
    source = open_model(make_llama(**MODELS[name]))
    with RotatedReader(source, Rotation(seed=3)) as reader:
        for tensor, info in reader.infos.items():
            change = reader.changes.get(tensor)
            if "norm" in tensor:
                assert torch.equal(reader.read(info).float(), torch.ones(info.shape)) == ("self_attn" not in tensor)
            if len(info.shape) == 2 and not tensor.endswith(("q_b_proj.weight", "kv_b_proj.weight")):
                assert change is not None
    heads = [tensor for tensor, change in reader.changes.items() if "values" in str(change)]
    assert bool(heads) == (not name.startswith("deepseek"))  # its values are computed from a latent


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with features between its linears that are much larger than others, which their readers make up for."""
    saved = make_llama(hidden=192, head_dim=24, attention_bias=True, mlp_bias=True, dtype="float32")
    return make_hard(saved, tmp_path_factory.mktemp("uneven") / "model")


def test_what_linears_hand_each_other_is_balanced(uneven: Path, tmp_path: Path) -> None:
    before, after = logits(uneven), logits(write_rotated(uneven, tmp_path / "rotated"))
    assert (after - before).abs().max() < 1e-4 * before.abs().max()
    with Reader(source := open_model(uneven)) as plain, RotatedReader(source) as reader:
        for name in ("self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
            dim = 1 if name.endswith(("v_proj", "up_proj")) else 0
            info = reader.infos[f"model.layers.1.{name}.weight"]
            spreads = []
            for each in (plain, reader):
                norms = each.read(info).norm(dim=dim)
                spreads.append((norms.max() / norms.median()).item())
            assert spreads[0] > 10 or dim == 0
            assert spreads[1] < 4


def test_parts_are_parts_of_the_whole(uneven: Path) -> None:
    source = open_model(uneven)
    with RotatedReader(source) as reader:
        for name in ("self_attn.v_proj.weight", "self_attn.o_proj.weight", "mlp.up_proj.weight"):
            info = reader.infos[f"model.layers.0.{name}"]
            whole = reader.read(info)
            out = torch.empty(13, 40)
            assert reader.read(info, rows=(11, 24), cols=(5, 45), out=out) is out
            assert torch.equal(out, whole[11:24, 5:45])
        for linear in ("o_proj", "v_proj"):
            bias = reader.infos[f"model.layers.0.self_attn.{linear}.bias"]
            assert torch.equal(reader.read(bias, rows=(7, 30)), reader.read(bias)[7:30])


def test_slabs_and_other_readers_give_the_same_bits(uneven: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the balance is summed up in pieces, too."""
    source = open_model(uneven)
    found = []
    for slab in (1 << 22, 1000):
        monkeypatch.setattr("modelexport.exporting.calibrated.rotation._SLAB", slab)
        with RotatedReader(source) as reader:
            found.append({name: reader.read(info) for name, info in reader.infos.items()})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_dtypes_are_those_of_what_will_be_written() -> None:
    """Quantised linears in float32; the embedding, the head, norms, biases and what --quant leaves as in the source."""
    source = open_model(make_llama(attention_bias=True, tied=True))
    q, k = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"
    with RotatedReader(source, quantised={q}) as reader:
        dtypes = {name: reader.read(info).dtype for name, info in reader.infos.items()}
        assert dtypes == {name: reader.tensor_dtype(name) for name in reader.infos}
        assert [name for name, dtype in dtypes.items() if dtype == torch.float32] == [f"{q}.weight"]
        rounded = reader.read(reader.infos[f"{k}.weight"])
        exact = reader.read(reader.infos[f"{k}.weight"], out=torch.empty(rounded.shape))
        assert torch.equal(exact.bfloat16(), rounded)
        assert not torch.equal(exact, rounded.float())
    with RotatedReader(source) as reader:
        assert reader.tensor_dtype(f"{k}.weight") == torch.float32
        assert reader.tensor_dtype(f"{k}.bias") == torch.bfloat16
        assert reader.tensor_dtype("lm_head.weight") == torch.bfloat16


def test_other_seeds_are_other_rotations_of_the_same_model() -> None:
    source = open_model(make_llama())
    found = []
    for seed in (0, 0, 1):
        with RotatedReader(source, Rotation(seed=seed)) as reader:
            found.append(reader.read(reader.infos["model.layers.1.mlp.down_proj.weight"]))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    torch.testing.assert_close(found[0].norm(), found[2].norm())


def test_what_is_outside_is_refused() -> None:
    with RotatedReader(open_model(make_llama())) as reader:
        info = reader.infos["model.layers.0.mlp.up_proj.weight"]
        with pytest.raises(ValueError, match="outside its 384 rows"):
            reader.read(info, rows=(0, 385))
        with pytest.raises(ValueError, match="out is"):
            reader.read(info, rows=(0, 3), out=torch.empty(4, 128))


# ------------------------------------------------------------------ what cannot be rotated


def refusal(monkeypatch: pytest.MonkeyPatch, family: Family, source: Checkpoint | None = None) -> str:
    monkeypatch.setattr("modelexport.exporting.calibrated.rotation.family_of", lambda *_: family)
    with pytest.raises(PlanError) as error:
        rotation_changes(source or headers_only())
    assert "leave rotation out of --algorithm" in str(error.value)
    return str(error.value)


def llama() -> Family:
    return family_of({"model_type": "llama"})


def test_norms_behind_a_block_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Gemma 2 has them: their weights scale what is added to the residual stream."""
    family = llama()
    behind = Module(path="post_feedforward_layernorm", kind="norm", role="mlp.norm_behind")
    assert "mlp.norm_behind" in refusal(monkeypatch, replace(family, layer=(*family.layer, behind)))


def test_linears_without_a_norm_before_them_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As OLMo 2 has them, whose blocks read the residual stream itself."""
    family = llama()
    scalings = tuple(scaling for scaling in family.scalings if scaling.source != "attention.norm")
    layer = tuple(module for module in family.layer if module.role != "attention.norm")
    family = replace(family, scalings=scalings, layer=layer)
    assert "self_attn.q_proj of llama models: no norm feeds it" in refusal(monkeypatch, family)


def test_a_scaling_to_what_does_not_read_the_residual_stream_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    family = llama()
    wrong = Scaling(source="mlp.norm", into=("mlp.gate", "mlp.up", "mlp.down"))
    scalings = (*family.scalings, wrong)
    assert "mlp.down_proj" in refusal(monkeypatch, replace(family, scalings=scalings))


def test_layer_norms_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    source = headers_only()
    norm = source.infos["model.layers.0.input_layernorm.weight"]
    bias = TensorInfo("model.layers.0.input_layernorm.bias", norm.dtype, norm.shape, norm.path, 8, norm.nbytes)
    found = refusal(monkeypatch, llama(), replace(source, infos={**source.infos, bias.name: bias}))
    assert bias.name in found
    assert "mean" in found


def test_vectors_along_the_residual_stream_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    family = llama()
    scale = Module(path="layer_scale", kind="vector", role="layer_scale")
    assert "layer_scale" in refusal(monkeypatch, replace(family, layer=(*family.layer, scale)))


# ------------------------------------------------------------------------------ untied embeddings


def test_a_tied_head_is_planned_as_a_tensor_of_its_own(tmp_path: Path) -> None:
    def add_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    saved = make_llama(tied=True)
    twice = open_model(copy_checkpoint(saved, tmp_path / "twice", tensors=add_head))
    once = open_model(saved)
    plans = [
        build_plan(each, None, Parallelism(tp=2), untied="no longer tied to the embedding") for each in (once, twice)
    ]
    assert [list(plan.outputs()) for plan in plans] == [list(plans[0].outputs())] * 2
    head = next(entry for entry in plans[0].outputs() if entry[0] == "lm_head.weight")
    assert head == ("lm_head.weight", "BF16", (211, 128))
    assert "no longer tied" in plans[0].unquantised["lm_head"]
    assert "serves as the head" not in plans[0].unquantised["model.embed_tokens"]
    assert not plans[1].left_out
    assert not plans[0].dimensions.tied_embeddings


def test_what_is_untied_reads_as_it_was() -> None:
    tied = open_model(make_llama(tied=True))
    parted = untie(tied)
    assert (parted.config or {})["tie_word_embeddings"] is False
    assert (tied.config or {})["tie_word_embeddings"] is True
    assert set(parted.infos) == {*tied.infos, "lm_head.weight"}
    with Reader(parted) as plain, RotatedReader(parted) as one, RotatedReader(tied) as other:
        embedding, head = (parted.infos[f"{name}.weight"] for name in ("model.embed_tokens", "lm_head"))
        assert torch.equal(plain.read(embedding), plain.read(head))
        for info in (embedding, head):
            assert torch.equal(one.read(info), other.read(info))
        assert not torch.equal(one.read(embedding), one.read(head))
    own = open_model(make_llama())
    assert untie(own) is own


def test_heads_that_are_not_tied_are_planned_as_ever() -> None:
    source = open_model(make_llama())
    assert build_plan(source, None, Parallelism(tp=1), untied="no longer tied to the embedding") == build_plan(
        source, None, Parallelism(tp=1)
    )
