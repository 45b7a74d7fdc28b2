"""Quantise a model without samples by another tool, in its environment; bench_scale.py starts this as a process.

    python peer_datafree.py --way oneshot|model_free|modelopt --quant fp8|int4 --model DIR --out DIR

oneshot and model_free_ptq are llm-compressor's, modelopt is mtq.quantize and export_hf_checkpoint; each rounds to
nearest. fp8: weights by channel, activations by token (modelopt: both by tensor, and a pass of 16 tokens for the
activations' ranges); int4: groups of 128 (modelopt: of its own default), weights alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", required=True, choices=["oneshot", "model_free", "modelopt"])
    parser.add_argument("--quant", required=True, choices=["fp8", "int4"])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    scheme = {"fp8": "FP8_DYNAMIC", "int4": "W4A16"}[options.quant]
    if options.way == "model_free":
        from llmcompressor import model_free_ptq

        model_free_ptq(str(options.model), str(options.out), scheme=scheme, ignore=["lm_head", "re:.*embed_tokens"])
        return
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto", local_files_only=True)
    if options.way == "oneshot":
        from llmcompressor import oneshot
        from llmcompressor.modifiers.quantization import QuantizationModifier

        oneshot(model=model, recipe=[QuantizationModifier(scheme=scheme, targets="Linear", ignore=["lm_head"])])
        model.save_pretrained(options.out, save_compressed=True)
        return
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    config = {"fp8": mtq.FP8_DEFAULT_CFG, "int4": mtq.INT4_BLOCKWISE_WEIGHT_ONLY_CFG}[options.quant]
    ids = [[1] * 16]

    def few_tokens(model: object) -> None:  # its ranges of activations want a pass, however short
        import torch

        model(torch.tensor(ids))  # type: ignore[operator]

    model = mtq.quantize(model, config, forward_loop=few_tokens)
    export_hf_checkpoint(model, export_dir=str(options.out))


if __name__ == "__main__":
    main()
