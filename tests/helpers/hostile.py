"""Programs that try to get out, to harm or to cheat: name -> (source, how each may end).

A program that gets what it wanted prints ESCAPED. "wrong_answer" stands for a run that ended by
itself without the answer, which none of them can know. PROGRAMS run in every `make test`, MORE
with the slow ones.
"""

from postgrad.rewards.sandbox import seccomp

SECRET = "POSTGRAD_TEST_SECRET"  # in the environment of the tests

_SYSCALL = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    result = libc.syscall(*[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    if result >= 0:
        print("ESCAPED", arguments)
    raise SystemExit(3 if ctypes.get_errno() == 1 else 4)
"""
_NUMBERS = {  # of system calls, on x86_64 and aarch64
    "unshare": (272, 97),
    "mount": (165, 40),
    "ptrace": (101, 117),
    "setns": (308, 268),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "io_uring_setup": (425, 425),
    "bpf": (321, 280),
    "keyctl": (250, 219),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "process_vm_readv": (310, 270),
    "open_by_handle_at": (304, 265),
    "memfd_create": (319, 279),
    "pidfd_open": (434, 434),
    "mknodat": (259, 33),
    "capset": (126, 91),
    "shmget": (29, 194),
    "finit_module": (313, 273),
    "mlockall": (151, 230),
}
_TRY = """
def attempt(deed):
    try:
        deed()
    except OSError:
        return
    print("ESCAPED")
"""


def _syscall(name: str) -> tuple[str, tuple[str, ...]]:
    x86, arm = _NUMBERS[name]
    number = f"({x86} if os.uname().machine == 'x86_64' else {arm})"
    return f"{_SYSCALL}\ncall({number}, 0x10000000, b'/tmp', b'/tmp', 0, 0)", ("exit",)


def _tries(deed: str) -> tuple[str, tuple[str, ...]]:
    return f"import os, socket, pathlib\n{_TRY}\n{deed}", ("wrong_answer",)


HARM = {
    "fork bomb": ("import os\nwhile True: os.fork()", ("exit",)),
    "fork bomb that goes on": (
        "import os\nwhile True:\n try: os.fork()\n except OSError: pass", ("cpu_time",)),
    "subprocess": ("import subprocess\nsubprocess.run(['sh', '-c', 'echo ESCAPED'])", ("exit",)),
    "multiprocessing": (
        "import multiprocessing as m\np = m.Process(target=print)\np.start()", ("exit",)),
    "thread bomb": (
        "import threading, time\nthreading.stack_size(32768)\nfor i in range(5000):\n"
        " threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "print('ESCAPED')", ("exit",)),
    "memory bomb": ("x = []\nwhile True: x.append(bytearray(1 << 24))", ("exit", "cpu_time")),
    "memory bomb that goes on": (
        "x = []\nwhile True:\n try: x.append(bytearray(1 << 24))\n except MemoryError: pass",
        ("cpu_time",)),
    "memory map": ("import mmap\nx = [mmap.mmap(-1, 1 << 28) for _ in range(64)]", ("exit",)),
    "one huge string": ("x = 'a' * 10**12", ("exit",)),
    "scratch filled": (
        "for i in range(10**6):\n open(f'/tmp/{i}', 'wb').write(b'x' * 1000000)", ("exit",)),
    "many files": ("for i in range(10**6): open(f'/tmp/{i}', 'w').close()", ("exit",)),
    "one huge file": ("open('/tmp/x', 'wb').truncate(1 << 40)", ("exit",)),
    "descriptors": (
        "import os\nx = [os.open('/dev/null', 0) for _ in range(10000)]", ("exit",)),
    "output without end": ("while True: print('x' * 1000)", ("output",)),
    "output that goes on": (
        "import os\nwhile True:\n try: os.write(1, b'x' * 65536)\n except OSError: pass",
        ("cpu_time",)),
    "errors without end": (
        "import sys\nwhile True: print('x' * 1000, file=sys.stderr)", ("output",)),
    "spinning": ("while True: pass", ("cpu_time",)),
    "spinning in C": ("print(len(str(7 ** 7 ** 9)))", ("cpu_time",)),
    "spinning in a regular expression": (
        "import re\nre.match('(a+)+$', 'a' * 40 + 'b')", ("cpu_time",)),
    "spinning in threads": (
        "import threading\ndef spin():\n while True: pass\n"
        "for _ in range(4): threading.Thread(target=spin).start()", ("cpu_time",)),
    "spinning deaf to signals": (
        "import signal\nfor s in range(1, 65):\n try: signal.signal(s, signal.SIG_IGN)\n"
        " except (OSError, ValueError): pass\nwhile True: pass", ("cpu_time",)),
    "sleeping for ever": ("import time\ntime.sleep(10**6)", ("idle",)),
    "pausing for ever": ("import signal\nsignal.sigwait([signal.SIGUSR1])", ("idle",)),
    "waiting for itself": ("import os\nr, w = os.pipe()\nos.read(r, 1)", ("idle",)),
    "deadlock": ("import threading\nl = threading.Lock()\nl.acquire()\nl.acquire()", ("idle",)),
    "a thread that stays": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(10**6,)).start()",
        ("idle",)),
    "recursion": ("def f(): f()\nf()", ("exit",)),
    "deep recursion in C": (
        "import sys\nsys.setrecursionlimit(10**9)\nx = []\nfor _ in range(10**5): x = [x]\n"
        "print(repr(x)[:0])", ("signal", "exit", "wrong_answer", "cpu_time")),
    "a crash": ("import ctypes\nctypes.string_at(0)", ("signal",)),
    "abort": ("import os\nos.abort()", ("signal", "exit")),
}  # fmt: skip

KILL = {
    "kill the parent": ("import os\nos.kill(os.getppid(), 9)", ("wrong_answer", "signal", "exit")),
    "kill everybody": ("import os\nos.kill(-1, 9)", ("exit",)),
    "kill the group": ("import os\nos.kill(0, 9)\nos.killpg(0, 9)", ("wrong_answer", "signal")),
    "kill every number": (
        # 70 000 of them come near the limit of CPU time, and over it on a busy machine
        "import os\nfor p in range(2, 20000):\n try:\n  os.kill(p, 9)\n  print('ESCAPED')\n"
        " except OSError: pass", ("wrong_answer",)),
    "limits of others": _tries(
        "import resource\nfor p in range(2, 2000):\n"
        " attempt(lambda: resource.prlimit(p, resource.RLIMIT_CPU))"),
    "higher limits": (
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))\n"
        "print('ESCAPED')", ("exit",)),
}  # fmt: skip

READ = {
    "passwords": _tries("attempt(lambda: open('/etc/passwd').read())"),
    "home": _tries("attempt(lambda: os.listdir('/home'))"),
    "the environment": (
        f"import os\nif {SECRET!r} in os.environ: print('ESCAPED')", ("wrong_answer",)),
    "the environment of C": (
        f"import ctypes\nlibc = ctypes.CDLL(None)\nlibc.getenv.restype = ctypes.c_char_p\n"
        f"if libc.getenv({SECRET!r}.encode()): print('ESCAPED')", ("wrong_answer",)),
    "the environment in /proc": _tries("attempt(lambda: open('/proc/self/environ').read())"),
    "the root of process 1": _tries("attempt(lambda: os.listdir('/proc/1/root'))"),
    "memory in /proc": _tries("attempt(lambda: open('/proc/self/mem'))"),
    "/sys": _tries("attempt(lambda: os.listdir('/sys'))"),
    "disks": _tries("attempt(lambda: open('/dev/vda', 'rb')); attempt(lambda: open('/dev/mem'))"),
    "the old root": _tries(
        "attempt(lambda: os.listdir('/old'))\n"
        "attempt(lambda: os.stat('/tmp/../../../../etc/passwd'))"),
    "descriptors left open": (
        "import os\nfor d in range(5, 70000):\n try:\n  os.fstat(d)\n  print('ESCAPED', d)\n"
        " except OSError: pass", ("wrong_answer",)),
    "a symbolic link": _tries(
        "os.symlink('/etc/passwd', '/tmp/link')\nattempt(lambda: open('/tmp/link').read())"),
    "a hard link": _tries("attempt(lambda: os.link('/dev/zero', '/tmp/zero'))"),
    "site-packages": (
        "import sysconfig, os\np = sysconfig.get_path('stdlib') + '/site-packages'\n"
        "if os.path.isdir(p) and os.listdir(p): print('ESCAPED')", ("wrong_answer",)),
}  # fmt: skip

WRITE = {
    "write to the root": _tries("attempt(lambda: open('/written', 'w'))"),
    "write to the library": _tries(
        "attempt(lambda: open(os.path.dirname(os.__file__) + '/os.py', 'a'))"
    ),
    "delete from the library": _tries("attempt(lambda: os.unlink(os.__file__))"),
    "a folder beside the scratch": _tries("attempt(lambda: os.mkdir('/shared'))"),
    "shared memory": _tries("attempt(lambda: open('/dev/shm/x', 'w'))"),
    "climb out of the scratch": _tries("attempt(lambda: open('/tmp/../written', 'w'))"),
    "become root": _tries("attempt(lambda: os.setuid(0))"),
}

NETWORK = {
    "tcp": _tries("attempt(lambda: socket.create_connection(('127.0.0.1', 22), 1))"),
    "udp": _tries("attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))"),
    "ipv6": _tries("attempt(lambda: socket.socket(socket.AF_INET6, socket.SOCK_STREAM))"),
    "names": _tries("attempt(lambda: socket.getaddrinfo('example.com', 80))"),
    "abstract socket": _tries("attempt(lambda: socket.socket(socket.AF_UNIX).bind(chr(0) + 'x'))"),
    "netlink": _tries("attempt(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0))"),
    "http": ("import urllib.request\nurllib.request.urlopen('http://1.1.1.1')", ("exit",)),
}

ESCAPE = {
    **{f"system call {name}": _syscall(name) for name in _NUMBERS},
    "execute a file": _tries("attempt(lambda: os.execv('/bin/sh', ['sh']))"),
    "execute itself": _tries("attempt(lambda: os.execv('/proc/self/exe', ['python']))"),
    "a second ABI": (
        "import ctypes, os\nif os.uname().machine == 'x86_64':\n"
        " ctypes.CDLL(None).syscall(0x40000000 + 39)\nelse:\n os.abort()\nprint('ESCAPED')",
        ("signal",)),
    "a terminal's input": _tries(
        "import fcntl\nattempt(lambda: fcntl.ioctl(0, 0x5412, b'x'))"),
}  # fmt: skip

FORGE = {
    "leave with success": ("import os\nos._exit(0)", ("wrong_answer",)),
    "say OK": ("print('OK')\nprint('passed')\nprint('1.0')", ("wrong_answer",)),
    "write a result": (
        "import os\nos.write(4, b'{\"passed\": true}')\nos._exit(0)", ("wrong_answer",)),
    "write everywhere": (
        "import os\nfor d in range(64):\n try: os.write(d, b'{\"passed\": true}\\n')\n"
        " except OSError: pass\nos._exit(0)", ("wrong_answer",)),
    "look for the answer": (
        "import gc, os\nfor d in range(64):\n"
        " try: found = os.pread(d, 1 << 20, 0)\n except OSError: continue\n"
        " if b'wanted' in found: print('ESCAPED')\n"
        "seen = [o for o in gc.get_objects() if isinstance(o, dict) and 'outputs' in o]\n"
        "if seen: print('ESCAPED')", ("wrong_answer",)),
    "compare as equal": (
        "class S(str):\n def __eq__(self, other): return True\nprint(S('no'))", ("wrong_answer",)),
    "patch json and the exit": (
        "import json, sys, builtins, os\njson.dumps = lambda *a, **k: '{\"passed\": true}'\n"
        "sys.exit = os._exit = builtins.exit = lambda *a: None", ("wrong_answer",)),
}  # fmt: skip

PROGRAMS = {**HARM, **KILL, **READ, **WRITE, **NETWORK, **ESCAPE, **FORGE}

_LISTED = {machine: sorted(seccomp.allowed(machine).values()) for machine in ("x86_64", "aarch64")}
_UP = """
import os, sysconfig
root = set(os.listdir("/"))
tops = {sysconfig.get_path(name).split("/")[1] for name in ("stdlib", "platstdlib")}
if not root <= {"dev", "tmp", *tops}:
    print("ESCAPED", root)
def climb(descriptor):
    for _ in range(20):
        try:
            above = os.open("..", os.O_RDONLY | FLAGS, dir_fd=descriptor)
        except OSError:
            return
        if descriptor > 8:
            os.close(descriptor)
        descriptor = above
    if set(os.listdir(descriptor)) != root:
        print("ESCAPED", os.listdir(descriptor))
    os.close(descriptor)
for descriptor in range(60):
    climb(descriptor)
for folder in ("/", "/tmp", "/dev", sysconfig.get_path("stdlib"), "."):
    climb(os.open(folder, os.O_RDONLY))
"""
_FLAGS = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
x86 = os.uname().machine == "x86_64"
new = [0x80, *(1 << bit for bit in (12, 13, 14, 15, 17, 23, 25, 26, 27, 28, 29, 30, 31))]
def refused(number, *arguments):
    padded = [ctypes.c_long(value) for value in (*arguments, 0, 0, 0, 0)]
    result = libc.syscall(ctypes.c_long(number), *padded)
    if result != -1 or ctypes.get_errno() != errno.EPERM:
        print("ESCAPED", number, *map(hex, arguments), result)
"""
MORE = {
    "up from every descriptor": (_UP.replace("FLAGS", "0"), ("wrong_answer",)),
    "up from every descriptor, as a path": (
        _UP.replace(" | FLAGS", " | os.O_DIRECTORY"), ("wrong_answer",)),
    "into every descriptor": (
        "import os\nfor d in range(64):\n try:\n  os.fchdir(d)\n  print('ESCAPED', d)\n"
        " except OSError: pass", ("wrong_answer",)),
    "a thread in new namespaces": (
        f"{_FLAGS}\nfor flag in new: refused(56 if x86 else 220, 0x3d0f00 | flag)",
        ("wrong_answer",)),
    "a process in new namespaces": (
        f"{_FLAGS}\nfor flag in new: refused(56 if x86 else 220, 17 | flag)", ("wrong_answer",)),
    "unshare of every kind": (
        f"{_FLAGS}\nfor flag in new: refused(272 if x86 else 97, flag)", ("wrong_answer",)),
    "clone3": (
        f"{_FLAGS}\nb = ctypes.create_string_buffer(88)\n"
        "if libc.syscall(435, b, 88) != -1 or ctypes.get_errno() != errno.ENOSYS:\n"
        " print('ESCAPED')", ("wrong_answer",)),
    "every system call that is not listed": (
        f"{_FLAGS}\nlisted = {_LISTED!r}[os.uname().machine]\n"
        # 335 and 336 belong to the kernel's own trampolines: SIGILL, whoever calls them.
        "fcntl, prlimit = {'x86_64': (72, 302), 'aarch64': (25, 261)}[os.uname().machine]\n"
        "for number in set(range(600)) - {335, 336, 435, fcntl, prlimit} - set(listed):\n"
        " refused(number, 0)\n"
        "refused(fcntl, 0, 8, 1)\nrefused(fcntl, 0, 15, 0)\nrefused(prlimit, 1, 0, 0, 0)",
        ("wrong_answer",)),  # the owner of a descriptor gets signals; limits of another process
    "a system call of 32 bits": (
        "import ctypes, mmap, os\nif os.uname().machine != 'x86_64': os.abort()\n"
        "m = mmap.mmap(-1, 4096, prot=7)\nm.write(bytes.fromhex('b814000000cd80c3'))\n"
        "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()\n"
        "print('ESCAPED')", ("signal",)),
    "named pipes and devices": _tries(
        "attempt(lambda: os.mkfifo('/tmp/fifo'))\n"
        "attempt(lambda: os.mknod('/tmp/disk', 0o60600, 8))"),
    "the library cut short": _tries("attempt(lambda: os.truncate(os.__file__, 0))"),
    "the library renamed": _tries(
        "attempt(lambda: os.rename(os.path.dirname(os.__file__), '/tmp/library'))"),
    "the library's mode": _tries("attempt(lambda: os.chmod(os.__file__, 0o777))"),
    "the library's times": _tries("attempt(lambda: os.utime(os.__file__))"),
    "a device removed": _tries("attempt(lambda: os.unlink('/dev/null'))"),
    "other devices": (
        "import os\nif sorted(os.listdir('/dev')) != ['null', 'random', 'urandom', 'zero']:\n"
        " print('ESCAPED')", ("wrong_answer",)),
    "namespaces in /proc": _tries("attempt(lambda: os.open('/proc/self/ns/mnt', 0))"),
    "descriptors in /proc and /dev": _tries(
        "attempt(lambda: os.listdir('/proc/self/fd'))\nattempt(lambda: os.listdir('/dev/fd'))"),
    "control groups": _tries("attempt(lambda: os.listdir('/sys/fs/cgroup'))"),
    "the old root by name": _tries(
        "for p in ('/old', '/oldroot', '/newroot', '/old_root', '/mnt', '/host', '/.dockerenv'):\n"
        " attempt(lambda: os.stat(p))"),
    "another group": _tries("attempt(lambda: os.setgroups([0]))\nattempt(lambda: os.setgid(0))"),
    "another session": _tries("attempt(os.setsid)\nattempt(lambda: os.setpgid(0, 0))"),
    "processors of its choice": _tries("attempt(lambda: os.sched_setaffinity(0, {0}))"),
    "a better priority": _tries("attempt(lambda: os.nice(-5))"),
    "the clock": _tries("import time\nattempt(lambda: time.clock_settime(time.CLOCK_REALTIME, 0))"),
    "the host's name": _tries("attempt(lambda: socket.sethostname('x'))"),
    "listening": _tries(
        "attempt(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM).listen())"),
    "a raw socket": _tries(
        "attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP))"),
    "a packet socket": _tries("attempt(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))"),
    "a virtual machine's socket": _tries(
        "attempt(lambda: socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM))"),
    "threads of others": (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\n"
        "number = 234 if os.uname().machine == 'x86_64' else 131\n"
        "for p in range(2, 3000):\n"
        " if libc.syscall(number, p, p, 9) == 0: print('ESCAPED')", ("wrong_answer",)),
    "the answer in gc and frames": (
        "import gc, sys\nneedle = 'a3f7 detnaw'[::-1]\n"
        "frame, seen = sys._getframe(), []\n"
        "while frame: seen += [frame.f_locals, frame.f_globals]; frame = frame.f_back\n"
        "for o in gc.get_objects() + seen:\n"
        " for x in gc.get_referents(o):\n"
        "  if type(x) is str and needle in x and x is not needle: print('ESCAPED')",
        ("wrong_answer",)),
    "spinning at the end": (
        "import atexit\n@atexit.register\ndef spin():\n while True: pass", ("cpu_time",)),
    "spinning after the end": (
        "import threading\ndef spin():\n while True: pass\n"
        "threading.Thread(target=spin).start()", ("cpu_time",)),
    "spinning in as many threads as there may be": (
        "import threading\ndef spin():\n while True: pass\ntry:\n"
        " while True: threading.Thread(target=spin, daemon=True).start()\n"
        "except RuntimeError: spin()", ("cpu_time",)),
    "spinning through pow": ("print(pow(3, 10**7) % 7)", ("cpu_time",)),
    "spinning in decimal": ("import decimal\ndecimal.getcontext().prec = 10**6\n"
        "print(decimal.Decimal(2) ** decimal.Decimal('0.5'))", ("cpu_time",)),
    "sleeping in a signal handler": (
        "import signal, time\nsignal.signal(signal.SIGALRM, lambda *a: time.sleep(10**6))\n"
        "signal.alarm(1)\ntime.sleep(10**6)", ("idle",)),
    "waking often": (
        "import time\nwhile True: time.sleep(0.001)", ("idle", "cpu_time")),
    "a lock on a file": (
        "import fcntl\na, b = open('/tmp/a', 'w'), open('/tmp/a', 'w')\n"
        "fcntl.flock(a, 2)\nfcntl.flock(b, 2)", ("idle",)),
    "stopping itself": (
        "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\nos.kill(1, signal.SIGKILL)",
        ("wrong_answer",)),
    "folders without end": (
        "import os\nwhile True:\n os.mkdir('d')\n os.chdir('d')", ("exit",)),
    "a bomb in zlib": (
        "import zlib\nx = zlib.compress(bytes(1 << 26))\n"
        "y = [zlib.decompress(x) for _ in range(9)]", ("exit", "cpu_time")),
    "a wide format": ("print(f'{1:>{10**11}}')", ("exit",)),
    "a deep literal": ("eval('[' * 10**5 + ']' * 10**5)", ("exit", "output")),
    "words that are no text": (
        "import sys\nprint(chr(0xd800), file=sys.stderr)\nsys.exit(chr(0xd801))", ("exit",)),
    "an answer that is no text": ("print(chr(0xd800))", ("exit",)),
    "closed streams": ("import os\nfor d in range(64):\n try: os.close(d)\n"
        " except OSError: pass", ("wrong_answer", "exit")),
    "an exit code that wraps": ("import os\nos._exit(256)", ("wrong_answer",)),
    "its own input rewritten": (
        "import os\nos.pwrite(0, b'wanted', 0)\nos.ftruncate(0, 1 << 12)", ("wrong_answer",)),
    "input as output": ("import os\nos.dup2(0, 1)\nprint('x')", ("wrong_answer",)),
}  # fmt: skip
