"""The layers of isolation: each is a way to start the zygote, and the first that works is used."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from postgrad.rewards.sandbox import seccomp
from postgrad.rewards.sandbox.box import DEVICES, HOST

_SOURCE = Path(__file__).parents[3]  # the folder that `postgrad` is in
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from postgrad.rewards.sandbox.zygote import main; "
    "del sys.path[0]; main(sys.argv[2], int(sys.argv[3]))"
)
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/nix/store", "/gnu/store")
# One arena, and hash order that no run changes.
ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "MALLOC_ARENA_MAX": "1"}


@dataclass(frozen=True)
class Layer:
    """A way to isolate programs."""

    name: str  # "bubblewrap", "namespaces" or "none"
    missing: Callable[[], str | None]  # why it cannot be tried here, None where it can
    prefix: Callable[[], list[str]]  # command line before the interpreter's

    def command(self, descriptor: int) -> list[str]:
        """The command line that starts the zygote with its socket at `descriptor`."""
        return [*self.prefix(), *_python(self.name, descriptor)]


def _python(layer: str, descriptor: int) -> list[str]:
    flags = ["-s", "-S", "-P", "-B"]
    return [_interpreter(), *flags, "-c", _BOOT, str(_SOURCE), layer, str(descriptor)]


def _interpreter() -> str:
    """The interpreter itself, not a virtual environment's link to it."""
    return os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)


def _bubblewrap() -> list[str]:
    shown = [*_SYSTEM, sys.base_prefix, str(Path(_interpreter()).parent), str(_SOURCE / "postgrad")]
    # Not --dev: for terminals bwrap makes a second user namespace, without the rights of box.py.
    devices = [part for path in DEVICES for part in ("--dev-bind", path, path)]
    binds = [part for path in shown for part in ("--ro-bind-try", path, path)]
    return [
        shutil.which("bwrap") or "bwrap", "--unshare-all", "--die-with-parent", "--new-session",
        "--as-pid-1", "--hostname", HOST, "--cap-add", "ALL",
        "--tmpfs", "/tmp", "--proc", "/proc", *devices, *binds, "--",
    ]  # fmt: skip


def _no_linux() -> str | None:
    if sys.platform != "linux":
        return f"needs Linux, this is {sys.platform}"
    if not seccomp.is_known():
        return f"no list of system calls for {os.uname().machine}"
    return None


def _no_bubblewrap() -> str | None:
    return _no_linux() or (None if shutil.which("bwrap") else "bwrap is not installed")


BUBBLEWRAP = Layer("bubblewrap", _no_bubblewrap, _bubblewrap)
NAMESPACES = Layer("namespaces", _no_linux, lambda: [])
NONE = Layer("none", lambda: None, lambda: [])
ISOLATING = (BUBBLEWRAP, NAMESPACES)


def in_order() -> tuple[Layer, ...]:
    """The layers to try. bubblewrap leaves root its user, whose threads the kernel never limits."""
    is_root = sys.platform == "linux" and os.geteuid() == 0
    return ISOLATING[::-1] if is_root else ISOLATING


# Tries what a program must not be able to do. Prints what it could do, then that exec failed.
PROBE = """
import json, os, socket
def can(deed):
    try:
        deed()
    except OSError:
        return False
    return True
deeds = {
    "open a socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM),
    "start a process": lambda: os.fork() or os._exit(0),
    "list /home": lambda: os.listdir("/home"),
    "list /etc": lambda: os.listdir("/etc"),
    "list /proc": lambda: os.listdir("/proc"),
    "read " + HERE: lambda: os.stat(HERE),
    "write beside its scratch": lambda: os.unlink(open("/written", "x").name),
    "signal another process": lambda: os.kill(2, 0),
}
def leads_up(descriptor):
    return can(lambda: os.stat("..", dir_fd=descriptor))
found = [name for name, deed in deeds.items() if can(deed)]
found += ["reach a folder by a descriptor"] * any(map(leads_up, range(64)))
found += ["be other than process 1"] * (os.getpid() != 1)
print(json.dumps(found), flush=True)
can(lambda: os.execv("/bin/true", ["true"]))
print(json.dumps("held"))
"""


HELD = b'[]\n"held"\n'


def probe() -> str:
    """A program that prints `HELD` where the sandbox isolates it."""
    return f"HERE = {json.dumps(str(Path(__file__)))}\n{PROBE}"
