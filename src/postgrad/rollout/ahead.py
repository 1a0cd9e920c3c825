"""Samples that are drawn while the policy learns, by an engine in processes of its own.

After a step's groups are taken, a thread goes on sampling with the weights that the engine has,
until all groups of the next step have ended, while the loop's thread trains. Both wait for each
other before the next weights are published:

    loop     take 1 | learn 1 ............ | cut, publish 1 | take 2 | learn 2 ...
    thread          | sample for 2 ... (waits)               |        | sample for 3 ...

Where the engine is cut is decided by samples, never by which of the two was faster, so a run has
the same bits however long either takes.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from postgrad.core.cursor import Cursor
from postgrad.core.process import Handle
from postgrad.rollout.pending import PendingArrays
from postgrad.rollout.source import NO_SAMPLES, LiveSource, Paused, Sampled, State


def sampling_thread(stack: ExitStack, halt: Callable[[], None]) -> ThreadPoolExecutor:
    """The thread of an OverlappedSource, which ends with `stack`. halt: ends its waiting for
    scores. An engine that is put on the stack later is closed before, and ends its waiting too.
    """
    thread = ThreadPoolExecutor(1, "sampling")
    stack.callback(thread.shutdown, cancel_futures=True)
    stack.callback(halt)
    return thread


class Progress:
    """Shows the samples that end while the loop waits for them. Those that ended before, while it
    did something else, are shown when it begins to wait.
    """

    def __init__(self, show: Callable[[int], None]) -> None:
        """show: called with a number of samples, from any thread."""
        self._show = show
        self._lock = threading.Lock()
        self._waiting = False
        self._before = 0

    def count(self, samples: int) -> None:
        """So many samples have just ended."""
        with self._lock:
            if self._waiting:
                self._show(samples)
            else:
                self._before += samples

    @contextmanager
    def shown(self) -> Iterator[None]:
        """While the loop waits for samples."""
        with self._lock:
            self._waiting = True
            before, self._before = self._before, 0
            self._show(before)
        try:
            yield
        finally:
            with self._lock:
                self._waiting = False


class OverlappedSource:
    """A live source that samples while the policy learns: Source.start_ahead is true.

    One thread does all of its work in its whole life, so that engine, environments and scorer are
    never used by two threads at once, and verifiers' processes, which Linux ends with the thread
    that started them, live as long as the run. Exceptions of that thread are raised by the call
    that waits for it. Between `pause` and `next` the thread does nothing: engine and scorer are the
    caller's.
    """

    def __init__(self, live: LiveSource, thread: ThreadPoolExecutor, progress: Progress) -> None:
        """thread: `sampling_thread`. progress: counts the source's samples."""
        self._live = live
        self._thread = thread
        self._progress = progress
        self._ahead: Handle[tuple[float, float]] | None = None  # when it began and ended
        self._learner_waited = 0.0  # seconds in this step

    def next(
        self, step: int, cursor: Cursor, state: State, pending: PendingArrays = NO_SAMPLES
    ) -> Sampled:
        """Source.next. Returns at once where the step's groups have ended before `pause`."""
        began = time.perf_counter()
        with self._progress.shown():
            taken = self._thread.submit(self._take, step, cursor, state, pending).result()
        self._learner_waited = time.perf_counter() - began
        return taken

    def awaited(self) -> str:
        """Source.awaited: of the live source, whose thread may be at work."""
        return self._live.awaited()

    def start_ahead(self) -> bool:
        """Source.start_ahead: the thread samples."""
        self._ahead = self._thread.submit(self._sample)
        return True

    def pause(self) -> Paused:
        """Source.pause, once the next step's groups have ended, where `start_ahead` was called. Its
        metrics say how long learner and engine have waited for each other since `next`.
        """
        called = time.perf_counter()
        ahead, self._ahead = self._ahead, None
        began = ended = called
        with self._progress.shown():
            if ahead is not None:
                began, ended = ahead.result()
            paused = self._thread.submit(self._cut).result()
        waited = self._learner_waited + max(0.0, ended - called)
        metrics = {
            "overlap/learner_wait_seconds": waited,
            "overlap/engine_wait_seconds": max(0.0, called - ended),
            "overlap/sample_seconds": min(ended, called) - began,
        }
        return replace(paused, metrics=paused.metrics | metrics)

    def _sample(self) -> tuple[float, float]:
        began = time.perf_counter()
        self._sample_ahead()
        return began, time.perf_counter()

    # The parts of a step, in the thread.

    def _take(self, step: int, cursor: Cursor, state: State, pending: PendingArrays) -> Sampled:
        return self._live.take(step, cursor, state, pending)

    def _sample_ahead(self) -> None:
        self._live.sample_ahead()

    def _cut(self) -> Paused:
        return self._live.cut()
