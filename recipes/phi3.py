"""Phi-3 to GGUF for llama.cpp: small enough for a laptop, and calibrated.

    python recipes/phi3.py --model DIR --out DIR [--tp 2]
    llama-cli -m DIR/model.gguf -p "Once upon a time"

Format: Q4_0, blocks of 32 weights with a float16 scale (4.5 bits a weight). --quant int8-wo --algorithm rtn writes
Q8_0 (8.5 bits; KL on the demo model 0.0002, where int4 in such groups is at 0.03 to 0.04 without calibration).

Algorithm: llama.cpp's own tool rounds to nearest (or weighs errors by an importance matrix). GPTQ fills the same
blocks with better values; nothing changes for the reader.

Fused on disk: q, k and v are one linear, gate and up another. They are rounded as they are (blocks lie within rows)
and stay fused, which is how llama.cpp wants Phi-3; under tensor parallelism each part is cut by itself. The factors of
the long-context rotary embedding are computed from config.json and stored as tensors.

Unquantised: the embedding, the head (both as the model has them) and the norms (float32, as llama.cpp wants them).
"""

from _recipe import run

if __name__ == "__main__":
    run(__file__, __doc__)
