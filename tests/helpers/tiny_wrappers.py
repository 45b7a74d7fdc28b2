"""Tiny random models that see, with processors that are made here: nothing of theirs is published anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.helpers.tiny_models import model_class, random_weights, tiny_config

__all__ = ["WRAPPERS", "save_chat", "save_wrapper"]

WRAPPERS = ("llava", "gemma3", "mistral3", "qwen2_5_vl", "qwen3_vl")
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
        vision.deepstack_visual_indexes = [0, 1]
        vision.num_position_embeddings = 64
    if model_type == "qwen2_5_vl":
        vision.window_size, vision.fullatt_block_indexes = 56, [1]
    return config


def _processor(model_type: str, config: Any) -> Any:
    import transformers

    tokenizer, mark = _tokenizer(), "<boi>" if model_type == "gemma3" else "<image>"
    template = _TEMPLATE.replace("MARK", f"<start> {mark} <end>" if model_type.startswith("qwen") else mark)
    size = {"height": 28, "width": 28}
    own: dict[str, Any] = {"tokenizer": tokenizer, "chat_template": template}
    if model_type == "llava":
        images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=size)
        return transformers.LlavaProcessor(
            images, patch_size=14, vision_feature_select_strategy="default", num_additional_image_tokens=1, **own
        )
    if model_type == "gemma3":
        images = transformers.Gemma3ImageProcessorPil(size=size)
        return transformers.Gemma3Processor(images, image_seq_length=4, **own)
    if model_type == "mistral3":
        images = transformers.PixtralImageProcessorPil(
            size={"longest_edge": 56}, patch_size={"height": 14, "width": 14}
        )
        return transformers.PixtralProcessor(
            images,
            patch_size=14,
            spatial_merge_size=2,
            image_token="<image>",
            image_break_token="[BREAK]",
            image_end_token="[END]",
            **own,
        )
    images = transformers.Qwen2VLImageProcessorPil(
        size={"shortest_edge": 28 * 28, "longest_edge": 112 * 112}, patch_size=14, merge_size=2, temporal_patch_size=2
    )
    kind = {"qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor"}[model_type]
    return getattr(transformers, kind)(images, video_processor=None, **own)


def save_wrapper(model_type: str, directory: Path) -> Path:
    """Save a model and its processor; returns ``directory``."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = _config(model_type)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(model_type)(config)
    random_weights(model, torch.Generator().manual_seed(0))
    model.save_pretrained(directory)
    _processor(model_type, config).save_pretrained(directory)
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
