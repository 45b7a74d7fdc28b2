"""What every test shares: quiet threads, no network, no deadline. What several share is in ``tests/helpers``."""

from __future__ import annotations

import os
import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as under nohup; programs that tests start would ignore it too
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before torch, numba or huggingface_hub is imported anywhere.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from hypothesis import HealthCheck, settings

# No deadline: how long an example takes depends on who else uses the machine. The same examples in every run: whether
# a commit passes depends on the commit. To look for new ones: pytest --hypothesis-profile=search
QUIET = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}
settings.register_profile("modelexport", derandomize=True, **QUIET)
settings.register_profile("search", max_examples=2000, **QUIET)
settings.load_profile("modelexport")

# What ranks of the tests import: three of them would import transformers and numba three times, for seconds each.
RANKS_IMPORT = (
    *("torch.distributed.checkpoint", "torch.distributed.tensor", "transformers.tokenization_utils_tokenizers"),
    *(f"modelexport.quantization.kernels.{name}" for name in ("fused", "compiled_affine", "compiled_blocks")),
    *(f"modelexport.quantization.kernels.{name}" for name in ("compiled_search", "microscaling_fused")),
    *(f"modelexport.quantization.methods.{name}" for name in ("awq", "fp8", "gguf", "gptq", "modelopt", "mxfp4")),
)


@pytest.fixture(scope="session", autouse=True)
def _fork_server(request: pytest.FixtureRequest) -> None:
    """Where many tests run, the fork server imports all that ranks need; else, what its first launch asks for."""
    if len(request.session.items) > 200:
        from modelexport.distributed import launch
        from modelexport.exporting.run import CALIBRATION_PRELOAD, PRELOAD

        launch.prestart((*PRELOAD, *CALIBRATION_PRELOAD, "modelexport.resharding.rank", *RANKS_IMPORT))
