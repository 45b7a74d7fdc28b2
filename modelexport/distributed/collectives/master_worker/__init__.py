"""Master-worker mode: one process calls the collectives, and all the others carry out their part of them.

:func:`init_master_worker` is called by every process. It returns on rank 0, the master, and there alone may be used
what :mod:`modelexport.distributed.collectives` offers; the other ranks, the workers, stay inside it and serve. When the
master calls ``destroy_process_group()`` it returns on the workers too, with nothing left initialised. (The first
torch.distributed ended a worker's process at this point. A function that returns lets the program go on: close files,
start again, end with exit status 0 for its launcher.)

What a collective does in this mode is what it does when every rank calls it:

- A plain tensor stands for one tensor per rank: the master's own on rank 0, a copy of it on every worker. The master's
  gets what rank 0 would get, so ``all_reduce(torch.ones(3))`` makes it the world size. Results on workers are lost.
- A :class:`~modelexport.distributed.collectives.master_worker.remote_types.RemoteTensor` is one tensor on each rank,
  where it stays and gets that rank's result. Both kinds can be mixed: ``gather(remote, gather_list=plain)`` fetches,
  ``scatter`` distributes.
- ``gather`` and ``scatter`` without ``dst`` / ``src`` mean rank 0. A list on another rank consists of RemoteTensors.
- ``send(t, dst)`` sends rank 0's tensor into rank ``dst``'s, ``recv(t, src)`` rank ``src``'s into rank 0's; another
  rank than 0 is named by ``t.part(rank)``. ``recv`` from any source is refused: nobody sends unless the master says so.
- Requests (``isend``, ``irecv``, ``async_op=True``) run on the ranks in the order of the calls.
- ``new_group`` returns a handle for the master's calls. Only the group's members take part in those.

Calls are checked on all ranks before data move (``check=True``), so that a mistake is an error and no more. Where
a rank fails in the middle, or its process ends, the master's call raises and names it, and all that can be done
afterwards is ``destroy_process_group()``. A worker whose master has gone raises as well.

The ranks meet by ``init_method`` alone (rpc uses the process group's store), and data go through a process group
like any other; rpc carries commands and copies of the master's tensors. (torch's rpc, like its stores, trusts whoever
reaches its ports: it is for networks that you trust.) Another session, or process-group mode, may follow in the same
processes. Under torchrun it needs an ``init_method`` of its own: the store of torchrun's agent still holds the
addresses of the first (``torch.distributed`` itself starts only once there as well).
"""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import rpc

from modelexport.distributed.collectives import operations
from modelexport.distributed.collectives.collective_mode import driver, set_driver
from modelexport.distributed.collectives.groups import AnyGroup, group
from modelexport.distributed.collectives.master_worker import remote_types
from modelexport.distributed.collectives.master_worker.driving import HANG_UP, Outcome, RankPool, Work
from modelexport.distributed.collectives.master_worker.master_calls import CollectiveCall, plan_call
from modelexport.distributed.collectives.master_worker.rank_session import RankSession
from modelexport.distributed.collectives.master_worker.remote_calls import copies
from modelexport.distributed.collectives.master_worker.remote_types import RemoteGroup
from modelexport.distributed.collectives.master_worker.serving import serve
from modelexport.distributed.config import DEFAULT_TIMEOUT
from modelexport.errors import RankFailedError

__all__ = ["init_master_worker"]


def init_master_worker(backend: str, init_method: str = "env://", **kwargs: Any) -> None:
    """Starts master-worker mode; every process of the job calls it. See the module for what follows.

    Returns at once on rank 0, the master; on the workers when the master has called ``destroy_process_group()``.

    Args:
        backend: as for ``collectives.init_process_group``: ``"gloo"``, ``"tcp"`` (gloo over TCP), ``"nccl"``,
            ``"mpi"`` where torch was built with MPI.
        init_method: ``env://``, ``tcp://host:port`` or ``file:///path``.
        world_size (int), rank (int): may be left out where ``init_method`` tells them.
        group_name (str): handed to torch, which no longer uses it.

    The environment's ``MODELEXPORT_TIMEOUT`` (seconds, 1800 by default) limits every wait for other ranks.

    Raises:
        AssertionError: an unknown argument.
        RuntimeError: torch has no distributed support, not this back end, or no rpc; the back end's name is
            unknown; this process belongs to a group already; the ranks do not find each other.
        RankFailedError: on a worker: the master's process has ended without ``destroy_process_group()``.
    """
    warnings.warn(
        "master-worker mode is experimental: how it is called may still change, and it has been tested and tuned "
        "less than process-group mode (init_process_group)",
        stacklevel=3,
    )
    place = {"world_size": -1, "rank": -1, "group_name": ""}
    place |= {name: kwargs.pop(name) for name in place if name in kwargs}
    assert len(kwargs) == 0, "got unexpected keyword arguments: {}".format(",".join(kwargs))
    if not dist.is_available():
        raise RuntimeError("PyTorch built without distributed support")
    if dist.is_initialized() or driver() is not None:
        raise RuntimeError("trying to initialize torch.distributed twice!")
    if not rpc.is_available():
        raise RuntimeError("this build of torch has no torch.distributed.rpc, by which the master drives its workers")
    seconds = float(os.environ.get("MODELEXPORT_TIMEOUT", DEFAULT_TIMEOUT))
    session = RankSession(backend, init_method, place, seconds)
    try:
        if session.rank == 0:
            Master(session).take_over()
            return
        together = serve()
    except ConnectionError as error:
        session.end(together=False)
        raise RankFailedError(0, f"driving rank {session.rank}", str(error)) from None
    except BaseException:
        session.end(together=False)
        raise
    session.end(together=together)


class Master:
    """The driver of the collectives on rank 0. Its calls may come from any thread; one is carried out at a time.

    Raises:
        RuntimeError: not all workers began to serve in time.
    """

    def __init__(self, session: RankSession) -> None:
        self.world_size = session.world_size
        self.types: Mapping[str, Any] = {name: getattr(remote_types, name) for name in remote_types.__all__}
        self._session = session
        self._numbers = itertools.count()
        self.lock = threading.RLock()
        self._ended = False
        session.lifelines.wait_for(session.world_size - 1, session.seconds)
        self._ranks = RankPool(session.world_size, session.seconds)

    def take_over(self) -> None:
        """From here on the collectives come to this driver, and the names of remote_types are theirs too."""
        set_driver(self)
        atexit.register(self._exit)

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One collective, as :mod:`collective_mode` says."""
        if self._ranks.is_own_thread():
            return getattr(operations, name).__wrapped__(*args, **kwargs)
        if name in ("get_rank", "get_world_size"):
            ranks = self._members(*args, **kwargs)
            return -1 if 0 not in ranks else ranks.index(0) if name == "get_rank" else len(ranks)
        if name == "destroy_process_group" and all(value in (None, group.WORLD) for value in (*args, *kwargs.values())):
            return self.destroy()
        plan = plan_call(name, args, kwargs, session=self, world_size=self.world_size)
        with self.lock:
            number = next(self._numbers)
            request = RemoteRequest(self, self._start(plan, number), plan.answer_from)
            if plan.in_background:
                return request
            request.wait()
        if name == "new_group":
            ranks = plan.on[0][1].get("ranks") or range(self.world_size)
            return RemoteGroup(self, number, ranks)
        return request.result

    def _start(self, plan: CollectiveCall, number: int) -> Work:
        self._check_usable()
        sent, devices = copies(plan.tensors) if len(plan.on) > (0 in plan.on) else ([], [])
        commands = {}
        for rank, (name, arguments) in plan.on.items():
            command = {"do": "prepare", "name": name, "arguments": arguments}
            commands[rank] = (command, plan.tensors) if rank == 0 else ({**command, "devices": devices}, sent)
        self._ranks.settle(self._ranks.send(f"preparing {plan.name}", commands))
        run: dict[str, Any] = {"do": "run", "number": number}
        return self._ranks.send(f"running {plan.name}", {rank: (run, []) for rank in plan.on})

    def settle(self, work: Work) -> dict[int, Outcome]:
        """Waits for what runs on the ranks; see :meth:`RankPool.settle`."""
        with self.lock:
            return self._ranks.settle(work, together=True)

    def _members(self, group: AnyGroup | RemoteGroup = group.WORLD) -> Sequence[int]:
        return group.ranks if isinstance(group, RemoteGroup) else range(self.world_size)

    def _check_usable(self) -> None:
        if self._ended:
            raise RuntimeError("this master-worker session has ended")
        if self._ranks.broken is not None:
            raise RuntimeError(
                f"the workers cannot be used any more: {self._ranks.broken}; "
                f"call destroy_process_group() and start again"
            )

    def _everywhere(self, name: str, command: dict[str, Any], ranks: Iterable[int]) -> dict[int, Outcome]:
        with self.lock:
            self._check_usable()
            return self._ranks.settle(self._ranks.send(name, {rank: (command, []) for rank in ranks}))

    # ------------------------------------------------------------------ what RemoteTensor needs

    def make(self, specs: list[dict[str, Any]], given: list[Tensor] | None) -> int:
        """See :class:`remote_types.RemoteTensor`."""
        number = next(self._numbers)
        commands = {}
        for rank, spec in enumerate(specs):
            device = spec["device"] or ("cuda" if str(dist.get_backend()) == "nccl" else "cpu")
            command = {"do": "make", "number": number, "spec": {**spec, "device": device}}
            commands[rank] = (command, [] if given is None else copies([given[rank]])[0])
        with self.lock:
            self._check_usable()
            try:
                self._ranks.settle(self._ranks.send("making a remote tensor", commands))
            except BaseException:
                self._ranks.forget(number)
                raise
        return number

    def fetch(self, number: int, ranks: Sequence[int]) -> list[Tensor]:
        """See :class:`remote_types.RemoteTensor`."""
        outcomes = self._everywhere("sending a tensor to the master", {"do": "fetch", "number": number}, ranks)
        return [outcomes[rank].tensors[0] for rank in ranks]

    def free(self, number: int) -> None:
        """See :class:`remote_types.RemoteTensor`."""
        self._ranks.forget(number)
        if not self._ended and self._ranks.broken is None:
            self.held_bytes()

    def forget(self, number: int) -> None:
        """See :class:`remote_types.RemoteTensor`."""
        self._ranks.forget(number)

    def held_bytes(self) -> list[int]:
        """Bytes of remote tensors on each rank."""
        outcomes = self._everywhere("freeing tensors", {"do": "free"}, range(self.world_size))
        return [outcomes[rank].reply["held"] for rank in range(self.world_size)]

    # ------------------------------------------------------------------ the end

    def destroy(self) -> None:
        """Sends the workers home and leaves nothing initialised.

        Raises:
            RankFailedError: a worker turns out to be gone. (One that an earlier error has named is not named again.)
        """
        with self.lock:
            known = self._ranks.broken is not None
            try:
                if not known:
                    self.held_bytes()  # leaving together needs everybody: is everybody there?
            finally:
                self._end(together=self._ranks.broken is None)

    def _end(self, *, together: bool) -> None:
        self._let_go()
        try:
            command = {"do": "end", "together": together}
            work = self._ranks.send("leaving", {rank: (command, []) for rank in self._ranks.living()})
            while work.missing and work.take(self._session.seconds if together else HANG_UP):
                pass
            self._session.lifelines.release()
            self._ranks.stop()
        finally:
            self._session.end(together=together)

    def _let_go(self) -> None:
        self._ended = True
        set_driver(None)
        atexit.unregister(self._exit)

    def _exit(self) -> None:
        """The program ends without destroy_process_group(): the workers see the connection end, and say so."""
        self._let_go()
        self._session.hang_up()


class RemoteRequest:
    """The request that an asynchronous call returns to the master.

    Attributes:
        result: what the call returns, once waited for.
    """

    def __init__(self, master: Master, work: Work, answer_from: int | None) -> None:
        self._master, self._work, self._answer_from = master, work, answer_from
        self._done = False
        self.result: Any = None

    def is_completed(self) -> bool:
        """Returns whether all ranks have carried the call out. Raises the exception that made it fail."""
        while self._work.missing and self._work.take(0.0):
            pass
        if not self._work.missing or self._work.failures():
            self.wait()
        return self._done

    def wait(self) -> None:
        """Blocks until all ranks have carried it out.

        Raises:
            RankFailedError: a worker failed or is gone. The error of rank 0 itself is raised as it is.
        """
        with self._master.lock:
            if self._done:
                return
            self._done = True
            outcomes = self._master.settle(self._work)
        if self._answer_from is not None:
            self.result = outcomes[self._answer_from].reply["result"]

    def source_rank(self) -> int:
        """Of a receive: the sender's rank."""
        self.wait()
        return int(self.result)
