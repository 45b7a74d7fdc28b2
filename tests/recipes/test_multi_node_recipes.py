"""recipes/multi_node.sh under torchrun, and recipes/multi_node.slurm with an srun that sets what SLURM's does.

Two "machines" on this one: agents of torchrun with two ranks each, or tasks on two nodes by SLURM's account. (The
SLURM script has also been run by SLURM 22.05 itself, on two nodes.)
"""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from modelexport.assets import demo_model_path
from modelexport.exporting import export
from modelexport.inspection.verify import verify_checkpoint
from tests.helpers.marks import few
from tests.helpers.models import make_llama
from tests.recipes._running import RECIPES, ROOT, run_apart

pytestmark = pytest.mark.timeout(240)

SRUN = '''#!{python}
"""srun's part: the step's tasks, each with the variables that say who it is; a failure ends all."""
import os, subprocess, sys, time
options = [word for word in sys.argv[1:] if word.startswith("--")][:2]
assert options == ["--cpus-per-task=1", "--kill-on-bad-exit=1"], sys.argv
command = sys.argv[1 + len(options):]
per_node, nodes = int(os.environ["SLURM_NTASKS_PER_NODE"]), int(os.environ["SLURM_JOB_NUM_NODES"])
tasks = []
for task in range(per_node * nodes):
    own = dict(SLURM_PROCID=task, SLURM_LOCALID=task % per_node, SLURM_NODEID=task // per_node, SLURM_STEP_ID=0,
               SLURM_STEP_NUM_TASKS=per_node * nodes, SLURM_STEP_TASKS_PER_NODE=f"{{per_node}}(x{{nodes}})",
               SLURM_STEP_NODELIST="localhost")
    tasks.append(subprocess.Popen(command, env=os.environ | {{k: str(v) for k, v in own.items()}}))
while True:
    states = [task.poll() for task in tasks]
    if any(states):
        time.sleep(1)
        for task in tasks:
            task.kill()
        sys.exit(next(state for state in states if state) % 256)
    if None not in states:
        sys.exit(0)
    time.sleep(0.05)
'''


def port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def environment(**own: str) -> dict[str, str]:
    """One thread a rank, and this interpreter."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, **own}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights as one process writes them."""
    out = tmp_path_factory.mktemp("alone") / "ckpt"
    export(model=str(demo_model_path()), quant="int8", out=str(out), evaluate=False, quiet=True)
    return (out / "model.safetensors").read_bytes()


def test_the_scripts_are_bash() -> None:
    for name in ("multi_node.sh", "multi_node.slurm"):
        subprocess.run(["bash", "-n", str(RECIPES / name)], check=True)


@pytest.mark.extended
def test_torchrun_on_two_machines(alone: bytes, tmp_path: Path) -> None:
    out, workspace = tmp_path / "out", tmp_path / "workspace"
    arguments = ["--model", str(demo_model_path()), "--quant", "int8", "--no-evaluate", "--out", str(out)]
    meeting = port()
    agents = [
        subprocess.Popen(
            ["bash", str(RECIPES / "multi_node.sh"), *arguments],
            cwd=ROOT,
            env=environment(
                NNODES="2", NODE_RANK=str(rank), NPROC_PER_NODE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=meeting,
                WORKSPACE=str(workspace),
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [agent.communicate(timeout=200) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert ["wrote" in printed for printed, _ in outputs] == [True, False], outputs
    assert (out / "model.safetensors").read_bytes() == alone
    assert list(workspace.iterdir()) == []


@pytest.mark.slow
def test_a_recipe_as_ranks_of_torchrun(tmp_path: Path) -> None:
    """A family's script is started like modelexport itself; one rank says what was chosen."""
    source, out = make_llama(model_type="qwen2"), tmp_path / "out"
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port(), "recipes/qwen2.py"]
    arguments = ["--tp", "2", "--serve-tp", "2", "--algorithm", "rtn", "--model", str(source), "--out", str(out)]
    done = run_apart("python", *launcher, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("group_size 64") == 1
    assert done.stdout.count("wrote") == 1
    assert verify_checkpoint(out, source).ok


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", str(RECIPES / "multi_node.sh")],
        env={"PATH": os.environ["PATH"], "NNODES": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "NODE_RANK: which one this is" in done.stderr


@pytest.fixture
def srun(tmp_path: Path) -> str:
    """PATH with our srun first."""
    program = tmp_path / "bin" / "srun"
    program.parent.mkdir()
    program.write_text(SRUN.format(python=sys.executable))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return f"{program.parent}:{os.environ['PATH']}"


def slurm(srun: str, *arguments: str, per_node: int = 1) -> subprocess.CompletedProcess[str]:
    """The batch script as sbatch starts it on the first of two nodes."""
    job = environment(
        PATH=srun, SLURM_JOB_ID=str(os.getpid()), SLURM_NTASKS=str(2 * per_node),
        SLURM_NTASKS_PER_NODE=str(per_node), SLURM_JOB_NUM_NODES="2",
        SLURM_CPUS_PER_TASK="1", SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0",
    )  # fmt: skip
    script = str(RECIPES / "multi_node.slurm")
    return subprocess.run(
        ["bash", script, *arguments], cwd=ROOT, env=job, capture_output=True, text=True, timeout=200, check=False
    )


@pytest.mark.parametrize("per_node", few([1, 2]))
def test_slurm_on_two_nodes(srun: str, alone: bytes, tmp_path: Path, per_node: int) -> None:
    arguments = [str(demo_model_path()), str(tmp_path / "out"), "--quant", "int8", "--no-evaluate"]
    done = slurm(srun, *arguments, per_node=per_node)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("wrote") == 1
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == alone
    assert {path.name for path in tmp_path.iterdir()} == {"out", "bin"}, "the workspace is gone"
    again = slurm(srun, *arguments, per_node=per_node)  # requeued after it had finished
    assert (again.returncode, again.stdout) == (0, f"{tmp_path / 'out'} exists already\n")


@pytest.mark.extended
def test_a_failed_slurm_job_says_so(srun: str, tmp_path: Path) -> None:
    done = slurm(srun, str(demo_model_path()), str(tmp_path / "out"), "--quant", "int9")
    assert done.returncode == 2
    assert done.stderr.count("int9") == 1, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"bin"}
    assert slurm(srun, str(demo_model_path())).returncode != 0
