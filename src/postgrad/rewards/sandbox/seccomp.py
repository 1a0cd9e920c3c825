"""Which system calls a program may make: a list of what is allowed, as a BPF filter.

Allowed are one process with threads, files, time, and signals to itself. Not allowed are fork and
exec, sockets to others, mounts, namespaces, tracing, keys and io_uring. A call that is not in the
list fails with EPERM, so that Python raises an exception.
"""

import ctypes
import errno
import os
import struct

# name, number on x86_64, number on aarch64 ("-": does not exist there)
_ALLOWED = """
read 0 63, readv 19 65, pread64 17 67, write 1 64, writev 20 66, pwrite64 18 68, lseek 8 62,
open 2 -, openat 257 56, close 3 57, close_range 436 436, dup 32 23, dup2 33 -, dup3 292 24,
stat 4 -, fstat 5 80, lstat 6 -, newfstatat 262 79, statx 332 291, statfs 137 43, fstatfs 138 44,
access 21 -, faccessat 269 48, faccessat2 439 439, flock 73 32, umask 95 166,
truncate 76 45, ftruncate 77 46, fsync 74 82, fdatasync 75 83, sendfile 40 71,
copy_file_range 326 285, getdents 78 -, getdents64 217 61, getcwd 79 17, chdir 80 49, fchdir 81 50,
rename 82 -, renameat 264 38, renameat2 316 276, mkdir 83 -, mkdirat 258 34, rmdir 84 -,
link 86 -, linkat 265 37, unlink 87 -, unlinkat 263 35, symlink 88 -, symlinkat 266 36,
readlink 89 -, readlinkat 267 78, chmod 90 -, fchmod 91 52, fchmodat 268 53, utimensat 280 88,
pipe 22 -, pipe2 293 59, eventfd2 290 19, poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72,
epoll_create 213 -, epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22,
sendto 44 206, recvfrom 45 207, getsockopt 55 209, setsockopt 54 208, getsockname 51 204,
getpeername 52 205, shutdown 48 210,
mmap 9 222, mprotect 10 226, munmap 11 215, mremap 25 216, madvise 28 233, brk 12 214,
rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, sigaltstack 131 132,
rt_sigpending 127 136, rt_sigtimedwait 128 137, rt_sigsuspend 130 133, pause 34 -,
kill 62 129, tgkill 234 131, tkill 200 130, restart_syscall 219 128,
gettimeofday 96 169, time 201 -, clock_gettime 228 113, clock_getres 229 114,
clock_nanosleep 230 115, nanosleep 35 101, getitimer 36 102, setitimer 38 103, alarm 37 -,
times 100 153, getrusage 98 165, getrlimit 97 163, setrlimit 160 164,
sysinfo 99 179, uname 63 160, getrandom 318 278, getcpu 309 168,
getpid 39 172, getppid 110 173, gettid 186 178, getuid 102 174, geteuid 107 175, getgid 104 176,
getegid 108 177, getresuid 118 148, getresgid 120 150, getgroups 115 158, getpgrp 111 -,
getpgid 121 155, getsid 124 156, wait4 61 260, waitid 247 95,
set_tid_address 218 96, set_robust_list 273 99, get_robust_list 274 100, rseq 334 293,
futex 202 98, membarrier 324 283, sched_yield 24 124, sched_getaffinity 204 123,
arch_prctl 158 -, exit 60 93, exit_group 231 94
"""
_COLUMN = {"x86_64": 0, "aarch64": 1}
_CLONE, _CLONE3, _PRCTL = (56, 220), (435, 435), (157, 167)
# A thread, with every flag that the two C libraries give it: a mask would let new namespaces pass,
# of which CLONE_NEWTIME hides in the byte of the exit signal.
_THREAD_OF_GLIBC, _THREAD_OF_MUSL = 0x003D_0F00, 0x007D_0F00
# Allowed where one argument is one of these: call, its numbers, the argument's place, values.
_BY_VALUE = (
    (_CLONE, 0, (_THREAD_OF_GLIBC, _THREAD_OF_MUSL)),  # clone
    ((53, 199), 0, (1,)),  # socketpair: AF_UNIX, which asyncio wakes itself with
    (_PRCTL, 0, (15, 16)),  # prctl: the name of a thread
    ((16, 29), 1, (0x5401, 0x5413, 0x5421, 0x5450, 0x5451)),  # ioctl: is it a tty, non-blocking
    ((72, 25), 1, (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1031, 1032)),  # fcntl, but no signals to others
    ((302, 261), 0, (0,)),  # prlimit64: limits of its own
)
# What a process that forks and sandboxes its children may do, too: clone with the flags of fork in
# both C libraries, prctl to install a filter and to give up new privileges.
_OF_FORKING = {_CLONE: (0x0120_0011, 0x11), _PRCTL: (15, 16, 22, 38)}
_FORK = (57, None)  # musl's, on x86_64
_SIGNALS = ((62, 129), (200, 130), (234, 131))  # kill, tkill, tgkill
_STARTS = (_FORK, (58, None), _CLONE, _CLONE3)  # vfork
_ARCHITECTURE = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
_X32 = 0x4000_0000  # the calls of a second ABI of x86_64 start here

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF_0000, 0x8000_0000, 0x0005_0000
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data


class FilterProgram(ctypes.Structure):
    """struct sock_fprog: a BPF program. Its attribute `code` keeps the instructions alive."""

    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def is_known() -> bool:
    """Whether there is a list for this machine's architecture."""
    return os.uname().machine in _COLUMN


def build(machine: str, *, forks: bool = False) -> FilterProgram:
    """The filter for an architecture, "x86_64" or "aarch64".

    forks: for a process that forks children and restricts them further (`build_leaf`).
    """
    return _program(_instructions(machine, forks))


def build_leaf(machine: str) -> FilterProgram:
    """A filter on top of `build`'s: no process or thread can be started, and none signalled."""
    return _program(_leaf_instructions(machine))


def _program(instructions: list[bytes]) -> FilterProgram:
    code = ctypes.create_string_buffer(b"".join(instructions))
    program = FilterProgram(len(code) // 8, ctypes.addressof(code))
    program.code = code
    return program


def allowed(machine: str) -> dict[str, int]:
    """Name -> number of the calls that are allowed whatever their arguments."""
    calls: dict[str, int] = {}
    for entry in _ALLOWED.split(","):
        name, *numbers = entry.split()
        number = numbers[_COLUMN[machine]]
        if number != "-":
            calls[name] = int(number)
    return calls


def _instructions(machine: str, forks: bool = False) -> list[bytes]:
    column = _COLUMN[machine]
    code = [
        _op(_LOAD, _ARCH),
        _op(_EQUAL, _ARCHITECTURE[machine], 1, 0),
        _op(_RETURN, _KILL),
        _op(_LOAD, _NUMBER),
        _op(_AT_LEAST, _X32, 0, 1),
        _op(_RETURN, _KILL),
    ]
    for number in allowed(machine).values():
        code += [_op(_EQUAL, number, 0, 1), _op(_RETURN, _ALLOW)]
    # glibc falls back from clone3, whose flags a filter cannot see, to clone.
    code += [_op(_EQUAL, _CLONE3[column], 0, 1), _op(_RETURN, _ERRNO | errno.ENOSYS)]
    if forks and (fork := _FORK[column]) is not None:
        code += [_op(_EQUAL, fork, 0, 1), _op(_RETURN, _ALLOW)]
    for numbers, place, values in _BY_VALUE:
        if forks:
            values = _OF_FORKING.get(numbers, values)
        tests = [
            _op(_EQUAL, value, len(values) - 1 - i, 0 if i < len(values) - 1 else 1)
            for i, value in enumerate(values)
        ]
        code += _if_number(numbers[column], place, tests)
    return [*code, _op(_RETURN, _ERRNO | errno.EPERM)]


def _leaf_instructions(machine: str) -> list[bytes]:
    column = _COLUMN[machine]
    code = [_op(_LOAD, _NUMBER)]
    for numbers in (*_STARTS, *_SIGNALS):
        if (number := numbers[column]) is not None:
            code += [_op(_EQUAL, number, 0, 1), _op(_RETURN, _ERRNO | errno.EPERM)]
    return [*code, _op(_RETURN, _ALLOW)]


def _if_number(number: int, place: int, tests: list[bytes]) -> list[bytes]:
    """Instructions: allow call `number` where a test of its argument falls through, else EPERM."""
    body = [
        _op(_LOAD, _ARGUMENTS + 8 * place),
        *tests,
        _op(_RETURN, _ALLOW),
        _op(_RETURN, _ERRNO | errno.EPERM),
    ]
    return [_op(_EQUAL, number, 0, len(body)), *body]


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
