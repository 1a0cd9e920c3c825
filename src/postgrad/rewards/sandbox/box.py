"""Isolation of programs: namespaces, a root with almost nothing in it, no capabilities.

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
_OWN = 8  # processes of the sandbox itself that count against the same limit
_COUNTS_BY_NAMESPACE = (5, 14)  # Linux version since which RLIMIT_NPROC counts by namespace
_NAMESPACES = (
    kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUTS | kernel.CLONE_NEWCGROUP
)  # fmt: skip


def enter_namespaces() -> int | None:
    """Forks a process that is alone in new namespaces of every kind, and returns None in it.

    The processes that stay outside wait for it; in them the exit status to end with is returned.
    Raises OSError where the system does not allow namespaces.
    """
    parent_end, child_end = socket.socketpair()
    child = os.fork()
    if child:
        child_end.close()
        if parent_end.recv(1):
            parent_end.send(b"y" if _map_nobody(child) else b"n")
        parent_end.close()
        return _status_of(child)
    parent_end.close()
    kernel.die_with_parent()
    user, group = os.geteuid(), os.getegid()
    kernel.unshare(kernel.CLONE_NEWUSER)
    child_end.send(b"?")
    if child_end.recv(1) != b"y":
        Path("/proc/self/setgroups").write_text("deny", "ascii")
        Path("/proc/self/uid_map").write_text(f"{_INSIDE} {user} 1", "ascii")
        Path("/proc/self/gid_map").write_text(f"{_INSIDE} {group} 1", "ascii")
    child_end.close()
    kernel.unshare(_NAMESPACES)
    socket.sethostname(HOST)
    child = os.fork()
    if child:
        return _status_of(child)
    kernel.die_with_parent()
    return None


def restrict_root(libraries: Sequence[str] = ()) -> int | None:
    """Changes the root to a read-only one with `libraries`, four devices and an empty /tmp.

    libraries: files and folders; without any, the standard library and no installed packages.
    Returns the number of the user that programs become, None where the namespace has one user.
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


def fork_isolated(pidfd: int, user: int | None, scratch_bytes: int) -> int:
    """Forks a child that is process 1 of new process, mount and IPC namespaces with an empty /tmp.

    Returns the child's id here and 0 in the child. pidfd: of this process. user: owner of /tmp.
    """
    kernel.join(pidfd, kernel.CLONE_NEWPID)  # without going back first, a second unshare is refused
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


def drop_rights(user: int | None, threads: int) -> None:
    """Drops all capabilities for good, becomes `user`, and limits the threads where the kernel
    counts them by namespace.
    """
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
