"""GLM-4 (9B and 32B of April 2025): attention in FP8, MLPs in 4 bits.

    python recipes/glm4.py --model DIR --out DIR --serve-tp 2 [--tp 2] [--calib text.jsonl]
    vllm serve DIR --tensor-parallel-size 2 --dtype bfloat16

Formats: all heads share two key/value heads, so that an error in k_proj or v_proj is in the scores of 16 or 24 heads
at once; and the attention is a small part of the weights (16 % of a layer in the 32B). It is kept in FP8, and the
MLPs, 84 % of a layer, go to 4 bits: 4.7 bits a weight in all.

Group size: the 9B has 13696 inputs of down_proj, 107 groups of 128, which two ranks cannot share; of 64 they can. The
script takes the largest of 128, 64 and 32 that fits --serve-tp. Beyond 2 ranks, each k and v head is held by several.

Fused on disk: gate and up are one linear, cut each by itself. q, k and v have biases, which stay bf16. Norms stand
behind the attention and the MLP as well: what they give is only added up, so that they take part in nothing.

Unquantised: the embedding, the head, the norms. Engines refuse float16 for this model (vLLM 0.32): bf16.
"""

from _recipe import Choice, Config, group_size, run


def choose(config: Config, serve_tp: int) -> dict[str, Choice]:
    """Groups that ``serve_tp`` ranks can cut."""
    return {"group_size": group_size(config, "intermediate_size", serve_tp)}


if __name__ == "__main__":
    run(__file__, __doc__, choose=choose, asks_serve_tp=True)
