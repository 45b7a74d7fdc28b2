"""Choose number formats with auto-round's AutoScheme, in its own environment; bench_autoquant.py starts this.

    python peer_autoscheme.py --model DIR --samples FILE.jsonl --candidates int4:128 none --problem FILE.json \
        --report FILE.json

Nothing is quantised: what it would choose for each of the budgets is written, a format for each linear. It reads the
samples themselves in place of a data set's text, and is told which linears engines fuse. Its scores, which do not
depend on the budget, are kept between budgets in the way that it has for that.
"""

from __future__ import annotations

import json
import os
import tempfile
from typing import Any

from _peer_budgets import answer, options_of, samples_of

CACHE = tempfile.TemporaryDirectory()
os.environ["AR_AUTO_SCHEME_CACHE"] = CACHE.name
BATCH = 8
SCHEMES = {"int4:128": "W4A16", "int8-wo:128": "W8A16", "nvfp4": "NVFP4", "fp8-static": "FP8_STATIC", "none": "BF16"}


def main() -> None:
    import torch
    import transformers
    from auto_round import __version__
    from auto_round.auto_scheme import delta_loss
    from auto_round.auto_scheme.gen_auto_scheme import AutoScheme, GenScheme
    from auto_round.schemes import preset_name_to_scheme

    options = options_of(__doc__, SCHEMES).parse_args()
    problem = json.loads(options.problem.read_text())
    ids = torch.tensor(samples_of(options))
    batches = [{"input_ids": rows, "attention_mask": torch.ones_like(rows)} for rows in ids.split(BATCH)]
    delta_loss.get_dataloader = lambda *_, **__: batches
    spelled = {_meaning(preset_name_to_scheme(SCHEMES[name])): name for name in options.candidates}
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model, local_files_only=True)

    def choose(bits: float) -> dict[str, str] | None:
        model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype="auto", local_files_only=True)
        scheme = AutoScheme(
            avg_bits=bits,
            options=[SCHEMES[name] for name in options.candidates],
            shared_layers=[group for group in problem["groups"] if len(group) > 1],
            nsamples=len(ids),
            seqlen=ids.shape[1],
            batch_size=BATCH,
        )
        linears = list(problem["sizes"])
        try:
            found = GenScheme(scheme, model, linears, {}, device_map="cpu", tokenizer=tokenizer).get_layer_config()
        except ValueError as error:  # a budget beyond its smallest or its largest option, as it counts
            print(f"{bits}: {error}", flush=True)
            return None
        return {name: spelled[_meaning(found[name])] for name in linears}

    versions = {"auto-round": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    answer(options, problem, choose, versions)


def _meaning(scheme: Any) -> int:
    """What tells the candidates of a contest apart: the bits of a weight."""
    bits = scheme.get("bits") if isinstance(scheme, dict) else scheme.bits
    return bits or 16


if __name__ == "__main__":
    main()
