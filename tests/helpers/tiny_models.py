"""A tiny random model of every causal language model that transformers knows, saved by transformers.

Its default architecture, shrunk: the sizes are in ``tiny_shrink.py``, what single types need beyond them in
``tiny_overrides.py``. Every kind of layer that a type has by default is there. Weights are bfloat16, no tensor
is constant, and the logits depend on the tokens. Saved models are kept for the session, to be read and never written.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
import zlib
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.helpers.tiny_overrides import CLASSES, NOT_MADE, OVERRIDES
from tests.helpers.tiny_shrink import ALWAYS, COMMON, HEADS, PER_LAYER, VOCAB

if TYPE_CHECKING:
    import torch

__all__ = [
    "NOT_MADE",
    "causal_types",
    "model_class",
    "save_tiny",
    "tiny_checkpoint",
    "tiny_inputs",
    "tiny_model",
    "wrapper_types",
]

STRUCTURED = ("A_log", "time_", "decay")  # decay rates and the like: noise around what transformers sets


def causal_types() -> dict[str, str]:
    """``model_type`` -> class of every causal language model of the installed transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def wrapper_types() -> dict[str, str]:
    """``model_type`` -> class of every model that transformers wraps around a language model: it also sees or hears."""
    from transformers.models.auto import modeling_auto

    found: dict[str, str] = {}
    for lists in ("MULTIMODAL_LM", "IMAGE_TEXT_TO_TEXT"):
        for kind, names in getattr(modeling_auto, f"MODEL_FOR_{lists}_MAPPING_NAMES").items():
            found.setdefault(kind, names if isinstance(names, str) else names[0])
    return found


def model_class(model_type: str) -> Any:
    """The class that a checkpoint of that type is of."""
    import transformers

    own = CLASSES.get(model_type) or causal_types().get(model_type) or wrapper_types()[model_type]
    return getattr(transformers, own)


@functools.cache
def tiny_checkpoint(model_type: str) -> Path:
    """Directory of a saved tiny model; shared by the session, so read it only.

    Raises:
        KeyError: there is no such type, or it cannot be made here (:data:`NOT_MADE` says why).
    """
    if model_type in NOT_MADE:
        raise KeyError(f"{model_type}: {NOT_MADE[model_type]}")
    return save_tiny(model_type, _root() / model_type)


@functools.cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="modelexport-tiny-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


def save_tiny(model_type: str, directory: Path) -> Path:
    """Save a random model of that type with ``save_pretrained``; returns ``directory``."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    tiny_model(model_type).save_pretrained(directory)
    return directory


def tiny_model(model_type: str) -> Any:
    """The model, in evaluation mode; the same one in every process."""
    import torch

    seed = zlib.crc32(model_type.encode())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(model_type)(tiny_config(model_type))
    random_weights(model, torch.Generator().manual_seed(seed))
    return model.eval()


def tiny_config(model_type: str, settings: dict[str, Any] | None = None) -> Any:
    """Its config: the class's defaults, shrunk; ``settings``: in place of those of ``OVERRIDES``."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return _shrunk(CONFIG_MAPPING[model_type], OVERRIDES.get(model_type, {}) if settings is None else settings)


def tiny_inputs(model: Any, length: int = 24, seed: int = 0) -> dict[str, Any]:
    """What its forward pass takes: token ids, and codes for the models that make sound."""
    import torch

    def ids(*shape: int) -> torch.Tensor:
        return torch.randint(3, 200, shape, generator=torch.Generator().manual_seed(seed))

    found: dict[str, Any] = {"input_ids": ids(1, length), "use_cache": False}
    if model.config.model_type in ("musicgen", "musicgen_melody"):
        found["decoder_input_ids"] = ids(model.config.decoder.num_codebooks, length)
    return found


def _shrunk(config_class: Any, own: dict[str, Any]) -> Any:
    """An instance of a config class, and of those of its parts, made small."""
    default = config_class()
    names = {field.name for field in fields(config_class)}
    settings: dict[str, Any] = {}
    for name in names:
        value = vars(default).get(config_class.attribute_map.get(name, name), vars(default).get(name))
        number = isinstance(value, (int, str)) and not isinstance(value, bool)
        if name.endswith("pad_token_id") and value is not None:
            settings[name] = 0
        elif name in ALWAYS or (name in COMMON and value and number):
            settings[name] = ALWAYS.get(name, COMMON.get(name))
        elif name.endswith(("token_id", "token_index")) and isinstance(value, int) and value >= VOCAB:
            settings[name] = VOCAB - 1 - zlib.crc32(name.encode()) % 32
    if "kv_lora_rank" in names and "num_key_value_heads" in names:
        settings["num_key_value_heads"] = HEADS  # latent attention has keys and values for every head
    settings |= _kinds_of_layers(default, names)
    parts = {name: getattr(default, name, None) for name in config_class.sub_configs}
    settings |= {name: _shrunk(type(part), own.get(name, {})) for name, part in parts.items() if part is not None}
    settings |= {name: value for name, value in own.items() if name not in parts}
    return config_class(**settings)


def _kinds_of_layers(default: Any, names: set[str]) -> dict[str, Any]:
    """The lists that say which layer is of which kind, cut to the first layer of each combination of kinds."""
    lists = {name: vars(default).get(name) for name in PER_LAYER if name in names}
    lists = {name: list(value) for name, value in lists.items() if isinstance(value, (list, tuple)) and value}
    if not lists:
        return {}
    length = min(map(len, lists.values()))
    kinds = list(dict.fromkeys(zip(*(value[:length] for value in lists.values()), strict=True)))
    kinds *= 2 if len(kinds) == 1 else 1
    return {"num_hidden_layers": len(kinds)} | {name: [kind[i] for kind in kinds] for i, name in enumerate(lists)}


def random_weights(model: Any, generator: torch.Generator) -> None:
    """Random weights in bfloat16; what is not saved (rotary frequencies) stays as precise as a loaded model has it."""
    import torch

    saved = set(model.state_dict())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name not in saved or not tensor.is_floating_point():
            continue
        value = tensor.detach().float()
        noise = torch.randn(value.shape, generator=generator)
        constant = bool((value == value.flatten()[:1]).all())
        if constant or value.ndim < 2 or any(part in name for part in STRUCTURED):
            value = value + 0.05 * noise
        else:
            value = 0.07 * noise
        tensor.data = value.to(torch.bfloat16)
    for config in (model.config, *(getattr(model.config, key, None) for key in model.config.sub_configs)):
        if config is not None:
            config.dtype = torch.bfloat16
