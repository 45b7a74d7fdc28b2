"""Choose number formats with ModelOpt's auto_quantize, in its own environment; bench_autoquant.py starts this.

    python peer_autoquantize.py --model DIR --samples FILE.jsonl --candidates nvfp4 none --problem FILE.json \
        --report FILE.json [--method kl_div]

What it chooses for each of the budgets is written, a format for each linear. It scores once, and its own solver is run
on these scores for each budget. Formats are rounded to nearest by it, too ("max"); which linears engines fuse it knows.
It rounds activations to NVFP4 on GPUs alone: without one, the same is done here in torch.
"""

from __future__ import annotations

import json
import warnings
from typing import Any

from _peer_budgets import answer, options_of, samples_of

INT8_GROUPS = {
    "quant_cfg": [
        {"quantizer_name": "*", "enable": False},
        {"quantizer_name": "*weight_quantizer", "cfg": {"num_bits": 8, "block_sizes": {-1: 128}}},
    ],
    "algorithm": "max",
}
FORMATS: dict[str, Any] = {
    "int4:128": "INT4_BLOCKWISE_WEIGHT_ONLY_CFG",
    "int8-wo:128": INT8_GROUPS,
    "nvfp4": "NVFP4_DEFAULT_CFG",
    "fp8-static": "FP8_DEFAULT_CFG",
    "none": None,
}
BITS = {"int4:128": 4, "int8-wo:128": 8, "nvfp4": 4, "fp8-static": 8, "none": 16}


def main() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it names the versions of transformers that it was tested with
        import modelopt
        import modelopt.torch.quantization as mtq
    import torch
    import transformers
    from modelopt.torch.quantization import tensor_quant
    from modelopt.torch.quantization.algorithms import _resolve_best_recipe

    parser = options_of(__doc__, FORMATS)
    parser.add_argument("--method", choices=["gradient", "kl_div"], default="gradient")
    options = parser.parse_args()
    problem = json.loads(options.problem.read_text())
    if not torch.cuda.is_available():
        tensor_quant.dynamic_block_quantize_op = _in_nvfp4
    rows = torch.tensor(samples_of(options)).split(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype="auto", local_files_only=True)
    formats = [FORMATS[name] for name in options.candidates if name != "none"]
    _, state = mtq.auto_quantize(
        model.eval(),
        constraints={"effective_bits": 8.0, "cost": {"excluded_module_name_patterns": ["*lm_head*"]}},
        quantization_formats=[getattr(mtq, each) if isinstance(each, str) else each for each in formats],
        data_loader=rows,
        forward_step=lambda model, ids: _forward(model, ids, options.method),
        loss_func=lambda output, _: output.loss,
        disabled_layers=["*lm_head*", "*router*", "*.mlp.gate"],
        num_calib_steps=len(rows),
        num_score_steps=len(rows),
        method=options.method,
    )
    spelled = {BITS[name]: name for name in options.candidates}

    def choose(bits: float) -> dict[str, str] | None:
        try:
            best = _resolve_best_recipe(state, {"effective_bits": bits})
        except (AssertionError, ValueError) as error:  # a budget below its smallest format
            print(f"{bits}: {error}", flush=True)
            return None
        found = {}
        for group, recipe in best.items():
            for name in state["candidate_stats"][group]["module_names"]:
                found[name] = spelled[recipe.num_bits]
        return {name: chosen for name, chosen in found.items() if name in problem["sizes"]}

    versions = {"modelopt": modelopt.__version__, "torch": torch.__version__}
    answer(options, problem, choose, {**versions, "transformers": transformers.__version__})


def _in_nvfp4(inputs: Any, block: int, amax: Any, *_: int) -> Any:
    """Its ``fp4_fake_quant_block``: e2m1 numbers, e4m3 scales of blocks below one of the tensor."""
    import torch

    x = inputs.float().reshape(-1, block)
    above = amax.float().amax() / (448 * 6)
    scale = (x.abs().amax(-1, keepdim=True) / 6 / above).clamp(max=448).to(torch.float8_e4m3fn).float() * above
    steps = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])  # halfway between e2m1's magnitudes
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    code = torch.bucketize((x / scale.clamp(min=1e-30)).abs(), steps)
    return (magnitudes[code] * scale * x.sign()).reshape(inputs.shape).to(inputs.dtype)


def _forward(model: Any, ids: Any, method: str) -> Any:
    """The output with its loss, by which it takes gradients; or the logits, which it compares."""
    output = model(input_ids=ids, labels=ids, use_cache=False)
    return output if method == "gradient" else output.logits


if __name__ == "__main__":
    main()
