"""Running programs: what comes back, what limits do, what happens when the sandbox itself dies."""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from postgrad.core.errors import UsageError
from postgrad.rewards.descendants import cpu_of, cpu_of_this_process, descendants
from postgrad.rewards.sandbox import choice, client, layers
from postgrad.rewards.sandbox.client import Limits, Program, Sandbox, SandboxError


@pytest.fixture
def run(sandbox):
    def run(source, stdin=b"", **limits):
        task = {"mode": "script", "sources": [source]}
        return sandbox.run([Program(task, stdin)], Limits(**limits))

    return run


def test_a_program_reads_prints_and_ends_as_python_does(run):
    end = run("import sys\nprint(input()[::-1])\nprint('bad', file=sys.stderr)", b"abc\n")
    assert (end.cause, end.code, end.output, end.errors) == (None, 0, b"cba\n", ("bad",))
    assert run("print(open(0).read(), end='')", "ü\n".encode()).output == "ü\n".encode()
    assert run("import sys\nsys.stdout.buffer.write(sys.stdin.buffer.read())", b"\xff").output == (
        b"\xff"
    )
    assert run("if __name__ == '__main__': print(1)").output == b"1\n"
    assert (run("raise SystemExit(7)").code, run("exit('why')").errors) == (7, ("why",))
    end = run("1 / 0")
    assert (end.cause, end.code) == ("exit", 1)
    assert end.errors[0].endswith("ZeroDivisionError: division by zero")
    assert "    1 / 0" in end.errors[0]


def test_what_is_written_at_the_end_arrives(run):
    assert run("import atexit\natexit.register(print, 'last')").output == b"last\n"
    source = "import threading, time\ndef f():\n time.sleep(0.05)\n print('late')\n"
    assert run(source + "threading.Thread(target=f).start()").output == b"late\n"
    assert run("import os\nprint('lost')\nos._exit(0)").output == b""


def test_a_program_starts_afresh_every_time(run):
    source = (
        "import os, random, builtins\n"
        "print(os.listdir('/tmp'), hasattr(builtins, 'x'), random.random(), hash('a'))\n"
        "builtins.x = 1\nopen('x', 'w').write('x')"
    )
    first = run(source)
    assert first.output.startswith(b"[] False 0.")
    assert run(source).output == first.output


def test_asyncio_and_threads_and_files_of_its_own_work(run):
    assert run("import asyncio\nasyncio.run(asyncio.sleep(0))\nprint(1)").output == b"1\n"
    assert run(
        "from concurrent.futures import ThreadPoolExecutor as T\n"
        "with T(8) as t: print(sum(t.map(abs, range(9))))"
    ).output == (b"36\n")
    assert run("open('a', 'w').write('b')\nprint(open('/tmp/a').read())").output == b"b\n"


def test_a_limit_is_met_where_it_is_set(run):
    assert run("print('x' * 9)", output_bytes=10).cause is None
    assert run("print('x' * 10)", output_bytes=10).cause == "output"
    assert run("x = bytearray(200 << 20)", memory_bytes=512 << 20).cause is None
    assert run("x = bytearray(200 << 20)", memory_bytes=128 << 20).cause == "exit"
    many = (
        "import threading, time\nfor _ in range(40):\n"
        " threading.Thread(target=time.sleep, args=(0.01,)).start()"
    )
    assert run(many, threads=64).cause is None


def test_cpu_time_is_that_of_the_program(run):
    end = run("import time\nwhile time.process_time() < 0.2: pass", cpu_seconds=5.0)
    assert end.cause is None
    assert 0.19 < end.cpu_seconds < 1.0
    end = run("while True: pass", cpu_seconds=0.1)
    assert end.cause == "cpu_time"
    assert 0.1 <= end.cpu_seconds < 1.0


@pytest.mark.slow
def test_cpu_time_counts_from_where_the_program_begins(sandbox):
    """What the walls cost before that grows on a busy machine; here a long task stands for it."""
    task = {"mode": "script", "sources": ["print(1)"], "ballast": list(range(3_000_000))}
    end = sandbox.run([Program(task)], Limits(cpu_seconds=0.1))
    assert (end.cause, end.output) == (None, b"1\n")
    assert end.cpu_seconds < end.own_cpu_seconds


def test_computing_is_not_idle_and_sleeping_is(run):
    end = run("import time\nwhile time.process_time() < 0.5: pass", idle_seconds=0.3)
    assert end.cause is None
    end = run("import time\ntime.sleep(60)", idle_seconds=0.3)
    assert end.cause == "idle"
    assert end.idle_seconds >= 0.3


def test_a_program_whose_cpu_time_stands_still_is_idle_where_nobody_tells_its_waits(
    run, monkeypatch
):
    """As on macOS, which has no /proc."""
    monkeypatch.setattr(client, "_TELLS_WAITS", False)
    end = run("import time\nwhile time.process_time() < 1.5: pass", idle_seconds=1.0)
    assert end.cause is None
    end = run("import time\ntime.sleep(60)", idle_seconds=0.3)
    assert (end.cause, end.idle_seconds >= 0.3) == ("idle", True)


def test_what_passed_before_a_program_was_started_is_not_its_idle_time(run, sandbox):
    """As on a host that is too busy to start it at once."""
    run("")
    (*_, starter) = descendants(sandbox._process.pid)
    os.kill(starter, signal.SIGSTOP)
    threading.Timer(0.6, os.kill, (starter, signal.SIGCONT)).start()
    end = run("import time\nwhile time.process_time() < 0.3: pass", idle_seconds=0.5)
    assert end.cause is None
    assert end.idle_seconds < 0.5


def test_a_program_is_idle_that_was_started_before_this_process_could_look(run, monkeypatch):
    """As on a host where this process has to wait once it has sent what to start."""
    send = client.socket.send_fds

    def sent_and_waited(*message):
        send(*message)
        time.sleep(0.3)

    monkeypatch.setattr(client.socket, "send_fds", sent_and_waited)
    end = run("import time\ntime.sleep(5)", idle_seconds=0.5)
    assert (end.cause, end.idle_seconds >= 0.5) == ("idle", True)


def test_a_program_that_can_run_now_is_not_idle(run, sandbox, monkeypatch):
    """How long it has waited for a processor the kernel tells only when it has got one."""
    monkeypatch.setattr(client, "_look", lambda pid: client._Look(0.0, True))
    end = run("import time\ntime.sleep(0.5)", idle_seconds=0.1)
    assert (end.cause, end.idle_seconds) == (None, 0.0)


def test_time_that_the_host_took_from_the_machine_is_not_idle_time(run, monkeypatch):
    """As on a virtual machine whose processors serve others for a while."""
    begun = time.monotonic()
    monkeypatch.setattr(client, "_stolen", lambda: time.monotonic() - begun)
    end = run("import time\ntime.sleep(0.5)", idle_seconds=0.1)
    assert end.cause is None
    assert end.idle_seconds < 0.1


def test_children_that_come_and_go_do_not_make_a_sleeping_program_younger(run):
    end = run(
        "import os, time\n"
        "while True:\n"
        "    if not os.fork():\n"
        "        time.sleep(0.05)\n"
        "        os._exit(0)\n"
        "    os.wait()",
        idle_seconds=0.5,
    )
    assert end.cause == "idle" or "Operation not permitted" in end.errors[0]  # no forks in a layer


def test_cpu_time_of_programs_that_have_ended_is_counted_once(run):
    before = cpu_of_this_process()
    for _ in range(2):
        run("import time\nwhile time.process_time() < 0.15: pass")
    used = cpu_of_this_process() - before
    assert 0.25 < used < 2.0
    assert cpu_of(os.getpid()) >= used


def lives(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_sandbox_that_was_killed_is_started_again(sandbox):
    program = {"mode": "script", "sources": ["print(1)"]}
    with Sandbox(sandbox.layer) as own_sandbox:
        assert own_sandbox.run([Program(program)], Limits()).output == b"1\n"
        before = set(descendants(os.getpid()))
        inside = set(descendants(own_sandbox._process.pid))
        os.kill(own_sandbox._process.pid, signal.SIGKILL)
        own_sandbox._process.wait()
        while any(map(lives, inside)):  # the kernel kills them
            time.sleep(0.01)
        with pytest.raises(SandboxError, match=r"the sandbox \(\w+\)"):
            own_sandbox.run([Program(program)], Limits())
        assert own_sandbox.run([Program(program)], Limits()).output == b"1\n"
        assert len(before & set(descendants(os.getpid()))) < len(before)


def test_programs_run_in_a_process_that_has_a_thousand_files_open(sandbox):
    """select(), which serves the first 1024 descriptors alone, would refuse the sandbox's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    opened = []
    try:
        while not opened or opened[-1] < 1024:
            opened.append(os.open(os.devnull, os.O_RDONLY))
        with Sandbox(sandbox.layer) as crowded:
            end = crowded.run([Program({"mode": "script", "sources": ["print(1)"]})], Limits())
    finally:
        for number in opened:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert end.output == b"1\n"


@pytest.mark.slow
def test_nothing_stays_when_the_process_with_the_sandbox_is_killed(sandbox):
    source = (
        "import sys\nfrom postgrad.rewards.sandbox import layers\n"
        "from postgrad.rewards.sandbox.client import *\n"
        f"box = Sandbox(layers.{sandbox.layer.name.upper()})\n"
        "box.run([Program({'mode': 'script', 'sources': ['']})], Limits())\n"
        "print('ready', flush=True)\n"
        "sleep = 'import time; time.sleep(600)'\n"
        "box.run([Program({'mode': 'script', 'sources': [sleep]})], Limits(idle_seconds=600.0))\n"
    )
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        late = time.monotonic() + 30
        while len(started := list(descendants(process.pid))) < 3 and time.monotonic() < late:
            time.sleep(0.01)
        assert len(started) >= 3
        process.kill()
    while any(Path(f"/proc/{pid}").exists() for pid in started) and time.monotonic() < late:
        time.sleep(0.01)
    assert [pid for pid in started if Path(f"/proc/{pid}").exists()] == []


def test_without_a_layer_programs_are_refused_unless_the_recipe_says_unsafe(monkeypatch):
    monkeypatch.setattr(layers, "ISOLATING", (layers.Layer("walls", lambda: "no bricks", list),))
    with pytest.raises(UsageError, match=r"walls: no bricks.*unsafe = true"):
        choice.choose()
    assert choice.describe().startswith("none: there is no sandbox")
    with choice.choose(unsafe=True) as sandbox:
        assert sandbox.layer.name == "none"
        before = set(descendants(os.getpid()))
        task = {"mode": "script", "sources": ["open('x', 'w')\nimport os\nprint(os.getcwd())"]}
        end = sandbox.run([Program(task)], Limits())
        assert end.cause is None
        assert not Path(end.output.decode().strip()).exists()
        task["sources"] = ["while True: pass"]
        assert sandbox.run([Program(task)], Limits(cpu_seconds=0.1)).cause == "cpu_time"
        assert len(set(descendants(os.getpid())) - before) == 1


def test_a_layer_that_does_not_hold_is_not_taken():
    with Sandbox(layers.Layer("none", lambda: None, list)) as sandbox:
        weakness = choice._weakness(sandbox)
    assert weakness.startswith("a program could open a socket, start a process, list /home")
    assert "be other than process 1" in weakness
