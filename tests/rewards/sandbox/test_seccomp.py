import struct

import pytest

from postgrad.rewards.sandbox import seccomp

ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
THREAD = 0x003D0F00  # the flags of clone(2) for a thread, as glibc makes it
# CLONE_NEWTIME, NS, CGROUP, UTS, IPC, USER, PID, NET; PTRACE, VFORK, PARENT, PIDFD, IO.
NEW = (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
OTHER = (0x2000, 0x4000, 0x8000, 0x1000, 0x80000000)
ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def verdict(machine, number, *arguments, arch=None, code=None):
    """What the filter returns for a call: the BPF machine in a few lines."""
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("=IIQ6Q", number, arch or ARCHITECTURE[machine], 0, *padded)
    code = code or seccomp._instructions(machine)
    place, accumulator = 0, 0
    while True:
        operation, if_true, if_false, value = struct.unpack("=HBBI", code[place])
        place += 1
        if operation == 0x06:
            return value
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, value)
            continue
        tests = {0x15: accumulator == value, 0x35: accumulator >= value}
        place += if_true if tests[operation] else if_false


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_what_is_listed_is_allowed_and_all_else_refused(machine):
    listed = set(seccomp.allowed(machine).values())
    special = {
        "x86_64": {56, 435, 53, 157, 16, 72, 302},
        "aarch64": {220, 435, 199, 167, 29, 25, 261},
    }[machine]
    for number in range(600):
        wanted = ALLOW if number in listed else EPERM
        if number not in special:
            assert verdict(machine, number) == wanted, number


@pytest.mark.parametrize(
    ("machine", "clone", "clone3", "socketpair", "prctl", "ioctl"),
    [("x86_64", 56, 435, 53, 157, 16), ("aarch64", 220, 435, 199, 167, 29)],
)
def test_some_calls_depend_on_an_argument(machine, clone, clone3, socketpair, prctl, ioctl):
    assert verdict(machine, clone, THREAD) == ALLOW
    assert verdict(machine, clone, 0x01200011) == EPERM  # fork
    assert verdict(machine, clone3) == ENOSYS
    assert [verdict(machine, socketpair, family) for family in (1, 2, 16)] == [ALLOW, EPERM, EPERM]
    assert [verdict(machine, prctl, option) for option in (14, 15, 16, 22)] == [
        EPERM, ALLOW, ALLOW, EPERM
    ]  # fmt: skip
    assert [verdict(machine, ioctl, 0, request) for request in (0x5401, 0x5412, 0x5451)] == [
        ALLOW, EPERM, ALLOW
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("machine", "fcntl", "prlimit"), [("x86_64", 72, 302), ("aarch64", 25, 261)]
)
def test_nobody_signals_or_limits_another_process_by_a_detour(machine, fcntl, prlimit):
    set_owner, set_flags, other = 8, 4, 4711
    assert verdict(machine, fcntl, 3, set_flags) == ALLOW
    assert verdict(machine, fcntl, 3, set_owner, other) == EPERM
    assert verdict(machine, prlimit, 0) == ALLOW
    assert verdict(machine, prlimit, other) == EPERM


@pytest.mark.parametrize(
    ("machine", "clone", "prctl", "kill"), [("x86_64", 56, 157, 62), ("aarch64", 220, 167, 129)]
)
def test_a_worker_that_forks_shuts_its_children_in_further(machine, clone, prctl, kill):
    forks = seccomp._instructions(machine, forks=True)
    fork, new_network, seccomp_filter = 0x01200011, 0x40000011, 22
    assert verdict(machine, clone, fork, code=forks) == ALLOW
    assert verdict(machine, clone, new_network, code=forks) == EPERM
    assert verdict(machine, prctl, seccomp_filter, code=forks) == ALLOW
    leaf = seccomp._leaf_instructions(machine)
    assert verdict(machine, clone, fork, code=leaf) == EPERM
    assert verdict(machine, kill, 1, code=leaf) == EPERM
    assert verdict(machine, prctl, code=leaf) == ALLOW  # the other filter decides


@pytest.mark.parametrize(("machine", "clone"), [("x86_64", 56), ("aarch64", 220)])
def test_a_thread_is_made_with_exactly_its_flags_and_no_namespace(machine, clone):
    assert verdict(machine, clone, THREAD | 0x400000) == ALLOW  # as musl makes it
    for flag in (*NEW, *OTHER):
        assert verdict(machine, clone, THREAD | flag) == EPERM, hex(flag)
        assert verdict(machine, clone, 0x10000 | flag) == EPERM, hex(flag)  # CLONE_THREAD
        assert verdict(machine, clone, flag) == EPERM, hex(flag)
    for flag in (0x100, 0x200, 0x400, 0x800, 0x10000):  # its memory, files and signals are shared
        assert verdict(machine, clone, THREAD & ~flag) == EPERM, hex(flag)


def test_another_architecture_or_abi_is_the_end():
    assert verdict("x86_64", 0, arch=0x40000003) == KILL
    assert verdict("x86_64", 0x40000000) == KILL
    assert verdict("aarch64", 63, arch=0x40000028) == KILL


def test_processes_namespaces_and_networks_are_not_in_the_list():
    names = set(seccomp.allowed("x86_64")) | set(seccomp.allowed("aarch64"))
    assert not names & {
        "fork", "vfork", "clone", "execve", "execveat", "socket", "connect", "bind", "mount",
        "unshare", "setns", "ptrace", "bpf", "memfd_create", "io_uring_setup", "shmget", "keyctl",
    }  # fmt: skip
