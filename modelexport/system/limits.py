"""The limits of a process that work runs into (open files, memory, threads, the size of a file), in words.

Which exception that is depends on who met the limit: Python, torch, gloo, the dynamic linker. Here they are known
again, and the sentence says which limit it was, how high it is, and what to type.
"""

from __future__ import annotations

import errno
import re
import resource
from collections.abc import Iterator

from modelexport.errors import LimitError, ModelExportError

__all__ = ["address_space_note", "advice", "file_size_limit", "limit_error"]

_AGAIN = "and run the same command again"
_MANY_FILES = 4096
_FILES = re.compile(r"too many open files", re.IGNORECASE)
_MEMORY = re.compile(
    r"(can('|no)t|could not|unable to|failed to) (allocate|mmap|map) |not enough memory|out of memory|bad_alloc",
    re.IGNORECASE,
)
_THREADS = re.compile(r"can't start new thread|pthread_create|resource temporarily unavailable", re.IGNORECASE)
_LIBRARY = re.compile(r"shared object")  # that cannot be loaded: for want of address space, where that is limited
_FORKS = frozenset({"fork_exec", "_fork_exec", "_execute_child", "_launch", "spawnv_passfds"})
_ULIMITS = {
    errno.EMFILE: ("ulimit -n (open files)", resource.RLIMIT_NOFILE),
    errno.EFBIG: ("ulimit -f (file size)", resource.RLIMIT_FSIZE),
    errno.ENOMEM: ("ulimit -v (address space)", resource.RLIMIT_AS),
}


def limit_error(error: BaseException) -> ModelExportError | None:
    """The error to show where ``error``, or one in its chain, is a limit that was reached; else None.

    An error that is a sentence already, and does not name the limit, is given as that sentence with the limit behind
    it.
    """
    found = next(filter(None, map(_reached, _chain(error))), None)
    if found is None:
        return None
    what, then = found
    if not isinstance(error, ModelExportError):
        return LimitError(f"{what}: {then}" if then else what)
    text = str(error)
    explained = not then or "ulimit" in text or then in text
    return None if explained else LimitError(f"{text}; {then}")


def advice(error: OSError) -> str:
    """``"; raise ulimit -n (open files), which is 20"``; or ``""`` where no such limit was met."""
    name, number = _ULIMITS.get(error.errno or 0, ("", 0))
    if not name:
        return ""
    limit = resource.getrlimit(number)[0]
    if limit == resource.RLIM_INFINITY:
        return f"; {_memory()}" if error.errno == errno.ENOMEM else ""
    return f"; raise {name}, which is {limit:,}{'' if error.errno == errno.EMFILE else ' bytes'}"


def file_size_limit() -> int | None:
    """The largest file that this process may write (``ulimit -f``), in bytes; None without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def address_space_note() -> str:
    """``" (ulimit -v ...)"``, where a limit on address space may be why a process died without a word; else ``""``."""
    limit = _address_space()
    if limit is None:
        return ""
    return f" (ulimit -v allows {limit:,} kB of address space, which libraries may not survive: ulimit -v unlimited)"


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _reached(error: BaseException) -> tuple[str, str] | None:
    """The limit that an exception by itself shows was reached, and the remedy; None where it shows none."""
    if isinstance(error, ModelExportError):
        return None
    code = error.errno if isinstance(error, OSError) else None
    text = "" if "CUDA" in str(error) else str(error)
    is_text = isinstance(error, (RuntimeError, ImportError, OSError, SystemError))
    if code == errno.ENFILE:
        return "the machine has too many open files", f"raise their number (sysctl fs.file-max) {_AGAIN}"
    if code == errno.EMFILE or (is_text and _FILES.search(text)):
        return "too many open files", _files()
    if code == errno.EAGAIN:
        return _threads() if _is_fork(error) else None
    if code == errno.EFBIG:
        limit = file_size_limit()
        then = "" if limit is None else f"ulimit -f allows files of {limit:,} bytes: type ulimit -f unlimited {_AGAIN}"
        return f"{_file_of(error)} is too large", then
    if code in (errno.ENOSPC, errno.EDQUOT):
        return f"no room is left for {_file_of(error)}: free some, or write elsewhere, {_AGAIN}", ""
    if code == errno.EIO:
        what = f"{_file_of(error)} cannot be read or written (input/output error)"
        return f"{what}: see what dmesg says of its disk, {_AGAIN}", ""
    if isinstance(error, MemoryError) or code == errno.ENOMEM or (is_text and _MEMORY.search(text)):
        return "memory ran out", _memory()
    if is_text and _THREADS.search(text):
        return _threads()
    is_library = isinstance(error, (ImportError, OSError)) and _LIBRARY.search(text)
    return ("a library cannot be loaded", _memory()) if is_library and _address_space() is not None else None


def _file_of(error: BaseException) -> str:
    return str(error.filename) if isinstance(error, OSError) and error.filename else "a file"


def _files() -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    more = max(_MANY_FILES, 4 * soft)
    enough = hard == resource.RLIM_INFINITY or hard >= more
    beyond = "" if enough else f" (as root or in a new shell, for the hard limit is {hard:,})"
    return f"ulimit -n allows {soft:,} at a time: type ulimit -n {more}{beyond} {_AGAIN}"


def _memory() -> str:
    limit = _address_space()
    if limit is not None:
        return f"ulimit -v allows a process {limit:,} kB of addresses: type ulimit -v unlimited {_AGAIN}"
    free, total = _machine_memory()
    return (
        f"{free:,} of this machine's {total:,} MB are free: end other programs, or have less of it used at once "
        f"(--calib-memory, eval --windows), {_AGAIN}"
    )


def _threads() -> tuple[str, str]:
    what = "no further thread or process can be started"
    if _address_space() is not None:  # which their stacks need
        return what, _memory()
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if limit == resource.RLIM_INFINITY:
        return what, f"a limit of this machine or its container: raise it (pids.max), or use fewer ranks, {_AGAIN}"
    return what, f"ulimit -u allows {limit:,} in all: end other programs, or type ulimit -u unlimited, {_AGAIN}"


def _address_space() -> int | None:
    """ulimit -v in kB, as it is typed; None without one."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit // 1024


def _machine_memory() -> tuple[int, int]:
    """Available and total memory in MB; zeros where /proc does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            known = {name: int(rest.split()[0]) // 1000 for name, _, rest in (line.partition(":") for line in file)}
    except (OSError, ValueError, IndexError):
        return 0, 0
    return known.get("MemAvailable", 0), known.get("MemTotal", 0)


def _is_fork(error: BaseException) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_name in _FORKS
