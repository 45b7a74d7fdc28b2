"""Llama and Mistral to 4-bit weights, calibrated.

    python recipes/llama.py --model DIR --out DIR [--tp 4] [--calib text.jsonl]
    vllm serve DIR --tensor-parallel-size 2

Format: at small batches an engine waits for weights to come out of memory, so that a quarter of the bytes is what
counts; activations stay bf16. (At large batches arithmetic counts: --quant fp8 --algorithm rtn, no calibration.)

Algorithm: GPTQ rounds each column so that it makes up for the errors before it, which is most of the gain. Large
Llamas have a few channels with very large activations, which GPTQ alone leaves to their group's scale: AWQ first
scales them into norms and weights. On the demo model both do alike (KL 0.023 nats a token, 0.053 rounded to nearest);
with outliers made by hand into the same model GPTQ alone is at 0.083 and both together at 0.024 (the README's tables).

Unquantised: the embedding (engines look rows up), the head (its error goes straight into the logits) and the norms.
"""

from _recipe import run

if __name__ == "__main__":
    run(__file__, __doc__)
