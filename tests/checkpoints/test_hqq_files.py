"""HQQ's own files: ``qmodel.pt``, and safetensors of whose numbers config.json says nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from modelexport.checkpoints.safetensors.file import Reader
from modelexport.errors import CheckpointError
from modelexport.models.decoded import decoded
from modelexport.models.opening import open_model
from tests.conformance._bitsandbytes_hqq import hqq
from tests.helpers.models import copy_checkpoint, make_llama

States = dict[str, dict[str, Any]]
_DOWN = "model.layers.0.mlp.down_proj"


def make_states(module: str = "") -> tuple[States, dict[str, torch.Tensor]]:
    """A Llama's modules, of 4 bits and of 3 in ``down_proj``: their states as HQQ has them, and the linears' weights.

    Args:
        module: of the settings and scales; ``"meta"``, as before 0.2.
    """
    states: States = {}
    weights = {}
    random = np.random.default_rng(3)
    model = open_model(make_llama(hidden=64, heads=2, kv_heads=1, intermediate=192, layers=1))
    with Reader(model) as reader:
        for name, info in model.infos.items():
            owner, _, parameter = name.rpartition(".")
            states[owner] = {parameter: reader.read(info)}
            if not owner.endswith("_proj"):
                continue
            bits = 3 if owner == _DOWN else 4
            stored, weight = hqq(bits, 1, 64).encoded(random, info.shape[0], info.shape[1])
            weights[name] = torch.tensor(weight).bfloat16()
            own: dict[str, Any] = {key: torch.tensor(stored[key]) for key in ("scale", "zero")}
            own |= {"nbits": bits, "group_size": 64, "axis": 1, "shape": torch.Size(info.shape), "quant_zero": False}
            own |= {"packing": f"{bits}bit", "compute_dtype": torch.float16, "view_as_float": False}
            numbers = torch.nn.Parameter(torch.tensor(stored["W_q"]), requires_grad=False)
            states[owner] = {"W_q": numbers, **({module: own} if module else own), "bias": None}
    return states, weights


def saved(directory: Path, states: States) -> Path:
    """A checkpoint as ``save_quantized`` writes it."""
    copy_checkpoint(make_llama(hidden=64, heads=2, kv_heads=1, intermediate=192, layers=1), directory)
    (directory / "model.safetensors").unlink()
    torch.save(states, directory / "qmodel.pt")
    return directory


def in_safetensors(directory: Path, states: States) -> Path:
    """A checkpoint as ``save_to_safetensors`` writes it: settings are tensors."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors.clear()
        for module, state in states.items():
            for name, value in state.items():
                if isinstance(value, torch.Tensor | int):
                    tensors[f"{module}.{name}"] = torch.as_tensor(value).clone()

    source = make_llama(hidden=64, heads=2, kv_heads=1, intermediate=192, layers=1)
    return copy_checkpoint(source, directory, tensors=change)


def read(directory: Path) -> dict[str, torch.Tensor]:
    """The weights that a checkpoint's linears stand for."""
    found = decoded(open_model(directory))
    with Reader(found) as reader:
        return {name: reader.read(found.infos[name]) for name in found.computed}


@pytest.mark.parametrize(("write", "module"), [(saved, ""), (saved, "meta"), (in_safetensors, "")])
def test_linears_have_settings_of_their_own(write: Callable[..., Path], module: str, tmp_path: Path) -> None:
    states, weights = make_states(module)
    found = read(write(tmp_path / "source", states))
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("nbits", 7, f"{_DOWN}: config.json: quantization_config: nbits is 7; 1, 2, 3, 4, 5, 6, 8 are known"),
        ("quant_zero", True, f"{_DOWN}: .*scales and zero points that are quantised are not known"),
        ("axis", None, "axis None and channel_wise True; axis 0 or 1, channel_wise true, are known"),
        ("scale", None, f"{_DOWN}.scale is missing"),
        ("scale", torch.ones(5), rf"{_DOWN}.scale is F32 \[5\]"),
    ],
)
def test_settings_that_are_not_known(key: str, value: object, message: str, tmp_path: Path) -> None:
    states, _ = make_states()
    states[_DOWN][key] = value
    with pytest.raises(CheckpointError, match=message):
        read(saved(tmp_path / "source", states))


def test_a_setting_that_is_no_number(tmp_path: Path) -> None:
    states, _ = make_states()
    states[_DOWN]["nbits"] = torch.ones(2)
    with pytest.raises(CheckpointError, match=rf"{_DOWN}.nbits is F32 \[2\]; a setting is one whole number"):
        read(in_safetensors(tmp_path / "source", states))


def test_a_pickle_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"qmodel.pt: holds .*; a state dict is needed"):
        open_model(saved(tmp_path / "source", {"model.norm": {"weight": torch.ones(64)}, "lm_head": torch.ones(1)}))
