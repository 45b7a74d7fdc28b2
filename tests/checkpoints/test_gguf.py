"""GGUF files, taken apart by a reader of the test's own, and back."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from modelexport.assets import demo_model_path
from modelexport.checkpoints.formats import gguf
from modelexport.checkpoints.gguf.file import read_gguf
from modelexport.checkpoints.gguf.metadata import model_values, read_rope
from modelexport.checkpoints.safetensors.file import Reader, torch_dtype
from modelexport.errors import CheckpointError, PlanError
from modelexport.models.rules import expected_rules, tensor_rules
from tests.helpers.format_models import Model, assert_same, make_model, reopen, write
from tests.helpers.models import LlamaShape, config_json, headers_only

SHAPES: dict[str, dict[str, Any]] = {
    "biased": {"attention_bias": True, "mlp_bias": True, "heads": 8, "kv_heads": 2, "head_dim": 32},
    "tied": {"tied": True, "model_type": "mistral"},
    "qwen2": {"model_type": "qwen2"},
    "phi3": {"model_type": "phi3"},
    "mixtral": {"model_type": "mixtral"},
    "float32": {"dtype": "float32", "model_type": "qwen2"},
}
NUMBERS = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    8: ("Q8_0", 32, 34),
    30: ("BF16", 1, 2),
    39: ("MXFP4", 32, 17),
}
BYTES = {"Q4_0": 18, "Q8_0": 34, "MXFP4": 17}


class File:
    """A GGUF file by ggml's description of it."""

    def __init__(self, path: Path) -> None:
        self.text, self.at = path.read_bytes(), 4
        assert self.text[:4] == b"GGUF"
        version, tensors, values = self.take("IQQ")
        assert version == 3
        self.values = {self.string(): self.value(self.take("I")[0]) for _ in range(values)}
        found = [(self.string(), self.take(f"{self.take('I')[0]}Q"), *self.take("IQ")) for _ in range(tensors)]
        start = -(-self.at // 32) * 32
        assert not any(self.text[self.at : start])
        self.tensors = {name: (NUMBERS[kind][0], dims[::-1]) for name, dims, kind, _ in found}
        self.data: dict[str, bytes] = {}
        reached = 0
        for name, dims, kind, offset in found:
            _, block, size = NUMBERS[kind]
            assert offset == reached
            nbytes = math.prod(dims) // block * size
            self.data[name] = self.text[start + offset : start + offset + nbytes]
            reached = -(-(offset + nbytes) // 32) * 32
        assert len(self.text) == start + reached

    def take(self, layout: str) -> tuple[Any, ...]:
        found = struct.unpack_from("<" + layout, self.text, self.at)
        self.at += struct.calcsize("<" + layout)
        return found

    def string(self) -> str:
        (length,) = self.take("Q")
        self.at += length
        return self.text[self.at - length : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == 8:
            return self.string()
        if kind == 9:
            kind, count = self.take("IQ")
            return [self.value(kind) for _ in range(count)]
        return self.take({4: "I", 5: "i", 6: "f", 7: "?"}[kind])[0]


def quantised(types: dict[str, list[str]], **shape: Any) -> Model:
    """A model of random bytes with the blocks that config.json's ``types`` say."""
    config = config_json(LlamaShape(**shape))
    ignore = ["lm_head", r"re:.*block_sparse_moe\.gate$"]
    config["quantization_config"] = {"quant_method": "gguf", "types": types, "ignore": ignore}
    rules = expected_rules(config, "BF16")
    generator = torch.Generator().manual_seed(1)
    values = {}
    for rule in rules:
        size = math.prod(rule.shape) * torch_dtype(rule.dtype).itemsize
        noise = torch.randint(1, 120, (size,), generator=generator, dtype=torch.uint8)
        values[rule.name] = noise.view(torch_dtype(rule.dtype)).view(rule.shape)
    return Model(config, rules, values)


def expected(model: Model) -> dict[str, torch.Tensor]:
    """The file's tensors, as llama.cpp's conversion makes them of whole ones."""
    config, values = model.config, model.values
    llama = config["model_type"] in ("llama", "mistral", "mixtral")

    def turned(name: str, value: torch.Tensor) -> torch.Tensor:
        if not llama or not name.startswith(("attn_q.", "attn_k.")):
            return value
        heads = config["num_attention_heads" if name.startswith("attn_q") else "num_key_value_heads"]
        return value.view(heads, 2, value.shape[0] // heads // 2, *value.shape[1:]).transpose(1, 2).reshape(value.shape)

    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.qkv_proj": "attn_qkv",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.gate_up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "block_sparse_moe.gate": "ffn_gate_inp",
    }
    found = {
        "token_embd.weight": values["model.embed_tokens.weight"],
        "output_norm.weight": values["model.norm.weight"],
    }
    if "lm_head.weight" in values:
        found["output.weight"] = values["lm_head.weight"]
    for layer in range(config["num_hidden_layers"]):
        ours, theirs = f"model.layers.{layer}.", f"blk.{layer}."
        for name, new in names.items():
            for kind in ("weight", "bias"):
                value = values.get(f"{ours}{name}.{kind}")
                if value is not None:
                    found[f"{theirs}{new}.{kind}"] = turned(f"{new}.{kind}", value)
        if config["model_type"] == "mixtral":
            for w, new in (("w1", "ffn_gate_exps"), ("w2", "ffn_down_exps"), ("w3", "ffn_up_exps")):
                each = [values[f"{ours}block_sparse_moe.experts.{e}.{w}.weight"] for e in range(4)]
                found[f"{theirs}{new}.weight"] = torch.stack(each)
    wide = ("norm.weight", ".bias", "ffn_gate_inp.weight")
    return {name: value.float() if name.endswith(wide) else value for name, value in found.items()}


def assert_holds(path: Path, model: Model) -> File:
    file = File(path)
    want = expected(model)
    assert sorted(file.data) == sorted(want)
    kinds = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
    for name, value in want.items():
        shape = tuple(value.shape)
        if value.dtype == torch.uint8:
            kind = next(kind for kind, size in BYTES.items() if size == shape[-1])
            assert file.tensors[name] == (kind, (*shape[:-2], shape[-2] * 32)), name
        else:
            assert file.tensors[name] == (kinds[value.dtype], shape), name
        assert file.data[name] == value.contiguous().view(torch.uint8).numpy().tobytes(), name
    return file


@pytest.mark.parametrize("shape", SHAPES)
def test_the_file_is_what_torch_makes_of_the_whole_tensors(tmp_path: Path, shape: str) -> None:
    model = make_model(**SHAPES[shape])
    write(gguf, tmp_path, model, model.plan())
    file = assert_holds(tmp_path / "model.gguf", model)
    assert file.values["general.file_type"] == (0 if shape == "float32" else 32)
    assert "general.quantization_version" not in file.values
    found = reopen(gguf, tmp_path)
    assert_same(found, model)
    assert (found.format, found.files) == ("gguf", [tmp_path / "model.gguf"])


def test_a_float32_model_stays_one(tmp_path: Path) -> None:
    """Though its norms are all ones, which bfloat16 would hold."""
    model = make_model(dtype="float32")
    for name, value in model.values.items():
        if name.endswith("norm.weight"):
            value.fill_(1)
    write(gguf, tmp_path, model, model.plan())
    assert_same(reopen(gguf, tmp_path), model)


@pytest.mark.parametrize("shape", ["llama", "qwen2", "phi3", "mixtral"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "MXFP4"])
def test_blocks_go_where_their_rows_go(tmp_path: Path, kind: str, shape: str) -> None:
    model = quantised({kind: ["Linear"]}, model_type=shape, intermediate=96)
    write(gguf, tmp_path, model, model.plan())
    file = assert_holds(tmp_path / "model.gguf", model)
    assert file.values["general.file_type"] == {"Q4_0": 2, "Q8_0": 7, "MXFP4": 38}[kind]
    assert file.values["general.quantization_version"] == 2
    assert_same(reopen(gguf, tmp_path), model)


def test_types_are_found_where_config_json_has_none(tmp_path: Path) -> None:
    """As in a file of llama.cpp's own: several types, the head quantised too."""
    types = {
        "Q8_0": ["lm_head", "re:.*self_attn.*"],
        "Q4_0": ["re:.*experts.*w[13]$"],
        "MXFP4": ["re:.*experts.*w2$"],
    }
    model = quantised(types, model_type="mixtral")
    assert model.values["model.layers.1.block_sparse_moe.experts.2.w2.weight"].shape == (128, 12, 17)
    config = {**model.config["quantization_config"], "ignore": []}
    model = Model({**model.config, "quantization_config": config}, *_rules_and_values(model, config))
    write(gguf, tmp_path, model, model.plan())
    plain = {key: value for key, value in model.config.items() if key != "quantization_config"}
    (tmp_path / "config.json").write_text(json.dumps(plain))
    found = reopen(gguf, tmp_path)
    assert_same(found, model)
    assert found.config is not None
    listed = found.config["quantization_config"]["types"]
    assert "lm_head" in listed["Q8_0"]
    assert "model.layers.1.block_sparse_moe.experts.3.w1" in listed["Q4_0"]
    assert [rule.name for rule in tensor_rules(found)] == [rule.name for rule in model.rules]


def _rules_and_values(model: Model, quantization: dict[str, Any]) -> tuple[Any, Any]:
    rules = expected_rules({**model.config, "quantization_config": quantization}, "BF16")
    values = dict(model.values)
    for rule in rules:
        if tuple(values[rule.name].shape) != rule.shape:
            values[rule.name] = torch.arange(math.prod(rule.shape)).to(torch_dtype(rule.dtype)).view(rule.shape)
    return rules, values


def test_the_model_s_numbers(tmp_path: Path) -> None:
    model = make_model(model_type="mixtral", head_dim=16)
    model.config.update({"rope_theta": 5e5, "rms_norm_eps": 1e-4, "max_position_embeddings": 99})
    write(gguf, tmp_path, model, model.plan())
    values = File(tmp_path / "model.gguf").values
    assert values.pop("llama.attention.layer_norm_rms_epsilon") == pytest.approx(1e-4)
    assert values == {
        "general.architecture": "llama",
        "general.file_type": 32,
        "llama.block_count": 2,
        "llama.context_length": 99,
        "llama.embedding_length": 128,
        "llama.feed_forward_length": 384,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 16,
        "llama.attention.value_length": 16,
        "llama.rope.dimension_count": 16,
        "llama.rope.freq_base": 5e5,
        "llama.vocab_size": 211,
        "llama.expert_count": 4,
        "llama.expert_used_count": 2,
        "tokenizer.ggml.model": "no_vocab",
    }


def rope(kind: str, model_type: str = "llama", **more: Any) -> Any:
    config = config_json(LlamaShape(model_type=model_type))
    return read_rope({**config, "rope_parameters": {"rope_type": kind, "rope_theta": 5e5, **more}})


def test_scaled_rotary_embeddings() -> None:
    linear = rope("linear", factor=4.0)
    assert (linear.values["rope.scaling.type"], linear.values["rope.scaling.factor"]) == ("linear", 4.0)
    yarn = rope("yarn", "qwen2", factor=4.0, original_max_position_embeddings=32768, beta_fast=16)
    assert {key.rpartition(".")[2]: value for key, value in yarn.values.items()} == {
        "dimension_count": 32,
        "freq_base": 5e5,
        "type": "yarn",
        "factor": 4.0,
        "original_context_length": 32768,
        "yarn_beta_fast": 16.0,
    }
    for kind, more in (("dynamic", {"factor": 2.0}), ("yarn", {"factor": 2.0, "mscale": 1.0}), ("longrope", {})):
        with pytest.raises(PlanError, match=f"type '?{kind}'?"):
            rope(kind, **more)


@pytest.mark.filterwarnings("ignore")
def test_llama3_s_factors_are_transformers(tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    model = make_model(heads=1, kv_heads=1)
    scaled = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
    model.config["rope_parameters"] = {"rope_type": "llama3", "rope_theta": 1e4, **scaled}
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**model.config), torch.device("cpu"))
    plain = 1.0 / 1e4 ** (torch.arange(0, 128, 2) / 128)
    write(gguf, tmp_path, model, model.plan())
    path = tmp_path / "model.gguf"
    file = File(path)
    assert file.tensors["rope_freqs.weight"] == ("F32", (64,))
    factors = torch.frombuffer(bytearray(file.data["rope_freqs.weight"]), dtype=torch.float32)
    assert len(set(factors.tolist())) > 5
    torch.testing.assert_close(factors, plain / theirs, rtol=1e-5, atol=0)
    found = reopen(gguf, tmp_path)
    assert_same(found, model)
    assert set(found.left_out) == {"rope_freqs.weight"}
    info = read_gguf(path).infos["rope_freqs.weight"]
    for value, why in ((8.0001, None), (8.1, "rope_freqs.weight holds other numbers")):
        text = bytearray(path.read_bytes())
        text[info.offset + 63 * 4 : info.offset + 64 * 4] = struct.pack("<f", value)
        path.write_bytes(text)
        if why is not None:
            with pytest.raises(CheckpointError, match=why):
                reopen(gguf, tmp_path)
    with pytest.raises(CheckpointError, match=r"config\.json has no factors of the rotary"):
        reopen(gguf, tmp_path, {key: value for key, value in model.config.items() if key != "rope_parameters"})


def test_a_part_of_a_turned_tensor_can_be_read(tmp_path: Path) -> None:
    """Ranks read rows of q and k, whose rows lie in another order in the file."""
    model = make_model(attention_bias=True)
    write(gguf, tmp_path, model, model.plan())
    found = reopen(gguf, tmp_path)
    with Reader(found) as reader:
        for name, rows in (("q_proj.weight", (5, 77)), ("k_proj.weight", (31, 33)), ("q_proj.bias", (30, 70))):
            full = f"model.layers.1.self_attn.{name}"
            got = reader.read(found.infos[full], rows=rows)
            assert torch.equal(got, model.values[full][rows[0] : rows[1]])


def test_every_family_of_the_tests_has_values() -> None:
    for kind in ("llama", "mistral", "qwen2", "mixtral", "phi3"):
        config = headers_only(model_type=kind).config or {}
        values = model_values(config, vocab=211, rope=read_rope(config))
        assert values["general.architecture"] in ("llama", "qwen2", "phi3")


def test_the_demo_s_tokenizer_goes_into_the_file(tmp_path: Path) -> None:
    model = make_model(vocab=2048)
    write(gguf, tmp_path, model, model.plan(), source=demo_model_path())  # type: ignore[arg-type]
    values = File(tmp_path / "model.gguf").values
    parsed = json.loads((demo_model_path() / "tokenizer.json").read_text())["model"]
    tokens = values["tokenizer.ggml.tokens"]
    assert {text: number for number, text in enumerate(tokens)} == parsed["vocab"]
    assert values["tokenizer.ggml.token_type"] == [3] + [1] * 2047
    assert values["tokenizer.ggml.merges"][:2] == ["\u0120 t", "h e"]
    assert len(values["tokenizer.ggml.merges"]) == len(parsed["merges"])
    rest = {key: value for key, value in values.items() if key.startswith("tokenizer") and not isinstance(value, list)}
    assert rest == {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_eos_token": False,
    }
    assert gguf.notes(model.plan(), model.config, demo_model_path()) == []
    assert_same(reopen(gguf, tmp_path), model)
