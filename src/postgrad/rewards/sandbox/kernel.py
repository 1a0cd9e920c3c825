"""Linux system calls that the standard library of Python 3.11 does not have."""

import ctypes
import os
import struct
from collections.abc import Iterable
from pathlib import Path

CLONE_NEWNS = 0x0002_0000
CLONE_NEWCGROUP = 0x0200_0000
CLONE_NEWUTS = 0x0400_0000
CLONE_NEWIPC = 0x0800_0000
CLONE_NEWUSER = 0x1000_0000
CLONE_NEWPID = 0x2000_0000
CLONE_NEWNET = 0x4000_0000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 22, 24, 38
SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x2008_0522
_SIGKILL = 9
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
# Landlock: the same numbers on every architecture.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}  # version -> how many rights it knows
_TCP_VERSION, _SCOPE_VERSION = 4, 6  # since when it also rules TCP, signals and abstract sockets

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """New namespaces for this process; the pid namespace is for its next child."""
    _checked(_libc.unshare(flags), f"unshare {flags:#x}")


def join(descriptor: int, kind: int) -> None:
    """setns(2): enter the namespace of that kind that the process of a pidfd is in."""
    _checked(_libc.setns(descriptor, kind), "setns")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """mount(2). `kind` is the type of the file system, None for bind and remount."""
    result = _libc.mount(
        source.encode(),
        os.fsencode(target),
        kind.encode() if kind else None,
        ctypes.c_ulong(flags),
        options.encode() or None,
    )
    _checked(result, f"mount {source} on {target}")


def unmount(target: str) -> None:
    """A lazy unmount: files in use stay until they are closed."""
    _checked(_libc.umount2(os.fsencode(target), MNT_DETACH), f"unmount {target}")


def pivot_root(new: str, old: str) -> None:
    """`new` becomes the root, and the old root stands at `old`."""
    number = _PIVOT_ROOT[os.uname().machine]
    _checked(_libc.syscall(number, os.fsencode(new), os.fsencode(old)), "pivot_root")


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent ends. A change of user undoes it."""
    _checked(_libc.prctl(PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0), "prctl PDEATHSIG")


def drop_bounding_set() -> None:
    """Empties the bounding set: no program that is executed later can get a capability."""
    capability = 0
    while _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1


def drop_capabilities() -> None:
    """Give up every capability for good."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _checked(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def install_filter(program: ctypes.Structure) -> None:
    """Installs a seccomp filter (a sock_fprog) for this process and its future threads."""
    _checked(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl NO_NEW_PRIVS")
    result = _libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0)
    _checked(result, "prctl SECCOMP")


def landlock_version() -> int:
    """The version of Landlock that this kernel has; 0 where it has none, or does not allow it."""
    return max(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1), 0)


def read_only(paths: Iterable[str]) -> None:
    """Landlock: from here on this process and its children can open nothing but what lies under
    `paths`, and that only to read. Raises OSError where the kernel has no Landlock.

    Names and sizes of other files can still be looked up (stat): Landlock does not rule that.
    """
    version = landlock_version()
    rights = (1 << max((n for v, n in _FILE_RIGHTS.items() if v <= version), default=0)) - 1
    rules = [rights]
    if version >= _TCP_VERSION:
        rules.append(0b11)
    if version >= _SCOPE_VERSION:
        rules.append(0b11)
    attributes = struct.pack(f"={len(rules)}Q", *rules)
    ruleset = _libc.syscall(_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    _checked(min(ruleset, 0), "landlock_create_ruleset")
    try:
        for path in paths:
            _add_path(ruleset, path)
        _checked(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl NO_NEW_PRIVS")
        _checked(_libc.syscall(_RESTRICT_SELF, ruleset, 0), "landlock_restrict_self")
    finally:
        os.close(ruleset)


def _add_path(ruleset: int, path: str) -> None:
    rights = _READ_FILE | _READ_DIR if Path(path).is_dir() else _READ_FILE
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", rights, descriptor)
        _checked(_libc.syscall(_ADD_RULE, ruleset, 1, rule, 0), f"landlock_add_rule {path}")
    finally:
        os.close(descriptor)
