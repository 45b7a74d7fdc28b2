"""The environment of another launcher (torchrun, accelerate, srun, mpirun), and the cores and network interfaces."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import struct
from collections.abc import Mapping

from modelexport.distributed.config import MISSING, MultiprocessConfig, is_loopback
from modelexport.errors import UsageError, shown

_SIOCGIFADDR = 0x8915
_MOST_NODES = 1 << 20

# rank, world size, local rank, local world size
_NAMES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),  # torchrun, accelerate
    (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),  # Intel MPI, MPICH
)


def external_config(config: MultiprocessConfig | None = None) -> MultiprocessConfig | None:
    """The config of this process as a rank of another launcher, or None where no other launcher started it.

    Understands torchrun's variables (accelerate sets the same), Open MPI's, PMI's, and SLURM's where this
    process is a task of ``srun`` with more than one task. A launcher of a single process counts as none.

    Args:
        config: gives all that the environment does not say (parallelism, back ends, time-out).

    Raises:
        UsageError: ``config`` asks for another world size than the launcher started, or the launcher says
            neither address nor port (``MASTER_ADDR``, ``MASTER_PORT``).
    """
    sizes = _sizes_from(os.environ)
    if sizes is None or sizes[1] <= 1:
        return None
    rank, world_size, local_rank, local_world_size = sizes
    base = MultiprocessConfig() if config is None else config
    if base.world_size not in (None, MISSING, world_size):
        raise UsageError(
            f"{base.world_size} ranks are asked for, but the launcher of this process started {world_size}; "
            f"make both the same, or leave out the number of ranks"
        )
    address, port = _master_address(os.environ, one_machine=local_world_size == world_size)
    found = base.for_rank(rank, local_rank)
    found.on_event = base.on_event
    found.world_size, found.local_world_size = world_size, local_world_size
    found.master_addr, found.master_port = address, port
    found.init_method = os.environ.get("INIT_METHOD", base.init_method)
    MultiprocessConfig.resolve(found)
    return found


def external_rank() -> int | None:
    """This process's rank among several that another launcher started; None where none did."""
    sizes = _sizes_from(os.environ)
    return None if sizes is None or sizes[1] <= 1 else sizes[0]


def _sizes_from(environ: Mapping[str, str]) -> tuple[int, int, int, int] | None:
    for rank, world, local_rank, local_world in _NAMES:
        if all(name in environ for name in (rank, world, local_rank)):
            size = _number(environ, world)
            own = _number(environ, local_world) if local_world in environ else size
            return _number(environ, rank), size, _number(environ, local_rank), own
    # SLURM_PROCID is also set in a batch script, which is one process; the step's task count is srun's own.
    if all(name in environ for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")):
        size = _number(environ, "SLURM_STEP_NUM_TASKS")
        node = _number(environ, "SLURM_NODEID") if "SLURM_NODEID" in environ else 0
        counts = slurm_tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", str(size)))
        if node >= len(counts):
            raise UsageError(f"SLURM_NODEID={node}, but SLURM_STEP_TASKS_PER_NODE is of {len(counts)} nodes")
        return _number(environ, "SLURM_PROCID"), size, _number(environ, "SLURM_LOCALID"), counts[node]
    return None


def _number(environ: Mapping[str, str], name: str) -> int:
    """A whole number that a launcher has left in the environment.

    Raises:
        UsageError: it is none.
    """
    if re.fullmatch(r"\s*[0-9]{1,18}\s*", environ[name]) is None:
        raise UsageError(
            f"{name}={shown(environ[name])}, which is no whole number: the launcher of this process sets it"
        )
    return int(environ[name].strip())


def _master_address(environ: Mapping[str, str], *, one_machine: bool) -> tuple[str, int]:
    address = environ.get("MASTER_ADDR", "127.0.0.1" if one_machine else "")
    port = _number(environ, "MASTER_PORT") if environ.get("MASTER_PORT") else 0
    if not address and "SLURM_STEP_NODELIST" in environ:
        address = first_slurm_host(environ["SLURM_STEP_NODELIST"])
    if not port and "SLURM_JOB_ID" in environ:
        # The same on every node, different for jobs and steps that share one; below the ephemeral ports.
        job = _number(environ, "SLURM_JOB_ID")
        step = _number(environ, "SLURM_STEP_ID") if "SLURM_STEP_ID" in environ else 0
        port = 12000 + (job * 31 + step) % 20000
    if not address or not port:
        raise UsageError("the ranks cannot meet: set MASTER_ADDR and MASTER_PORT to the same on every machine")
    return address, port


def slurm_tasks_per_node(text: str) -> list[int]:
    """``"4(x2),3"`` -> ``[4, 4, 3]``."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,6})\))?", part.strip())
        if found is None or len(counts) > _MOST_NODES:
            raise UsageError(f"cannot read SLURM_STEP_TASKS_PER_NODE={shown(text)}: '4(x2),3' is such a text")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def first_slurm_host(text: str) -> str:
    """``"node[03-05,9],other"`` -> ``"node03"``."""
    found = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", text)
    if found is None:
        raise UsageError(f"cannot read SLURM_STEP_NODELIST={shown(text)}: 'node[03-05,9],other' is such a text")
    return found[1] + (found[2] or "") + (found[3] or "")


def cores() -> int:
    """Processor cores that this process may use: its affinity, cut by the control group's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        if quota != "max":
            count = min(count, -(-int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return max(1, count)


def share_cores(local_world_size: int) -> None:
    """Gives torch in this process its part of the machine's cores; ``OMP_NUM_THREADS``, where set, says how many."""
    import torch

    # Ranks that spin while they wait take the cores from those that work.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // local_world_size)))
    try:
        threads = int(os.environ["OMP_NUM_THREADS"].split(",")[0])
    except ValueError:
        return
    torch.set_num_threads(max(1, threads))


def interface_towards(address: str, *, local: bool) -> str | None:
    """The network interface by which this machine reaches ``address``, None where that cannot be told.

    Args:
        address: a host name, IPv4 or IPv6 address.
        local: everything is on this machine: the loopback interface will do.
    """
    names = [name for _, name in socket.if_nameindex()]
    if local or is_loopback(address):
        return next((name for name in names if name in ("lo", "lo0")), None)
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)  # sends nothing: the kernel chooses the way, and with it our address
            mine = probe.getsockname()[0]
            if family != socket.AF_INET:
                return _interface_with_ipv6(mine)
            return next((name for name in names if _ipv4_address(probe, name) == mine), None)
    except OSError:
        return None


def _ipv4_address(sock: socket.socket, interface: str) -> str | None:
    try:
        answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    except OSError:  # it has none
        return None
    return socket.inet_ntoa(answer[20:24])


def _interface_with_ipv6(address: str) -> str | None:
    wanted = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
    with open("/proc/net/if_inet6", encoding="ascii") as table:
        for fields in map(str.split, table):
            if fields[0] == wanted:
                return fields[5]
    return None
