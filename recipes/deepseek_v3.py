"""DeepSeek-V3, R1 and V2: FP8 in blocks, as published; what is in FP8 already is not rounded again.

    python recipes/deepseek_v3.py --model DIR --out DIR --tp 8
    vllm serve DIR --tensor-parallel-size 8

Format: the published checkpoints are trained in FP8 with blocks of 128 x 128 (DeepSeek-AI, 2024). Of such a source the
script keeps every number and scale (quant: keep) and writes one complete checkpoint; of a fine-tuned one in bf16 it
makes the same format. Other formats follow from flags: --quant none decodes to bf16, which int4 or NVFP4 can start
from.

Latent attention: q_a, kv_a and their norms are whole on every rank, q_b, kv_b and o_proj are cut by heads. kv_a has
576 outputs, of which the last block is half full; it is never cut, so that this is allowed.

Unquantised: the routers and the correction of their choice, the embedding, the head, all norms. The layer behind the
last (num_nextn_predict_layers) only drafts further tokens: it is left out, and the summary says so.
"""

from _recipe import Choice, Config, run


def choose(config: Config, serve_tp: int) -> dict[str, Choice]:
    """What is quantised stays as it is."""
    del serve_tp
    if config.get("quantization_config"):
        return {"quant": Choice("keep", "the source is quantised already; its numbers stay")}
    return {}


if __name__ == "__main__":
    run(__file__, __doc__, choose=choose)
