"""Gemma 2 to FP8, in bf16 around it.

    python recipes/gemma2.py --model DIR --out DIR [--tp 4]
    vllm serve DIR --tensor-parallel-size 2 --dtype bfloat16

Range: between its layers this model's numbers grow beyond what float16 holds (65504), and engines refuse float16 for
it (vLLM 0.32: "Numerical instability"). So no format whose kernels compute in float16, and compressed-tensors rather
than AWQ's or GPTQ's. FP8 is scaled for each token as it comes: no range has to be known beforehand.

Algorithm: rounded to nearest. The scores are capped (50 tanh(x / 50)), which transformers computes with eager
attention only; there is little that calibration could add in 8 bits (fp8-static, KL on the demo model: 0.0064 rounded
to nearest, 0.0050 with GPTQ).

Unquantised: the norms (four in a layer, which multiply by 1 + their weight) and the embedding, which is the
head, too: 256,000 rows, more than a fifth of the weights of the 2B, whose file shrinks by less than half.
"""

from _recipe import run

if __name__ == "__main__":
    run(__file__, __doc__)
