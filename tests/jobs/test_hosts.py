"""Exports whose ranks another launcher started: torchrun on one machine and on two, accelerate, srun's environment.

The two machines are network namespaces (helpers/hosts.py). Every result must be the single process's, to the byte.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from modelexport.checkpoints.safetensors.file import open_checkpoint
from modelexport.cli import main
from modelexport.errors import CheckpointError, UsageError
from modelexport.exporting import export
from modelexport.exporting.run import launcher_config
from modelexport.jobs import hosts as export_hosts
from modelexport.recipe import ExportRecipe
from modelexport.resharding import reshard
from tests.exporting.test_export import AWKWARD, digests
from tests.helpers.hosts import Host, finish, torchrun, two_hosts, why_not
from tests.helpers.marks import few
from tests.helpers.models import make_llama

pytestmark = pytest.mark.timeout(240)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with two_hosts() as pair:
        yield pair


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """The directory that the machines share."""
    (tmp_path / "workspace").mkdir()
    return tmp_path


def alone(shared: Path, **settings: object) -> dict[str, str]:
    """Hashes of the export in one process."""
    export(out=str(shared / "alone"), quiet=True, **{"evaluate": False, **settings})
    return digests(shared / "alone")


def nothing_left(shared: Path) -> None:
    assert list((shared / "workspace").iterdir()) == []
    assert [path.name for path in shared.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(("gather", "per_host"), few([("nfs", 1), ("nfs", 2), ("direct", 2)], ("nfs", 1)))
def test_two_machines_write_what_one_process_does(
    hosts: tuple[Host, Host], shared: Path, gather: str, per_host: int
) -> None:
    source = str(make_llama(**AWKWARD))
    arguments = ["modelexport", "--tp", str(2 * per_host), "--gather", gather, "--workspace", str(shared / "workspace")]
    arguments += ["--model", source, "--quant", "int4", "--out", str(shared / "out")]
    statuses, logs = torchrun(hosts, arguments, shared, per_host=per_host)
    assert statuses == [0, 0], logs
    assert digests(shared / "out") == alone(shared, model=source, quant="int4")
    assert "wrote" in logs[0], "rank 0 says what was written"
    assert "wrote" not in logs[1], "and nobody else"
    nothing_left(shared)


@pytest.mark.extended
def test_the_demo_model_with_its_evaluation(hosts: tuple[Host, Host], shared: Path) -> None:
    arguments = ["modelexport", "--tp", "2", "--workspace", str(shared / "workspace"), "--out", str(shared / "out")]
    statuses, logs = torchrun(hosts, arguments, shared, per_host=1)
    assert statuses == [0, 0], logs
    assert logs[0].count("perplexity") == 1
    assert digests(shared / "out") == alone(shared, evaluate=True)  # the record and the card have the figures
    nothing_left(shared)


@pytest.mark.extended  # fast, on one machine: tests/resharding/test_reshard.py
@pytest.mark.parametrize("exchange", ["direct", "auto"])
def test_two_machines_reshard_as_one_process_does(hosts: tuple[Host, Host], shared: Path, exchange: str) -> None:
    source = make_llama(**AWKWARD)
    reshard(checkpoint=str(source), out=str(shared / "four"), tp=2, quiet=True)
    arguments = ["modelexport", "reshard", str(shared / "four"), "--exchange", exchange, "--out", str(shared / "out")]
    statuses, logs = torchrun(hosts, arguments, shared)
    assert statuses == [0, 0], logs
    assert "compared with the source: equal" in logs[0]
    assert ("exchanged" in logs[0]) == (exchange == "auto")
    assert "compared" not in logs[1], "only rank 0 speaks"
    reshard(checkpoint=str(shared / "four"), out=str(shared / "alone"), quiet=True)
    assert digests(shared / "out") == digests(shared / "alone")
    nothing_left(shared)


@pytest.mark.parametrize(("kind", "per_host"), few([("kill", 1), ("kill", 2), ("raise", 1)], ("kill", 1)))
def test_a_death_on_one_machine_ends_the_job_on_both(
    hosts: tuple[Host, Host],
    shared: Path,
    kind: str,
    per_host: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The rerun is on both, too, or, where each has one rank, in this process."""
    ranks, out = 2 * per_host, shared / "out"
    monkeypatch.setenv("FAULT", f"{kind} {ranks - 1} 3")
    monkeypatch.chdir(ROOT)
    rest = ["--tp", str(ranks), "--no-evaluate", "--workspace", str(shared / "workspace"), "--out", str(out)]
    statuses, logs = torchrun(hosts, ["tests.helpers.faults", *rest], shared, per_host=per_host)
    assert 0 not in statuses
    assert f"rank {ranks - 1} failed while quantising model.layers.2" in logs[0], logs[0]
    assert not out.exists()
    monkeypatch.delenv("FAULT")
    if per_host == 1:
        assert main(["--no-evaluate", "--out", str(out)]) == 0
        said = "".join(capsys.readouterr())
    else:
        statuses, logs = torchrun(hosts, ["modelexport", *rest], shared)
        assert statuses == [0, 0], logs
        said = logs[0]
    assert "resuming" in said
    assert digests(shared / "out") == alone(shared)
    nothing_left(shared)


@pytest.mark.extended  # fast, in one process: test_what_a_launchers_ranks_cannot_do
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ([], "shared memory does not reach the others: add --workspace DIR"),
        (["--tp", "4", "--workspace", "W"], "the launcher started 2 ranks, and --tp is 4"),
        (["--workspace", "W", "--out", "W"], "{W} exists already; choose"),
    ],
)
def test_wrong_requests_are_refused_once_in_words(
    hosts: tuple[Host, Host], shared: Path, change: list[str], text: str
) -> None:
    text = text.replace("{W}", str(shared / "workspace"))
    change = [str(shared / "workspace") if word == "W" else word for word in change]
    arguments = ["modelexport", "--tp", "2", "--out", str(shared / "out"), *change]
    statuses, logs = torchrun(hosts, arguments, shared, per_host=1)
    assert 0 not in statuses
    assert text in logs[0], logs[0]
    assert text not in logs[1], "the other machine stays silent"
    assert "Traceback" not in logs[0].partition("ChildFailedError")[0].partition("torch/distributed")[0]
    assert not (shared / "out").exists()


@pytest.mark.extended  # fast, in one process: test_a_machine_that_sees_something_else_is_named
def test_machines_that_see_different_models(hosts: tuple[Host, Host], shared: Path) -> None:
    first, second = make_llama(), make_llama(vocab=160)
    (shared / "model").symlink_to(first)
    command = [
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--master-addr",
        hosts[0].address,
    ]
    command += ["--master-port", "29518"]
    rest = ["-m", "modelexport", "--tp", "2", "--workspace", str(shared / "workspace"), "--out", str(shared / "out")]
    logs = [shared / "a.log", shared / "b.log"]
    agents = [
        host.start([*command, "--node-rank", str(number), *rest, "--model", str(model)], log)
        for number, (host, log, model) in enumerate(zip(hosts, logs, (first, second), strict=True))
    ]
    assert 0 not in finish(agents)
    text = logs[0].read_text()
    assert "rank 1 on host-b sees another model in" in text, text
    assert not (shared / "out").exists()


# --------------------------------------------------------------- one machine, other launchers


def test_a_workspace_that_nobody_needs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="on several machines, and these are on one: drop it"):
        export(out=str(tmp_path / "out"), gather="direct", workspace=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def first_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has the environment of torchrun's first rank of two, each on a machine of its own."""
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.0.0.1"}
    for name, value in {**place, "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("first_of_two")
def test_what_a_launchers_ranks_cannot_do(tmp_path: Path) -> None:
    recipe = ExportRecipe(tp=2, out=str(tmp_path / "out"))
    with pytest.raises(UsageError, match="shared memory does not reach the others: add --workspace DIR"):
        launcher_config(recipe)
    with pytest.raises(UsageError, match="the launcher started 2 ranks, and --tp is 4"):
        launcher_config(dataclasses.replace(recipe, tp=4, workspace=str(tmp_path)))


def test_a_machine_that_sees_something_else_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    views: list[dict[str, str]] = []

    def meet(local: Callable[[], dict[str, str]], compare: Callable[[list[dict[str, str]]], None]) -> None:
        views.append(local())
        compare(views)

    monkeypatch.setattr(export_hosts.ranks, "reduce_and_broadcast", meet)
    monkeypatch.setattr(export_hosts.socket, "gethostname", lambda: f"host-{'ab'[len(views)]}")
    recipe = ExportRecipe(tp=2)
    export_hosts.agree(open_checkpoint(make_llama()), recipe)
    with pytest.raises(CheckpointError, match=r"rank 1 on host-b sees another model in .* than rank 0 on host-a in "):
        export_hosts.agree(open_checkpoint(make_llama(vocab=160)), recipe)
    views.pop()
    with pytest.raises(UsageError, match="rank 1 on host-b was started with other settings than rank 0 on host-a"):
        export_hosts.agree(open_checkpoint(make_llama()), dataclasses.replace(recipe, quant="int4"))


@pytest.mark.usefixtures("first_of_two")
def test_direct_is_refused_where_machines_undo_each_others_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two NFS clients may each write back a whole page of which they changed a part."""
    recipe = ExportRecipe(tp=2, out=str(tmp_path / "new" / "out"), workspace=str(tmp_path), gather="direct")
    found = launcher_config(recipe)
    assert found is not None
    assert export_hosts.is_spread(found)
    monkeypatch.setattr(export_hosts, "filesystem_type", lambda path: "nfs4")
    with pytest.raises(UsageError, match=r"is on nfs4, where the writes of two machines.*use --gather nfs"):
        launcher_config(recipe)
    launcher_config(dataclasses.replace(recipe, gather="nfs"))


def test_the_type_of_a_file_system() -> None:
    assert export_hosts.filesystem_type(Path("/proc/self")) == "proc"
    assert export_hosts.filesystem_type(Path("/sys/no/such/place")) == "sysfs"


def port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def command(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """``python -m *arguments`` from the project's directory."""
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.extended
@pytest.mark.parametrize(("gather", "ranks"), [("shm", 2), ("shm", 3), ("direct", 3)])
def test_torchrun_on_one_machine_needs_no_workspace(shared: Path, gather: str, ranks: int) -> None:
    source, out, tp = str(make_llama(**AWKWARD)), shared / "out", str(ranks)
    done = command(
        "torch.distributed.run", "--nproc-per-node", tp, "--master-port", port(), "-m", "modelexport", "--tp", tp,
        "--model", source, "--quant", "int8", "--gather", gather, "--out", str(out),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("wrote") == 1
    assert digests(out) == alone(shared, model=source, quant="int8")
    nothing_left(shared)


@pytest.mark.extended
def test_accelerate_as_the_launcher(shared: Path) -> None:
    if shutil.which("accelerate", path=str(Path(sys.executable).parent)) is None:
        pytest.skip("accelerate's command is not installed")
    done = command(
        "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no",
        "--dynamo_backend", "no", "--main_process_port", port(), "-m", "modelexport", "--tp", "2", "--no-evaluate",
        "--out", str(shared / "out"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert digests(shared / "out") == alone(shared)


@pytest.mark.extended  # fast, through a batch script: tests/recipes/test_multi_node_recipes.py
def test_the_environment_that_srun_sets(shared: Path) -> None:
    """Four tasks, two for each of two nodes by SLURM's account; all on this machine, so the address is given."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port(), "OMP_NUM_THREADS": "1"}
    arguments = ["--tp", "4", "--workspace", str(shared / "workspace"), "--no-evaluate", "--out", str(shared / "out")]
    tasks = []
    for task in range(4):
        slurm = {
            "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task % 2), "SLURM_NODEID": str(task // 2),
            "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_JOB_ID": "7",
        }  # fmt: skip
        tasks.append(
            subprocess.Popen(
                [sys.executable, "-m", "modelexport", *arguments],
                env={**os.environ, **meeting, **slurm},
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        outputs = [task.communicate(timeout=120) for task in tasks]
    finally:
        for task in tasks:
            task.kill()
    assert [task.returncode for task in tasks] == [0] * 4, outputs
    assert ["wrote" in out for out, _ in outputs] == [True, False, False, False]
    assert digests(shared / "out") == alone(shared)
    nothing_left(shared)
