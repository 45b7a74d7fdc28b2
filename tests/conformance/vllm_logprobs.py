"""Run inside an environment that holds vLLM's CPU build: log-probabilities of a prompt, as one line of JSON.

usage: python vllm_logprobs.py CHECKPOINT TP TOKEN [TOKEN ...] [, TOKEN ...]

A comma, as an argument of its own, begins another prompt; their log-probabilities follow each other in the list.

A second line, KERNELS, lists the reference kernels that stood in for those that this build lacks.

MODELEXPORT_VLLM_LOAD_FORMAT is vLLM's load_format, MODELEXPORT_VLLM_KV its kv_cache_dtype, "auto" unless set,
MODELEXPORT_VLLM_DTYPE its dtype, "bfloat16" unless set.
MODELEXPORT_VLLM_KERNELS: "reference" offers vLLM the kernels of vllm_reference_kernels.py, "weights" the same, but
they round no inputs; unset: only its own.
"""

from __future__ import annotations

import json
import os
import sys

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def main() -> None:
    checkpoint, tp, *tokens = sys.argv[1:]
    os.environ.update(SETTINGS)
    if int(tp) > 1:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(core) for core in range(int(tp)))
    from vllm import LLM, SamplingParams

    used: set[str] = set()
    if kernels := os.environ.get("MODELEXPORT_VLLM_KERNELS"):
        import vllm_reference_kernels  # beside this script

        vllm_reference_kernels.install(round_inputs=kernels == "reference")
        used = vllm_reference_kernels.USED
    prompts = [[int(token) for token in prompt.split()] for prompt in " ".join(tokens).split(",")]
    engine = LLM(
        model=checkpoint,
        tensor_parallel_size=int(tp),
        dtype=os.environ.get("MODELEXPORT_VLLM_DTYPE", "bfloat16"),
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=1,
        skip_tokenizer_init=True,
        kv_cache_dtype=os.environ.get("MODELEXPORT_VLLM_KV", "auto"),
        load_format=os.environ.get("MODELEXPORT_VLLM_LOAD_FORMAT", "auto"),
        distributed_executor_backend="mp" if int(tp) > 1 else "uni",
    )
    wanted = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], wanted, use_tqdm=False)
    scores = [
        entry[token].logprob
        for prompt, output in zip(prompts, outputs, strict=True)
        for entry, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
    ]
    print("KERNELS " + json.dumps(sorted(used)), flush=True)
    print("LOGPROBS " + json.dumps(scores), flush=True)


if __name__ == "__main__":
    main()
