"""Run inside an environment that holds vLLM's CPU build: which of its parameters does a checkpoint fill?

usage: python vllm_parameters.py [--modules] [--draft] CHECKPOINT...

Builds vLLM's model class for each checkpoint, runs its real weight loading, and prints a line of JSON for each:

* ``parameters``: how many parameters the model has;
* ``missing``: those that no tensor of the checkpoint filled, by what loading names and by their bytes: they stay
  uninitialised, and vLLM says nothing;
* ``methods``: class of the quantisation method -> how many modules have it;
* ``error``: what vLLM raised instead;
* with ``--modules``, ``asked``: what ``vllm_rules.py`` works with, instead of the methods.

With ``--draft``, the class is that of the model's draft layers, as speculative decoding builds it.

Nothing is computed. What stands between a CPU and building the model is replaced: the choice of kernels for quantised
weights (vLLM has none for quantised experts on a CPU), sparse attention, and the inspection of model classes (vLLM
does that in processes of their own).
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import re
import sys
import tempfile
import time
import types
from typing import Any

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
LAYERS = "vllm.model_executor.layers."
COMPRESSED = LAYERS + "quantization.compressed_tensors."
# Of the KV cache; 1.0 unless the checkpoint has them.
UNTOUCHED = 0xA5
"""What every byte of a parameter is before loading."""
CACHE_SCALE = re.compile(r"\.attn\w*\.([0-9]+\.)?(q|k|v|prob)_(scale|zero_point)$")


class Kernel:
    """Stands for any kernel: it is built, and never run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def replace_kernels() -> None:
    """Have vLLM choose a kernel that needs no device, wherever it chooses one."""
    oracle = LAYERS + "fused_moe.oracle."
    moe = COMPRESSED + "compressed_tensors_moe.compressed_tensors_moe_"
    schemes = COMPRESSED + "schemes.compressed_tensors_"

    def first(module: str, kind: str) -> Any:
        return next(iter(getattr(importlib.import_module(oracle + module), kind)))

    def returns(module: str, name: str, result: Any) -> None:
        setattr(importlib.import_module(module), name, lambda *args, **kwargs: result)

    unquantised = first("unquantized", "UnquantizedMoeBackend")
    returns(LAYERS + "fused_moe.unquantized_fused_moe_method", "select_unquantized_moe_backend", (unquantised, Kernel))
    returns(moe + "wna16", "select_wna16_moe_backend", (first("int_wna16", "WNA16MoEBackend"), Kernel))
    fp8 = importlib.import_module(oracle + "fp8").Fp8MoeBackend.TRITON
    returns(moe + "w8a8_fp8", "select_fp8_moe_backend", (fp8, Kernel))
    returns(moe + "w4a4_nvfp4", "select_nvfp4_moe_backend", (first("nvfp4", "NvFp4MoeBackend"), Kernel))
    mxfp4 = importlib.import_module(oracle + "mxfp4").Mxfp4MoeBackend.TRITON
    returns(LAYERS + "quantization.mxfp4", "select_mxfp4_moe_backend", (mxfp4, Kernel))
    returns(schemes + "wNa16", "choose_mp_linear_kernel", Kernel)
    returns(schemes + "w4a4_nvfp4", "init_nvfp4_linear_kernel", Kernel())
    returns(schemes + "w8a8_fp8", "init_fp8_linear_kernel", Kernel())
    returns(LAYERS + "quantization.fp8", "init_fp8_linear_kernel", Kernel())
    returns(LAYERS + "quantization.fp8", "select_fp8_moe_backend", (fp8, Kernel))


def replace_attention() -> None:
    """Have the CPU platform name an attention for models whose attention it has none for."""
    from vllm.platforms.cpu import CpuPlatform

    usual = CpuPlatform.get_attn_backend_cls.__func__

    def named(cls: Any, selected: Any, attn_selector_config: Any, num_heads: Any = None) -> str:
        if attn_selector_config.use_sparse:
            return "vllm.v1.attention.backends.mla.flashmla_sparse.FlashMLASparseBackend"
        return usual(cls, selected, attn_selector_config, num_heads)

    CpuPlatform.get_attn_backend_cls = classmethod(named)


class Stand:
    """Stands for anything that a module is asked for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stand()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return Stand()


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of a package that is not installed: image processors import torchvision, models compute without.

    Its builds on the package index want another torch than vLLM's CPU build has.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: Stand() if not name.startswith("__") else None  # type: ignore[method-assign]
        return module

    def exec_module(self, module: Any) -> None:
        module.__version__ = "0.28.0"


def inspect_here() -> None:
    """Have vLLM look at model classes in this process: it imports its own modules anew for each otherwise."""
    from vllm.model_executor.models import registry

    def inspect(self: Any) -> Any:
        return registry._ModelInfo.from_model_cls(self.load_model_cls())

    registry._LazyRegisteredModel.inspect_model_cls = inspect


def ask_no_device() -> None:
    """Have vLLM not ask for a device's memory, a device's experts without a gate, or an image processor's limits."""
    import torch
    from vllm.config import ModelConfig
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

    torch.accelerator.empty_cache = lambda: None
    ModelConfig._supports_multimodal_inputs = lambda self, *args: True
    checked = FusedMoEConfig.__post_init__

    def unchecked(self: Any) -> None:
        with contextlib.suppress(NotImplementedError):  # its last check: no experts without a gate on a CPU
            checked(self)

    FusedMoEConfig.__post_init__ = unchecked


def built(path: str, *, draft: bool = False) -> tuple[Any, Any]:
    """vLLM's model for a checkpoint, or that of its draft layers, and its configuration."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    arguments = EngineArgs(
        model=os.path.abspath(path),
        dtype="bfloat16",
        max_model_len=64,
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_num_seqs=2,
        disable_log_stats=True,
        **({"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}} if draft else {}),
    )
    config = arguments.create_engine_config()
    with set_current_vllm_config(config), set_default_torch_dtype(config.model_config.dtype):
        own = config.speculative_config.draft_model_config if draft else config.model_config
        return initialize_model(vllm_config=config, model_config=own), config


def start_distributed() -> None:
    """Make vLLM's groups of one rank, those of experts too: with no model's config they are made whatever the model."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.v1.worker import workspace

    with tempfile.TemporaryDirectory() as directory, set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"file://{directory}/store", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
    workspace.init_workspace_manager("cpu")


def filled(path: str, *, modules: bool = False, draft: bool = False) -> dict[str, Any]:
    """What is printed of a checkpoint."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader

    model, config = built(path, draft=draft)
    loader = get_model_loader(config.load_config)
    for parameter in model.parameters():
        parameter.data.view(torch.uint8).fill_(UNTOUCHED)
    with set_current_vllm_config(config):
        loaded = set(model.load_weights(loader.get_all_weights(config.model_config, model)) or ())
    names: dict[int, str] = {}  # by identity: a module may stand in several places
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in names or name in loaded:
            names[id(parameter)] = name
    methods: collections.Counter[str] = collections.Counter()
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None:
            kind = type(getattr(module, "scheme", None) or method).__name__
            methods[f"{re.sub(r'[0-9]+', 'N', '.'.join(name.split('.')[-2:]))}: {kind}"] += 1
    result: dict[str, Any] = {"methods": dict(methods)}
    if modules:
        result = {"asked": asked(model, config)}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    missing = sorted(
        name
        for name in names.values()
        if name not in loaded and not CACHE_SCALE.search(name) and is_untouched(parameters[name])
    )
    return {"parameters": len(names), "missing": missing, **result}


def is_untouched(parameter: Any) -> bool:
    """Returns whether a parameter is as it was before loading: not all of vLLM's classes name all that they fill."""
    import torch

    return bool((parameter.data.view(torch.uint8) == UNTOUCHED).all())


def asked(model: Any, config: Any) -> dict[str, Any]:
    """How a model class names and fuses modules, and which modules it asks its quantization config about."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    modules = {}
    for name, module in model.named_modules():
        method, prefix = getattr(module, "quant_method", None), ASKED.get(id(module))
        if prefix is None or method is None or not isinstance(module, (LinearBase, RoutedExperts, ParallelLMHead)):
            continue
        names = [prefix]
        kind = type(module).__name__
        if isinstance(module, RoutedExperts):
            own = (module.ckpt_gate_proj_name, module.ckpt_up_proj_name, module.ckpt_down_proj_name)
            names, kind = [f"{prefix}.0.{each}" for each in own], "Linear"
        modules[name] = {"asks": names, "kind": kind, "quantised": type(method).__name__.startswith("Compressed")}
    rename = getattr(type(model), "hf_to_vllm_mapper", None)
    kinds = ("regex", "substr", "prefix", "suffix")
    renames = {kind: dict(getattr(rename, f"orig_to_new_{kind}", None) or {}) for kind in kinds}
    renames["regex"] = {pattern.pattern: new for pattern, new in renames["regex"].items()}
    return {"renames": renames, "fused": dict(config.quant_config.packed_modules_mapping), "modules": modules}


ASKED: dict[int, str] = {}


def note_what_is_asked() -> None:
    """Keep the name by which each module asks for its quantisation method: it is not always the module's own."""
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    method_of = CompressedTensorsConfig.get_quant_method

    def noted(self: Any, layer: Any, prefix: str) -> Any:
        ASKED[id(layer)] = prefix
        return method_of(self, layer, prefix)

    CompressedTensorsConfig.get_quant_method = noted


def main() -> None:
    os.environ.update(SETTINGS)
    import torch

    torch.set_num_threads(1)
    sys.meta_path.append(Absent())
    replace_kernels()
    replace_attention()
    inspect_here()
    ask_no_device()
    note_what_is_asked()
    start_distributed()
    options = {each.removeprefix("--"): True for each in sys.argv[1:] if each.startswith("--")}
    for path in (each for each in sys.argv[1:] if not each.startswith("--")):
        began = time.monotonic()
        try:
            ASKED.clear()
            result = filled(path, **options)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            if os.environ.get("MODELEXPORT_VLLM_TRACEBACK"):
                import traceback

                traceback.print_exc()
            result = {"error": f"{type(error).__name__}: {str(error)[:600]}"}
        result |= {"checkpoint": path, "seconds": round(time.monotonic() - began, 1)}
        print("PARAMETERS " + json.dumps(result), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
