"""gpt-oss, fine-tuned in bf16: one checked checkpoint, and the reason why it is not quantised.

    python recipes/gpt_oss.py --model DIR --out DIR [--tp 4]
    vllm serve DIR --tensor-parallel-size 2

Experts: all of a layer are one tensor, of 32 or 128 matrices with gate and up column by column in turn. Engines look
for it in bf16, or as the MXFP4 blocks of the published models, and nothing else, so it stays as it is whatever --quant
says. They are 19.1 of 20.9 billion weights of the 20B (OpenAI's model card).

Attention: --quant '*.self_attn.*=fp8' rounds q, k, v and o, 3 % of the weights. It is not the default because vLLM 0.32
does not load experts in bf16 beside it (KeyError at their biases); with nothing quantised it does.

Published models have their experts in MXFP4 already and load as they are: the script refuses them.

Unquantised: everything.
"""

from _recipe import Choice, Config, run

from modelexport.errors import UsageError


def choose(config: Config, serve_tp: int) -> dict[str, Choice]:
    """Nothing; a published model is refused."""
    del serve_tp
    if config.get("quantization_config"):
        raise UsageError(
            "the model's experts are quantised already (as published): engines load it as it is; this recipe is for "
            "a bfloat16 one"
        )
    return {}


if __name__ == "__main__":
    run(__file__, __doc__, choose=choose)
