"""Makes a Python process look like macOS to postgrad, and to nothing else: its modules see `os`,
`sys`, `time`, ... without what macOS lacks, and neither /proc, /sys nor /dev/shm.

Python imports a module of this name at its start: put this folder into PYTHONPATH. Libraries see
the system that they were built for. What cannot be shown so: kqueue, Apple's libraries of products,
spawned processes that import no module of postgrad, a file system that ignores case.
"""

import builtins
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = str(Path(__file__).parent)
ABSENT = {  # as typeshed and Python's documentation say
    "os": """memfd_create pidfd_open sched_getaffinity sched_setaffinity posix_fadvise
        posix_fallocate fdatasync pipe2 eventfd splice copy_file_range getrandom unshare setns
        setresuid getxattr listxattr O_TMPFILE O_DIRECT O_PATH O_NOATIME P_PIDFD waitid""",
    "time": "pthread_getcpuclockid CLOCK_BOOTTIME CLOCK_TAI",
    "signal": """sigtimedwait sigwaitinfo pidfd_send_signal SIGRTMIN SIGRTMAX SIGPWR SIGSTKFLT
        SIGPOLL""",
    "select": "epoll",
    "resource": "prlimit RUSAGE_THREAD RLIMIT_RTTIME RLIMIT_NICE RLIMIT_MSGQUEUE",
    "socket": "SOCK_CLOEXEC SOCK_NONBLOCK SO_PEERCRED AF_NETLINK AF_PACKET TCP_USER_TIMEOUT",
    "errno": "EREMOTEIO EBADE ECOMM",
    "fcntl": "F_GETPIPE_SZ F_SETPIPE_SZ F_ADD_SEALS F_OFD_SETLK",
    "mmap": "MAP_POPULATE MADV_HUGEPAGE MADV_DONTFORK",
}
LIBC = {  # functions of glibc and Linux
    *("prctl", "malloc_trim", "mallinfo2", "unshare", "setns", "umount2", "pivot_root", "capset"),
}
FOLDERS = ("/proc", "/sys", "/dev/shm")
F_FULLFSYNC = 51
BRAND = "Apple M2 Pro"
full_syncs: list[int] = []  # descriptors
_import = builtins.__import__


class Seen(ModuleType):
    """A module as postgrad sees it."""

    def __init__(self, real: ModuleType, changes: dict[str, Any]) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(_real=real, _absent=ABSENT.get(real.__name__, "").split(), **changes)

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__["_absent"]:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} on macOS")
        return getattr(self.__dict__["_real"], name)

    def __setattr__(self, name: str, value: Any) -> None:  # as a monkeypatch or a test does
        setattr(self.__dict__["_real"], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.__dict__["_real"], name)


def _of_sys(real: Any) -> dict[str, Any]:
    return {"platform": "darwin"}


def _of_os(real: Any) -> dict[str, Any]:
    def uname() -> Any:
        seen = real.uname()
        return real.uname_result(
            ("Darwin", seen.nodename, "24.0.0", "Darwin Kernel Version 24.0.0", "arm64")
        )

    return {"uname": uname}


def _of_platform(real: Any) -> dict[str, Any]:
    answers = {
        "system": "Darwin", "processor": "arm", "machine": "arm64", "release": "24.0.0",
        "platform": "macOS-15.0-arm64-arm-64bit",
    }  # fmt: skip
    return {name: lambda *_, answer=answer, **__: answer for name, answer in answers.items()}


def _of_fcntl(real: Any) -> dict[str, Any]:
    import os

    def fcntl(descriptor: int, command: int, argument: Any = 0) -> Any:
        if command == F_FULLFSYNC:
            full_syncs.append(descriptor)
            return os.fsync(descriptor)
        return real.fcntl(descriptor, command, argument)

    return {"fcntl": fcntl, "F_FULLFSYNC": F_FULLFSYNC}


def _of_resource(real: Any) -> dict[str, Any]:
    def setrlimit(kind: int, limits: tuple[int, int]) -> None:
        if kind == real.RLIMIT_AS:
            raise ValueError("current limit exceeds maximum limit")  # what macOS says
        real.setrlimit(kind, limits)

    def getrusage(who: int) -> Any:
        usage = list(real.getrusage(who))
        usage[2] *= 1024  # ru_maxrss: bytes
        return real.struct_rusage(usage)

    return {"setrlimit": setrlimit, "getrusage": getrusage}


def _of_ctypes(real: Any) -> dict[str, Any]:
    class CDLL(real.CDLL):
        def __init__(self, name: str | None, *more: Any, **named: Any) -> None:
            if name is not None and ".so" in name:
                raise OSError(f"dlopen({name}, 0x0006): no such file")
            super().__init__(name, *more, **named)

        def __getattr__(self, name: str) -> Any:
            if name in LIBC:
                raise AttributeError(f"dlsym(RTLD_DEFAULT, {name}): symbol not found")
            return _sysctlbyname if name == "sysctlbyname" else super().__getattr__(name)

    return {"CDLL": CDLL}


def _sysctlbyname(name: bytes, value: Any, size: Any, new: Any, new_size: Any) -> int:
    """sysctlbyname(3) of two values; all others fail, as unknown names do."""
    values = {b"machdep.cpu.brand_string": BRAND.encode() + b"\0"}
    values[b"hw.perflevel0.physicalcpu"] = (1).to_bytes(4, "little")
    content = values.get(name)
    if content is None or value is None or size._obj.value < len(content):
        return -1
    value._obj[: len(content)] = content
    size._obj.value = len(content)
    return 0


def _of_psutil(real: Any) -> dict[str, Any]:
    class Process(real.Process):
        def cpu_times(self) -> Any:
            times = super().cpu_times()
            return times._replace(children_user=0.0, children_system=0.0)

    lacking = ("cpu_affinity", "io_counters", "rlimit", "cpu_num", "ionice", "num_ctx_switches")
    for name in lacking:
        setattr(Process, name, property(_no_attribute))
    return {"Process": Process, "MACOS": True, "OSX": True, "LINUX": False}


def _no_attribute(process: Any) -> Any:
    raise AttributeError("psutil has none on macOS")


def _of_torch(real: Any) -> dict[str, Any]:
    real.backends.mkldnn.is_available = lambda: False
    real.backends.mkl.is_available = lambda: False
    real.backends.cpu.get_cpu_capability = lambda: "DEFAULT"
    return {}


CHANGES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "sys": _of_sys, "os": _of_os, "platform": _of_platform, "fcntl": _of_fcntl,
    "resource": _of_resource, "ctypes": _of_ctypes, "psutil": _of_psutil,
    **{name: lambda real: {} for name in ("time", "signal", "select", "socket", "errno", "mmap")},
}  # fmt: skip
_seen: dict[str, Seen] = {}


def _imported(
    name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
) -> Any:
    """__import__, which gives modules of postgrad the modules of macOS."""
    module = _import(name, globals, locals, fromlist, level)
    if level or globals is None or not _is_of_postgrad(globals):
        return module
    if name == "torch" and "torch" not in _seen:
        _seen["torch"] = Seen(module, _of_torch(module))
    if name not in CHANGES:
        return module
    if name not in _seen:
        _seen[name] = Seen(module, CHANGES[name](module))
    return _seen[name]


def _is_of_postgrad(names: dict[str, Any]) -> bool:
    """Whether these are the globals of a module of postgrad, also of one that was started."""
    return str(names.get("__package__")).partition(".")[0] == "postgrad"


def _asked_by_postgrad() -> bool:
    """Whether the nearest caller outside the standard library is a module of postgrad."""
    frame = sys._getframe(2)
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if _is_of_postgrad(frame.f_globals):
            return True
        if name.partition(".")[0] not in sys.stdlib_module_names and name != __name__:
            return False
        frame = frame.f_back
    return False


def _require_there(path: Any) -> None:
    if isinstance(path, bytes | int) or path is None:
        return
    text = str(path)
    hidden = any(text == folder or text.startswith(f"{folder}/") for folder in FOLDERS)
    if hidden and _asked_by_postgrad():
        raise FileNotFoundError(2, "No such file or directory", text)


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir"):
        _require_there(arguments[0])


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(path: Any, *more: Any, **named: Any) -> Any:
        _require_there(path)
        return function(path, *more, **named)

    return call


def _boots_alike() -> None:
    """Children that run without `site` import this module too: the zygote of programs."""
    import subprocess

    start = subprocess.Popen.__init__

    def begin(self: Any, command: Any, *more: Any, **named: Any) -> None:
        words = list(command) if isinstance(command, list | tuple) else []
        if "-S" in words and "-c" in words:
            place = words.index("-c") + 1
            words[place] = f"import sys; sys.path.insert(0, {HERE!r}); import sitecustomize; " + (
                f"sys.path.remove({HERE!r}); {words[place]}"
            )
            command = words
        start(self, command, *more, **named)

    subprocess.Popen.__init__ = begin  # pyright: ignore[reportAttributeAccessIssue]


def become_macos() -> None:
    """From now on modules of postgrad that are imported see macOS."""
    import os

    builtins.__import__ = _imported
    os.stat, os.lstat, os.readlink = map(_checked, (os.stat, os.lstat, os.readlink))  # pyright: ignore
    sys.addaudithook(_hook)
    _boots_alike()


become_macos()
