"""Who stands still while others wait for it: told long before their collective gives up.

A process says beside its call how much the call has computed, and where it is. It hangs where it
has computed nothing for STILL_SECONDS outside of a collective while all others do nothing but wait,
one of them in a collective; or where it says nothing at all and its machine sees it use no
processor. So whoever computes, however slowly, does not hang, nor does a large tensor on its way.
"""

import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

LOOK_SECONDS = 5.0  # between two looks
STILL_SECONDS = 30.0  # in which even a starved process computes something
OUTSIDE_SECONDS = 5.0  # for a look at a process that says nothing


class Pulse(NamedTuple):
    """What a call does. spent: seconds of processors, of its thread and of processes that this one
    started. waits: in a collective. place: "file:line in function"; empty: there is no call.
    """

    spent: float = 0.0
    waits: bool = False
    place: str = ""


def pulse_of(thread: int | None) -> Pulse:
    """Of the thread of this process that has this identifier, and lives. Where a system does not
    say what a thread computes (macOS), it is as if there were no call.
    """
    import psutil

    frame = None if thread is None else sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]
    if thread is None or frame is None or not hasattr(time, "pthread_getcpuclockid"):
        return Pulse()
    spent = time.clock_gettime(time.pthread_getcpuclockid(thread))
    for child in psutil.Process().children(recursive=True):
        try:
            spent += sum(child.cpu_times()[:2])
        except psutil.NoSuchProcess:  # it has ended meanwhile
            continue
    waits, torch = False, _folder_of("torch")
    while frame.f_back is not None and frame.f_code.co_filename.startswith(torch):
        waits = waits or frame.f_code.co_filename.startswith(str(Path(torch, "distributed")))
        frame = frame.f_back
    code = frame.f_code
    return Pulse(spent, waits, f"{code.co_filename}:{frame.f_lineno} in {code.co_name}")


def uses_nothing(pid: int, seconds: float) -> bool:
    """Whether a process of this machine uses no processor for so long. False where it ends."""
    import psutil

    try:
        process = psutil.Process(pid)
        before = process.cpu_times()
        time.sleep(seconds)
        return process.cpu_times() == before
    except psutil.NoSuchProcess:
        return False


class Watch:
    """Looks at actors that have a `pulse`, for as long as somebody waits for them.

    nodes, pids: where each is. still: look also for those that stand still. Not on GPUs, where a
    thread spins while it waits for its device, and computes nothing while the device does.
    """

    def __init__(
        self, actors: Sequence[Any], nodes: Sequence[str], pids: Sequence[int], *, still: bool
    ) -> None:
        self._actors = actors
        self._nodes = nodes
        self._pids = pids
        self._still = still
        self._turn = threading.Lock()
        now = time.monotonic()
        self._asked: list[Any] = [None] * len(actors)
        self._outside: list[Any] = [None] * len(actors)
        self._asked_at = [now] * len(actors)
        self._heard = [now] * len(actors)  # when what was answered last was asked, at the least
        self._moved = [now] * len(actors)  # when what is new was known, at the most
        self._last = [Pulse()] * len(actors)

    def look(self) -> tuple[list[int], str] | None:
        """The numbers of those that hang, and what is known of them."""
        if not self._turn.acquire(blocking=False):
            return None  # another caller looks
        try:
            now = time.monotonic()
            self._listen(now)
            return self._silent(now) or (self._standing() if self._still else None)
        finally:
            self._turn.release()

    def _listen(self, now: float) -> None:
        """Takes what was answered to the last look, and asks again."""
        import ray
        from ray.exceptions import RayActorError

        for number, actor in enumerate(self._actors):
            asked = self._asked[number]
            if asked is not None:
                if not ray.wait([asked], timeout=0.0)[0]:
                    continue
                try:
                    found = Pulse(*ray.get(asked))
                except RayActorError:  # it is lost, which its call says
                    found = Pulse()
                if found != self._last[number]:
                    self._moved[number] = now
                self._heard[number], self._last[number] = self._asked_at[number], found
                self._outside[number] = None
            self._asked[number], self._asked_at[number] = actor.pulse.remote(), now

    def _silent(self, now: float) -> tuple[list[int], str] | None:
        """Whoever holds the interpreter cannot answer and is not to blame: its machine is asked."""
        import ray
        from ray.exceptions import RayError
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        for number, heard in enumerate(self._heard):
            if now - heard < STILL_SECONDS:
                continue
            if self._outside[number] is None:
                there = NodeAffinitySchedulingStrategy(self._nodes[number], soft=False)
                asked: Any = ray.remote(uses_nothing)
                asked = asked.options(num_cpus=0, scheduling_strategy=there)
                self._outside[number] = asked.remote(self._pids[number], OUTSIDE_SECONDS)
            elif ray.wait([self._outside[number]], timeout=0.0)[0]:
                try:
                    stopped: bool = ray.get(self._outside[number])
                except RayError:  # its machine is lost, which its call says
                    stopped = False
                if stopped:
                    return [number], (
                        f"for {now - heard:.0f} seconds it has not answered, and it uses no "
                        "processor; was it stopped?"
                    )
                self._outside[number] = None
        return None

    def _standing(self) -> tuple[list[int], str] | None:
        called = [number for number, last in enumerate(self._last) if last.place]
        waiting = [number for number in called if self._last[number].waits]
        late = [number for number in called if not self._last[number].waits]
        if not waiting or not late:
            return None
        still = min(self._heard[number] - self._moved[number] for number in called)
        if still < STILL_SECONDS:
            return None
        places = " and ".join(self._last[number].place for number in late)
        return late, (
            f"for {still:.0f} seconds it has computed nothing at {places}, while "
            f"{_numbers(waiting)} waited for it at {self._last[waiting[0]].place}"
        )


def _numbers(found: Sequence[int]) -> str:
    return "rank" + "s" * (len(found) > 1) + " " + ", ".join(map(str, found))


def _folder_of(package: str) -> str:
    """Where a package is that was imported; without one, what no path begins with."""
    file = getattr(sys.modules.get(package), "__file__", None)
    return str(Path(file).parent) + os.sep if file else "\0"
