"""Command R7B (Cohere2) to 4-bit weights, with one norm that five linears read.

    python recipes/cohere2.py --model DIR --out DIR [--tp 4] [--calib text.jsonl]
    vllm serve DIR --tensor-parallel-size 2

Algorithm: attention and MLP stand side by side behind one norm. AWQ searches one scale for each of its channels that
suits q, k, v, gate and up together, and divides it out of that norm; then v into o and up into down. The norm is a
LayerNorm, which takes the mean away: a rotation of the stream is refused.

Size: the embedding is the head, too, and has 256,000 rows: 1.05 of 8 billion weights of the 7B, which stay bf16, so
that the file has more than 4 bits a weight (the summary says how many). logit_scale is a number of config.json.

Unquantised: the embedding, the norms (they have no biases).
"""

from _recipe import run

if __name__ == "__main__":
    run(__file__, __doc__)
