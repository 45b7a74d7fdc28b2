"""Blocks of NVFP4 in a GGUF file: each linear's has one number beside it, by which llama.cpp has to multiply."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modelexport.checkpoints.formats import gguf
from modelexport.checkpoints.gguf.architectures import ARCHITECTURES, SCALED
from modelexport.checkpoints.gguf.file import GgufFile, read_gguf, read_values
from modelexport.errors import PlanError
from modelexport.quantization.methods import read_quantization_config
from tests.checkpoints.test_gguf_architectures import tiny
from tests.helpers.format_models import assert_same, reopen, write

EXTRA = ("general.tensor_extra.name", "general.tensor_extra.prec_a4")


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_blocks_and_scales_come_back(tmp_path: Path, kind: str) -> None:
    model = tiny(kind, "NVFP4")
    write(gguf, tmp_path, model, model.plan(), max_shard_bytes=1 << 16)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) > 1
    found = read_gguf(*parts)
    scales = {name: info.shape for name, info in found.infos.items() if name.endswith(".scale")}
    assert scales["blk.0.attn_q.scale"] == (1,)
    assert scales.get("blk.0.ffn_up_exps.scale", (4,)) == (4,)  # one for each expert
    values = read_values(parts[0], EXTRA)
    assert values["general.file_type"] == 39
    assert [values[key] for key in EXTRA] == [
        [name.replace("scale", "weight") for name in scales],
        [False] * len(scales),
    ]
    assert_same(reopen(gguf, tmp_path), model)


@pytest.mark.parametrize(
    ("kind", "changes", "why"),
    [
        (
            "qwen2",
            {},
            r"mlp.gate_proj, mlp.up_proj, mlp.down_proj are NVFP4, and llama.cpp's graph of 'qwen2' multiplies by the "
            r"scales of attn_k.* only, not by those of ffn_gate, ffn_up, ffn_down: give.*--quant "
            r"'\*gate_proj=mxfp4-wo,.*,\*=nvfp4-wo'",
        ),
        ("llama", {"mlp_bias": True}, "mlp.gate_proj, .* are NVFP4 with a bias, behind which llama.cpp would multiply"),
        ("deepseek_v3", {}, "self_attn.q_a_proj.* multiplies by the scales of attn_output only"),
    ],
)
def test_scales_that_llama_cpp_would_not_multiply_by_are_refused(
    tmp_path: Path, kind: str, changes: dict[str, Any], why: str
) -> None:
    model = tiny(kind, "NVFP4", changes)
    with pytest.raises(PlanError, match=why):
        write(gguf, tmp_path, model, model.plan())


def test_every_architecture_of_scales_is_one() -> None:
    assert SCALED.keys() <= {each.name for each in ARCHITECTURES}


def test_files_of_others_may_lack_the_scale_or_have_one_of_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama-quantize writes no scale; its converter one of activations, too, which its graphs do not read."""
    model = tiny("llama", "NVFP4")
    write(gguf, tmp_path, model, model.plan())
    (tmp_path / "config.json").unlink()

    def altered(*paths: Path) -> GgufFile:
        found = read_gguf(*paths)
        infos = dict(found.infos)
        own = infos.pop("blk.0.attn_q.scale")
        infos["blk.0.attn_k.input_scale"] = replace(own, name="blk.0.attn_k.input_scale")
        return replace(found, infos=infos)

    monkeypatch.setattr(gguf, "read_gguf", altered)
    config = {key: value for key, value in model.config.items() if key != "quantization_config"}
    checkpoint = reopen(gguf, tmp_path, config)
    assert "blk.0.attn_k.input_scale" in checkpoint.left_out
    assert model.values.keys() - checkpoint.infos.keys() == {"model.layers.0.self_attn.q_proj.scale"}
    quantization = read_quantization_config(checkpoint.config)
    assert quantization is not None
    scheme = quantization.scheme_of("model.layers.0.self_attn.q_proj")
    assert scheme is not None
    assert scheme.name == "NVFP4 (scale 1)"
