"""A Llama in plain torch: importing transformers' takes longer than running a model of a few million parameters.

The forward pass of transformers' ``LlamaForCausalLM``, for checkpoints that are small and in which nothing is out of
the ordinary; :func:`plain_llama` refuses all others. Quantised linears are decoded when the model is made, and their
inputs are rounded as engines do.
"""

from __future__ import annotations

import math
from concurrent.futures import Executor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from modelexport.inspection.evaluate.models import PlainTensors
from modelexport.quantization.calibration.products import linear
from modelexport.system.small_files import LARGEST_JSON, check_regular, has_file, read_json

__all__ = ["FastTokenizer", "PlainLlama", "WholeOutputs", "fast_tokenizer", "plain_llama"]

_LARGEST = 1 << 24  # weights: 64 MB in float32
_BATCH = 1 << 11  # tokens of one forward pass
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "vocab_size",
)
_CPU = torch.device("cpu")
_Cache = list[tuple[Tensor, Tensor]]


def plain_llama(
    tensors: PlainTensors, dtype: torch.dtype = torch.float32, device: torch.device = _CPU
) -> PlainLlama | None:
    """Returns the model of a checkpoint; None where it is large, or has any tensor or setting that is not a Llama's."""
    config = tensors.checkpoint.config or {}
    rope = config.get("rope_parameters")
    sizes = [config.get(name) for name in _SIZES]
    if (
        (config.get("model_type"), config.get("hidden_act"), config.get("rope_scaling")) != ("llama", "silu", None)
        or not isinstance(rope, dict)
        or set(rope) != {"rope_type", "rope_theta"}
        or rope["rope_type"] != "default"
        or not all(type(number) in (int, float) for number in (rope["rope_theta"], config.get("rms_norm_eps")))
        or not all(type(size) is int and size > 0 for size in (*sizes, config.get("head_dim")))
    ):
        return None
    shapes = _shapes(config)
    if (
        sum(map(math.prod, shapes.values())) > _LARGEST
        or {name: tensors.shape(name) for name in tensors.names} != shapes
    ):
        return None
    return PlainLlama(tensors, config, dtype, device)


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor that such a model has."""
    hidden, between, heads, groups, layers, vocabulary = (config[name] for name in _SIZES)
    if layers * hidden * between > _LARGEST:  # before names are made of a number that may be absurd
        return {"": (_LARGEST + 1,)}
    width = config["head_dim"]
    linears = {
        "self_attn.q_proj": (heads * width, hidden),
        "self_attn.k_proj": (groups * width, hidden),
        "self_attn.v_proj": (groups * width, hidden),
        "self_attn.o_proj": (hidden, heads * width),
        "mlp.gate_proj": (between, hidden),
        "mlp.up_proj": (between, hidden),
        "mlp.down_proj": (hidden, between),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocabulary, hidden)
    for layer in range(layers):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in linears.items()}
    return shapes


class PlainLlama:
    """A small Llama, all of it in memory; called as transformers' models are."""

    def __init__(self, tensors: PlainTensors, config: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        self.device = device
        self.weights = {name.removesuffix(".weight"): tensors.read(name).to(device, dtype) for name in tensors.names}
        self.weights.setdefault("lm_head", self.weights["model.embed_tokens"])
        self.activations = tensors.activations
        self.layers, self.width, self.epsilon = config["num_hidden_layers"], config["head_dim"], config["rms_norm_eps"]
        self.vocabulary = config["vocab_size"]
        self.caches = [tensors.cache_rounding(f"model.layers.{number}.") for number in range(self.layers)]
        powers = torch.arange(0, self.width, 2, dtype=torch.float32) / self.width
        self._frequencies = (1.0 / config["rope_parameters"]["rope_theta"] ** powers).to(device)

    def eval(self) -> PlainLlama:
        """Returns the model, which has no other mode."""
        return self

    def __call__(self, input_ids: Tensor, past_key_values: _Cache | None = None, use_cache: bool = False) -> Any:
        """Returns ``logits`` and, in ``past_key_values``, all keys and values; a token at a time may follow these."""
        hidden, cache = self.hidden(input_ids, past_key_values)
        return SimpleNamespace(logits=self._linear("lm_head", hidden), past_key_values=cache)

    def hidden(self, input_ids: Tensor, past: _Cache | None = None) -> tuple[Tensor, _Cache]:
        """Returns the final hidden states ``[windows, length, hidden]``, and the keys and values of each layer."""
        x = functional.embedding(input_ids.to(self.device), self.weights["model.embed_tokens"])
        start = 0 if past is None else past[0][0].shape[2]
        places = torch.arange(start, start + x.shape[1], dtype=torch.float32, device=self.device)
        angles = places[:, None] * self._frequencies
        angles = torch.cat([angles, angles], dim=-1)
        rotation = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        cache: _Cache = []
        for number in range(self.layers):
            layer = f"model.layers.{number}"
            before = None if past is None else past[number]
            x = x + self._attention(
                f"{layer}.self_attn", self._norm(f"{layer}.input_layernorm", x), rotation, before, cache
            )
            h = self._norm(f"{layer}.post_attention_layernorm", x)
            gated = functional.silu(self._linear(f"{layer}.mlp.gate_proj", h)) * self._linear(f"{layer}.mlp.up_proj", h)
            x = x + self._linear(f"{layer}.mlp.down_proj", gated)
        return self._norm("model.norm", x), cache

    def _attention(
        self, name: str, x: Tensor, rotation: tuple[Tensor, Tensor], past: tuple[Tensor, Tensor] | None, cache: _Cache
    ) -> Tensor:
        q, k, v = (
            self._linear(f"{name}.{part}_proj", x).unflatten(-1, (-1, self.width)).transpose(1, 2) for part in "qkv"
        )
        q, k = _rotated(q, *rotation), _rotated(k, *rotation)
        rounded = self.caches[len(cache)]
        if rounded is not None:
            k, v = rounded(k, v)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        cache.append((k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=past is None, enable_gqa=True)
        return self._linear(f"{name}.o_proj", out.transpose(1, 2).flatten(2))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        activation = self.activations.get(name)
        return linear(x if activation is None else activation(x), self.weights[name])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.weights[name] * wide.to(x.dtype)


def _rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat([-second, first], dim=-1) * sines


class WholeOutputs:
    """The final hidden states of all windows, and logits of a chunk of the vocabulary at a time.

    Attributes:
        hidden: each batch's, ``[windows, length, hidden]``.
        vocabulary: rows of the head.
        device: where the model is.
    """

    def __init__(self, model: PlainLlama, windows: Tensor, pool: Executor) -> None:
        def run(part: Tensor) -> Tensor:
            with torch.inference_mode():
                return model.hidden(part)[0]

        self.hidden = list(pool.map(run, windows.split(max(1, _BATCH // windows.shape[1]))))
        self.vocabulary, self.device = model.vocabulary, model.device
        self._model, self._rows = model, slice(None)

    def select(self, start: int, stop: int) -> None:
        """Sets the rows of the head that :meth:`logits` are of."""
        self._rows = slice(start, stop)

    def logits(self, batch: int) -> Tensor:
        """Returns a batch's logits, float32 ``[tokens, rows selected]``."""
        activation = self._model.activations.get("lm_head")
        with torch.inference_mode():
            hidden = self.hidden[batch] if activation is None else activation(self.hidden[batch])
            return linear(hidden, self._model.weights["lm_head"][self._rows]).flatten(0, -2).float()


class FastTokenizer:
    """The tokenizer that a ``tokenizer.json`` is all of, without transformers; called as transformers' are."""

    def __init__(self, tokenizer: Any, start: int | None, end: int | None) -> None:
        self.bos_token_id, self.eos_token_id, self._tokenizer = start, end, tokenizer

    def encode(self, text: str, *, add_special_tokens: bool = True, verbose: bool = True) -> list[int]:
        """Returns a text's token ids."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        """Returns the text of token ids, special ones included."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text


def fast_tokenizer(directory: Path) -> FastTokenizer | None:
    """Returns a directory's tokenizer; None where more than ``tokenizer.json`` and the names of two tokens make it."""
    from tokenizers import Tokenizer

    names = ("tokenizer.json", "tokenizer_config.json")
    if not all(has_file(directory, name) for name in names):
        return None
    settings = read_json(directory / names[1], largest=LARGEST_JSON)
    known = {"tokenizer_class", "bos_token", "eos_token", "model_max_length"}
    if (
        not isinstance(settings, dict)
        or settings.get("tokenizer_class") != "PreTrainedTokenizerFast"
        or set(settings) - known
    ):
        return None
    check_regular(directory / names[0], largest=LARGEST_JSON)
    try:
        tokenizer = Tokenizer.from_file(str(directory / names[0]))
        special = [settings.get(name) for name in ("bos_token", "eos_token")]
        ids = [None if token is None else tokenizer.token_to_id(token) for token in special]
    except Exception:  # of any kind: what is wrong with it, transformers says
        return None
    return FastTokenizer(tokenizer, *ids)
