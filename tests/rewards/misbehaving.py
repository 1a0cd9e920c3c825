"""Verifiers that tests run in workers, most of them bad ones. `text` says what to do."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from postgrad.rewards.verifier import Score, Verifier


def obey(prompt, rollout, factor=1.0):
    """Does what the sample's text says; a text that is a number is the score."""
    text = rollout.text
    if text in DEEDS:
        return DEEDS[text]()
    return factor * float(text)


def spin():
    while True:
        pass


def spin_in_regex():
    """Holds the interpreter's lock for ever."""
    import re

    return float(bool(re.fullmatch(r"(a+)+", "a" * 64 + "b")))


def spin_in_child():
    subprocess.run([sys.executable, "-c", "while True: pass"], check=True)
    return 1.0


def raise_error():
    raise ValueError("cannot read this")


def burn():
    """Takes 0.3 s of CPU time."""
    until = time.process_time() + 0.3
    while time.process_time() < until:
        pass
    return 0.5


def print_much():
    for _ in range(40):
        print("x" * 100_000)
        print('{"key": 1, "value": 9.0}')
        print("y" * 100_000, file=sys.stderr)
    os.write(1, b'{"key": 1, "cpu": 0, "scores": [[9.0, null]], "text": null}\n')
    return 0.25


def crash_once():
    """Crashes in the first worker that tries, not in the second."""
    try:
        descriptor = os.open(os.environ["POSTGRAD_TEST_MARK"], os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return 0.5
    os.close(descriptor)
    os._exit(1)


def print_and_crash():
    print("these are my last words")
    os._exit(3)


def read_input():
    return float(len(input("a question: ")))


def close_and_hang():
    """A forked child keeps the pipes open after the worker has died."""
    if os.fork() == 0:
        time.sleep(60)
    os._exit(4)


def deep_detail():
    nested = []
    for _ in range(100_000):
        nested = [nested]
    return Score(1.0, nested)


def count():
    """How often it was called in this process."""
    count.calls += 1
    return float(count.calls)


count.calls = 0


def own_the_signals():
    """SIGIO to the run, from a descriptor that is ready: kill in another way."""
    import fcntl

    reading, _ = os.pipe()
    return fcntl.fcntl(reading, fcntl.F_SETOWN, os.getppid())


def write_answer(text):
    """Whatever runs in the process of a score may write its answer."""
    os.write(3, text.encode())
    os._exit(0)


DEEDS = {
    "spin": spin,
    "spin in regex": spin_in_regex,
    "spin in child": spin_in_child,
    "sleep": lambda: time.sleep(60),
    "sleep a little": lambda: time.sleep(0.4) or 0.75,
    "burn": burn,
    "raise": raise_error,
    "long integer": lambda: 10**400,
    "exit": lambda: sys.exit("bye"),
    "crash": lambda: os._exit(3),
    "crash once": crash_once,
    "print and crash": print_and_crash,
    "abort": os.abort,
    "close and hang": close_and_hang,
    "print": print_much,
    "input": read_input,
    "none": lambda: None,
    "string": lambda: "1.0",
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "list": lambda: [1.0],
    "true": lambda: True,
    "true of numpy": lambda: __import__("numpy").bool_(True),
    "false of numpy": lambda: Score(__import__("numpy").array([2.0, 1.0])[0] < 1, "compared"),
    "float32 of numpy": lambda: __import__("numpy").float32(0.5),
    "int of numpy": lambda: __import__("numpy").int64(3),
    "nan of numpy": lambda: __import__("numpy").float32("nan"),
    "score": lambda: Score(0.5, {"why": ["a", 1, None]}),
    "score of none": lambda: Score(None),
    "set as detail": lambda: Score(1.0, {1, 2}),
    "nan as detail": lambda: Score(1.0, float("nan")),
    "huge detail": lambda: Score(1.0, "x" * 1_000_000),
    "deep detail": deep_detail,
    "score of the pid": lambda: Score(0.0, os.getpid()),
    "read a secret": lambda: float("POSTGRAD_TEST_SECRET" in os.environ),
    "read the environment of the run": lambda: Path(f"/proc/{os.getppid()}/environ").read_text(),
    "list the root": lambda: float(len(list(Path("/").iterdir()))),
    "write a file": lambda: Path("/tmp/postgrad-written").write_text("x"),
    "open a socket": lambda: socket.socket(),
    "fork": lambda: os.fork() or os._exit(0),
    "signal the run": lambda: os.kill(os.getppid(), signal.SIGTERM),
    "own the signals of the run": own_the_signals,
    "execute": lambda: os.execv("/bin/true", ["true"]),
    "take much memory": lambda: float(len(bytearray(3 << 30))),
    "count": count,
    "write a score for another key": lambda: write_answer('{"key": 9, "scores": [[0.5, null]]}'),
    "write a list": lambda: write_answer("[1.0]"),
    "write nan": lambda: write_answer('{"scores": [[NaN, null]]}'),
    "write much": lambda: write_answer('{"scores": [[1.0, "' + "x" * 10_000_000 + '"]]}'),
    "is torch there": lambda: float("torch" in sys.modules or "numpy" in sys.modules),
}


class HangingCheck(Verifier):
    def check(self, prompt):
        time.sleep(60)

    def score(self, prompt, rollout):
        return 1.0


class HangingScore(Verifier):
    def check(self, prompt):
        return None

    def score(self, prompt, rollout):
        time.sleep(60)


class Picky(Verifier):
    """Its check finds fault with some answers, hangs on one and raises on another."""

    wanted: str = "good"

    def check(self, prompt):
        if prompt.answer == "raise":
            raise_error()
        if prompt.answer == "spin":
            spin()
        return None if prompt.answer == self.wanted else f"{prompt.answer!r} is not {self.wanted!r}"

    def score(self, prompt, rollout):
        return float(prompt.metadata["bonus"]) + len(rollout.text)


class Unprepared(Verifier):
    """Cannot get ready."""

    def prepare(self):
        raise OSError("its data is missing")


class DiesEarly(Verifier):
    """Ends the worker before it is ready."""

    def prepare(self):
        print("no licence found")
        os._exit(7)


not_callable = 3
