"""smoothquant: outliers of activations are divided down, and the weights that read them multiplied (Xiao et al. 2022).

"SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models": of feature j,
``s_j = max|X_j|^alpha / max|W_j|^(1 - alpha)``, over all that read it. For formats that round activations.

The paper has norms as sources only. Where activations have one scale, what o and down are given matters most: of
the demo model in int8-static the mean KL is 0.0100 by rtn, 0.0097 with norms alone, 0.0044 with v and up as well.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from modelexport.quantization.algorithms import _scaling
from modelexport.quantization.algorithms.base import Fold, Folding, Want


class SmoothQuant(Folding):
    """See the file. From norms and, where the family has such pairs, from linears too (v into o, up into down)."""

    name: ClassVar[str] = "smoothquant"
    description: ClassVar[str] = "moves outliers from activations into weights (--alpha: how much of them)"
    wants: ClassVar[frozenset[Want]] = frozenset({"amax"})

    def scales(self, fold: Fold) -> Tensor | None:
        """See the base: float32 ``[features]``; 1 where either side is all zeros."""
        readers = _scaling.quantised(fold)
        seen = [inputs.amax for inputs in _scaling.given(readers) if inputs.amax is not None]
        if not seen:
            return None
        activations = _scaling.largest_per_feature(torch.stack(seen).amax(dim=0), fold)
        weights = _scaling.largest_per_feature(_scaling.column_amax(readers, self.ranks).amax(dim=0), fold)
        alpha = self.options.alpha
        # In float64, where the powers of different libraries agree to more than is kept.
        scale = activations.double() ** alpha / weights.to(activations.device).double() ** (1 - alpha)
        degenerate = (activations == 0) | (weights.to(activations.device) == 0)
        return _scaling.settled(scale.masked_fill(degenerate, torch.nan), fold)


ALGORITHM = SmoothQuant
