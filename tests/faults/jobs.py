"""The commands that are disturbed, and a process in which all of them are warm, that runs each in a fork of itself."""

from __future__ import annotations

import hashlib
import multiprocessing.forkserver
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from modelexport import assets
from tests.faults.interposed import Interposed
from tests.helpers.hub_server import TOKEN, Hub, running_hub

ENDLESS = 60.0
"""Seconds after which a run is taken to hang."""
_IDLE = 5  # times, 10 ms apart, that a fork server sleeps which waits for requests
_LAST_WORDS = re.compile(
    rb"Traceback(?:(?!Traceback).)*"
    rb"(?:in recvfds(?:(?!Traceback).)*EOFError|reduction.pickle.load\(from_parent\)(?:(?!Traceback).)*"
    rb"(?:EOFError: Ran out of input|UnpicklingError: pickle data was truncated))\n",
    re.DOTALL,
)
"""Of multiprocessing, in a fork server or a rank to be, whose launcher died in the middle of a request."""
FEW = ("--calib-samples", "2", "--calib-length", "16")
REPOSITORY = "me/demo"
"""That pushes make on the hub."""
PUSH = "push"


@dataclass(frozen=True)
class Job:
    """A command.

    Attributes:
        command: as it begins, with ``{source}``, ``{int4}`` (an export of it) and ``{work}`` (a directory) to be
            filled in; ``--out`` follows.
        ranks: whether it starts processes.
        same_as: the job whose output this one's must equal.
        pushes: whether its output is not a directory but :data:`REPOSITORY` on the hub.
    """

    command: tuple[str, ...]
    ranks: bool = False
    same_as: str = ""
    pushes: bool = False

    def argv(self, place: Path, out: Path) -> list[str]:
        """The command's arguments."""
        known = {"source": place / "source", "int4": place / "int4", "work": out.parent / "workspace"}
        target = [] if self.pushes else ["--out", str(out)]
        return [*(word.format(**known) for word in self.command), *target, "--quiet"]


_EXPORT = ("--model", "{source}")
_INT4 = (*_EXPORT, "--quant", "int4", "--group-size", "32")
_TP2 = ("--tp", "2", "--gather")
_GGUF = (*_EXPORT, "--format", "gguf", "--quant", "q4_k_m")
_DCP = (*_INT4, "--format", "dcp", "--target-tp", "2")
_RESHARD = ("reshard", "{source}", "--tp", "2", "--ranks")
JOBS = {
    "none": Job((*_EXPORT, "--quant", "none")),
    "int4": Job(_INT4),
    "int4 tp2 direct": Job((*_INT4, *_TP2, "direct"), ranks=True, same_as="int4"),
    "int4 tp2 shm": Job((*_INT4, *_TP2, "shm"), ranks=True, same_as="int4"),
    "int4 tp2 nfs": Job((*_INT4, *_TP2, "nfs", "--workspace", "{work}"), ranks=True, same_as="int4"),
    "none tp2 direct": Job((*_EXPORT, "--quant", "none", *_TP2, "direct"), ranks=True, same_as="none"),
    "gptq": Job((*_INT4, "--algorithm", "gptq", *FEW)),
    "gptq tp2": Job((*_INT4, "--algorithm", "gptq", *FEW, *_TP2, "direct"), ranks=True, same_as="gptq"),
    "gguf": Job(_GGUF),
    "gguf tp2": Job((*_GGUF, *_TP2, "direct"), ranks=True, same_as="gguf"),
    "dcp": Job(_DCP),
    "dcp tp2": Job((*_DCP, *_TP2, "direct"), ranks=True, same_as="dcp"),
    "reshard": Job((*_RESHARD, "1")),
    "reshard ranks2": Job((*_RESHARD, "2"), ranks=True, same_as="reshard"),
    "reshard exchange": Job((*_RESHARD, "2", "--exchange", "p2p"), ranks=True, same_as="reshard"),
    "convert": Job(("convert", "{int4}", "--format", "gptq")),
    "convert dcp": Job(("convert", "{int4}", "--format", "dcp")),
    "convert gguf": Job(("convert", "{int4}", "--format", "gguf")),
    PUSH: Job(("push", "{int4}", REPOSITORY), pushes=True),
}


def digests(directory: Path) -> dict[str, str]:
    """SHA-256 of every file of a checkpoint but the record and the card, which tell how it was made."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name not in ("modelexport.json", "README.md")
    }


def difference(found: dict[str, str], expected: dict[str, str]) -> str:
    """The files in which two checkpoints differ; "" where they are equal."""
    names = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    return f"other bytes in {', '.join(names)}" if names else ""


@dataclass
class Ended:
    """A run that is over.

    Attributes:
        status: its exit status; negative: the signal; None: it had to be ended.
        errors: what it wrote to stderr.
    """

    status: int | None
    errors: str
    seconds: float


class Patience:
    """Seconds to wait for something; those do not count in which this process was stopped itself (SIGSTOP)."""

    def __init__(self, seconds: float) -> None:
        self._left, self._looked = seconds, time.monotonic()

    def is_over(self) -> bool:
        """Returns whether they are; to be asked often."""
        now = time.monotonic()
        self._left -= min(now - self._looked, 0.5)
        self._looked = now
        return self._left <= 0


class Running:
    """A command in a fork of this process, in a session of its own.

    Args:
        run: returns the exit status.
        output: takes stdout and stderr.
    """

    def __init__(self, run: Callable[[], int], output: Path) -> None:
        self._output, self._began = output, time.monotonic()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            status = 70
            try:
                os.setsid()
                fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(fd, 1)
                os.dup2(fd, 2)
                # The fork server is this process's parent's: it cannot be waited for here.
                for place in (multiprocessing.forkserver._forkserver, multiprocessing.forkserver):
                    setattr(place, "ensure_running", lambda: None)  # noqa: B010 - mypy refuses the assignment
                status = run()
            except BaseException:
                traceback.print_exc()
            finally:
                with suppress(Exception):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(status)

    def runs(self) -> bool:
        """Returns whether it has not ended."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def wait(self, seconds: float = ENDLESS) -> Ended:
        """Waits for its end, or brings it about."""
        patience = Patience(seconds)
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                code: int | None = os.waitstatus_to_exitcode(status)
                break
            if patience.is_over():
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                code = None
                break
            time.sleep(0.002)
        errors = self._output.read_text(errors="replace") if self._output.exists() else ""
        return Ended(code, errors, time.monotonic() - self._began)


class Workshop:
    """A directory with sources, in a process that has run each job once.

    Args:
        directory: an empty one.
        names: of the jobs that will be run.
        hub: for pushes, see :func:`pushing`.

    Attributes:
        expected: job -> digests of its undisturbed output.
        seconds: job -> how long it takes.
        server: the fork server's process id, 0 without one.
    """

    def __init__(self, directory: Path, names: Sequence[str], hub: Hub | None = None) -> None:
        self.directory, self.hub = directory, hub
        self.cases = directory / "cases"
        self.cases.mkdir(parents=True)
        self.interposed = Interposed([self.cases, directory / "source", directory / "int4"])
        self.interposed.exempt([os.getpid()])
        shutil.copytree(assets.demo_model_path(), directory / "source")
        self._said, self._heard = directory / "ranks", 0
        self.server = 0
        if any(JOBS[name].ranks for name in names):
            self._start_server()
        self._number = 0
        assert self.main(JOBS["int4"].argv(directory, directory / "int4")) == 0
        for name in names:  # here, so that whatever a job imports on its way is imported once
            if not JOBS[name].ranks:
                with self.case() as out:
                    assert self.main(JOBS[name].argv(directory, out)) == 0
        self.expected: dict[str, dict[str, str]] = {}
        self.seconds: dict[str, float] = {}
        for name in names:
            job = JOBS[name]
            with self.case() as out:
                ended = self.run(job, out)
                assert ended.status == 0, f"{name}: {ended.errors}"
                assert ended.errors == "", f"{name}: {ended.errors}"
                self.expected[name], self.seconds[name] = self.output(job, out), ended.seconds
            if job.same_as in self.expected:
                assert self.expected[name] == self.expected[job.same_as], name

    def _start_server(self) -> None:
        """Starts the fork server, with an stderr of its own, which ranks inherit.

        It is to outlive launchers, whose own it would be, but it ends where one dies in the middle of a request.
        """
        from modelexport.distributed.launch import starting
        from modelexport.exporting.run import CALIBRATION_PRELOAD, PRELOAD

        with self._said.open("ab") as output:
            own = os.dup(2)
            os.dup2(output.fileno(), 2)
            try:  # not prestart, which does nothing where address space is limited
                starting._start_server((*PRELOAD, *CALIBRATION_PRELOAD, "modelexport.resharding.rank"))
            finally:
                os.dup2(own, 2)
                os.close(own)
        self.server = multiprocessing.forkserver._forkserver._forkserver_pid or 0  # type: ignore[attr-defined]
        self.interposed.exempt([os.getpid(), self.server])

    @staticmethod
    def main(argv: Sequence[str]) -> int:
        """The command line."""
        from modelexport.cli import main

        return main([*argv, "--no-evaluate"] if argv[0].startswith("-") else argv)

    def start(self, job: Job, out: Path) -> Running:
        """Starts a job."""
        argv = job.argv(self.directory, out)
        if job.ranks and not self._serves():
            self._start_server()
        return Running(lambda: self.main(argv), out.parent / "output")

    def _serves(self) -> bool:
        """Returns whether the fork server is there; one that is just ending is seen to do so."""
        with suppress(psutil.NoSuchProcess):
            server, idle = psutil.Process(self.server), 0
            while _is_alive(server) and idle < _IDLE:
                idle = idle + 1 if server.status() == psutil.STATUS_SLEEPING else 0
                time.sleep(0.01)
            return _is_alive(server)
        return False

    def run(self, job: Job, out: Path) -> Ended:
        """Runs a job to its end."""
        return self.start(job, out).wait()

    def output(self, job: Job, out: Path) -> dict[str, str]:
        """Digests of what a job has written; none where nothing is there."""
        if not job.pushes:
            return digests(out) if out.exists() else {}
        assert self.hub is not None
        repository = self.hub.repositories.get(REPOSITORY)
        return {} if repository is None else {name: str(content) for name, content in repository.files.items()}

    @contextmanager
    def case(self) -> Iterator[Path]:
        """A target for one case, in a directory of its own, which is removed in the end."""
        self._number += 1
        place = self.cases / str(self._number)
        place.mkdir()
        if self.hub is not None:
            self.hub.forget()
        try:
            yield place / "out"
        finally:
            self.remove(place)

    @staticmethod
    def remove(directory: Path) -> None:
        """Removes a case's directory."""
        shutil.rmtree(directory)

    def ranks_output(self) -> str:
        """What ranks have written to stderr since this was last called."""
        if not self._said.exists():
            return ""
        text = self._said.read_bytes()[self._heard :]
        self._heard += len(text)
        return _LAST_WORDS.sub(b"", text).decode(errors="replace")

    def ranks(self) -> list[psutil.Process]:
        """The rank processes that there are."""
        if not self.server:
            return []
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.server).children(recursive=True)
        return []

    def left_over(self, before: set[str], seconds: float = 8.0) -> str:
        """What a run has left beside its files: a process, or a name in shared memory; "" where there is nothing."""
        patience = Patience(seconds)
        while True:
            alive = [process.pid for process in self.ranks() if _is_alive(process)]
            names = shared_memory() - before
            if not alive and not names:
                return ""
            if patience.is_over():
                for pid in alive:
                    os.kill(pid, signal.SIGKILL)
                return f"processes {alive}, shared memory {sorted(names)}"
            time.sleep(0.01)

    def server_is_alive(self) -> bool:
        """Returns whether ranks can still be started."""
        if not self.server:
            return True
        with suppress(psutil.NoSuchProcess):
            return _is_alive(psutil.Process(self.server))
        return False


@contextmanager
def pushing(directory: Path) -> Iterator[Hub]:
    """A hub, to which pushes of this process and its forks go. To be entered before huggingface_hub is imported."""
    with running_hub() as hub:
        os.environ.update(
            HF_ENDPOINT=hub.url,
            HF_HOME=str(directory / "hf"),
            HF_HUB_DISABLE_XET="1",
            HF_TOKEN=TOKEN,
            NO_PROXY="127.0.0.1",
            HF_HUB_DISABLE_TELEMETRY="1",
        )
        os.environ.pop("HF_HUB_OFFLINE", None)
        from modelexport.jobs import hub as pushes

        pushes.ANSWER_SECONDS = 5.0
        yield hub


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def shared_memory() -> set[str]:
    """The names in shared memory."""
    return set(os.listdir("/dev/shm"))


def files_left(out: Path) -> list[str]:
    """Files beside a target that are not a run's staging directory, its workspace or its output."""
    known = {out.name, f".{out.name}.modelexport", "output", "workspace"}
    return sorted(path.name for path in out.parent.iterdir() if path.name not in known)


def version() -> str:
    """The commit that is tested."""
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()
