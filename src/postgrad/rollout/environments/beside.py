"""Steps of environments side by side: async functions with limits, in a thread of their own.

The thread runs an event loop. A step gets one of `concurrent` places, and is given up when it has
had it for too long: whoever waits gets a failure with its cause, and what the step had begun is
cancelled (workers.py kills its process).
"""

import asyncio
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Any

from postgrad.core.errors import PostgradError, RunError
from postgrad.core.process import Handle
from postgrad.core.records import EpisodeFailure
from postgrad.rollout.environments.base import Reply, failure_of

Timed = tuple[Reply | EpisodeFailure, float]  # a reply, or why there is none; seconds it has taken
Running = Callable[[], AbstractAsyncContextManager[None]]

_BEAT = 1.0  # seconds between two signs of life of the loop
_STUCK = 30  # of them in a row that are missing: a step blocks the loop
_CLOSING = 10.0  # seconds that closing may take


def at_once_replied(step: Callable[[], Any]) -> Timed:
    """The reply of a step that waits for nothing, computed here and now."""
    began = time.perf_counter()
    try:
        reply = step()
        if inspect.iscoroutine(reply):
            reply = _driven(reply)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # code of others: recorded with its cause
        reply = failure_of(error)
    return reply, time.perf_counter() - began


def _driven(work: Coroutine[Any, Any, Reply]) -> Reply:
    """The result of a coroutine that never waits. Raises RunError where it does."""
    try:
        work.send(None)
    except StopIteration as ended:
        return ended.value
    except RuntimeError as error:  # asyncio refuses to wait where no loop runs
        if "event loop" not in str(error):
            raise
    work.close()
    raise RunError("a step of the environment waits for something: set its `waits = True`")


class SideBySide:
    """Runs steps in a thread, which begins with the first of them and ends with `close`."""

    def __init__(self, running: Running, concurrent: int) -> None:
        """running: the context that all steps run in (ChatEnvironment.running)."""
        self._running = running
        self._thread: threading.Thread | None = None
        self._opened: Future[asyncio.AbstractEventLoop] = Future()
        self._stop = asyncio.Event()
        self._places = asyncio.Semaphore(concurrent)
        self._given_up: set[asyncio.Task[Any]] = set()
        self._later: set[asyncio.Task[Any]] = set()
        self._open: set[Handle[Timed]] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._missing = 0  # signs of life of the loop, in a row

    def begin(
        self, step: Callable[[], Awaitable[Reply] | Reply], seconds: float, limit: str
    ) -> Handle[Timed]:
        """Begins a step. seconds: how long it may have a place; limit: the recipe key that says so.

        Raises RunError where the context cannot be opened, or an error of postgrad's own that
        opening it raised; RunError after `close`.
        """
        if self._closed.is_set():
            raise RunError("the environment was closed")
        if self._thread is None:
            self._start()
        loop = self._opened.result()
        handle: Handle[Timed] = Handle()
        with self._lock:
            self._open.add(handle)
        work = asyncio.run_coroutine_threadsafe(self._placed(step, seconds, limit), loop)
        work.add_done_callback(lambda ended: self._hand_over(ended, handle))
        return handle

    def later(self, call: Callable[[], object], failed: Callable[[str], None]) -> None:
        """Calls something in the thread, where there is one: a function, plain or `async def`.
        failed: called there with the reason where it raises or does not end.
        """
        if self._thread is not None and not self._closed.is_set():
            self._opened.result().call_soon_threadsafe(self._called, call, failed)

    def _called(self, call: Callable[[], object], failed: Callable[[str], None]) -> None:
        task = asyncio.ensure_future(_ended(call, failed))
        self._later.add(task)  # the loop itself holds no task
        task.add_done_callback(self._later.discard)

    def close(self) -> None:
        """Cancels all steps, lets what was to be called later end, closes what they share, and ends
        the thread.
        """
        self._closed.set()
        if self._thread is None or not self._opened.done() or self._opened.exception():
            return
        loop = self._opened.result()
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._stop.set)
        if self._thread is not threading.current_thread():  # where garbage is collected there
            self._thread.join(_CLOSING)

    def _start(self) -> None:
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._loop()), name="environment", daemon=True
        )
        self._thread.start()
        threading.Thread(target=self._watch, name="environment watch", daemon=True).start()

    async def _loop(self) -> None:
        try:
            async with self._running():
                self._opened.set_result(asyncio.get_running_loop())
                beating = asyncio.create_task(self._beat())
                await self._stop.wait()
                beating.cancel()
                others = asyncio.all_tasks() - {asyncio.current_task()}
                for task in others - self._later:
                    task.cancel()
                await asyncio.wait(others, timeout=_CLOSING / 2)
        except Exception as error:
            if self._opened.done():
                raise
            if not isinstance(error, PostgradError):
                why = failure_of(error).message
                error = RunError(f"the environment could not start (its `running`): {why}")
            self._opened.set_exception(error)

    async def _placed(
        self, step: Callable[[], Awaitable[Reply] | Reply], seconds: float, limit: str
    ) -> Timed:
        async with self._places:
            began = time.perf_counter()
            if seconds > 0.0:
                task = asyncio.ensure_future(_awaited(step))
                await asyncio.wait({task}, timeout=seconds)
                if task.done():
                    return task.result(), time.perf_counter() - began
                task.cancel()  # it is not waited for: it may refuse to end
                self._given_up.add(task)
                task.add_done_callback(self._given_up.discard)
            taken = time.perf_counter() - began
            message = f"no reply after {taken:.1f} s ({limit})"
            return EpisodeFailure("wall_clock", message), taken

    def _hand_over(self, ended: Future[Timed], handle: Handle[Timed]) -> None:
        with self._lock:
            if handle not in self._open:
                return
            self._open.remove(handle)
        if ended.cancelled():
            handle.set_exception(RunError("the environment was closed"))
        elif (error := ended.exception()) is not None:
            handle.set_exception(error)
        else:
            handle.set_result(ended.result())

    async def _beat(self) -> None:
        while True:
            self._missing = 0
            await asyncio.sleep(_BEAT)

    def _watch(self) -> None:
        """Ends the waiting for steps of a loop that a step blocks: no limit can hold there."""
        while not self._closed.wait(_BEAT):
            self._missing += 1
            if self._missing <= _STUCK:
                continue
            error = RunError(
                f"a step of the environment has blocked all others for {_STUCK * _BEAT:.0f} s: "
                "what an `async def` calls must not wait by itself; await it, or give it a process "
                "(docs/environments.md)"
            )
            with self._lock:
                stuck, self._open = self._open, set()
            for handle in stuck:
                handle.set_exception(error)


async def _ended(call: Callable[[], object], failed: Callable[[str], None]) -> None:
    """Calls a function, plain or `async def`, and says why where it does not end as it should."""
    try:
        if inspect.isawaitable(waiting := call()):
            await waiting
    except asyncio.CancelledError:
        failed("it had not ended when the run did")
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001  # code of others: told with its line
        failed(str(error) if isinstance(error, PostgradError) else failure_of(error).message)


async def _awaited(step: Callable[[], Awaitable[Reply] | Reply]) -> Reply | EpisodeFailure:
    """The reply, or the failure that a step raised. A step may also leak a cancellation of its own,
    or leave by SystemExit: that is its failure, where this task was not cancelled.
    """
    try:
        reply = step()
        return await reply if inspect.isawaitable(reply) else reply
    except BaseException as error:  # code of others: recorded with its cause
        task = asyncio.current_task()
        cancelled = isinstance(error, asyncio.CancelledError) and task and task.cancelling()
        if cancelled or isinstance(error, GeneratorExit):
            raise
        return failure_of(error)
