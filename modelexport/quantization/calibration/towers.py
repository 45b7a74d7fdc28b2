"""Images on their way into a language model: transformers' whole model runs until it calls that part of itself.

Towers and projectors are filled from the checkpoint in the model's dtype, the decoder layers are left out. The call is
what is kept: embeddings with the images in place, positions, masks, and whatever else the decoder is given.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from modelexport.errors import CheckpointError, ModelExportError, PlanError, error_text, quoted
from modelexport.quantization.calibration.arguments import replaced
from modelexport.quantization.calibration.around import ModelShell, tokens_of
from modelexport.quantization.calibration.cut import ForwardShard
from modelexport.quantization.calibration.model import attention_of, decoder_layers, in_memory, parsed_config

__all__ = ["WITHOUT_IMAGES", "EmbeddedSample", "embedded"]

WITHOUT_IMAGES = "leave out the rows with images"
"""What else to do where a model cannot be calibrated on images."""
_BESIDE = ("past_key_values", "use_cache", "return_dict", "output_attentions", "output_hidden_states", "cache_position")
"""Arguments that say how to run, and not what."""


@dataclass(frozen=True)
class EmbeddedSample:
    """A sample that begins with embeddings.

    Attributes:
        tokens: int64 ``[1, length]``, among them those that stand for images.
        inputs: arguments of the language model's forward pass; ``inputs_embeds`` ``[1, length, hidden]`` among them.
    """

    tokens: Tensor
    inputs: Mapping[str, Any]


class _Reached(Exception):
    """Carries the arguments out of the forward pass."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        super().__init__("the language model was called")
        self.inputs = inputs


def embedded(
    config: Mapping[str, Any],
    names: Collection[str],
    read: Callable[[str, ForwardShard], Tensor],
    samples: Sequence[Mapping[str, Any]],
    dtype: torch.dtype,
) -> Iterator[EmbeddedSample]:
    """Yields each sample as its language model is given it.

    Args:
        config: config.json of the whole model.
        names: every tensor of the checkpoint.
        read: one of them, or some of its rows.
        samples: arguments of the whole model's forward pass, of one sample each: see
            :func:`~modelexport.quantization.calibration.images.processed`.
        dtype: of the towers.

    Raises:
        PlanError: transformers has no such model, not with these tensors, or it does not run on these images.
    """
    kind = config.get("model_type")
    try:
        model, decoder = _built(config)
        layers = decoder_layers(decoder)
        modules = {module: name for name, module in model.named_modules()}
        inside = [modules[each] for each in (layers, model.get_output_embeddings()) if each in modules]
        theirs = in_memory(model, names)
        shell = ModelShell(
            model,
            [],
            inside,
            {*names, *theirs},
            lambda name, share: read(theirs.get(name, name), share),
            dtype,
            torch.device("cpu"),
        )
        rows = getattr(shell.embedding, "num_embeddings", 0)
        tokens = tokens_of([sample["input_ids"] for sample in samples])
        with shell.filled(tokens[tokens < rows]), torch.inference_mode():
            for sample in samples:
                inputs = {key: _cast(value, dtype) for key, value in sample.items()}
                found = _call(model, decoder, inputs)
                yield EmbeddedSample(sample["input_ids"], found)
    except (PlanError, CheckpointError) as error:
        text = str(error).partition(": choose what needs no calibration")[0].removeprefix("calibration: ")
        raise PlanError(f"images of the calibration text: {text}: {WITHOUT_IMAGES}") from error
    except ModelExportError:
        raise
    except Exception as error:  # of any kind: images run the code of towers, which raises what it likes
        what = f"{type(error).__name__}: {error_text(error)}"
        raise PlanError(
            f"images of the calibration text: transformers' {quoted(kind)} model does not run on them ({what}): "
            f"{WITHOUT_IMAGES}"
        ) from error


def _built(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """transformers' whole model without storage, and the part of it that is the language model.

    Raises:
        PlanError: there is none that takes images.
    """
    from accelerate import init_empty_weights
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForImageTextToText

    parsed = parsed_config(config)
    kind = config.get("model_type")
    if type(parsed) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise PlanError(f"transformers has no model of the model_type {quoted(kind)} that takes any")
    text = parsed.get_text_config(decoder=True)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForImageTextToText.from_config(parsed).eval()
    decoder = model.get_decoder()
    if decoder is None or decoder is model or decoder_layers(decoder) is None:
        raise PlanError(f"no language model is found within transformers' {type(model).__name__}")
    # Masks that it is given have the form that the decoder layers want which are run on them.
    for own in {id(each): each for each in (text, model.config.get_text_config(decoder=True), decoder.config)}.values():
        own._attn_implementation = attention_of(own)
    return model, decoder


def _call(model: Any, decoder: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with which the whole model calls its language model."""

    def note(*args: Any, **kwargs: Any) -> None:
        if args:
            raise TypeError("its language model is called with arguments that have no names")
        raise _Reached(kwargs)

    decoder.forward = note
    try:
        model(**inputs, use_cache=False)
    except _Reached as reached:
        given = {key: value for key, value in reached.inputs.items() if value is not None and key not in _BESIDE}
        if not isinstance(given.get("inputs_embeds"), Tensor):
            raise TypeError("its language model is not called with embeddings") from None
        return given
    finally:
        del decoder.forward
    raise TypeError("its language model is not called")


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Tensors of floating-point numbers in a dtype."""
    return replaced(value, (Tensor,), lambda x: x.to(dtype) if x.is_floating_point() else x)
