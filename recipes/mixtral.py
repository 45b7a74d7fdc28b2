"""Mixtral to 4-bit weights, calibrated on the tokens that each expert is given.

    python recipes/mixtral.py --model DIR --out DIR [--tp 4] [--calib text.jsonl]
    vllm serve DIR --tensor-parallel-size 2

Format: nearly all weights are experts' (w1, w2, w3 of 8 in each layer), of which a token reads two: memory is what
counts. Symmetric, because transformers does not load experts with zero points.

Algorithm: AWQ. The norm before the experts is read by the router, too: what is divided out of the norm is multiplied
into the router's unquantised weights, so that the choice of experts stays what it was.

Calibration: with 8 experts and 2 of them for each token no expert starves, and its own tokens are the better sample
(calib_experts: routed). An expert that saw few of them is named in the summary; --calib-experts all shows it all.

Unquantised: the routers, the embedding, the head and the norms.
"""

from _recipe import run

if __name__ == "__main__":
    run(__file__, __doc__)
