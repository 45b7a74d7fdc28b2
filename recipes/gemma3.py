"""Gemma 3 to 4-bit weights: the language model's linears; what sees stays as it is.

    python recipes/gemma3.py --model DIR --out DIR [--tp 4]
    vllm serve DIR --tensor-parallel-size 2 --dtype bfloat16

Multimodal: the vision tower and the projector (0.4 B parameters in the 4B, 12B and 27B) pass through unchanged, and
are named in the summary and in config.json's ignore list. Text-only checkpoints (1B, 270M: gemma3_text) go the same
way.

Algorithm: without images and their tokens a calibration would see half of what the model does, so none is made: small
groups and searched scales do part of what it would (KL on the demo model: groups of 128 rounded to nearest 0.053,
groups of 32 with searched scales 0.032; GPTQ 0.023).

Range: activations are too large for float16, which engines refuse for it (vLLM 0.32): compressed-tensors in bf16
rather than AWQ's or GPTQ's formats.

Unquantised: also the embedding, which is the head, too (262,144 rows: three tenths of the weights of the 1B), the
norms, those over each head of q and k among them.
"""

from _recipe import run

if __name__ == "__main__":
    run(__file__, __doc__, model_types=("gemma3", "gemma3_text"))
