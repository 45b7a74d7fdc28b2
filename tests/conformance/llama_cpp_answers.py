"""Run inside an environment that holds llama-cpp-python: what llama.cpp makes of GGUF files, as one line of JSON.

usage: python llama_cpp_answers.py WHAT FILE [FILE ...] < JSON

WHAT is "logprobs" (stdin: the token ids of a prompt; prints for each file the log-probability of each token after the
first), "logprobs-f32" (the same with keys and values cached in float32), "tokens" (stdin: texts; prints each text's
token ids), "encodings" (stdin: texts; prints for each file the ids of all texts with special tokens taken for text,
parsed, and parsed with what is put around every text), "tensors" (prints for each file its values and, for each tensor,
its type and a digest of its float32 numbers, all by the gguf package), "drafts" (stdin: token ids and a hidden state
for each; prints for each file the log-probability that its draft layer gives each token after the first), "requantise"
(stdin: block types -> files to write; prints nothing), or "quantise" (stdin: a list of file types, each with whether
blocks are fitted with an importance of inputs; prints for each file, and each of these, the type that llama.cpp's
quantiser gives each tensor).
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import numpy as np

SPARSE_IF_FLASH = ("minimax-m3",)
"""Architectures whose graph attends to every token where flash attention is not asked for."""


def architecture(path: str) -> str:
    import gguf

    field = gguf.GGUFReader(path).fields["general.architecture"]
    return bytes(field.parts[field.data[0]]).decode()


def log_probabilities(path: str, prompt: list[int], cache: dict[str, int]) -> list[float]:
    from llama_cpp import Llama

    settings = {"logits_all": True, "verbose": False, "n_threads": 1, "n_threads_batch": 1, "seed": 0}
    flash = architecture(path) in SPARSE_IF_FLASH
    model = Llama(path, n_ctx=max(64, len(prompt)), flash_attn=flash, **settings, **cache)
    model.eval(prompt)
    scores = np.asarray(model.scores[: len(prompt)], dtype=np.float64)
    scores -= scores.max(axis=-1, keepdims=True)
    scores -= np.log(np.exp(scores).sum(axis=-1, keepdims=True))
    found = [float(scores[at, token]) for at, token in enumerate(prompt[1:])]
    model.close()
    return found


def drafted(path: str, prompt: list[int], states: list[list[float]]) -> list[float]:
    """Of the tokens of a prompt, by the draft layer, each from the token before it and a hidden state."""
    import ctypes

    import llama_cpp

    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    params.load_mtp = True
    model = llama_cpp.llama_model_load_from_file(path.encode(), params)
    own = llama_cpp.llama_context_default_params()
    own.ctx_type, own.n_ctx, own.n_threads, own.n_threads_batch = llama_cpp.LLAMA_CONTEXT_TYPE_MTP, 64, 1, 1
    context = llama_cpp.llama_init_from_model(model, own)
    if not context:
        raise SystemExit(f"llama.cpp makes no context of the draft layers of {path}")
    batch = llama_cpp.llama_batch_init(len(prompt), 0, 1)
    numbers = np.asarray(states, dtype=np.float32)
    batch.embd = numbers.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    batch.n_tokens = len(prompt)
    for at, token in enumerate(prompt):
        batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, at, 1
        batch.seq_id[at][0], batch.logits[at] = 0, True
    if llama_cpp.llama_decode(context, batch):
        raise SystemExit(f"llama.cpp does not run the draft layers of {path}")
    rows = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    found = []
    for at, token in enumerate(prompt[1:]):
        scores = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, at), (rows,)).astype(np.float64)
        scores -= scores.max()
        found.append(float(scores[token] - np.log(np.exp(scores).sum())))
    return found


def token_ids(path: str, texts: list[str]) -> list[list[int]]:
    from llama_cpp import Llama

    model = Llama(path, vocab_only=True, verbose=False)
    found = [model.tokenize(text.encode(), add_bos=False, special=False) for text in texts]
    model.close()
    return found


def encodings(path: str, texts: list[str]) -> list[list[list[int]]]:
    from llama_cpp import Llama

    model = Llama(path, vocab_only=True, verbose=False)
    found = []
    for add, special in ((False, False), (False, True), (True, True)):
        found.append([model.tokenize(text.encode(), add_bos=add, special=special) for text in texts])
    model.close()
    return found


def digest(numbers: Any) -> str:
    """Of float32 numbers, those of zero without a sign."""
    wide = np.ascontiguousarray(numbers, dtype=np.float32) + np.float32(0)
    return hashlib.sha256(wide.tobytes()).hexdigest()


def tensors(path: str) -> dict[str, Any]:
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(path)
    found = {}
    for tensor in reader.tensors:
        numbers = dequantize(tensor.data, tensor.tensor_type)
        found[tensor.name] = [tensor.tensor_type.name, [int(n) for n in numbers.shape], digest(numbers)]
    return {"values": {name: field.contents() for name, field in reader.fields.items()}, "tensors": found}


def requantise(path: str, target: str, kind: str) -> None:
    """Write the file again with the gguf package, its linears in blocks that the package makes."""
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
    from gguf.quants import dequantize, quantize

    reader = GGUFReader(path)
    values = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    writer = GGUFWriter(target, values.pop("general.architecture").contents())
    for name, field in values.items():
        inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        of = tensor.tensor_type
        data = tensor.data
        if tensor.name.startswith("blk.") and "norm" not in tensor.name:
            of = GGMLQuantizationType[kind]
            data = quantize(dequantize(tensor.data, tensor.tensor_type), of)
        writer.add_tensor(tensor.name, data, raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantise(path: str, file_type: int, important: bool) -> dict[str, str]:
    """The types of all tensors, by a dry run; of an importance that is the same for all inputs."""
    import ctypes
    import re

    import llama_cpp
    from gguf import GGUFReader

    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread, params.ftype, params.dry_run = 1, file_type, True
    kept = []
    if important:
        tensors = [tensor for tensor in GGUFReader(path).tensors if len(tensor.shape) > 1]
        data = (llama_cpp.llama_model_imatrix_data * (len(tensors) + 1))()
        for entry, tensor in zip(data, tensors, strict=False):
            columns = int(tensor.shape[0]) * (int(tensor.shape[2]) if len(tensor.shape) > 2 else 1)
            kept.append((ctypes.c_float * columns)(*([1.0] * columns)))
            entry.name, entry.data, entry.size = tensor.name.encode(), kept[-1], columns
        params.imatrix = data
    said: list[str] = []
    log = llama_cpp.llama_log_callback(lambda _, text, __: said.append(text.decode()))
    llama_cpp.llama_log_set(log, None)
    failed = llama_cpp.llama_model_quantize(path.encode(), b"", ctypes.byref(params))
    if failed:
        raise SystemExit(f"llama.cpp does not quantise {path} to file type {file_type}: {''.join(said)[-1000:]}")
    lines = re.findall(r"\] (\S+) +- \[[^]]*\], type = +(\w+), size = ([^\n]*)", "".join(said))
    return {name: (re.findall(r"\((\w+)\)", rest) or [kind])[0].upper() for name, kind, rest in lines}


def main() -> None:
    what, *paths = sys.argv[1:]
    given = json.loads(sys.stdin.read() or "null")
    if what in ("logprobs", "logprobs-f32"):
        cache = {"type_k": 0, "type_v": 0} if what == "logprobs-f32" else {}
        answer: Any = [log_probabilities(path, given, cache) for path in paths]
    elif what == "drafts":
        answer = [drafted(path, *given) for path in paths]
    elif what == "tokens":
        answer = [token_ids(path, given) for path in paths]
    elif what == "encodings":
        answer = [encodings(path, given) for path in paths]
    elif what == "requantise":
        answer = [requantise(paths[0], target, kind) for kind, target in given.items()]
    elif what == "quantise":
        answer = [[quantise(path, number, important) for number, important in given] for path in paths]
    else:
        answer = [tensors(path) for path in paths]
    print("ANSWER " + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
