"""smoothquant: outliers of activations are divided down, and the weights that read them multiplied (Xiao et al. 2022).

"SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models": of feature j,
``s_j = max|X_j|^alpha / max|W_j|^(1 - alpha)``, over all that read it. For formats that round activations.

The paper has norms as sources only. Where activations have one scale, what o and down are given matters most: of
the demo model in int8-static the mean KL is 0.0100 by rtn, 0.0097 with norms alone, 0.0044 with v and up as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from modelexport.errors import UsageError
from modelexport.quantization.algorithms.base import Fold, Folding, Want
from modelexport.settings import setting

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SmoothQuantSettings:
    """The settings of :class:`SmoothQuant`."""

    alpha: float = setting(0.5, "how much of an outlier goes into the weights, 0 to 1", metavar="A")

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise UsageError(
                f"--smoothquant-alpha {self.alpha:g}: a number from 0 to 1 is needed, e.g. --smoothquant-alpha 0.5"
            )


class SmoothQuant(Folding):
    """See the file. From norms and, where the family has such pairs, from linears too (v into o, up into down)."""

    name: ClassVar[str] = "smoothquant"
    description: ClassVar[str] = "moves outliers from activations into weights"
    Settings = SmoothQuantSettings
    wants: ClassVar[frozenset[Want]] = frozenset({"amax"})

    def scales(self, fold: Fold) -> Tensor | None:
        """See the base: float32 ``[features]``; 1 where either side is all zeros."""
        import torch

        from modelexport.quantization.algorithms import _scaling

        readers = _scaling.quantised(fold)
        seen = [inputs.amax for inputs in _scaling.given(readers) if inputs.amax is not None]
        if not seen:
            return None
        activations = _scaling.largest_per_feature(torch.stack(seen).amax(dim=0), fold)
        weights = _scaling.largest_per_feature(_scaling.column_amax(readers, self.ranks).amax(dim=0), fold)
        alpha = self.settings.alpha
        # In float64, where the powers of different libraries agree to more than is kept.
        scale = activations.double() ** alpha / weights.to(activations.device).double() ** (1 - alpha)
        degenerate = (activations == 0) | (weights.to(activations.device) == 0)
        return _scaling.settled(scale.masked_fill(degenerate, torch.nan), fold)


ALGORITHM = SmoothQuant
