"""Run by test_lm_eval.py with an interpreter that has lm-eval: what its own model of transformers gives.

    python lm_eval_oracle.py TASKS_PATH TASKS SHOTS DIRECTORY...

Prints a JSON line with the results of each directory, all of whose linears are decoded in memory.
"""

import json
import sys
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM

from modelexport.inspection.evaluate import load_dequantised
from modelexport.quantization.calibration.text import load_tokenizer


def whole(directory: str) -> AutoModelForCausalLM:
    """The model in float32: transformers' own reading of it, where it is not quantised."""
    if "quantization_config" in json.loads(Path(directory, "config.json").read_text()):
        return load_dequantised(directory)
    return AutoModelForCausalLM.from_pretrained(directory, dtype="float32").eval()


def results(directory: str, tokenizer: Path, tasks: list[str], path: str, shots: int) -> dict[str, dict[str, float]]:
    model = HFLM(pretrained=whole(directory), tokenizer=load_tokenizer(tokenizer), batch_size=4)
    manager = TaskManager(include_path=path, include_defaults=False)
    found = simple_evaluate(model=model, tasks=tasks, task_manager=manager, num_fewshot=shots, log_samples=False)
    return found["results"]


if __name__ == "__main__":
    path, tasks, shots, *directories = sys.argv[1:]
    each = [results(name, Path(directories[0]), tasks.split(","), path, int(shots)) for name in directories]
    print(json.dumps(each))
