"""Finds a process that hangs, long before the collective in which others wait for it times out.

Beside its call, each process answers how much processor time the call has used and where in the
code it is. A process hangs in two cases: it has used no processor time for STILL_SECONDS outside of
a collective, while all others do nothing but wait and one of them waits in a collective; or it does
not answer, and its machine sees it use no processor. So a slow computation is not taken for a hang,
and neither is the transfer of a large tensor.

On GPUs a collective that times out ends the process: torch's watchdog of NCCL writes why on stderr,
then aborts. `last_words` reads what a dead process wrote, `timed_out` finds the watchdog's words in
it, and what the process did last is known from its pulse.
"""

import os
import re
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

LOOK_SECONDS = 5.0  # between two looks
STILL_SECONDS = 30.0  # in which even a starved process computes something
OUTSIDE_SECONDS = 5.0  # for a look at a process that says nothing
LAST_BYTES = 1 << 18  # of what a process wrote: the watchdog writes stacks after its words
STDERR = Path("/proc/self/fd/2")
# Words of torch's ProcessGroupNCCL, the same in 2.11 and 2.13. First: this process waited in a
# collective until its timeout. Second: others did, and ended this one, which had not come.
WATCHDOG = re.compile(
    r"Watchdog caught collective operation timeout: (?P<work>.*?)"
    r"(?: ran for (?P<waited>\d+) milliseconds|$)",
    re.MULTILINE,
)
FIELD = re.compile(r"(\w+)=(\w+)")
SIGNALLED = ("Observed flight recorder dump signal", "Received a dump signal due to a collective")


class Pulse(NamedTuple):
    """What a process is doing."""

    spent: float = 0.0  # seconds of processor time, of the call's thread and of child processes
    waits: bool = False  # in a collective
    place: str = ""  # "file:line in function"; empty: no call is under way


def pulse_of(thread: int | None) -> Pulse:
    """The pulse of a thread of this process, by its identifier. Where the system cannot tell the
    processor time of a thread (macOS), it is as if no call were under way.
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


def stderr_file() -> str:
    """The file that this process's stderr goes to; empty where it goes elsewhere."""
    try:
        path = STDERR.readlink()
    except OSError:  # no /proc
        return ""
    return str(path) if path.is_file() else ""


def last_words(path: str) -> str:
    """The end of what a process of this machine wrote to a file."""
    try:
        with Path(path).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
            return file.read().decode(errors="replace")
    except OSError:  # it was removed with the session
        return ""


def timed_out(words: str) -> str | None:
    """What a process waited for that NCCL's watchdog ended, from its last words: "ALLREDUCE of 4096
    values (number 12), for 600 seconds"; empty where it was ended because others had waited for it;
    None where neither is the case.
    """
    match = WATCHDOG.search(words)
    if match is None:
        return "" if any(text in words for text in SIGNALLED) else None
    fields = dict(FIELD.findall(match["work"]))
    work = fields.get("OpType", "a collective")
    work += f" of {fields['NumelIn']} values" if "NumelIn" in fields else ""
    work += f" (number {fields['SeqNum']})" if "SeqNum" in fields else ""
    return f"{work}, for {int(match['waited']) / 1000:.0f} seconds" if match["waited"] else work


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

    nodes: Ray's id of each actor's machine. pids: of their processes. still: look also for actors
    that answer and compute nothing. That cannot be seen on GPUs, where a thread spins while it
    waits for its device.
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
        self._heard = [now] * len(actors)  # when the newest question that has an answer was asked
        self._moved = [now] * len(actors)  # when an answer last differed from the one before
        self._last = [Pulse()] * len(actors)

    def look(self) -> tuple[list[int], str] | None:
        """The numbers of the actors that hang, and a message about them; None where none hangs."""
        if not self._turn.acquire(blocking=False):
            return None  # another caller looks
        try:
            now = time.monotonic()
            self._listen(now)
            return self._silent(now) or (self._standing() if self._still else None)
        finally:
            self._turn.release()

    def place(self, number: int) -> str:
        """Where the actor's call was when it last answered; empty where that is not known."""
        return self._last[number].place

    def _listen(self, now: float) -> None:
        """Takes the answers to the last questions, and asks again."""
        import ray
        from ray.exceptions import RayActorError

        for number, actor in enumerate(self._actors):
            asked = self._asked[number]
            if asked is not None:
                if not ray.wait([asked], timeout=0.0)[0]:
                    continue
                try:
                    pulse = Pulse(*ray.get(asked))
                except RayActorError:  # the actor is lost: its call raises that
                    pulse = self._last[number]
                if pulse != self._last[number]:
                    self._moved[number] = now
                self._heard[number], self._last[number] = self._asked_at[number], pulse
                self._outside[number] = None
            self._asked[number], self._asked_at[number] = actor.pulse.remote(), now

    def _silent(self, now: float) -> tuple[list[int], str] | None:
        """A process that does not answer and that uses no processor, as its machine sees it. A call
        that holds the interpreter cannot answer either, but it does use one.
        """
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
                except RayError:  # its machine is lost: its call raises that
                    stopped = False
                if stopped:
                    return [number], (
                        f"for {now - heard:.0f} seconds it has not answered, and it uses no "
                        "processor; was it stopped?"
                    )
                self._outside[number] = None
        return None

    def _standing(self) -> tuple[list[int], str] | None:
        """Processes that answer, compute nothing, and for which others wait in a collective."""
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


def _numbers(ranks: Sequence[int]) -> str:
    return "rank" + "s" * (len(ranks) > 1) + " " + ", ".join(map(str, ranks))


def _folder_of(package: str) -> str:
    """The folder of a package, with a separator at its end; where it was never imported, a text
    that no path begins with.
    """
    file = getattr(sys.modules.get(package), "__file__", None)
    return str(Path(file).parent) + os.sep if file else "\0"
