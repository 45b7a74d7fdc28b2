"""Sound inputs of the readers of files, from which a corpus begins: ``python -m tests.fuzz.guided._sound DIR``.

The messages between processes have theirs in the corpus alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from modelexport.checkpoints.gguf.file import encode_header as encode_gguf
from modelexport.checkpoints.gguf.tokenizer import read_tokenizer
from modelexport.checkpoints.safetensors.header import read_header
from modelexport.exporting import export
from modelexport.quantization.calibration.hidden_states import HiddenStates
from modelexport.system.safetensors_header import encode_header
from tests.fuzz._seeds import RECIPE, RESUMED, interrupted_export, make_tokenizers
from tests.fuzz.guided import _corpus
from tests.fuzz.guided._files import CONFIG, WEIGHTS
from tests.fuzz.guided._mutators import joined_files
from tests.helpers.models import make_llama
from tests.helpers.small_tokenizers import ROWS

_SHAPE = {"hidden": 64, "intermediate": 64, "heads": 2, "kv_heads": 1, "layers": 1, "vocab": 64}
_TOKENS = 270


def _with_zeros(path: Path) -> bytes:
    """A safetensors file all of whose numbers are zero; those that may not be, scales of a cache, are left out."""
    header = read_header(path)
    kept = [info for info in header.infos.values() if "attn._" not in info.name]
    tensors = [(info.name, info.dtype, info.shape, info.nbytes) for info in kept]
    return encode_header(tensors, header.metadata) + bytes(sum(info.nbytes for info in kept))


def _files(directory: Path, names: Sequence[str]) -> bytes:
    paths = [directory / name for name in names]
    return joined_files([_with_zeros(path) if path.suffix == ".safetensors" else path.read_bytes() for path in paths])


def sound(root: Path) -> Iterator[tuple[str, bytes]]:
    """Yields the name of a reader and an input, again and again; files are written below ``root``."""
    source = make_llama(**_SHAPE)

    def made(name: str, **settings: object) -> Path:
        export(model=str(source), out=str(root / name), quiet=True, evaluate=False, **settings)
        return root / name

    yield "checkpoint", _files(source, (CONFIG, WEIGHTS))
    for quant in ("int8", "int4", "fp8-block", "nvfp4-wo", "mxfp4-wo"):
        directory = made(quant, quant=quant, **({"group_size": 32} if quant == "int4" else {}))
        yield "checkpoint", _files(directory, (CONFIG, WEIGHTS))
        yield "quantization-config", (directory / CONFIG).read_bytes()
        if quant in ("int8", "mxfp4-wo"):
            yield "record", (directory / "modelexport.json").read_bytes()
    beside = {"modelopt": ("fp8", "hf_quant_config.json"), "gptq": ("int4", "quantize_config.json")}
    beside["awq"] = ("int4-asym", "quant_config.json")
    for name, (quant, file) in beside.items():
        directory = made(name, quant=quant, format=name, **({"group_size": 32} if "int4" in quant else {}))
        config = json.loads((directory / CONFIG).read_text())
        yield "quantization-config", json.dumps(config).encode()
        said = config.pop("quantization_config")
        (directory / CONFIG).write_text(json.dumps(config))
        (directory / file).write_text(json.dumps(said))
        yield name, _files(directory, (CONFIG, WEIGHTS, file))
    for name, files in {
        "trtllm": (CONFIG, "rank0.safetensors"),
        "vllm-sharded": (CONFIG, "model-rank-0-part-0.safetensors"),
    }.items():
        yield name, _files(made(name, quant="none", format=name), files)
    directory = made("sharded", quant="none", target_tp=2)
    yield "hf-sharded", _files(directory, (CONFIG, *sorted(path.name for path in directory.glob("*.safetensors"))))
    directory = made("indexed", quant="none", max_shard_bytes=40_000)
    names = [CONFIG, "model.safetensors.index.json", *sorted(path.name for path in directory.glob("*.safetensors"))[:2]]
    yield "indexed", _files(directory, names)
    gguf = made("gguf", quant="none", format="gguf")
    content = next(gguf.glob("*.gguf")).read_bytes()
    yield "gguf-model", joined_files([content[:6000] + bytes(len(content) - 6000)])
    yield "dcp-metadata", (made("dcp", quant="none", format="dcp") / ".metadata").read_bytes()
    yield "pickle", (root / "dcp" / ".metadata").read_bytes()
    yield from _torch(root)
    yield from _tokenizers(root)
    yield from _small(root, source)


def _torch(root: Path) -> Iterator[tuple[str, bytes]]:
    tensors = {"a.weight": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16).view(2, 2).t()}
    torch.save(tensors, root / "a.bin")
    yield "state-dict", (root / "a.bin").read_bytes()
    torch.save({"model.layers.0.q_proj": {**tensors, "nbits": 4, "axis": 1}}, root / "qmodel.pt")
    yield "module-states", (root / "qmodel.pt").read_bytes()
    states = HiddenStates([(2, 3), (1, 4)], torch.float32, torch.device("cpu"))
    states[0], states[1] = torch.zeros(2, 3), torch.zeros(1, 4)
    states.save(root / "state", 3)
    yield "hidden-states", (root / "state").read_bytes()


def _tokenizers(root: Path) -> Iterator[tuple[str, bytes]]:
    for name, content in make_tokenizers().items():
        directory = root / "tokenizers" / name
        directory.mkdir(parents=True)
        (directory / "tokenizer.json").write_text(json.dumps(content))
        model = content["model"]
        values = dict(read_tokenizer(directory, {}, ROWS).values)
        values = {key: value[:_TOKENS] if isinstance(value, list) else value for key, value in values.items()}
        (directory / "a.gguf").write_bytes(encode_gguf(values, [])[0])
        if isinstance(model["vocab"], dict):  # the corpus is small
            model["vocab"] = dict(sorted(model["vocab"].items(), key=lambda item: item[1])[:270])
            model["merges"] = model.get("merges", [])[:5]
        settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "{{ messages }}"}
        beside = [settings, {"eos_token_id": [1, 2]}, {"<extra>": 300}]
        yield "tokenizer", joined_files([json.dumps(each, ensure_ascii=False).encode() for each in (content, *beside)])
        yield "gguf-tokenizer", (directory / "a.gguf").read_bytes()


def _small(root: Path, source: Path) -> Iterator[tuple[str, bytes]]:
    yield "recipe", RECIPE.encode()
    yield "journal", (interrupted_export(source, root / "cut" / "off") / "journal.jsonl").read_bytes()
    export(model=str(source), out=str(root / "logged"), log=str(root / "log.jsonl"), **RESUMED)
    yield "log", b"\n".join((root / "log.jsonl").read_bytes().splitlines()[:12])


def main(root: Path) -> None:
    found: dict[str, list[bytes]] = {}
    for name, data in sound(root):
        found.setdefault(name, []).append(data)
    for name, inputs in found.items():
        _corpus.save(name, [*inputs, *_corpus.load(name)])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
