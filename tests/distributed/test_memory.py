"""The shared arena: what it hands out, takes back, shares, and how it runs out."""

from __future__ import annotations

import fcntl
import gc
import itertools
import os
import resource
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modelexport.distributed.transport import memory, segments
from modelexport.errors import GatherError
from tests.helpers.warm import run_warm


def run_script(text: str, *before: str, **environment: str) -> str:
    code = "import warnings\nwarnings.simplefilter('error')\n" + textwrap.dedent(text)
    env = {**os.environ, **environment}
    if before:
        command, root = [*before, sys.executable, "-c", code], Path(__file__).parents[2]
        done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, timeout=60, check=False)
    else:
        done = run_warm("-c", code, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex128])
def test_shared_empty_is_an_ordinary_tensor(dtype: torch.dtype) -> None:
    tensor = memory.shared_empty((3, 5), dtype)
    assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == ((3, 5), dtype, True)
    assert tensor.data_ptr() % 64 == 0
    tensor.copy_(torch.ones(3, 5).to(dtype))
    assert bool((tensor.to(torch.complex128) == 1).all())
    assert memory.shared_empty((), dtype).shape == ()
    assert memory.shared_empty(4, dtype).shape == (4,)
    assert memory.shared_empty((0, 4), dtype).shape == (0, 4)


def test_memory_returns_with_its_last_view_and_is_used_again() -> None:
    owner = memory.Arena()
    region = owner.allocate(1 << 20)
    offset = region.offset
    address = torch.frombuffer(region.view(), dtype=torch.uint8).data_ptr()
    assert owner.find(address, 1 << 20) == (region, offset)
    owner.release(region)
    assert owner.stats().used == 1 << 20
    owner.release(region)
    assert owner.stats().used == 0
    assert owner.allocate(1 << 20).offset == offset

    gc.collect()
    before = memory.arena().stats().used
    tensor = memory.shared_empty((1000, 1000), torch.uint8)
    rows = tensor[3:5].view(torch.int8)
    del tensor
    assert memory.arena().stats().used > before
    del rows
    assert memory.arena().stats().used == before


@given(st.lists(st.tuples(st.integers(1, 300_000), st.booleans()), max_size=40))
def test_regions_never_overlap_and_nothing_is_lost(steps: list[tuple[int, bool]]) -> None:
    owner = memory.Arena()
    live: list[memory.Region] = []
    for nbytes, drop in steps:
        live.append(owner.allocate(nbytes))
        if drop:
            owner.release(live.pop(nbytes % len(live)))
        spans = sorted((r.offset, r.offset + r.extent) for r in live)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert all(r.offset % 64 == 0 and r.extent >= r.nbytes for r in live)
        assert owner.stats().used == sum(r.extent for r in live)
    for region in live:
        owner.release(region)
    assert owner.stats().used == 0
    assert [book.free for book in owner._books] == [[(0, book.segment.size)] for book in owner._books]


def test_find_knows_what_lies_in_the_arena() -> None:
    tensor = memory.shared_empty((100,), torch.float32)
    region, offset = memory.arena().find(tensor[10:].data_ptr(), 360) or pytest.fail("not found")
    assert offset == region.offset + 40
    memory.arena().release(region)
    assert memory.arena().find(tensor.data_ptr(), 401) is None
    assert memory.arena().find(torch.ones(4).data_ptr(), 16) is None


def test_reclaimers_run_before_the_arena_grows() -> None:
    owner = memory.Arena()
    waiting = [owner.allocate(1 << 20)]
    owner.add_reclaimer(lambda: owner.release(waiting.pop()) if waiting else None)
    owner.allocate(1 << 20)
    assert owner.stats().reserved == 1 << 20


@pytest.mark.parametrize("kind", ["memfd", "file", "file without O_TMPFILE"])
def test_segments_are_anonymous_and_sealed(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind != "memfd":
        monkeypatch.setenv("MODELEXPORT_SHM", "file")
        monkeypatch.setenv("MODELEXPORT_SHM_DIR", str(tmp_path))
    if kind.endswith("O_TMPFILE"):
        monkeypatch.delattr(os, "O_TMPFILE")
    segment = segments.open_segment(1 << 20)
    assert list(tmp_path.iterdir()) == []
    assert os.fstat(segment.fd).st_nlink == 0
    assert segment.sealed == (kind == "memfd")
    if segment.sealed:
        for size in (1 << 19, 1 << 21):
            with pytest.raises(PermissionError):
                os.ftruncate(segment.fd, size)
    assert segments.reserve(segment, 0, 100) == 1 << 20
    segment.memory[:4] = b"data"
    mapping = segments.Mapping(os.dup(segment.fd), segment.size, segment.sealed)
    view = mapping.view(0, 4)
    monkeypatch.setattr(segments, "RESIDENT_BYTES", 100)
    mapping.consumed(4096)  # drops the pages from our tables, not from the file
    assert mapping._resident == 0
    assert bytes(view) == b"data"
    with pytest.raises(GatherError, match="outside"):
        mapping.view(1 << 20, 1)


def test_a_mapping_distrusts_what_could_become_a_bus_error() -> None:
    segment = segments.open_segment(8192)
    with pytest.raises(GatherError, match="has 8192 bytes, 8193 were announced"):
        segments.Mapping(os.dup(segment.fd), 8193, True)
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    assert fcntl.fcntl(fd, 1034) == 0
    with pytest.raises(GatherError, match="announced as sealed"):
        segments.Mapping(fd, 4096, True)


def test_a_limit_on_file_size_is_an_error_that_says_so() -> None:
    limit = 4 << 20
    out = run_script(
        f"""
        import resource, torch
        from modelexport.distributed.transport import memory
        from modelexport.errors import GatherError
        resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
        kept = [memory.shared_empty((3 << 20,), torch.uint8).fill_(value) for value in (1, 2)]
        try:
            memory.shared_empty((5 << 20,), torch.uint8)
        except GatherError as error:
            print(error)
        assert [int(t.sum()) for t in kept] == [3 << 20, 6 << 20]
        """
    )
    assert "5242880 bytes" in out
    assert "ulimit -f" in out


def test_too_many_open_files_is_an_error() -> None:
    out = run_script(
        """
        import os, resource, torch
        from modelexport.distributed.transport import memory
        from modelexport.errors import GatherError
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        held = []
        try:
            while True:
                held.append(os.dup(0))
        except OSError:
            pass
        try:
            memory.shared_empty((10,), torch.uint8)
        except GatherError as error:
            print(error)
        """
    )
    assert "Too many open files" in out


@pytest.mark.skipif(shutil.which("unshare") is None or os.geteuid() != 0, reason="needs to mount a small tmpfs")
def test_a_full_shm_file_system_is_an_error_and_not_a_bus_error() -> None:
    out = run_script(
        """
        import os, subprocess, torch
        os.makedirs("/tmp/modelexport-test-shm", exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", "/tmp/modelexport-test-shm"], check=True)
        from modelexport.distributed.transport import memory
        from modelexport.errors import GatherError
        kept = memory.shared_empty((2 << 20,), torch.uint8).fill_(1)
        try:
            memory.shared_empty((3 << 20,), torch.uint8)
        except GatherError as error:
            print(error)
        again = memory.shared_empty((1 << 20,), torch.uint8).fill_(1)
        assert int(kept.sum()) + int(again.sum()) == 3 << 20
        """,
        "unshare", "-m",
        MODELEXPORT_SHM="file",
        MODELEXPORT_SHM_DIR="/tmp/modelexport-test-shm",
    )  # fmt: skip
    Path("/tmp/modelexport-test-shm").rmdir()
    assert "No space left on device" in out
    assert "--shm-size" in out


def test_a_forked_child_has_an_arena_of_its_own() -> None:
    tensor = memory.shared_empty((10,), torch.uint8).fill_(5)
    pid = os.fork()
    if pid == 0:
        mine = memory.shared_empty((10,), torch.uint8).fill_(6)
        os._exit(0 if int(tensor[0]) == 5 and mine.data_ptr() != tensor.data_ptr() else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert bool((tensor == 5).all())
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss > 0
