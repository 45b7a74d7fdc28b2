"""nvidia-modelopt's export of TensorRT-LLM checkpoints writes what we write, to the bit; and we read what it writes.

modelopt lives in an environment of its own, whose interpreter the variable MODELEXPORT_MODELOPT_PYTHON names.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelexport.checkpoints.safetensors.file import Checkpoint, Reader
from modelexport.exporting import export
from modelexport.models.opening import open_model
from modelexport.quantization import formats
from modelexport.quantization.decoding import dequantise
from modelexport.quantization.methods import WeightSlice, read_quantization_config
from tests.helpers.models import make_llama

MODELOPT = os.environ.get("MODELEXPORT_MODELOPT_PYTHON")
WORDS = {  # our number format -> modelopt's, its block size
    "fp8-static": ("fp8", 0),
    "fp8": ("fp8_pc_pt", 0),
    "int8-static": ("int8_sq", 0),
    "int4": ("int4_awq", 64),
    "nvfp4": ("nvfp4", 16),
}
SHAPE = {"hidden": 256, "intermediate": 512, "heads": 8, "kv_heads": 4, "vocab": 256}
CASES = [
    *((quant, "llama", 2, None) for quant in WORDS),
    ("fp8-static", "llama", 4, "fp8"),
    ("nvfp4", "llama", 1, None),
    *((quant, "mixtral", 2, None) for quant in ("fp8-static", "int4", "nvfp4")),
]
PLACES = {"self_attn.q_proj": "q", "self_attn.k_proj": "k", "self_attn.v_proj": "v", "self_attn.o_proj": "dense"}
PLACES |= {"mlp.gate_proj": "fc", "mlp.up_proj": "gate", "mlp.down_proj": "proj"}


class Stored:
    """A checkpoint of ours, seen as modelopt's dataclasses: float32 weights and what they are divided by."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.reader, self.infos = Reader(checkpoint), checkpoint.infos
        quantization = read_quantization_config(checkpoint.config)
        assert quantization is not None
        self.quantization = quantization

    def tensor(self, name: str) -> torch.Tensor:
        return self.reader.read(self.infos[name])

    def linear(self, module: str) -> dict[str, torch.Tensor]:
        """``weight`` float32 and the scales as modelopt's quantisers give them; a kept module as it is."""
        scheme = self.quantization.scheme_of(module)
        if scheme is None:
            return {"weight": self.tensor(f"{module}.weight")}
        start = f"{module}."
        own = {n.removeprefix(start): self.tensor(n) for n in self.infos if n.startswith(start)}
        number_format = formats.of_scheme(scheme, scale_dtype=torch.float32)
        rows, cols = own["weight"].shape
        shape = {"int4": (2 * rows, cols), "nvfp4": (rows, 2 * cols)}.get(number_format.name, (rows, cols))
        weight = dequantise("trtllm", number_format, own, WeightSlice.whole(shape))
        weight[(weight == 0) & weight.signbit()] = -1e-30  # what becomes -0: modelopt makes that of negative numbers
        found = {"weight": weight}
        found |= {name: value for name, value in own.items() if name.endswith(("factor", "factor_2"))}
        if "per_channel_scale" in own:
            found["weights_scaling_factor"] = own["per_channel_scale"]
        if number_format.name == "int8-static":
            found["prequant_scaling_factor"] = torch.ones(cols)
        return found

    def experts(self, layer: int, names: tuple[str, ...], count: int) -> dict[str, torch.Tensor]:
        """A layer's experts behind each other, of each those of ``names`` below each other."""
        prefix = f"model.layers.{layer}.block_sparse_moe.experts"
        linears = [[self.linear(f"{prefix}.{e}.{name}") for name in names] for e in range(count)]
        found = {}
        for key in linears[0][0]:
            if key == "activation_scaling_factor":
                found[key] = (
                    torch.stack([part[key].reshape(()) for parts in linears for part in parts]).max().reshape(1)
                )
                continue
            rows = key == "weight" or linears[0][0][key].dim() == 2
            octets = [
                [part[key].view(torch.uint8) if part[key].dtype.itemsize == 1 else part[key] for part in parts]
                for parts in linears
            ]
            stack = torch.stack([torch.cat(parts) if rows else parts[0] for parts in octets])
            found[key] = stack.view(linears[0][0][key].dtype) if stack.dtype == torch.uint8 else stack
        return found


def modelopts_own(stored: Stored, layers: int, experts: int, *, cache: bool) -> dict[str, torch.Tensor]:
    """Every tensor of the whole model by modelopt's names."""
    found = {
        "vocab_embedding": stored.tensor("model.embed_tokens.weight"),
        "ln_f": stored.tensor("model.norm.weight"),
        "lm_head.weight": stored.tensor("lm_head.weight"),
    }
    for i in range(layers):
        ours, theirs = f"model.layers.{i}.", f"layers.{i}."
        found[f"{theirs}input_layernorm"] = stored.tensor(f"{ours}input_layernorm.weight")
        found[f"{theirs}post_layernorm"] = stored.tensor(f"{ours}post_attention_layernorm.weight")
        parts = {
            name: stored.linear(ours + module) for module, name in PLACES.items() if not experts or "attn" in module
        }
        if experts:
            parts["fc"] = stored.experts(i, ("w3", "w1"), experts)
            parts["proj"] = stored.experts(i, ("w2",), experts)
            parts["router"] = {"weight": stored.tensor(f"{ours}block_sparse_moe.gate.weight").float()}
        found |= {f"{theirs}{name}.{key}": value for name, part in parts.items() for key, value in part.items()}
        if cache:
            found |= {f"{theirs}{n}_cache": stored.tensor(f"{ours}self_attn.{n}_scale") for n in "kv"}
    return {name: value.contiguous() for name, value in found.items()}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(MODELOPT is None, reason="MODELEXPORT_MODELOPT_PYTHON names no interpreter with modelopt")
@pytest.mark.parametrize(("quant", "model_type", "tp", "cache"), CASES)
def test_modelopt_writes_the_same_and_is_read(
    tmp_path: Path, quant: str, model_type: str, tp: int, cache: str | None
) -> None:
    word, block = WORDS[quant]
    source = make_llama(model_type=model_type, **SHAPE)
    samples = tmp_path / "samples.jsonl"
    samples.write_text("".join(json.dumps({"input_ids": list(range(i, i + 40))}) + "\n" for i in range(6)))
    settings: dict[str, Any] = {"calib": str(samples), "calib_samples": 4, "calib_length": 32, "kv_cache": cache}
    group = 64 if quant == "int4" else None
    export(
        model=str(source), quant=quant, group_size=group, format="trtllm", target_tp=tp, out=str(tmp_path / "ours"),
        quiet=True, evaluate=False, **settings,
    )  # fmt: skip
    stored = Stored(open_model(tmp_path / "ours"))
    (tmp_path / "case").mkdir()
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    experts = 4 if model_type == "mixtral" else 0
    save_file(modelopts_own(stored, 2, experts, cache=cache is not None), tmp_path / "case" / "tensors.safetensors")
    case = {"quantization": word, "block": block, "tp": tp, "layers": 2, "experts": experts}
    (tmp_path / "case" / "case.json").write_text(json.dumps(case))
    script = Path(__file__).with_name("modelopt_trtllm.py")
    command = [str(MODELOPT), str(script), str(tmp_path / "case"), str(theirs)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(tp):
        want, got = (load_file(root / f"rank{rank}.safetensors") for root in (theirs, tmp_path / "ours"))
        larger = {name for name in want if name.endswith(".kv_cache_scaling_factor")}
        assert bool(larger) == (cache is not None)
        assert sorted(want.keys() - larger) == sorted(got)
        for name, value in got.items():
            own = want[name]
            assert (own.dtype, own.shape) == (value.dtype, value.shape), name
            assert torch.equal(octets(own), octets(value)), name
    said, engine = (
        json.loads((theirs / "quantization.json").read_text()),
        json.loads((tmp_path / "ours" / "config.json").read_text()),
    )
    same = ("quant_algo", "group_size", "has_zero_point")
    assert {key: said[key] for key in same if key in said} == {
        key: engine["quantization"][key] for key in same if key in engine["quantization"]
    }
    # Its files are read, by its own words, without the model's own config.json.
    said |= {"pre_quant_scale": False, "kv_cache_quant_algo": "FP8" if cache else None}
    (theirs / "config.json").write_text(json.dumps({**engine, "quantization": said}))
    found = Stored(open_model(theirs))
    assert sorted(found.infos) == sorted(stored.infos)
    for name in stored.infos:
        assert torch.equal(octets(found.tensor(name)), octets(stored.tensor(name))), name


def octets(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
