"""Qwen3's mixtures of experts (30B-A3B, 235B-A22B) to NVFP4 for Blackwell.

    python recipes/qwen3_moe.py --model DIR --out DIR [--tp 4] [--calib text.jsonl]
    vllm serve DIR --tensor-parallel-size 4

Format: the experts are narrow (768 inputs of down_proj in the 30B). 768 is 6 groups of 128, so that int4 in its usual
groups, and FP8 in blocks of 128, end at 2 ranks; 48 groups of 16 go into 8. FP4 activations make use of what Blackwell
computes fastest.

Calibration: NVFP4 has a fixed scale for the inputs of every linear. 8 of 128 experts are chosen for a token, and the
rare ones may see none of a short text: with calib_experts: all each is shown every token (16 times the work in the
experts). Scales that reach over a whole weight are shared by an expert's gate and up, which engines fuse.

Unquantised: the routers (they choose by small differences; 0.04 % of the weights), the embedding, the head, all norms.
"""

from _recipe import run

if __name__ == "__main__":
    run(__file__, __doc__)
