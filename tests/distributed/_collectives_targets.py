"""What the rank processes of test_collectives run. Expected values are computed from Python numbers and bytes."""

from __future__ import annotations

import functools
import math
import operator
import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from modelexport.distributed import collectives as c
from modelexport.distributed.launch import report

FLOAT8 = [
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [*FLOATS, *INTEGERS, *COMPLEX, *FLOAT8, torch.bool]
SHAPES: list[tuple[int, ...]] = [(), (0,), (3, 0, 2), (1,), (5,), (2, 3), (3, 1, 4)]
LAYOUTS = ["dense", "transposed", "every second", "shifted", "parameter", "inference", "conjugate"]


# --- tensors from bytes ----------------------------------------------------------------------------


def filled(dtype: torch.dtype, shape: tuple[int, ...], *seed: object) -> torch.Tensor:
    """A tensor of arbitrary bits, the same for the same seed on every rank."""
    data = bytearray(random.Random(repr((str(dtype), shape, seed))).randbytes(math.prod(shape) * dtype.itemsize))
    if dtype == torch.bool:
        data = bytearray(byte & 1 for byte in data)
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).view(shape)


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same elements in other strides."""
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "every second" and tensor.dim():
        room = torch.zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]), dtype=tensor.dtype)
        room[..., ::2].copy_(tensor)
        return room[..., ::2]
    if layout == "shifted":
        room = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)
        room[1:].view(tensor.shape).copy_(tensor)
        return room[1:].view(tensor.shape)
    if layout == "conjugate" and tensor.is_complex():
        return tensor.conj_physical().conj()
    if layout == "inference":
        with torch.inference_mode():
            return laid_out(tensor, "every second")
    if layout == "parameter" and tensor.is_floating_point() and tensor.dtype in FLOATS:
        return torch.nn.Parameter(tensor.clone())
    return tensor.clone()


def bits(tensor: torch.Tensor) -> bytes:
    dense = tensor.detach().clone(memory_format=torch.contiguous_format).flatten()
    return dense.view(torch.uint8).numpy().tobytes() if dense.numel() else b""


def same(found: torch.Tensor, expected: torch.Tensor, case: object) -> None:
    assert found.shape == expected.shape, case
    assert bits(found) == bits(expected), (case, found, expected)


# --- moving data -----------------------------------------------------------------------------------


class Case:
    """One drawn collective, the same on every rank; ``send`` and ``room`` make this rank's tensors."""

    def __init__(self, draw: random.Random, number: int, ranks: list[int], group: Any) -> None:
        self.number, self.ranks, self.group = number, ranks, group
        self.dtype = draw.choice(DTYPES)
        self.shape = draw.choice(SHAPES)
        self.layouts = draw.choices(LAYOUTS, k=2)
        self.root = draw.choice(ranks)
        self.options = {"group": group, "async_op": draw.random() < 0.4, "check": draw.random() < 0.2}
        self.draw = draw
        self.rank = c.get_rank()

    def value(self, *seed: object, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        return filled(self.dtype, self.shape if shape is None else shape, self.number, *seed)

    def send(self, *seed: object, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        return laid_out(self.value(*seed, shape=shape), self.layouts[0])

    def room(self, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        return laid_out(self.value("before", shape=shape), self.layouts[1])

    def finish(self, request: Any) -> None:
        assert (request is not None) == self.options["async_op"]
        if request is not None:
            request.wait()
            assert request.is_completed()

    def __repr__(self) -> str:
        return f"case {self.number}: {self.dtype} {self.shape} {self.layouts} {self.ranks} {self.root} {self.options}"


def _broadcast(case: Case) -> None:
    tensor = case.send("sent") if case.rank == case.root else case.room()
    case.finish(c.broadcast(tensor, case.root, **case.options))
    same(tensor, case.value("sent"), case)


def _all_gather(case: Case) -> None:
    mine, rooms = case.send(case.rank), [case.room() for _ in case.ranks]
    case.finish(c.all_gather(rooms, mine, **case.options))
    for rank, room in zip(case.ranks, rooms, strict=True):
        same(room, case.value(rank), case)
    same(mine, case.value(case.rank), case)


def _gather(case: Case) -> None:
    rooms = [case.room() for _ in case.ranks]
    if case.rank == case.root:
        case.finish(c.gather(case.send(case.rank), gather_list=rooms, **case.options))  # dst left out: it is me
        for rank, room in zip(case.ranks, rooms, strict=True):
            same(room, case.value(rank), case)
    else:
        case.finish(c.gather(case.send(case.rank), dst=case.root, **case.options))


def _scatter(case: Case) -> None:
    room = case.room()
    if case.rank == case.root:
        case.finish(c.scatter(room, scatter_list=[case.send(rank) for rank in case.ranks], **case.options))
    else:
        case.finish(c.scatter(room, src=case.root, **case.options))
    same(room, case.value(case.rank), case)


def _all_to_all(case: Case) -> None:
    shapes = {pair: case.draw.choice(SHAPES) for pair in [(a, b) for a in case.ranks for b in case.ranks]}
    sent = [case.send(case.rank, to, shape=shapes[case.rank, to]) for to in case.ranks]
    rooms = [case.room(shape=shapes[source, case.rank]) for source in case.ranks]
    case.finish(c.all_to_all(rooms, sent, **case.options))
    for source, room in zip(case.ranks, rooms, strict=True):
        same(room, case.value(source, case.rank, shape=shapes[source, case.rank]), case)


def _all_to_all_single(case: Case) -> None:
    even = case.draw.random() < 0.5
    rest = case.draw.choice([(), (2,), (0,), (2, 3)])
    rows = {(a, b): 2 if even else case.draw.randrange(3) for a in case.ranks for b in case.ranks}
    given = [rows[case.rank, to] for to in case.ranks]
    taken = [rows[source, case.rank] for source in case.ranks]
    chunks = [case.value(case.rank, to, shape=(n, *rest)) for to, n in zip(case.ranks, given, strict=True)]
    data = bytearray(b"".join(map(bits, chunks)))
    whole = torch.frombuffer(data, dtype=case.dtype) if data else torch.empty(0, dtype=case.dtype)
    source = laid_out(whole.view(sum(given), *rest), case.layouts[0])
    room = case.room(shape=(sum(taken), *rest))
    splits = () if even else (taken, given)
    case.finish(c.all_to_all_single(room, source, *splits, **case.options))
    start = 0
    for rank, count in zip(case.ranks, taken, strict=True):
        same(room[start : start + count], case.value(rank, case.rank, shape=(count, *rest)), case)
        start += count


def _ring(case: Case) -> None:
    """Everyone sends to the next of the group and receives from the one before."""
    place = case.ranks.index(case.rank)
    after, before = case.ranks[(place + 1) % len(case.ranks)], case.ranks[place - 1]
    if after == case.rank:
        return
    room, tag = case.room(), case.number
    if case.options["async_op"]:
        arriving = c.irecv(room, before, case.group, tag)
        leaving = c.isend(case.send(case.rank), after, case.group, tag)
        while not arriving.is_completed():
            time.sleep(0.001)
        leaving.wait()
        assert arriving.source_rank() == before
    elif place == 0:
        c.send(case.send(case.rank), after, case.group, tag)
        assert c.recv(room, before, case.group, tag) == before
    else:
        assert c.recv(room, None if len(case.ranks) == 2 else before, case.group, tag) == before
        c.send(case.send(case.rank), after, case.group, tag)
    same(room, case.value(before), case)


MOVES: list[Callable[[Case], None]] = [
    _broadcast,
    _all_gather,
    _gather,
    _scatter,
    _all_to_all,
    _all_to_all_single,
    _ring,
]


def move(seed: int, count: int) -> None:
    """``count`` drawn transfers of each kind, in the world and in a group in some order."""
    draw = random.Random(seed)
    world = list(range(c.get_world_size()))
    some = draw.sample(world, max(1, len(world) - 1))
    groups = [(world, c.group.WORLD), (some, c.new_group(some)), (world[::-1], c.new_group(world[::-1]))]
    for number in range(count * len(MOVES)):
        ranks, group = draw.choice(groups)
        kind = MOVES[number % len(MOVES)]
        case = Case(random.Random(draw.random()), number, ranks, group)
        if c.get_rank() in ranks:
            try:
                kind(case)
            except Exception as error:
                error.args = (f"{kind.__name__} {case}: {error}",)
                raise
    report({"rank": c.get_rank()})


# --- arithmetic ------------------------------------------------------------------------------------

OPS = ["SUM", "PRODUCT", "MAX", "MIN"]
BITWISE = {"BAND": operator.and_, "BOR": operator.or_, "BXOR": operator.xor}
EXPECTED: dict[str, Callable[[list], Any]] = {
    "SUM": lambda values: functools.reduce(operator.add, values),
    "PRODUCT": lambda values: functools.reduce(operator.mul, values),
    "MAX": max,
    "MIN": min,
    **{name: functools.partial(functools.reduce, function) for name, function in BITWISE.items()},
}


def numbers(dtype: torch.dtype, count: int, *seed: object) -> list:
    """Values whose sums and products are exact in ``dtype``, or wrap around."""
    draw = random.Random(repr((str(dtype), count, seed)))
    if dtype == torch.bool:
        return [draw.random() < 0.5 for _ in range(count)]
    if dtype.is_complex:
        return [complex(draw.randrange(-9, 9), draw.randrange(-9, 9)) for _ in range(count)]
    if dtype.is_floating_point:
        return [float(draw.randrange(-2, 3)) for _ in range(count)]
    info = torch.iinfo(dtype)
    return [draw.choice([draw.randint(info.min, info.max), draw.randint(0, 9)]) for _ in range(count)]


def combined(dtype: torch.dtype, op: str, values: list) -> Any:
    """The ranks' values of one element combined as ``dtype`` does it."""
    found = EXPECTED[op]([int(value) for value in values] if dtype == torch.bool else values)
    if dtype == torch.bool:
        return bool(found)
    if dtype.is_complex or dtype.is_floating_point:
        return found
    info = torch.iinfo(dtype)
    return (found - info.min) % (1 << 8 * dtype.itemsize) + info.min


def reductions(seed: int, count: int, per_rank: int) -> None:
    """Drawn reductions over ``per_rank`` tensors on each rank (0: the ones of a single tensor)."""
    draw = random.Random(seed)
    world = list(range(c.get_world_size()))
    some = draw.sample(world, max(1, len(world) - 1))
    groups = [(world, c.group.WORLD), (some, c.new_group(some))]
    for number in range(count):
        dtype = draw.choice([*FLOATS, *INTEGERS, *COMPLEX, torch.bool])
        ops = ["SUM"] if dtype.is_complex else OPS if dtype.is_floating_point else [*OPS, *BITWISE]
        op, shape = draw.choice(ops), draw.choice(SHAPES)
        ranks, group = draw.choice(groups)
        root = draw.choice([None, *ranks])
        options = {"async_op": draw.random() < 0.3} if not per_rank else {}
        layout, check = draw.choice(LAYOUTS), draw.random() < 0.2
        if c.get_rank() not in ranks:
            continue
        each = [(rank, index) for rank in ranks for index in range(per_rank or 1)]
        given = {place: numbers(dtype, math.prod(shape), number, place) for place in each}
        total = [combined(dtype, op, list(values)) for values in zip(*given.values(), strict=True)]
        mine = [given[c.get_rank(), index] for index in range(per_rank or 1)]
        tensors = [laid_out(torch.tensor(values, dtype=dtype).view(shape), layout) for values in mine]
        kind = getattr(c.reduce_op, op) if op in OPS and number % 2 else getattr(dist.ReduceOp, op)
        what: Any = tensors if per_rank else tensors[0]
        arguments: tuple = (what, kind, group) if root is None else (what, root, kind, group)
        name = ("all_reduce" if root is None else "reduce") + ("_multigpu" if per_rank else "")
        request = getattr(c, name)(*arguments, **options, check=check)
        if options.get("async_op"):
            request.wait()
        expected = [total] * len(tensors) if root is None else mine
        if c.get_rank() == root:
            expected = [total, *mine[1:]]
        for tensor, values in zip(tensors, expected, strict=True):
            case = (number, name, dtype, op, shape, layout, ranks, root)
            assert tensor.flatten().tolist() == values, (case, tensor, values)
            assert dtype != torch.bool or set(bits(tensor)) <= {0, 1}, (case, bits(tensor))
    report({"rank": c.get_rank()})


def identical_bits(count: int) -> None:
    """all_reduce of numbers whose sum depends on the order: every rank gets the same bits, and about the right ones."""
    for dtype in FLOATS:
        for op in c.reduce_op:
            mine = filled(torch.uint8, (count,), c.get_rank()).to(torch.float64).sub(127).div(61)
            tensor = mine.to(dtype)
            total = tensor.double()
            c.all_reduce(tensor, op)
            every = [torch.empty_like(tensor) for _ in range(c.get_world_size())]
            c.all_gather(every, tensor)
            assert len({bits(each) for each in every}) == 1, (dtype, op)
            lists = [mine.to(dtype).clone() for _ in range(2)]
            c.all_reduce_multigpu(lists, op)
            c.all_gather(every, lists[1])
            assert len({bits(each) for each in (*every, lists[0])}) == 1, (dtype, op)
            if op is c.reduce_op.SUM:
                c.all_reduce(total)
                torch.testing.assert_close(tensor.double(), total, rtol=0, atol=0.05)
    report({"rank": c.get_rank()})


def many_devices() -> None:
    """broadcast_multigpu and all_gather_multigpu, three tensors a rank."""
    rank, size, count = c.get_rank(), c.get_world_size(), 3
    for dtype in DTYPES:
        for shape, layout in [((2, 3), "transposed"), ((), "dense"), ((0, 2), "dense")]:
            tensors = [laid_out(filled(dtype, shape, rank, j), layout) for j in range(count)]
            outputs = [[torch.empty(shape, dtype=dtype) for _ in range(size * count)] for _ in range(count)]
            c.all_gather_multigpu(outputs, tensors)
            for output in outputs:
                for k in range(size):
                    for j in range(count):
                        same(output[k * count + j], filled(dtype, shape, k, j), (dtype, shape, k, j))
            c.broadcast_multigpu(tensors, size - 1)
            for tensor in tensors:
                same(tensor, filled(dtype, shape, size - 1, 0), (dtype, shape))
    report({"rank": rank})
