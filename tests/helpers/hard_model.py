"""The demo model made hard to quantise, with the same function: a few channels scaled by powers of two.

Large models have a few channels whose activations are a hundred times the others'. Here a norm's weight is multiplied
by a power of two in some channels and the columns of what reads it are divided by it, which is exact in bfloat16; the
same for the rows of v and up and the columns of o and down.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from modelexport.models.architecture import Dimensions, Family, Module, family_of, read_dimensions
from tests.helpers.models import copy_checkpoint

CHANNELS = 6
EXPONENTS = (4, 7)  # least and greatest


def make_hard(source: Path, target: Path, *, seed: int = 0) -> Path:
    """A copy of a dense model's checkpoint of one file, made hard; returns ``target``."""
    config = json.loads((source / "config.json").read_text())
    family = family_of(config)
    dims = read_dimensions(config, family)
    return copy_checkpoint(source, target, tensors=lambda tensors: harden(tensors, family, dims, seed=seed))


def harden(tensors: dict[str, Tensor], family: Family, dimensions: Dimensions, *, seed: int = 0) -> None:
    """Scale :data:`CHANNELS` channels of every source that the family lists by 2^4 .. 2^7, in place.

    Args:
        tensors: of a dense model's checkpoint by name.
    """
    generator = torch.Generator().manual_seed(seed)
    by_role: dict[str, tuple[Module, int, int]] = {}  # its module, and which of its rows are the role's
    for module in family.layer:
        start = 0
        for role, axis in module.axes or ((module.role, None),):
            size = dimensions.hidden if axis is None else dimensions.axis_size(axis)
            by_role[role] = (module, start, start + size)
            start += size
        by_role.setdefault(module.role, (module, 0, start))
    for layer in range(dimensions.layers):
        prefix = family.layer_prefix.format(i=layer)
        for scaling in family.scalings:
            module, start, stop = by_role[scaling.source]
            chosen = torch.randperm(stop - start, generator=generator)[:CHANNELS]
            factor = torch.ones(stop - start)
            factor[chosen] = 2.0 ** torch.randint(EXPONENTS[0], EXPONENTS[1] + 1, (CHANNELS,), generator=generator)
            source = f"{prefix}.{module.path}"
            for name in (f"{source}.weight", f"{source}.bias"):
                if name in tensors:
                    part = tensors[name][start:stop]
                    part.mul_(factor.to(part.dtype).view(-1, *(1,) * (part.dim() - 1)))
            for role in scaling.into:
                reader = tensors[f"{prefix}.{by_role[role][0].path}.weight"]
                repeats = reader.shape[1] // len(factor)  # heads that share keys and values
                wide = factor.view(-1, dimensions.head_dim).repeat_interleave(repeats, 0).flatten()
                reader.div_((factor if repeats == 1 else wide).to(reader.dtype))
