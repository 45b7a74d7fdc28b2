"""Qwen3 to FP8 in blocks, the form of Qwen's own FP8 models. Nothing to calibrate.

    python recipes/qwen3.py --model DIR --out DIR [--tp 4]
    vllm serve DIR --tensor-parallel-size 4

Format: a scale for each block of 128 x 128 weights; activations are scaled as they come, a token's 128 channels
together, so that a channel with outliers spoils only its block. Nothing has to be known of the inputs.

Tensor parallelism: engines want whole blocks on every rank, of each part of qkv and of gate/up by itself. k_proj and
v_proj are the narrowest (8 heads of 128 in all dense sizes): one head is one block, so that 8 ranks is the most. The
summary's "loads at tensor-parallel sizes" is computed for the model at hand. Beyond: --quant fp8 --format hf.

Unquantised: the embedding, the head, and all norms, among them those over each head of q and k, which every rank holds
whole.
"""

from _recipe import run

if __name__ == "__main__":
    run(__file__, __doc__)
