"""The readers of files: checkpoints, configs, tokenizers, recipes, texts, and what our own runs leave behind."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from modelexport.checkpoints.adapters import read_adapter
from modelexport.checkpoints.card_metadata import read_card_metadata
from modelexport.checkpoints.gguf.file import read_gguf, read_values
from modelexport.checkpoints.gguf.tokenizer import read_tokenizer
from modelexport.checkpoints.gguf.tokenizer.restored import restore_tokenizer
from modelexport.checkpoints.mirrors.mirror import Mirror
from modelexport.checkpoints.safetensors.header import read_header
from modelexport.checkpoints.safetensors.reader import open_checkpoint
from modelexport.checkpoints.staging.journal import Journal, OtherExport, published_inode
from modelexport.checkpoints.torch_archive.dcp_container import sharded_backend
from modelexport.checkpoints.torch_archive.dcp_metadata import read_metadata
from modelexport.checkpoints.torch_archive.pickle_reading import read_pickle
from modelexport.checkpoints.torch_archive.state_dict import read_module_states, read_state_dict
from modelexport.checkpoints.torch_archive.zip import find_tensor
from modelexport.errors import CheckpointError
from modelexport.inspection.inspect import inspect_checkpoint
from modelexport.inspection.record.reading import read_record
from modelexport.inspection.report.timeline import read_log
from modelexport.quantization.calibration.hidden_states import HiddenStates
from modelexport.quantization.calibration.images import image_files
from modelexport.quantization.calibration.text import TokenDocuments
from modelexport.quantization.methods import extras, read_quantization_config, tensor_specs
from modelexport.quantization.methods.bitsandbytes import _State
from modelexport.recipe import ExportRecipe, ReshardRecipe
from modelexport.settings import parse_assignments
from modelexport.system.small_files import read_json
from tests.fuzz._mutations import mutate_archive, mutate_bytes, mutate_card, mutate_numbers, mutate_pickle, mutate_yaml
from tests.fuzz.guided._execution import Place, Reader
from tests.fuzz.guided._mutators import (
    checked_lines,
    files_in,
    json_lines,
    json_object,
    or_bytes,
    safetensors,
    several,
)

_LINEARS = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "model.layers.0.mlp.experts.0.w1")
_SHAPE = (256, 512)
_ROWS = 400


def _in(name: str, read: Callable[[Path], object]) -> Callable[[bytes, Place], object]:
    """Of a file of that name: its path is what ``read`` takes."""
    return lambda data, place: read(place.put(name, data))


def _beside(name: str, read: Callable[[Path], object]) -> Callable[[bytes, Place], object]:
    """The same, of its directory."""
    return lambda data, place: read(place.put(name, data).parent)


def _directory(
    name: str, files: tuple[str, ...], read: Callable[[Path], object], more: Mapping[str, bytes] | None = None
) -> Reader:
    """A reader of a directory of several files, all of which may be damaged."""

    def call(data: bytes, place: Place) -> object:
        contents = files_in(data, len(files))
        for file in files[len(contents) :]:
            place.remove(file)
        for file, content in zip(files, contents, strict=False):
            place.put(file, content)
        for file, content in (more or {}).items():
            place.put(file, content)
        return read(place.directory)

    return Reader(name, call, several(files))


# ------------------------------------------------------------------ checkpoints


def _gguf(path: Path) -> None:
    found = read_gguf(path)
    read_values(path, found.values.keys())


def _inspect(directory: Path) -> None:
    inspect_checkpoint(directory).as_json()


def _quantization(path: Path) -> None:
    config = read_quantization_config(read_json(path))
    if config is None:
        return
    for name in _LINEARS:
        config.ignores(name)
        scheme = config.scheme_of(name)
        if scheme is not None:
            scheme.describe()
            tensor_specs(scheme, _SHAPE)
            extras(scheme, _SHAPE)


def _metadata(directory: Path) -> None:
    found = read_metadata(directory)
    for key in found.keys:
        found.tensor(key)
    sharded_backend(directory)


def _archive(path: Path) -> None:
    with open(path, "rb") as file:
        find_tensor(file.fileno(), 0, path.stat().st_size)


def _quant_state(data: bytes, place: Place) -> None:
    absmax, weight = torch.zeros(128, dtype=torch.uint8), torch.zeros(4096, 1, dtype=torch.uint8)
    state = torch.frombuffer(bytearray(data or b" "), dtype=torch.uint8)
    tensors = {"weight": weight, "weight.absmax": absmax, "weight.quant_state.bitsandbytes__nf4": state}
    _State(tensors, "nf4", (64, 128))


# ------------------------------------------------------------------ tokenizers


def _tokenizer(directory: Path) -> None:
    read_tokenizer(directory, {"eos_token_id": [1, 2], "bos_token_id": 1}, _ROWS)


def _gguf_tokenizer(path: Path) -> None:
    restore_tokenizer(path)
    read_tokenizer(path.parent, {}, _ROWS)


# ------------------------------------------------------------------ texts and recipes


class _Bytes:
    """A tokenizer of bytes, whose template is the messages as they are."""

    chat_template, bos_token_id = "{{ messages }}", 1

    def encode(self, text: str, **_: object) -> list[int]:
        return list(text.encode())

    def apply_chat_template(self, messages: object, **_: object) -> str:
        return json.dumps(messages)


def _texts(path: Path) -> None:
    documents = TokenDocuments(path, path.parent, 104)
    documents._tokenizer = _Bytes()
    for _ in documents:
        pass


# ------------------------------------------------------------------ what our own runs leave behind


def _mirror(data: bytes, place: Place) -> None:
    place.put("table", bytes(5 * 16))
    mirror = Mirror(place.put("manifest.json", data).parent)
    place.put("failed", data)
    with contextlib.suppress(CheckpointError):
        mirror._check()


def _journal(path: Path) -> None:
    published_inode(path)
    Journal.join(path).close()
    with contextlib.suppress(OtherExport):
        Journal.open(path, {"a": {"b": 1}}).close()


def _hidden_states(path: Path) -> None:
    states = HiddenStates([(2, 3), (1, 4)], torch.float32, torch.device("cpu"))
    try:
        states.restore(path)
    finally:
        states.close()


CONFIG, WEIGHTS = "config.json", "model.safetensors"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "added_tokens.json")
_TEMPLATES = ("chat_template.json", "chat_template.jinja")
_INDEXED = (CONFIG, "model.safetensors.index.json", *(f"model-0000{i}-of-00002.safetensors" for i in (1, 2)))

READERS = (
    Reader("safetensors", _in("a.safetensors", read_header), safetensors),
    _directory("indexed", _INDEXED, open_checkpoint),
    _directory("checkpoint", (CONFIG, WEIGHTS), _inspect),
    _directory("modelopt", (CONFIG, WEIGHTS, "hf_quant_config.json"), _inspect),
    _directory("gptq", (CONFIG, WEIGHTS, "quantize_config.json"), _inspect),
    _directory("awq", (CONFIG, WEIGHTS, "quant_config.json"), _inspect),
    _directory("trtllm", (CONFIG, "rank0.safetensors"), _inspect),
    _directory("vllm-sharded", (CONFIG, "model-rank-0-part-0.safetensors"), _inspect),
    _directory(
        "hf-sharded", (CONFIG, *(f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in range(2))), _inspect
    ),
    _directory("mistral", ("params.json", "consolidated.safetensors"), _inspect),
    _directory("gguf-model", ("model.gguf",), _inspect),
    Reader("gguf", _in("a.gguf", _gguf), or_bytes(mutate_numbers)),
    Reader("quantization-config", _in(CONFIG, _quantization), json_object),
    Reader("bitsandbytes-state", _quant_state, json_object),
    Reader("pickle", lambda data, place: read_pickle(data, what="input"), or_bytes(mutate_pickle)),
    Reader("state-dict", _in("pytorch_model.bin", read_state_dict), or_bytes(mutate_archive)),
    Reader("module-states", _in("qmodel.pt", read_module_states), or_bytes(mutate_archive)),
    Reader("tensor-archive", _in("0.distcp", _archive), or_bytes(mutate_archive)),
    _directory("pytorch", (CONFIG, "pytorch_model.bin"), _inspect),
    _directory("hqq", (CONFIG, "qmodel.pt"), _inspect),
    Reader("dcp-metadata", _beside(".metadata", _metadata), or_bytes(mutate_pickle)),
    Reader("dcp-backend", _beside("metadata.json", sharded_backend), json_object),
    _directory("adapter", ("adapter_config.json", "adapter_model.safetensors"), read_adapter),
    Reader("card", _beside("README.md", read_card_metadata), or_bytes(mutate_card)),
    _directory("tokenizer", (*_TOKENIZER_FILES, *_TEMPLATES), _tokenizer),
    Reader("tokenizer-model", _beside("tokenizer.model", _tokenizer), or_bytes(mutate_numbers)),
    Reader("tekken", _beside("tekken.json", _tokenizer), json_object),
    Reader("gguf-tokenizer", _in("a.gguf", _gguf_tokenizer), or_bytes(mutate_numbers)),
    Reader("recipe", _in("recipe.yaml", ExportRecipe.load), or_bytes(mutate_yaml)),
    Reader("reshard-recipe", _in("recipe.yaml", ReshardRecipe.load), or_bytes(mutate_yaml)),
    Reader("assignment", lambda data, place: parse_assignments([data.decode(errors="replace")]), mutate_bytes),
    Reader("texts", _in("text.jsonl", _texts), json_lines),
    Reader("images", _in("images.jsonl", image_files), json_lines),
    Reader("record", _beside("modelexport.json", read_record), json_object),
    Reader("log", _in("run.log", read_log), json_lines),
    Reader("journal", _in("journal.jsonl", _journal), checked_lines),
    Reader("hidden-states", _in("state.safetensors", _hidden_states), safetensors),
    Reader("mirror", _mirror, json_object),
)
