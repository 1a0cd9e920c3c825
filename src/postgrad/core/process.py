"""What a process does for itself and its children: garbage collection and the C library's heap, its
cores, the environment that children inherit, its pipes and ports, its signals, its end with its
parent. Imports no heavy package.

And handles: the results of role calls, the same for roles in this process and on a cluster. A role
in this process returns a finished handle; a remote one returns a handle that is finished
later. The loop calls `.result()` where it needs the value.
"""

import ctypes
import gc
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from io import TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, TypeVar, cast

# Free bytes above which the heap is trimmed. New pages cost 0.2 ms a MB in a virtual machine, which
# for small models would be a tenth of a step.
TRIM_BYTES = 2**28

# Variables by which programs, modules and shared libraries are found, and text is encoded.
_LIBRARIES = """
    PATH HOME USER LANG LANGUAGE TZ TMPDIR TEMP TMP SYSTEMROOT VIRTUAL_ENV CONDA_PREFIX PYTHONPATH
    PYTHONHOME PYTHONUTF8 PYTHONDONTWRITEBYTECODE LD_LIBRARY_PATH DYLD_LIBRARY_PATH
"""
LIBRARIES = frozenset(_LIBRARIES.split())

CONTROL_GROUP = Path("/sys/fs/cgroup")

PARENT_SECONDS = 1.0  # between two looks at whether the parent lives, where no kernel tells its end


@contextmanager
def heavy_imports() -> Generator[None]:
    """For the first import of torch and transformers: some 2 500 modules, none of which ever
    becomes garbage. Inside, the cyclic collector is off; afterwards it ignores what was imported.
    Imports take a fifth less time, and all later collections are short.

    Does nothing where torch is imported already: objects of the program may become garbage.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


class _HeapInfo(ctypes.Structure):
    """struct mallinfo2 of mallinfo(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


@cache
def _library() -> Any:
    """glibc, from version 2.33 on, which has mallinfo2; None elsewhere."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    if not (hasattr(libc, "malloc_trim") and hasattr(libc, "mallinfo2")):
        return None
    libc.mallinfo2.restype = _HeapInfo
    libc.malloc_trim.argtypes = [ctypes.c_size_t]
    return libc


def free_heap_bytes() -> int:
    """Freed bytes that the heap may still hold; 0 without glibc."""
    library = _library()
    return 0 if library is None else library.mallinfo2().fordblks


def trim_heap() -> None:
    """Returns freed pages to the system where there are many (TRIM_BYTES).

    An update leaves free holes between the memory that it keeps. The next phase needs larger pieces
    than these holes, so without trimming both would add up.
    """
    if free_heap_bytes() > TRIM_BYTES:
        _library().malloc_trim(0)


def inherited(more: Iterable[str] = ()) -> dict[str, str]:
    """LIBRARIES, the locale, and the variables that `more` names, where they are set."""
    names = {*LIBRARIES, *more}
    return {
        name: value for name, value in os.environ.items() if name in names or name.startswith("LC_")
    }


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """(requests, answers): the original standard input and output, for the protocol alone."""
    requests, answers = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    printed: object = sys.stdout
    if isinstance(printed, TextIOWrapper):  # the last words before a crash arrive
        cast(TextIOWrapper, printed).reconfigure(line_buffering=True)
    return os.fdopen(requests, "rb"), os.fdopen(answers, "wb", buffering=0)


def write(pipe: BinaryIO, line: bytes) -> None:
    """Writes all of `line`; one write to a raw pipe may take only a part."""
    rest = memoryview(line)
    while rest:
        rest = rest[pipe.write(rest) :]


def held_port() -> tuple[socket.socket, int]:
    """A free port of this machine, and what keeps others from it until it is closed: a port that
    was only looked up may be that of any connection by the time that its server starts. A server
    with SO_REUSEADDR, such as torch's TCPStore, may listen there.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Of every address: gloo gets its ports at that of the host's name, and the store listens at
    # all. macOS lets the store listen beside another address alone.
    held.bind(("" if sys.platform == "linux" else "127.0.0.1", 0))
    return held, held.getsockname()[1]


def die_with_parent() -> None:
    """Kills this process where its parent ends: on Linux the kernel does, elsewhere a thread that
    looks once in PARENT_SECONDS.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
        return
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def kill_group(leader: int) -> None:
    """Kills the process group of a child that began a session of its own; nothing where none of it
    lives. macOS takes a group of zombies for one that may not be signalled.
    """
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        pass
    except PermissionError:
        if sys.platform != "darwin":
            raise


@contextmanager
def signals_handled(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], object]
) -> Generator[None]:
    """Inside, these signals come to `handler`; afterwards to who had them. Outside the main thread,
    where Python sets no handler, they stay as they are: whoever started the thread ends it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def import_path() -> dict[str, str]:
    """The variable by which a child imports what this process can, such as a verifier beside a
    script. Start it with -P: `python -m` alone would put the current directory first, where a
    `random.py` takes the place of Python's.
    """
    for_children = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    folders = dict.fromkeys(str(Path(entry).absolute()) for entry in [*sys.path, *for_children])
    return {"PYTHONPATH": os.pathsep.join(folders)}


def interrupt(number: int, frame: FrameType | None) -> None:
    """A handler that interrupts as Ctrl-C does, so that `finally` runs and folders are removed."""
    raise KeyboardInterrupt


def command_of_child(words: Iterable[str]) -> list[str]:
    """The command of a child that runs postgrad's command line with `words`, and ends with this
    process: one that outlived it would train on, and keep its run directory locked.
    """
    program = (
        f"import sys; from {__name__} import die_with_parent; die_with_parent(); "
        "from postgrad.cli.main import main; sys.exit(main())"
    )
    return [sys.executable, "-P", "-c", program, *words]


def usable_cores() -> int:
    """Physical cores of this machine that this process may use. On Apple silicon the performance
    cores alone, as torch counts: a product waits for its slowest thread.
    """
    import psutil  # 25 ms to import, an eighth of the start of a scoring worker

    physical = psutil.cpu_count(logical=False) or 1
    performance = int.from_bytes(macos_value("hw.perflevel0.physicalcpu"), sys.byteorder)
    return max(1, min(usable_cpus(), performance or physical))


def usable_cpus() -> int:
    """Logical CPUs that this process can keep busy: those that it may use, and no more than its
    container has CPU time for, a part of one counted as one.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    v1 = ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")
    for names in (("cpu.max",), v1):  # control groups, version 2 and 1
        try:
            words = " ".join((CONTROL_GROUP / name).read_text("ascii") for name in names).split()
            quota, period = map(int, words)
        except (OSError, ValueError):
            continue  # no container, or "max"
        if quota > 0 < period:
            return max(1, min(allowed or 1, math.ceil(quota / period)))
    return allowed or 1


def macos_value(name: str) -> bytes:
    """What the kernel of macOS knows by a name of sysctl(8); empty elsewhere, and where it has no
    such name.
    """
    if sys.platform != "darwin":
        return b""
    value = ctypes.create_string_buffer(256)
    size = ctypes.c_size_t(len(value))
    call = ctypes.CDLL(None).sysctlbyname
    call.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    call.argtypes += [ctypes.c_size_t]
    failed = call(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0)
    return b"" if failed else value.raw[: size.value]


def default_threads() -> int:
    """CPU threads of a process whose recipe states none: OMP_NUM_THREADS where the environment has
    it, as for torch itself, else one for each usable core.
    """
    stated = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(stated) if stated.isdecimal() and int(stated) > 0 else usable_cores()


T = TypeVar("T")

Handle = Future


def done(value: T) -> Handle[T]:
    """A finished handle with this value."""
    handle: Handle[T] = Handle()
    handle.set_result(value)
    return handle
