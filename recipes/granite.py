"""Granite 3 to FP8 for many users at once: linears with fixed scales, and a KV cache of half the size.

    python recipes/granite.py --model DIR --out DIR [--tp 4] [--calib text.jsonl]
    vllm serve DIR --tensor-parallel-size 2 --kv-cache-dtype fp8

Format: fixed scales are cheaper for an engine than a token's own: nothing has to be found out in each step. With many
sequences the cache is what fills a GPU; in FP8 twice as many fit.

Multipliers: Granite multiplies the embedding, the scores, what each layer adds and the logits by numbers of
config.json (embedding_multiplier, attention_multiplier, residual_multiplier, logits_scaling). Engines apply them; they
are no weights, and nothing is folded into them. Calibration runs with them, so that ranges are of what the linears are
given.

Range: what a static scale reaches is chosen by the least squared error (--calib-range max: the largest magnitude).

Unquantised: the embedding (often the head, too), the head, the norms.
"""

from _recipe import run

if __name__ == "__main__":
    run(__file__, __doc__)
