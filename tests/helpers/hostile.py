"""Programs that try to get out, to harm or to cheat: name -> (source, how each may end).

A program that gets what it wanted prints ESCAPED. "wrong_answer" stands for a run that ended by
itself without the answer, which none of them can know.
"""

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
