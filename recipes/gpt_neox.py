"""GPT-NeoX and Pythia to int8, weights and activations, for hardware without FP8.

    python recipes/gpt_neox.py --model DIR --out DIR [--tp 4] [--calib text.jsonl]
    vllm serve DIR

Algorithm: models of this kind (LayerNorms with biases, as OPT) are what SmoothQuant was made for: a few channels of
what a LayerNorm gives are far larger than the rest. It divides them out of the norm's weight and bias and multiplies
them into query_key_value and dense_h_to_4h. On the demo model with such channels made by hand, static int8 goes from
KL 4.58 to 0.0030; here activations are scaled for each token besides. dense and dense_4h_to_h have nothing before them
that could be scaled, and are rounded as they are.

Fused on disk: query_key_value has q, k and v of the first head, then of the second, and so on. It is cut between
heads.

Engine: vLLM 0.32 runs these models through transformers' modules (its transformers backend).

Unquantised: the embedding, the head (embed_out, a tensor of its own), norms, and all biases.
"""

from _recipe import run

if __name__ == "__main__":
    run(__file__, __doc__)
