"""OLMo 2 and 3 to 4-bit weights, by the one algorithm that this architecture leaves whole.

    python recipes/olmo2.py --model DIR --out DIR [--tp 4] [--calib text.jsonl]
    vllm serve DIR --tensor-parallel-size 2

Algorithm: norms stand behind the attention and the MLP only; q, k, v, gate and up read the residual stream itself. So
AWQ and SmoothQuant have no norm to divide (left to them are v into o, and up into down), and the stream cannot be
rotated. GPTQ changes nothing but the weights that it rounds.

Norms of q and k reach over all heads of a token at once: a rank that holds some heads needs the others' squares. They
stay whole on every rank, and bf16.

Engine: vLLM 0.32 runs these models through transformers' modules (its transformers backend).

Unquantised: the embedding, the head, the norms.
"""

from _recipe import run

if __name__ == "__main__":
    run(__file__, __doc__)
