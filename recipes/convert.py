"""A quantised checkpoint into the spelling that an engine reads, its numbers as they are, compared value by value.

    python recipes/convert.py nvfp4-modelopt/ --engine transformers --out DIR      # ModelOpt to compressed-tensors
    python recipes/convert.py llama-awq/ --format gptq --out DIR                   # AWQ to GPTQ
    python recipes/convert.py llama-int4-g32/ --engine llama.cpp --out DIR         # to GGUF's Q4_0

Nothing is rounded again: `modelexport convert` repacks, and refuses what the other spelling cannot say. This script
adds two things. With --engine it tries the formats that the engine reads, in the order of the table below, and takes
the first that can hold these numbers and that the engine is not known to refuse; what speaks against the others is
printed. Then it decodes every tensor of both checkpoints and compares them, one in memory at a time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from modelexport.cli.summary import summary
from modelexport.errors import CheckpointError, ModelExportError, PlanError
from modelexport.exporting import export
from modelexport.models import checkpoint_formats as formats
from modelexport.models.opening import open_model

ENGINES = {
    "vllm": ("hf", "fp8-block", "awq", "gptq", "modelopt"),
    "transformers": ("hf", "fp8-block", "awq", "gptq"),
    "tensorrt-llm": ("trtllm", "modelopt"),
    "llama.cpp": ("gguf",),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script; returns the exit status: 0 done, 1 failed, 2 usage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="CKPT", help="a quantised checkpoint: directory or hub id")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--engine", choices=sorted(ENGINES), help="which is to load it")
    what.add_argument("--format", choices=formats.names(), metavar="NAME", help="checkpoint format to write")
    parser.add_argument("--out", required=True, metavar="DIR", help="target directory; must not exist")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="rank processes")
    given = parser.parse_args(argv)
    try:
        chosen = given.format or choose(given.model, given.engine)
        print(summary(export(model=given.model, quant="keep", format=chosen, tp=given.tp, out=given.out)))
        if Path(given.model).is_dir():
            print(f"decoded and compared: {compare(Path(given.model), Path(given.out))} tensors are equal")
    except ModelExportError as error:
        print(f"{Path(__file__).name}: {error}", file=sys.stderr)
        return error.exit_status
    return 0


def choose(model: str, engine: str) -> str:
    """The first format of the engine's that can hold the checkpoint's numbers.

    Raises:
        PlanError: none can; with what each lacks.
    """
    against: list[str] = []
    for name in ENGINES[engine]:
        try:
            plan = export(model=model, quant="keep", format=name, dry_run=True, quiet=True)
        except PlanError as error:
            against.append(f"{name}: {error}")
            continue
        refused = [warning for warning in plan.warnings if warning.lower().startswith(f"{engine} ")]
        if not refused:
            print("\n".join([*(f"not {reason}" for reason in against), f"{engine}: --format {name}"]), file=sys.stderr)
            return name
        against += [f"{name}: {warning}" for warning in refused]
    raise PlanError(f"no format that {engine} reads can hold what {model} holds:\n  " + "\n  ".join(against))


def compare(before: Path, after: Path) -> int:
    """How many tensors the two have, all of them equal once decoded.

    Raises:
        CheckpointError: one is missing, or differs.
    """
    import torch

    from modelexport.inspection.evaluate.models import PlainTensors

    with PlainTensors(open_model(before)) as a, PlainTensors(open_model(after)) as b:
        if missing := set(a.names) ^ set(b.names):
            raise CheckpointError(f"{sorted(missing)[0]} is in one of {before} and {after} only")
        for name in a.names:
            if not torch.equal(a.read(name).float(), b.read(name).float()):
                raise CheckpointError(f"{name} is not the same in {before} and {after}")
        return len(a.names)


if __name__ == "__main__":
    sys.exit(main())
