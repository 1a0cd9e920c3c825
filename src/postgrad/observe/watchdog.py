"""Reports a phase that hangs: its name, for how long, and the stacks of all threads."""

import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from postgrad.core.errors import RunError
from postgrad.observe.console import Console
from postgrad.observe.sentinels.base import SentinelStop
from postgrad.observe.sentinels.stall import Stall
from postgrad.observe.sinks import Logs

STACKS = "stacks.txt"


class Watchdog:
    """A thread that watches the phase under way. Use `with`.

    A phase without a `beat` for `seconds` is recorded once, with all stacks in stacks.txt. With the
    action "stop" a signal interrupts the main thread, which raises SentinelStop: at once where the
    phase hangs in Python, after it returns where it hangs in native code.
    """

    def __init__(self, settings: Stall, logs: Logs, console: Console, directory: Path) -> None:
        self._settings = settings
        self._logs = logs
        self._console = console
        self._stacks = directory / STACKS
        self._phase: str | None = None
        self._awaited: Callable[[], str] = str
        self._beaten = time.monotonic()
        self._warned = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._before: object = None

    def __enter__(self) -> "Watchdog":
        if self._settings.action == "stop":
            self._before = signal.signal(signal.SIGUSR1, self._stop)
        if self._settings.action != "off":
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._settings.action != "off":
            self._thread.join()
        if self._settings.action == "stop":
            signal.signal(signal.SIGUSR1, self._before)  # pyright: ignore[reportArgumentType]

    @contextmanager
    def phase(self, name: str, awaited: Callable[[], str] = str) -> Iterator[None]:
        """Watches the code that runs inside as the phase `name`. awaited: says what it waits for,
        called from another thread.
        """
        self._phase, self._awaited = name, awaited
        self.beat()
        try:
            yield
        finally:
            self._phase = None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Watches nothing inside: the phase waits for people, and has told them."""
        phase, self._phase = self._phase, None
        try:
            yield
        finally:
            self.beat()
            self._phase = phase

    def beat(self) -> None:
        """Tells the watchdog that the phase has made progress."""
        self._beaten = time.monotonic()
        if self._warned:
            self._warned = False
            self._console.spoken("stall", None)

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self._settings.seconds / 4)):
            silent = time.monotonic() - self._beaten
            if self._phase is not None and not self._warned and silent > self._settings.seconds:
                self._warned = True
                self._tell(self._phase, silent)

    def _tell(self, phase: str, silent: float) -> None:
        awaited = self._awaited()
        message = (
            f"phase {phase} makes no progress for {silent:.0f} s"
            + (f", waiting for {awaited}" if awaited else "")
            + f"; stacks are in {self._stacks}"
        )
        try:
            self._record(phase, silent, message)
        except (OSError, RunError) as error:  # a full disk may be why: people are told all the same
            message = f"{message}; it could not be recorded: {error}"
        if self._settings.action != "observe":
            self._console.spoken("stall", message)
            self._console.warn(f"sentinel stall: {message}")
        if self._settings.action == "stop":
            os.kill(os.getpid(), signal.SIGUSR1)

    def _record(self, phase: str, silent: float, message: str) -> None:
        with self._stacks.open("a", encoding="utf-8") as file:
            file.write(f"phase {phase}, {silent:.0f} s without progress\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        self._logs.event("sentinel", message, sentinel="stall", action=self._settings.action)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self._phase is None or not self._warned:
            return  # it went on meanwhile, or the signal is a scheduler's
        raise SentinelStop(
            f"sentinel stall: phase {self._phase} made no progress for "
            f"{self._settings.seconds:g} s; stacks are in {self._stacks}"
        )
