"""Power loss at every moment of a run: the target is whole or absent in all that a journalled file system may keep.

``python -m tests.faults.power_loss DIRECTORY``: a job runs once, and the calls of all its processes are logged, in one
order, with the bytes that they wrote. For every prefix of the log, the states are made that the disk may be in if the
power goes then, as POSIX and file systems with an ordered journal (ext4, XFS) allow:

- Changes of names (making, renaming, removing) are kept up to some point, in order. That point is not before the last
  change of a file or a directory that has been fsynced since.
- What was written into a file before its last fsync began is there. Of all later writes, and changes of its size, none
  is there, or all are, or any of them, whole or in part.

In each state the target's files are compared with those that the run ended with. A part of the states is put on the
disk and the command is run again, as after another boot. Of a job with ranks all is looked at a second time as if each
process had a machine to itself: an fsync is then good for its own writes alone.

A push writes nothing here, which is checked; power is lost at each of its requests to the hub, whose repository has the
whole checkpoint then, or nothing.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
import re
import signal
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tests.faults.interposed import FILES, KINDS, Record, run_interposed
from tests.faults.jobs import JOBS, PUSH, Job, Running, Workshop, difference, digests, pushing, version

_EXCHANGE = 2
_CREATE, _TRUNCATE = os.O_CREAT, os.O_TRUNC
_CHANGING = ("write", "munmap", "truncate", "allocate", "rename", "unlink", "mkdir")
Tree = dict[str, "Node"]
"""Path -> what is there."""


@dataclass(eq=False)
class Node:
    """A file or a directory.

    Attributes:
        changes: of a file: (place in the log, process, what it does to the content).
        before: its content when the log begins.
        syncs: (place in the log where one begins, where it has ended, process).
        named: places in the log at which its names, or those in it, change.
    """

    is_directory: bool
    inode: int
    before: bytes = b""
    changes: list[tuple[int, int, int, bytes]] = field(default_factory=list)
    syncs: list[tuple[int, int, int]] = field(default_factory=list)
    named: list[int] = field(default_factory=list)

    def unsynced(self, end: int, *, apart: bool) -> frozenset[int]:
        """Places of the changes before ``end`` that no fsync has made safe; with ``apart``, none of its process."""
        safe: dict[int, int] = {}
        for begin, ended, pid in self.syncs:
            if ended < end:
                key = pid if apart else 0
                safe[key] = max(begin, safe.get(key, -1))
        return frozenset(place for place, pid, _, _ in self.changes if safe.get(pid if apart else 0, -1) <= place < end)

    def content(self, kept: Callable[[int, int], int]) -> bytes:
        """The content if of each change so many bytes are kept."""
        content = bytearray(self.before)
        for place, _, offset, data in self.changes:
            if offset == _SIZE:
                size = int.from_bytes(data, "little")
                if kept(place, 1):
                    del content[size:]
                    content.extend(bytes(size - len(content)))
                continue
            count = kept(place, len(data))
            if count:
                content.extend(bytes(max(0, offset + count - len(content))))
                content[offset : offset + count] = data[:count]
        return bytes(content)


_SIZE = -1  # in place of an offset: the change sets the file's size


@dataclass(frozen=True)
class State:
    """What is on the disk.

    Attributes:
        end: how many calls were done.
        names: how many changes of names are kept.
        unsynced: whether ``none``, ``all`` or ``some`` of the writes that were not synced are.
    """

    end: int
    names: int
    unsynced: str

    def __str__(self) -> str:
        return f"after call {self.end}, {self.names} changes of names and {self.unsynced} of what was not synced kept"


class History:
    """The log of a run as changes of names and of contents.

    Args:
        log: of the run.
        data: what it wrote.
        begin: the tree before it, its directories with their inodes.
        apart: whether each process has a machine to itself.

    Attributes:
        names: (place in the log, the change, what else it says) of every change of names.
        nodes: all files and directories that there ever were.
        length: of the log.
    """

    def __init__(self, log: Sequence[Record], data: bytes, begin: Tree, *, apart: bool = False) -> None:
        self.begin, self.length, self._apart = copy.deepcopy(begin), len(log), apart
        self.names: list[tuple[int, Callable[[Tree], object]]] = []
        self.nodes: list[Node] = list(self.begin.values())
        self._now, self._by_inode = dict(self.begin), {node.inode: node for node in self.nodes}
        self._beginning: dict[tuple[int, int], int] = {}
        self._contents: dict[tuple[Node, int, frozenset[int]], bytes] = {}
        for place, record in enumerate(log):
            if record.result >= 0:
                self._take(place, KINDS[record.kind], record, data)

    def _take(self, place: int, kind: str, record: Record, data: bytes) -> None:
        path, other = record.path.decode(), record.other.decode()
        node = self._by_inode.get(record.inode)
        if kind == "mkdir" or (kind == "open" and record.flags & 1 and record.flags & _CREATE):
            made = Node(kind == "mkdir", record.inode)
            self.nodes.append(made)
            self._by_inode[record.inode] = made
            self._change(place, path, made, lambda tree: tree.__setitem__(path, made))
        elif kind == "open" and node is not None and record.flags & _TRUNCATE:
            node.changes.append((place, record.pid, _SIZE, (0).to_bytes(8, "little")))
        elif kind == "rename":
            for each in (path, other):
                self._parent(each).named.append(place)
            self._change(place, other, node, lambda tree: _rename(tree, path, other, record.flags == _EXCHANGE))
        elif kind == "unlink":
            self._change(place, path, node, lambda tree: tree.pop(path, None))
        elif node is None:
            assert kind not in ("write", "munmap", "truncate", "allocate"), f"{kind} of an unknown file {path}"
        elif kind in ("write", "munmap"):
            assert record.data >= 0, "the bytes were not kept"
            written = data[record.data : record.data + record.length]
            node.changes.append((place, record.pid, record.offset, written))
        elif kind == "truncate" or (kind == "allocate" and record.flags == 0):
            size = (record.offset + record.length).to_bytes(8, "little")
            node.changes.append((place, record.pid, _SIZE, size))
        elif kind == "begin fsync":
            self._beginning[record.pid, record.inode] = place
        elif kind == "fsync":
            node.syncs.append((self._beginning.pop((record.pid, record.inode)), place, record.pid))

    def _parent(self, path: str) -> Node:
        return self._now[os.path.dirname(path)]

    def _change(self, place: int, path: str, node: Node | None, change: Callable[[Tree], object]) -> None:
        self._parent(path).named.append(place)
        if node is not None:
            node.named.append(place)
        change(self._now)
        self.names.append((place, change))

    def durable_names(self, end: int) -> int:
        """How many changes of names are on the disk in any case when the first ``end`` calls were done."""
        last = -1
        for node in self.nodes:
            begun = max((begin for begin, done, _ in node.syncs if done < end), default=-1)
            last = max(last, max((place for place in node.named if place < begun), default=-1))
        return sum(place <= last for place, _ in self.names)

    def tree(self, count: int) -> Tree:
        """The names after so many changes of them."""
        tree = dict(self.begin)
        for _, change in self.names[:count]:
            change(tree)
        return tree

    def states(self, end: int) -> Iterator[State]:
        """What the disk may hold when the power goes after ``end`` calls."""
        done = sum(place < end for place, _ in self.names)
        for count in range(self.durable_names(end), done + 1):
            for label in ("none", "all", "some"):
                yield State(end, count, label)

    def contents(self, state: State, tree: Tree) -> dict[Node, bytes]:
        """What the files hold."""
        rng = Random(f"{state.end}/{state.names}")
        return {node: self._content(node, state, rng) for node in tree.values() if not node.is_directory}

    def _content(self, node: Node, state: State, rng: Random) -> bytes:
        count = sum(place < state.end for place, _, _, _ in node.changes)
        unsynced = node.unsynced(state.end, apart=self._apart)
        label = state.unsynced if unsynced else "all"

        def kept(place: int, length: int) -> int:
            if place >= state.end:
                return 0
            if place not in unsynced or label == "all":
                return length
            return 0 if label == "none" else rng.choice((0, length, rng.randint(0, length)))

        if label == "some":
            return node.content(kept)
        key = (node, count, unsynced if label == "none" else frozenset())
        if key not in self._contents:
            self._contents[key] = node.content(kept) if node.changes else node.before
        return self._contents[key]


def _rename(tree: Tree, a: str, b: str, exchange: bool) -> None:
    moved = {path: tree.pop(path) for path in list(tree) if _is_in(path, a)}
    replaced = {path: tree.pop(path) for path in list(tree) if _is_in(path, b)}
    tree.update({b + path[len(a) :]: node for path, node in moved.items()})
    if exchange:
        tree.update({a + path[len(b) :]: node for path, node in replaced.items()})


def _is_in(path: str, directory: str) -> bool:
    return path == directory or path.startswith(f"{directory}/")


def tree_on_disk(directory: Path) -> Tree:
    """The names that there are, and their contents."""
    tree = {str(directory): Node(True, directory.stat().st_ino)}
    for path in sorted(directory.rglob("*")):
        content = b"" if path.is_dir() else path.read_bytes()
        tree[str(path)] = Node(path.is_dir(), path.stat().st_ino, content)
    return tree


def files_below(tree: Tree, contents: Mapping[Node, bytes], directory: str) -> dict[str, bytes] | None:
    """The files of a directory, by relative path; None where there is none."""
    if directory not in tree:
        return None
    return {
        path[len(directory) + 1 :]: contents[node]
        for path, node in tree.items()
        if _is_in(path, directory) and not node.is_directory
    }


@dataclass
class Outcomes:
    """Counts of the states that were looked at.

    Attributes:
        calls: of all logs.
        jobs: name -> calls, processes that changed something, and files that several of these wrote.
        states: in which the target was compared; ``whole``, ``absent`` and ``old`` (of an overwritten one) of them.
        reruns: of the command, from such a state.
        defects: (what is wrong, in which state).
    """

    calls: int = 0
    prefixes: int = 0
    states: int = 0
    whole: int = 0
    absent: int = 0
    old: int = 0
    reruns: int = 0
    jobs: dict[str, dict[str, int]] = field(default_factory=dict)
    defects: list[tuple[str, str]] = field(default_factory=list)


def check_job(
    shop: Workshop,
    name: str,
    outcomes: Outcomes,
    rng: Random,
    reruns: int,
    *,
    overwrite: bool = False,
    forgotten: str = "",
) -> None:
    """Logs a run, checks every state that may come of it, and runs it again from some of them.

    Args:
        overwrite: whether there is a target already.
        forgotten: a kind of calls that is taken to do nothing, so that there must be defects.
    """
    job, label = JOBS[name], name
    if overwrite:
        job, label = Job((*job.command, "--overwrite"), job.ranks), f"{name}, overwriting"
    with shop.case() as out:
        if overwrite:
            assert shop.run(JOBS["none"], out).status == 0
        begin = tree_on_disk(out.parent)
        shop.interposed.start_log(FILES, data=True)
        ended = shop.run(job, out)
        shop.interposed.disarm()
        assert ended.status == 0, ended.errors
        log = [record for record in shop.interposed.log() if KINDS[record.kind] != forgotten]
        data = shop.interposed.data()
        new = {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}
    history = History(log, data, begin)
    outcomes.calls += history.length
    outcomes.jobs[label] = _facts(history, log)
    found = _target(history, State(history.length, len(history.names), "all"), out)
    assert found is not None
    assert difference(_texts(found), _texts(new)) == "", "the log leads elsewhere"
    by_names = _check_states(history, out, label, outcomes, new)
    if job.ranks:
        _check_states(History(log, data, begin, apart=True), out, f"{label}, machines", outcomes, new)
    # As many from each number of names, which say what there is; those at the end, where it is published, first.
    for number in range(reruns):
        names = sorted(by_names)[-1 - number % len(by_names)]
        _run_again(shop, name, job, out, outcomes, history, rng.choice(by_names[names]), new)


def _facts(history: History, log: Sequence[Record]) -> dict[str, int]:
    writers = [{pid for _, pid, offset, _ in node.changes if offset != _SIZE} for node in history.nodes]
    return {
        "calls": history.length,
        "processes": len({record.pid for record in log if KINDS[record.kind] in _CHANGING and record.result >= 0}),
        "files of several": sum(len(pids) > 1 for pids in writers),
    }


def _texts(files: Mapping[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def _check_states(
    history: History, out: Path, label: str, outcomes: Outcomes, new: Mapping[str, bytes]
) -> dict[int, list[State]]:
    """Compares the target in every state; returns the states by the number of names that are kept."""
    before = {node: node.before for node in history.begin.values()}
    old = files_below(history.begin, before, str(out))
    by_names: dict[int, list[State]] = {}
    for end in range(history.length + 1):
        outcomes.prefixes += 1
        for state in history.states(end):
            found = _target(history, state, out)
            outcomes.states += 1
            outcomes.whole += found == new
            outcomes.absent += found is None
            outcomes.old += found is not None and found == old
            if found != new and (found != old or end == history.length):
                outcomes.defects.append((f"{label}: the target is neither whole nor absent", str(state)))
            by_names.setdefault(state.names, []).append(state)
    return by_names


def check_push(shop: Workshop, outcomes: Outcomes) -> None:
    """Loses power at every request of a push."""
    job, hub = JOBS[PUSH], shop.hub
    assert hub is not None
    with shop.case() as out:
        shop.interposed.start_log(FILES)
        ended = shop.run(job, out)
        shop.interposed.disarm()
        assert ended.status == 0, ended.errors
        requests = len(hub.requests)
        log = shop.interposed.log()
    changes = [record for record in log if KINDS[record.kind] in _CHANGING and record.result >= 0]
    outcomes.calls += len(log)
    outcomes.jobs[PUSH] = {"calls": len(log), "requests": requests, "changes": len(changes)}
    outcomes.defects += [(f"push: changes {record.path.decode()}", record.site.decode()) for record in changes]
    for number in range(requests + 1):
        with shop.case() as out:
            running = shop.start(job, out)
            while len(hub.requests) < number and running.runs():
                time.sleep(0.0005)
            os.kill(running.pid, signal.SIGKILL)
            running.wait()
            time.sleep(0.02)  # the hub may be at its last request
            found, where = shop.output(job, out), f"after request {number} of {requests}"
            outcomes.states += 1
            outcomes.whole += found == shop.expected[PUSH]
            outcomes.absent += not found
            if found not in ({}, shop.expected[PUSH]):
                outcomes.defects.append(("push: the repository has a part of the checkpoint", where))
            outcomes.reruns += 1
            again = shop.run(job, out)
            if again.status != 0 or shop.output(job, out) != shop.expected[PUSH]:
                outcomes.defects.append((f"push, run again: status {again.status}: {again.errors[-300:]!r}", where))


def _target(history: History, state: State, out: Path) -> dict[str, bytes] | None:
    """The target's files in a state."""
    tree = history.tree(state.names)
    if str(out) not in tree:
        return None
    below = {path: node for path, node in tree.items() if _is_in(path, str(out))}
    return files_below(tree, history.contents(state, below), str(out))


def _run_again(
    shop: Workshop,
    name: str,
    job: Job,
    out: Path,
    outcomes: Outcomes,
    history: History,
    state: State,
    new: Mapping[str, bytes],
) -> None:
    """Puts a state on the disk, and runs the command there as after another boot."""
    outcomes.reruns += 1
    tree = history.tree(state.names)
    contents = history.contents(state, tree)
    whole = _target(history, state, out) == new and "--overwrite" not in job.command
    out.parent.mkdir()  # under the same path, as the journal has it
    for path, node in tree.items():
        if node.is_directory:
            Path(path).mkdir(exist_ok=True)
    for path, node in tree.items():
        if not node.is_directory:
            content = contents[node]
            if Path(path).name == "journal.jsonl":
                content = _with_inodes(content, tree)
            Path(path).write_bytes(content)

    def after_another_boot() -> int:
        from modelexport.checkpoints.staging import journal

        journal.boot_id = lambda: "another"
        return Workshop.main(job.argv(shop.directory, out))

    ended = Running(after_another_boot, out.parent / "output").wait()
    wrong = ""
    if whole:  # the user is told that it is there
        if ended.status != 2 or "exists already" not in ended.errors:
            wrong = f"status {ended.status}, {ended.errors[-300:]!r}, and the target was whole"
    elif ended.status != 0:
        wrong = f"status {ended.status}: {ended.errors[-600:]!r}"
    wrong = wrong or difference(digests(out), shop.expected[name])
    left = sorted({path.name for path in out.parent.iterdir()} - {"out", "output", "workspace"})
    if not wrong and left:
        wrong = f"left: {left}"
    if wrong:
        outcomes.defects.append((f"{name}, run again: {wrong}", str(state)))
    shop.remove(out.parent)


def _with_inodes(journal: bytes, tree: Tree) -> bytes:
    """The journal, in which inodes are those of the directories that were made in place of the logged ones."""
    now = {node.inode: Path(path).stat().st_ino for path, node in tree.items() if node.is_directory}

    def changed(line: re.Match[bytes]) -> bytes:
        inode = int(line[1])
        text = b'"publishing":%d}' % now.get(inode, 0)
        return b'{"crc32":%d,%b\n' % (zlib.crc32(text), text)

    return re.sub(rb'\{"crc32":\d+,"publishing":(\d+)\}\n', changed, journal)


def run_campaign(shop: Workshop, names: Sequence[str], seed: int, reruns: int) -> Outcomes:
    """Checks each job, also over a target that is there."""
    outcomes = Outcomes()
    for name in names:
        if name == PUSH:
            check_push(shop, outcomes)
            continue
        check_job(shop, name, outcomes, Random(f"{seed}/{name}"), reruns)
        check_job(shop, name, outcomes, Random(f"{seed}/{name}/overwrite"), reruns, overwrite=True)
        print(f"{name}: {outcomes.states:,} states, {len(outcomes.defects)} defects so far", flush=True)
    return outcomes


def main(arguments: Sequence[str]) -> int:
    """Checks jobs; 0 where no defect was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.power_loss", description=__doc__)
    parser.add_argument("directory", type=Path, help="an empty one")
    parser.add_argument("--jobs", default=",".join(JOBS), help=", ".join(JOBS))
    parser.add_argument("--reruns", type=int, default=40, help="of each job")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    given.directory.mkdir(parents=True, exist_ok=True)
    run_interposed(given.directory, ["-m", "tests.faults.power_loss", *arguments])
    names = given.jobs.split(",")
    with pushing(given.directory) as hub:
        shop = Workshop(given.directory / "shop", ["none", *(name for name in names if name != "none")], hub)
        outcomes = run_campaign(shop, names, given.seed, given.reruns)
    found: dict[str, Any] = {"commit": version(), "jobs": names, **vars(outcomes)}
    for what, how in outcomes.defects[:40]:
        print(f"DEFECT {what}\n    {how}")
    print(json.dumps({**found, "defects": len(outcomes.defects)}))
    return 1 if outcomes.defects else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
