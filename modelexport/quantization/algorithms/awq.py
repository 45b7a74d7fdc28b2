"""awq: features that matter to the outputs are scaled up before weights are rounded (Lin et al.).

"AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration" (2023). Of a feature's magnitudes and
of the weights that read it a few candidates are made; each is judged by the squared error of the readers' outputs on a
sample, their weights rounded to nearest by their own number formats, activations too where the format does that. The
paper's search for ranges is :mod:`.imatrix`, which rounds after it unless another algorithm is named.

Mean KL on the demo model's held-out text, int4 in groups of 128 (the demo model made hard, see the tests: 0.175 when
rounded to nearest): powers of the mean alone 0.0668, largest magnitude over the weights' 0.0515; on the demo model as
it is (0.0525) 0.0502 and 0.0520. With both kinds of candidates, the better of the two each time. 128 tokens are enough
to choose by: followed by imatrix 0.0366, 0.0127 on a small mixture of experts (512 tokens: 0.0368, 0.0129). So are some
of the rows, for the choice of those candidates that are tried on all: 0.03613 either way (32 windows).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from modelexport.errors import UsageError
from modelexport.quantization.algorithms.base import Fold, Folding, Want
from modelexport.settings import setting

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class AwqSettings:
    """The settings of :class:`ActivationAware`."""

    grid: int = setting(20, "scales tried for each module", metavar="N")

    def __post_init__(self) -> None:
        if self.grid < 1:
            raise UsageError(f"--awq-grid {self.grid}: at least 1 is needed, e.g. --awq-grid 20")


class ActivationAware(Folding):
    """See the file."""

    name: ClassVar[str] = "awq"
    description: ClassVar[str] = "scales up what matters to the outputs, then narrows ranges"
    Settings = AwqSettings
    wants: ClassVar[frozenset[Want]] = frozenset({"amax", "mean", "sample"})
    followed_by: ClassVar[str] = "imatrix"

    @classmethod
    def device_bytes(cls, rows: int, columns: int, rows_at_once: int | None, settings: Any) -> int:
        """See the base: a part of the sample as it is and scaled, all of its outputs, and a tile of the weight."""
        from modelexport.quantization.algorithms._tiles import TILE
        from modelexport.quantization.calibration.statistics import THINNED

        return 4 * (3 * THINNED * columns + THINNED * rows + 12 * TILE * columns)

    def scales(self, fold: Fold) -> Tensor | None:
        """See the base: the best of the candidates, None where none is better than no scale."""
        from modelexport.quantization.algorithms import _awq_search

        return _awq_search.best_scales(fold, self.ranks, self.settings.grid)


ALGORITHM = ActivationAware
