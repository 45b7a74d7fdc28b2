"""Qwen2 and Qwen2.5 to 4-bit weights in GPTQ's format, with groups that fit the engine's tensor parallelism.

    python recipes/qwen2.py --model DIR --out DIR --serve-tp 4 [--tp 4] [--calib text.jsonl]
    vllm serve DIR --tensor-parallel-size 4

Group size: the widths of these MLPs are odd. In the 72B down_proj has 29568 inputs, 231 groups of 128, which no 2, 4
or 8 divides; Qwen padded its own quantised 72B models to 29696 to get 8 ranks. Smaller groups do it without padding:
29568 / 32 = 924 groups go into 4 ranks. The script takes the largest of 128, 64 and 32 that fits, and refuses where
none does: then use a format without groups (--quant fp8 --algorithm rtn --format hf).

Biases: q, k and v have one each, which stays bf16, and is cut with its linear's rows.

Unquantised: the embedding, the head (in the small models both are one tensor) and the norms.
"""

from _recipe import Choice, Config, group_size, run


def choose(config: Config, serve_tp: int) -> dict[str, Choice]:
    """Groups that ``serve_tp`` ranks can cut."""
    return {"group_size": group_size(config, "intermediate_size", serve_tp)}


if __name__ == "__main__":
    run(__file__, __doc__, choose=choose, asks_serve_tp=True)
