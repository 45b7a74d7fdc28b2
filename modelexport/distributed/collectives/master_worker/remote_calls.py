"""One rank's side of master-worker mode: its tensors and groups, and the collectives that it is told to run.

A command is a JSON object with a list of tensors beside it, and so is the answer. The master's own rank carries its
commands out with the same code, in a thread; there the tensors are the caller's own, on the workers copies of them.
"""

from __future__ import annotations

import inspect
import json
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from modelexport.distributed.collectives import operations
from modelexport.distributed.collectives.groups import group
from modelexport.distributed.collectives.master_worker.remote_types import RemoteGroup, RemotePart, RemoteTensor
from modelexport.distributed.collectives.reductions import op_name, reduce_op
from modelexport.distributed.supervision.failures import exception_message
from modelexport.system.dtypes import torch_dtype_named


class Arguments:
    """Turns a collective's arguments into JSON and the tensors that they name.

    A JSON object stands for what JSON has not: ``{"plain": i}`` the ``i``-th tensor, ``{"remote": n}`` a rank's own
    tensor of that number, ``{"group": n}``, ``{"world": true}``, ``{"op": "SUM"}``, and ``{"scratch": x, "count": k}``
    ``k`` fresh tensors like ``x``.
    """

    def __init__(self, session: object) -> None:
        self.tensors: list[Tensor] = []
        self._session = session

    def encode(self, value: Any) -> Any:
        """The JSON form of one argument.

        Raises:
            TypeError: there is none.
            RuntimeError: a handle of another session, or one that has been freed.
        """
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, timedelta):
            return value.total_seconds()
        if isinstance(value, (list, tuple)):
            return [self.encode(item) for item in value]
        if isinstance(value, Tensor):
            return {"plain": self._index(value)}
        if isinstance(value, (RemoteTensor, RemoteGroup)):
            if value.session is not self._session:
                raise RuntimeError(f"{value!r} belongs to a master-worker session that has ended")
            return {"group": value.number} if isinstance(value, RemoteGroup) else {"remote": value.alive()}
        if isinstance(value, RemotePart):
            raise TypeError(f"{value!r} names one rank's tensor: only send, recv, isend and irecv take one")
        if value is group.WORLD:
            return {"world": True}
        if isinstance(value, (reduce_op, dist.ReduceOp, dist.ReduceOp.RedOpType)):
            return {"op": op_name(value)}
        if hasattr(value, "__index__"):
            return value.__index__()
        raise TypeError(f"a {type(value).__name__} cannot be an argument in master-worker mode")

    def _index(self, tensor: Tensor) -> int:
        for index, known in enumerate(self.tensors):
            if known is tensor:
                return index
        if tensor.layout != torch.strided or tensor.is_meta:
            raise TypeError("only dense tensors with data can be given to a collective")
        self.tensors.append(tensor)
        return len(self.tensors) - 1


def copies(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[str]]:
    """``tensors`` on the CPU, to be sent to another process, and the type of device where each belongs."""
    sent = [tensor.detach().resolve_conj().resolve_neg().cpu() for tensor in tensors]
    return sent, [tensor.device.type for tensor in tensors]


def _let_go(error: BaseException) -> None:
    """Empties the frames of a traceback: the process group in their variables could otherwise not be closed."""
    link: BaseException | None = error
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__


class Member:
    """One rank's part. Used by one thread."""

    def __init__(self) -> None:
        self._tensors: dict[int, Tensor] = {}
        self._groups: dict[int, Any] = {}
        self._ready: tuple[str, dict[str, Any]] | None = None
        self._commands: dict[str, Callable[[dict[str, Any], list[Tensor]], tuple[dict[str, Any], list[Tensor]]]] = {
            "make": self._make,
            "fetch": self._fetch,
            "free": self._free,
            "prepare": self._prepare,
            "run": self._run,
            "drop": self._drop,
            "end": self._end,
        }

    def answer(self, text: str, tensors: list[Tensor]) -> tuple[str, list[Tensor], Exception | None]:
        """Carries one command out: the answer's text and tensors, and the exception that it tells of."""
        try:
            command = json.loads(text)
            for number in command.get("free", ()):
                self._tensors.pop(number, None)
            reply, result = self._commands[command["do"]](command, tensors)
        except Exception as error:
            reply = {"error": exception_message(error)}
            _let_go(error)
            return json.dumps(reply), [], error
        return json.dumps(reply), result, None

    def _make(self, command: dict[str, Any], tensors: list[Tensor]) -> tuple[dict[str, Any], list[Tensor]]:
        spec = command["spec"]
        if tensors:
            made = tensors[0].to(spec["device"], copy=True)
        else:
            dtype = torch_dtype_named(spec["dtype"])
            made = torch.empty(spec["shape"], dtype=dtype, device=spec["device"])
            if "value" in spec:
                value = spec["value"]
                made.fill_(complex(*value) if isinstance(value, list) else value)
        self._tensors[command["number"]] = made
        return {}, []

    def _fetch(self, command: dict[str, Any], tensors: list[Tensor]) -> tuple[dict[str, Any], list[Tensor]]:
        return {}, [self._tensors[command["number"]].detach().to("cpu", copy=True)]

    def _free(self, command: dict[str, Any], tensors: list[Tensor]) -> tuple[dict[str, Any], list[Tensor]]:
        return {"held": sum(tensor.nbytes for tensor in self._tensors.values())}, []

    def _prepare(self, command: dict[str, Any], tensors: list[Tensor]) -> tuple[dict[str, Any], list[Tensor]]:
        if "devices" in command:
            tensors = [tensor.to(device) for tensor, device in zip(tensors, command["devices"], strict=True)]
        name = command["name"]
        arguments = {key: self._decode(node, tensors) for key, node in command["arguments"].items()}
        parameters = inspect.signature(getattr(operations, name)).parameters
        if "check" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
            # What is wrong on one rank is then an error on all of them, and they remain usable.
            arguments.setdefault("check", True)
        self._ready = name, arguments
        return {}, []

    def _run(self, command: dict[str, Any], tensors: list[Tensor]) -> tuple[dict[str, Any], list[Tensor]]:
        assert self._ready is not None
        (name, arguments), self._ready = self._ready, None
        result = getattr(operations, name)(**arguments)
        if name == "new_group":
            self._groups[command["number"]] = result
            result = None
        return {"result": result}, []

    def _drop(self, command: dict[str, Any], tensors: list[Tensor]) -> tuple[dict[str, Any], list[Tensor]]:
        """Closes this rank's connections, which frees ranks that wait for it in a collective that has failed."""
        self._end(command, tensors)
        if dist.is_initialized():
            operations.destroy_process_group()
        return {}, []

    def _end(self, command: dict[str, Any], tensors: list[Tensor]) -> tuple[dict[str, Any], list[Tensor]]:
        self._tensors.clear()
        self._groups.clear()
        self._ready = None
        return {}, []

    def _decode(self, node: Any, tensors: list[Tensor]) -> Any:
        if isinstance(node, list):
            return [self._decode(item, tensors) for item in node]
        if not isinstance(node, dict):
            return node
        if "plain" in node:
            return tensors[node["plain"]]
        if "remote" in node:
            return self._tensors[node["remote"]]
        if "group" in node:
            return self._groups[node["group"]]
        if "op" in node:
            return getattr(dist.ReduceOp, node["op"])
        if "scratch" in node:
            like = self._decode(node["scratch"], tensors)
            return [torch.empty_like(like) for _ in range(node["count"])]
        assert "world" in node
        return group.WORLD
