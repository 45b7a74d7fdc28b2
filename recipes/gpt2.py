"""GPT-2: one checked checkpoint, and the reason why it is not quantised.

    python recipes/gpt2.py --model DIR --out DIR
    vllm serve DIR

Transposed: GPT-2's linears (transformers' Conv1D) lie on disk as [in_features, out_features], the other way round than
all others'. Engines turn them as they load them, and none looks for a packed weight or its scales there. A quantised
file would be of no use to anyone, so modelexport keeps them, whatever --quant says, and names them with that reason.

What the script is good for: every tensor is read, checked for NaN and Inf, hashed and written once; for more than one
rank add --format dcp --target-tp 2. An engine may still round on loading (vllm serve DIR --quantization fp8).
"""

from _recipe import run

if __name__ == "__main__":
    run(__file__, __doc__)
