"""Machines in one: network namespaces with a cable or a switch between them, their own host names and /dev/shm."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.switch import Conditions

_ROOT = Path(__file__).parents[2]

# What makes a namespace a machine: what ranks could share without a network is taken away. /tmp stays common.
_ISOLATE = ["unshare", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"]

_BOOT_ID = '{ [ -z "$BOOT_ID" ] || mount --bind "$BOOT_ID" /proc/sys/kernel/random/boot_id; }'


@dataclass(frozen=True)
class Host:
    """One of the machines."""

    name: str
    namespace: str
    address: str

    def start(self, arguments: Sequence[str], log: Path, env: Mapping[str, str] = {}) -> subprocess.Popen[bytes]:
        """Start ``python *arguments`` there, its output going to ``log``.

        The file that ``BOOT_ID`` names in ``env`` takes the place of the one that tells this machine's boots apart.
        """
        script = f'hostname {self.name} && mount -t tmpfs tmpfs /dev/shm && {_BOOT_ID} && exec "$@"'
        command = [
            "ip",
            "netns",
            "exec",
            self.namespace,
            *_ISOLATE,
            "sh",
            "-c",
            script,
            "sh",
            sys.executable,
            *arguments,
        ]
        with log.open("wb") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **env},
                start_new_session=True,
            )


def why_not() -> str | None:
    """Why two hosts cannot be made here; None where they can."""
    for program in ("ip", "unshare", "mount", "hostname"):
        if shutil.which(program) is None:
            return f"network namespaces need the program {program}, which is not installed"
    name = f"mexp-{os.getpid()}-probe"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"network namespaces cannot be made here: {tried.stderr.strip()}"
    try:
        isolated = subprocess.run(
            ["ip", "netns", "exec", name, *_ISOLATE, "sh", "-c", "hostname probe && mount -t tmpfs tmpfs /dev/shm"],
            capture_output=True,
            text=True,
        )
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)
    return f"namespaces cannot be isolated here: {isolated.stderr.strip()}" if isolated.returncode else None


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts with a cable between them."""
    tag = os.getpid() % 100_000
    hosts = (
        Host("host-a", f"mexp-{tag}-a", "10.213.7.1"),
        Host("host-b", f"mexp-{tag}-b", "10.213.7.2"),
    )
    cables = [f"mx{tag}a", f"mx{tag}b"]
    with contextlib.ExitStack() as stack:
        for host in hosts:
            _ip("netns", "add", host.namespace)
            stack.callback(_ip, "netns", "delete", host.namespace)
        _ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        for host, cable in zip(hosts, cables, strict=True):
            _ip("link", "set", cable, "netns", host.namespace)
            _connect(host, cable)
        yield hosts


class Network:
    """A switch that hosts hang on.

    Args:
        devices: names of theirs, which are made.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        command = [sys.executable, "-m", "tests.helpers.switch", *devices]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n", "the switch has not begun"

    def become(self, conditions: Conditions) -> None:
        """From now on frames pass as they say."""
        assert self._process.stdin is not None
        self._process.stdin.write(conditions.as_line())
        self._process.stdin.flush()

    def close(self) -> None:
        """Ends the switch."""
        self._process.communicate(timeout=10)


@contextlib.contextmanager
def hosts_on_a_switch(count: int) -> Iterator[tuple[list[Host], Network]]:
    """So many hosts, each a port of the network by its number."""
    tag = os.getpid() % 100_000
    hosts = [Host(f"host-{n}", f"mexp-{tag}-{n}", f"10.213.8.{n + 1}") for n in range(count)]
    devices = [f"mx{tag}n{n}" for n in range(count)]
    with contextlib.ExitStack() as stack:
        network = Network(devices)
        stack.callback(network.close)
        for host, device in zip(hosts, devices, strict=True):
            _ip("netns", "add", host.namespace)
            stack.callback(_ip, "netns", "delete", host.namespace)
            _ip("link", "set", device, "netns", host.namespace)
            _connect(host, device)
        yield hosts, network


def torchrun(
    hosts: tuple[Host, Host], arguments: Sequence[str], logs: Path, *, per_host: int = 2
) -> tuple[list[int], list[str]]:
    """Run ``python -m <arguments>`` as ``per_host`` ranks on each host; the agents' exit statuses and outputs."""
    agents = []
    for number, host in enumerate(hosts):
        agent = [
            "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(per_host),
            "--node-rank", str(number), "--master-addr", hosts[0].address, "--master-port", "29517", "-m", *arguments,
        ]  # fmt: skip
        agents.append(host.start(agent, logs / f"{host.name}.log"))
    return finish(agents), [(logs / f"{host.name}.log").read_text() for host in hosts]


def finish(processes: Sequence[subprocess.Popen[bytes]], seconds: float = 120.0) -> list[int]:
    """Their exit statuses; whatever still runs when one does not end is killed."""
    try:
        return [process.wait(seconds) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _connect(host: Host, device: str) -> None:
    _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", device)
    _ip("-n", host.namespace, "link", "set", device, "up")
    _ip("-n", host.namespace, "link", "set", "lo", "up")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
