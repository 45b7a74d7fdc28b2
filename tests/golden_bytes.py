"""SHA-256 of every file of a fixed list of exports, conversions and reshardings: for refactorings, which change none.

    python -m tests.golden_bytes before.json            # records, on the code as it was
    python -m tests.golden_bytes before.json --compare  # on the code as it is: 0 where all are equal

Every number format in every checkpoint format for a dense and a mixture-of-experts model, calibrated exports for every
algorithm, conversions and reshardings. A command that is refused is recorded with its message. The record is of one
machine: library versions stand in ``modelexport.json``.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

NUMBER_FORMATS = (
    *("none", "int8", "int8-static", "int8-wo", "int8-wo-asym", "int4", "int4-asym", "w4a8"),
    *("fp8", "fp8-static", "fp8-block", "nvfp4", "nvfp4-wo", "mxfp4", "mxfp4-wo", "mxfp8"),
)
CHECKPOINT_FORMATS = (
    *("hf", "modelopt", "awq", "gptq", "fp8-block", "gguf", "trtllm", "dcp", "megatron", "vllm-sharded"),
)
MODELS = ("llama", "qwen3_moe")
FEW = ("--calib-samples", "4", "--calib-length", "32")
CALIBRATED = {
    "mse": ("--quant", "int4", "--group-size", "32", "--algorithm", "mse"),
    "gptq": ("--quant", "int4", "--group-size", "32", "--algorithm", "gptq"),
    "awq": ("--quant", "int4-asym", "--group-size", "32", "--algorithm", "awq"),
    "awq-gptq": ("--quant", "int4", "--group-size", "32", "--algorithm", "awq+gptq", "--format", "awq"),
    "smoothquant": ("--quant", "int8", "--algorithm", "smoothquant"),
    "rotation": ("--quant", "int4", "--group-size", "32", "--algorithm", "rotation+rtn"),
    "rotation-gptq": ("--quant", "nvfp4", "--algorithm", "rotation+gptq"),
    "autoquant": ("--algorithm", "autoquant", "--autoquant-bits", "6"),
    "kv": ("--quant", "fp8-static", "--kv-cache", "fp8"),
    "kv-modelopt": ("--quant", "nvfp4", "--kv-cache", "fp8", "--format", "modelopt"),
    "patterns": ("--quant", "*.self_attn.*=fp8,*.mlp.*=int4:64"),
}
CONVERTED = {  # of the exports of these names
    "int4.hf": ("awq", "gptq", "dcp", "trtllm"),
    "int4.awq": ("gptq", "hf"),
    "int4.gptq": ("awq", "hf"),
    "nvfp4.modelopt": ("hf",),
    "nvfp4.hf": ("modelopt", "trtllm"),
    "fp8-block.hf": ("fp8-block",),
    "fp8-static.trtllm": ("hf", "fp8-block"),
}
RESHARDED = {
    "int4.hf": (("--tp", "2", "--pp", "2"), ("--tp", "2", "--format", "dcp"), ("--tp", "2", "--format", "trtllm")),
    "none.hf": (
        *(("--tp", "2", "--format", "megatron"), ("--tp", "2", "--format", "vllm-sharded"), ("--tp", "2", "--ep", "2")),
    ),
    "none.megatron": (("--tp", "1"),),
    "nvfp4.trtllm": (("--tp", "1", "--format", "hf"),),
    "none.dcp": (("--tp", "4", "--format", "hf"),),
}


def commands() -> Iterator[tuple[str, list[str]]]:
    """(name of the target, arguments) of everything; later ones read what earlier ones wrote."""
    for model in MODELS:
        shape = ("--group-size", "32") if model == "qwen3_moe" else ()
        for quant in NUMBER_FORMATS:
            for number, kind in enumerate(CHECKPOINT_FORMATS):
                group = shape or (("--group-size", "32") if kind == "gguf" else ())
                sized = group if quant.startswith(("int4", "int8-wo", "w4a8")) else ()
                calibrated = FEW if quant.endswith("static") or quant == "nvfp4" else ()
                tp = "2" if number == 0 else "1"
                yield (
                    f"{model}.{quant}.{kind}",
                    ["--model", model, "--quant", quant, "--format", kind, "--tp", tp, *sized, *calibrated],
                )
        for name, settings in CALIBRATED.items():
            yield f"{model}.{name}", ["--model", model, "--tp", "1", *FEW, *settings]
        for name, kinds in CONVERTED.items():
            for kind in kinds:
                yield f"{model}.{name}.to.{kind}", ["convert", f"{model}.{name}", "--format", kind]
        for name, targets in RESHARDED.items():
            for settings in targets:
                label = "-".join(word.strip("-") for word in settings)
                yield f"{model}.{name}.resharded.{label}", ["reshard", f"{model}.{name}", *settings]
    yield "demo", ["--tp", "2", "--no-evaluate"]
    yield "demo.gptq", ["--tp", "2", "--quant", "int4", "--algorithm", "gptq", "--no-evaluate", *FEW]


def hashes() -> dict[str, dict[str, str]]:
    """Target -> file -> SHA-256 (or ``refused`` -> the message), made in the working directory."""
    from modelexport.cli import main

    found = {}
    for number, (name, arguments) in enumerate(commands()):
        print(f"{number:4} {name}", file=sys.stderr)
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            status = main([*arguments, "--out", name, *([] if arguments[0] == "convert" else ["--quiet"])])
        if status:
            found[name] = {"refused": said.getvalue()}
        else:
            files = sorted(path for path in Path(name).rglob("*") if path.is_file())
            found[name] = {str(path.relative_to(name)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    return found


def make_models() -> None:
    """The two sources, made from fixed seeds, under fixed names: a record holds the name of its source."""
    from tests.helpers.models import make_llama

    for model in MODELS:
        shutil.copytree(make_llama(model_type=model, layers=2, vocab=2048), model)
        demo = Path(__file__).resolve().parents[1] / "modelexport" / "assets" / "demo_model"
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(demo / name, model)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, help="JSON file")
    parser.add_argument("--compare", action="store_true", help="with what it holds, instead of writing it")
    given = parser.parse_args()
    record = given.record.resolve()
    directory = tempfile.mkdtemp(prefix="golden-")
    here = os.getcwd()
    try:
        os.chdir(directory)
        make_models()
        found = hashes()
    finally:
        os.chdir(here)
        shutil.rmtree(directory)
    files = sum(len(each) for each in found.values() if "refused" not in each)
    refused = sum("refused" in each for each in found.values())
    print(f"{len(found)} commands: {files} files of {len(found) - refused} targets, {refused} refused")
    if not given.compare:
        record.write_text(json.dumps(found, indent=1))
        return 0
    before = json.loads(record.read_text())
    unlike = [name for name in before.keys() | found.keys() if before.get(name) != found.get(name)]
    for name in sorted(unlike):
        was, now = before.get(name, {}), found.get(name, {})
        changed = sorted(key for key in was.keys() | now.keys() if was.get(key) != now.get(key))
        print(f"{name}: {', '.join(changed)} changed")
        if "refused" in was or "refused" in now:
            print(f"  was {was.get('refused', 'written')}\n  is  {now.get('refused', 'written')}")
    print("equal" if not unlike else f"{len(unlike)} of {len(before)} are not equal")
    return 1 if unlike else 0


if __name__ == "__main__":
    sys.exit(main())
