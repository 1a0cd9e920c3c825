"""The walls around programs: namespaces, a root with nothing in it, capabilities given up.

Runs inside the interpreter of the zygote: standard library only.
"""

import os
import resource
import socket
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from postgrad.rewards.sandbox import kernel

HOST = "sandbox"
SCRATCH = "/tmp"
_INSIDE, _NOBODY = 1000, 65534  # user of the programs: its number inside, and outside for root
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_OLD = "/old"
_PLAIN = kernel.MS_NOSUID | kernel.MS_NODEV
_LOCKED = 2 | 4 | 8 | 1024 | 2048 | 4096  # flags that a remount by another user must keep
_FILES = 1024  # of a scratch
_OWN = 8  # processes of the sandbox itself that the same limit may count
_COUNTS_BY_NAMESPACE = (5, 14)  # Linux
_NAMESPACES = (
    kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUTS | kernel.CLONE_NEWCGROUP
)  # fmt: skip


def enter() -> int | None:
    """Go on in a process that is alone in new namespaces of every kind: there, None is returned.

    The processes left outside only wait; for them it returns the exit status to end with. Raises
    OSError where the system does not allow it.
    """
    asks, told = socket.socketpair()
    child = os.fork()
    if child:
        told.close()
        if asks.recv(1):
            asks.send(b"y" if _map_nobody(child) else b"n")
        asks.close()
        return _status_of(child)
    asks.close()
    kernel.die_with_parent()
    user, group = os.geteuid(), os.getegid()
    kernel.unshare(kernel.CLONE_NEWUSER)
    told.send(b"?")
    if told.recv(1) != b"y":
        Path("/proc/self/setgroups").write_text("deny", "ascii")
        Path("/proc/self/uid_map").write_text(f"{_INSIDE} {user} 1", "ascii")
        Path("/proc/self/gid_map").write_text(f"{_INSIDE} {group} 1", "ascii")
    told.close()
    kernel.unshare(_NAMESPACES)
    socket.sethostname(HOST)
    child = os.fork()
    if child:
        return _status_of(child)
    kernel.die_with_parent()
    return None


def narrow(libraries: Sequence[str] = ()) -> int | None:
    """A root that holds `libraries`, four devices and an empty scratch; read only.

    libraries: files and folders; without any, the standard library and no installed packages.
    Returns the user that programs become, None where there is only one.
    """
    standard = dict.fromkeys(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
    users = Path("/proc/self/uid_map").read_text("ascii").splitlines()
    kernel.unshare(kernel.CLONE_NEWNS)
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("root", SCRATCH, "tmpfs", _PLAIN, "mode=0755,size=1m")
    Path(SCRATCH + _OLD).mkdir()
    kernel.pivot_root(SCRATCH, SCRATCH + _OLD)
    os.chdir("/")
    Path(SCRATCH).mkdir()
    for library in libraries or standard:
        _bind(library, _PLAIN)
        if libraries:
            continue
        for packages in (Path(library, "site-packages"), Path(library, "dist-packages")):
            if packages.is_dir():
                flags = _PLAIN | kernel.MS_RDONLY
                kernel.mount("none", str(packages), "tmpfs", flags, "mode=0755,size=4k")
    for device in DEVICES:
        _bind(device, kernel.MS_NOSUID)
    kernel.unmount(_OLD)
    Path(_OLD).rmdir()
    kernel.mount("none", "/", None, kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | _PLAIN)
    kernel.drop_bounding_set()
    return _INSIDE if len(users) > 1 else None


def seclude(own: int, user: int | None, scratch_bytes: int) -> int:
    """Fork: the child is process 1 of a world of its own, where /tmp is new and empty.

    Returns the child's number here and 0 there. `own` is a pidfd of this process.
    """
    kernel.join(own, kernel.CLONE_NEWPID)  # without going back first, a second unshare is refused
    kernel.unshare(kernel.CLONE_NEWPID)
    child = os.fork()
    if child:
        return child
    kernel.unshare(kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC)
    owner = "" if user is None else f",uid={user},gid={user}"
    options = f"mode=0700,size={scratch_bytes},nr_inodes={_FILES}{owner}"
    kernel.mount("scratch", SCRATCH, "tmpfs", _PLAIN, options)
    os.chdir(SCRATCH)
    return 0


def give_up(user: int | None, threads: int) -> None:
    """No capabilities, for good, and at most that many threads where the kernel counts them."""
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    kernel.drop_capabilities()
    kernel.die_with_parent()
    release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    if release >= _COUNTS_BY_NAMESPACE:  # before, every process of the user counted
        resource.setrlimit(resource.RLIMIT_NPROC, (threads + _OWN, threads + _OWN))


def _bind(path: str, flags: int) -> None:
    """Show a file or folder of the old root at the same place, read only."""
    source, target = _OLD + path, Path(path)
    if Path(source).is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    kernel.mount(source, path, None, kernel.MS_BIND | kernel.MS_REC)
    locked = os.statvfs(path).f_flag & _LOCKED
    change = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY
    kernel.mount("none", path, None, change | flags | locked)


def _map_nobody(child: int) -> bool:
    """Give the child's namespace two users, root and nobody; only root of the outside may."""
    if os.geteuid() != 0:
        return False
    try:
        for kind in ("uid_map", "gid_map"):
            Path(f"/proc/{child}/{kind}").write_text(f"0 0 1\n{_INSIDE} {_NOBODY} 1\n", "ascii")
    except OSError:  # a container whose root may not, or knows no nobody: the child maps itself
        return False
    return True


def _status_of(child: int) -> int:
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code
