"""vLLM's own loader fills every parameter of its models from exports of layouts as their makers published them.

Of types that transformers does not know, and of wrappers whose other parts are taken over as they are.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from modelexport.exporting import export
from tests.conformance._vllm import VLLM, needs_vllm
from tests.published._layouts import LAYOUTS
from tests.published._writing import write

pytestmark = [pytest.mark.slow, needs_vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

# vLLM reads Kimi K2.5's vision_config by transformers' names: by the published ones it has its sizes from defaults.
VISION = {"init_pos_emb_": "pos_emb_", "vt_": ""}


def as_transformers_names_it(config: dict[str, object]) -> dict[str, object]:
    """Kimi K2.5's vision_config."""
    found = dict(config)
    for theirs, own in VISION.items():
        found |= {own + key.removeprefix(theirs): value for key, value in config.items() if key.startswith(theirs)}
    return {**found, "model_type": "kimi_k25_vision"}


@pytest.mark.parametrize("name", ["Kimi K2", "Kimi K2 Thinking", "Kimi K2.5", "Llama 3.2 Vision"])
def test_every_parameter_is_filled(name: str, tmp_path: Path) -> None:
    source = write(LAYOUTS[name], tmp_path / "source")
    outs = [tmp_path / quant for quant in ("none", "int4", "fp8")]
    for out in outs:
        export(model=str(source), quant=out.name, out=str(out), evaluate=False, quiet=True)
        config = json.loads((out / "config.json").read_text())
        if config["model_type"] == "kimi_k25":
            config["vision_config"] = as_transformers_names_it(config["vision_config"])
            config["projection_hidden_size"] = config["vision_config"]["mm_hidden_size"]
            (out / "config.json").write_text(json.dumps(config))
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "PYTHON"))}
    script = Path(__file__).with_name("vllm_parameters.py")
    command = [str(VLLM), str(script), *map(str, outs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, env=environment)
    printed = [json.loads(line[11:]) for line in done.stdout.splitlines() if line.startswith("PARAMETERS ")]
    assert len(printed) == len(outs), done.stderr[-2000:]
    for result in printed:
        assert "error" not in result, result["error"]
        assert result["missing"] == []
        assert result["parameters"] > 20
