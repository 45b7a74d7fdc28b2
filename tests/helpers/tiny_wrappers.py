"""Tiny random models that see, with processors that are made here: none is published anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.helpers.tiny_models import model_class, random_weights, tiny_config

__all__ = ["PROCESSED", "WRAPPERS", "image_inputs", "save_chat", "save_processor", "save_wrapper"]

WRAPPERS = ("llava", "gemma3", "mistral3", "qwen2_5_vl", "qwen3_vl")
PROCESSED = ("llava", "gemma3")
"""Those whose processors need no torchvision."""
_MARKS = ("<image>", "<boi>", "<eoi>", "[BREAK]", "[END]", "<video>", "<start>", "<end>")
_FIRST = 240  # number of the first of them, in a vocabulary of 250
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}MARK{% else %}{{ part['text'] }}{% endif %} {% endfor %}{% endfor %}"
)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "</s>", "user", "assistant", *(f"w{number}" for number in range(5, 250))]
    words[_FIRST : _FIRST + len(_MARKS)] = _MARKS
    core = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment] # of the same base
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        extra_special_tokens=dict(
            zip(("image_token", "boi_token", "eoi_token", "break_token", "end_token"), _MARKS, strict=False)
        )
        | {"video_token": "<video>", "vision_start_token": "<start>", "vision_end_token": "<end>"},
    )


def _config(model_type: str) -> Any:
    config = tiny_config(model_type)
    numbers = {mark: _FIRST + place for place, mark in enumerate(_MARKS)}
    config.image_token_id = numbers["<image>"]
    if hasattr(config, "image_token_index"):
        config.image_token_index = numbers["<image>"]
    vision = config.vision_config
    if model_type == "gemma3":
        config.mm_tokens_per_image = 4
        config.boi_token_index, config.eoi_token_index = numbers["<boi>"], numbers["<eoi>"]
    if model_type.startswith("qwen"):
        config.video_token_id = numbers["<video>"]
        config.vision_start_token_id, config.vision_end_token_id = numbers["<start>"], numbers["<end>"]
        config.text_config.rope_parameters = {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 6, 6],
        }
        vision.out_hidden_size = config.text_config.hidden_size
    if model_type == "qwen3_vl":
        vision.deepstack_visual_indexes = [1]  # one, added behind the first of two layers
        vision.num_position_embeddings = 64
    if model_type == "qwen2_5_vl":
        vision.window_size, vision.fullatt_block_indexes = 56, [1]
    return config


def _processor(model_type: str) -> Any:
    import transformers

    tokenizer, mark = _tokenizer(), "<boi>" if model_type == "gemma3" else "<image>"
    template = _TEMPLATE.replace("MARK", mark)
    size = {"height": 28, "width": 28}
    own: dict[str, Any] = {"tokenizer": tokenizer, "chat_template": template}
    if model_type == "llava":
        images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=size)
        return transformers.LlavaProcessor(
            images, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1, **own
        )
    images = transformers.Gemma3ImageProcessorPil(size=size)
    return transformers.Gemma3Processor(images, image_seq_length=4, **own)


def image_inputs(model_type: str, seed: int = 0) -> dict[str, Any]:
    """Arguments of the forward pass of a sample with an image of four tokens, as the type's processor gives them."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 200, (1, 24), generator=generator)
    ids[:, 6:10] = _FIRST
    shown = (ids == _FIRST).long()
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if model_type.startswith("qwen"):
        ids[:, 5], ids[:, 10] = _FIRST + 6, _FIRST + 7
        pixels = torch.randn(16, 3 * 2 * 14 * 14, generator=generator)
        return {
            **found,
            "pixel_values": pixels,
            "image_grid_thw": torch.tensor([[1, 4, 4]]),
            "mm_token_type_ids": shown,
        }
    side = 56 if model_type == "mistral3" else 28
    found["pixel_values"] = torch.randn(1, 3, side, side, generator=generator)
    if model_type == "mistral3":
        found["image_sizes"] = torch.tensor([[56, 56]])
    return {**found, "token_type_ids": shown} if model_type == "gemma3" else found


def save_wrapper(model_type: str, directory: Path) -> Path:
    """Save a model, and its processor where it is one of ``PROCESSED``; returns ``directory``."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = _config(model_type)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(model_type)(config)
    random_weights(model, torch.Generator().manual_seed(0))
    model.save_pretrained(directory)
    return save_processor(model_type, directory) if model_type in PROCESSED else directory


def save_processor(model_type: str, directory: Path) -> Path:
    """Save the processor alone; returns ``directory``."""
    _processor(model_type).save_pretrained(directory)
    return directory


def save_chat(directory: Path, images: int = 2, texts: int = 2) -> Path:
    """Save rows with images of different sizes, and rows of text, as JSON lines; returns the file."""
    from PIL import Image

    rows: list[dict[str, Any]] = []
    for number in range(images):
        size = (60 + 30 * number, 50)
        image = Image.new("RGB", size)
        image.putdata([(x * 7 % 256, (x // size[0]) * 5 % 256, number * 90) for x in range(size[0] * size[1])])
        image.save(directory / f"image{number}.png")
        words = [f"w{(7 * i + 13 * number) % 200 + 5}" for i in range(20)]
        content = [
            {"type": "text", "text": " ".join(words[:5])},
            {"type": "image", "image": f"image{number}.png"},
            {"type": "text", "text": " ".join(words[5:])},
        ]
        rows.append({"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "w9 w8"}]})
    rows += [{"input_ids": [(7 * i + j) % 199 + 5 for j in range(40)]} for i in range(texts)]
    path = directory / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
