"""StarCoder2 to 4-bit weights in AWQ's format.

    python recipes/starcoder2.py --model DIR --out DIR [--tp 4] --calib code.jsonl
    vllm serve DIR

Format: AWQ's is asymmetric (a zero point for each group), which is worth a little at the same speed (KL on the demo
model, rounded to nearest: 0.043 against 0.053), and the oldest of the 4-bit formats, so that nearly every engine reads
it. It is the format that is meant, not the algorithm: the numbers are GPTQ's.

Algorithm: the MLP has no gate. A GELU lies between c_fc and c_proj, which nothing can be scaled through, so that AWQ
would leave c_proj alone, two fifths of a layer. GPTQ treats all alike.

Calibrate on code (--calib): what comes with the package is prose.

Engine: vLLM 0.32 runs these models through transformers' modules (its transformers backend).

Unquantised: the embedding, which is often the head, too, LayerNorms, and the biases that every linear has.
"""

from _recipe import run

if __name__ == "__main__":
    run(__file__, __doc__)
