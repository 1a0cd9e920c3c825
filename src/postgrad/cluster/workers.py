"""Processes behind Ray: started where they belong, called, watched and ended. They work
alone (`Workers`) or as the ranks of one process group (`RankGroup`).

Each process holds an object of a class that is given by name, so that this room knows no roles.
"""

import os
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from postgrad.cluster import pulse
from postgrad.cluster.connection import VISIBLE, Reservation, first_line
from postgrad.cluster.pulse import Pulse, Watch, last_words, pulse_of, stderr_file, timed_out
from postgrad.cluster.settings import POLICY, ClusterSettings
from postgrad.core.errors import PostgradError, RunError, WorkerLost
from postgrad.core.process import Handle, heavy_imports, held_port
from postgrad.core.text import resolve

GRACE_SECONDS = 2.0  # after a first error: another process may report the real cause
HUNG_SECONDS = 10.0  # after a collective timed out: whoever reports nothing until then hangs
# After NCCL's watchdog ended a process: it writes reports first, so others may follow late.
ENDED_SECONDS = 60.0
WORDS_SECONDS = 10.0  # for reading what a dead process wrote, on its machine
WAITED = "waited in vain"  # in the message of a process whose collective timed out
# In errors of a lost process's peers: gloo's words, then NCCL's.
GONE = (
    *("closed by peer", "reset by peer", "Broken pipe"),
    *("closed by remote peer", "remote process exit"),
)


class Workers:
    """`size` actors, each with an object of one class, in the places reserved for `role`."""

    # The error of one that hangs. Nobody waits for it in a collective, so it is ended and counts as
    # lost: another one takes its place.
    hang_error: type[RunError] = WorkerLost

    def __init__(
        self,
        title: str,
        worker: str,
        arguments: Sequence[Any],
        size: int,
        settings: ClusterSettings,
        reservation: Reservation,
        role: str,
        first: int = 0,
        *,
        still: bool = False,
    ) -> None:
        """title: what messages call a process ("rank"). worker: "package.module:Class", of which
        each process makes an object with `arguments`. first: number of the first process among
        those of the role, whose places they take. still: as in Watch. Raises the error of that
        object's constructor, or RunError where not all start within settings.start_seconds.
        """
        import ray

        self.size = size
        self._first = first
        self._title = title
        self._settings = settings
        self._order = ThreadPoolExecutor(size + 4, title)
        self._turn = threading.Lock()
        self._ended = False
        self._ended_by: BaseException | None = None  # the first error of a call
        remote: Any = ray.remote  # its types know neither an actor's groups nor numbers by name
        actor: Any = remote(concurrency_groups={"aside": 1, "pulse": 1})(_Worker)
        numbers = range(first, first + size)
        self._actors = [actor.options(**reservation.options(role, n)).remote() for n in numbers]
        self.places = [("?", 0)] * size  # of each process: its machine's address, its pid
        self._written = [("", "")] * size  # of each: Ray's id of its machine, the file of stderr
        try:
            here, devices = str(Path.cwd()), [reservation.devices(role, n) for n in numbers]
            asked = zip(self._actors, devices, strict=True)
            places = self._each([actor.stand.remote(here, visible) for actor, visible in asked])
            reservation.note_devices(role, [visible for *_, visible in places])
            order = _side_by_side([address for address, *_ in places])
            self._actors = [self._actors[number] for number in order]
            self.places = [places[number][:2] for number in order]
            self._written = [places[number][2:4] for number in order]
            nodes, pids = [node for node, _ in self._written], [pid for _, pid in self.places]
            self._watch = Watch(self._actors, nodes, pids, still=still)
            self._each([actor.make.remote(worker, list(arguments)) for actor in self._actors])
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *arguments: Any) -> Handle[Any]:
        """Calls a method of every object, in the order of calls. The handle gives what the first
        object returned.

        An error of any process is the handle's error, and ends all processes: the others would wait
        for ever. Whoever calls afterwards, or waits in another thread, gets that error too: a lost
        process is one to all of them, and the run restarts whichever hears of it first.
        """
        return self._submit("call", method, arguments)

    def aside(self, method: str, *arguments: Any) -> Handle[Any]:
        """As `call`, but at once, beside a call that is under way: for files."""
        return self._submit("aside", method, arguments)

    def description(self) -> str:
        """How many processes there are, with pid and machine of each, for logs."""
        where = (
            f"{n} is pid {pid} on {address}"
            for n, (address, pid) in enumerate(self.places, self._first)
        )
        return f"{self.size} {self._title}{'s' * (self.size > 1)}: {', '.join(where)}"

    def close(self) -> None:
        """Kills all processes at once, whatever they do."""
        import ray

        self._ended = True
        for actor in self._actors:
            ray.kill(actor)
        self._order.shutdown(wait=False)

    def _submit(self, entry: str, method: str, arguments: tuple[Any, ...]) -> Handle[Any]:
        import ray

        if self._ended_by is not None:
            raise self._ended_by
        if self._ended:
            raise RunError(f"the {self._title}s have ended")
        stored = ray.put(arguments)  # once for all of them
        with self._turn:  # all actors get calls in one order, whichever thread calls
            refs = [getattr(actor, entry).remote(method, stored) for actor in self._actors]
        return self._order.submit(self._collect_or_end, refs)

    def _collect_or_end(self, refs: list[Any]) -> Any:
        try:
            return self._collect(refs)[0]
        except OSError:
            raise
        except BaseException as error:
            with self._turn:
                first = self._ended_by = self._ended_by or error
            self.close()
            if first is not error:
                raise first from first.__cause__
            raise

    def _each(self, refs: list[Any]) -> list[Any]:
        return self._collect(refs, self._settings.start_seconds)

    def _collect(self, refs: list[Any], seconds: float | None = None) -> list[Any]:
        """The results, once all calls have returned. After an error the others have a short time to
        report what was behind it (_patience). seconds: to wait at most; None: for
        ever, while none hangs. refs: one for each process.
        """
        import ray

        left, failed = list(refs), list[tuple[int, Exception]]()
        end = None if seconds is None else time.monotonic() + seconds
        while left:
            timeout = pulse.LOOK_SECONDS if end is None else max(0.0, end - time.monotonic())
            ready, left = ray.wait(left, num_returns=1, timeout=timeout)
            if not ready and end is None:
                self._require_none_hangs()
            elif not ready and failed:
                break
            elif not ready:
                raise RunError(
                    f"{len(left)} of {len(refs)} {self._title}s did not start within {seconds:g} "
                    "seconds (cluster.start_seconds): is the cluster full, or another run in it?"
                )
            for ref in ready:
                try:
                    ray.get(ref)
                except Exception as raised:  # noqa: BLE001  collected, and raised below
                    number = refs.index(ref)
                    error = self._of_death(number, raised)
                    failed.append((number, error))
                    end = time.monotonic() + _patience(error)
        if failed:
            raise self._cause(failed, [refs.index(ref) for ref in left])
        return [ray.get(ref) for ref in refs]

    def _require_none_hangs(self) -> None:
        if (hang := self._watch.look()) is not None:
            numbers, message = hang
            raise self.hang_error(f"{self._named(numbers)} hangs: {message}")

    def _of_death(self, number: int, error: Exception) -> Exception:
        """The error of a process that NCCL's watchdog ended, which Ray calls lost; else `error`."""
        from ray.exceptions import RayActorError

        waited = None
        together = self.size > 1  # a process that is alone waits in no collective
        if together and isinstance(error, RayActorError) and self._written[number][1]:
            waited = timed_out(self._last_words(number))
        if waited is None:
            return error
        name, at = self._named([number]), self._place(number)
        if waited:
            return _TimedOut(
                f"{name} {WAITED}{at} for a collective of NCCL, {waited} (cluster.limit_seconds); "
                "torch's watchdog ended it"
            )
        return _TimedOut(f"{name} did not come{at}: others {WAITED} for it", late=True)

    def _last_words(self, number: int) -> str:
        """What a dead process wrote on stderr; empty where its machine is lost too."""
        import ray
        from ray.exceptions import RayError
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node, path = self._written[number]
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        asked: Any = ray.remote(last_words)
        asked = asked.options(num_cpus=0, scheduling_strategy=there, max_retries=0)
        try:
            return ray.get(asked.remote(path), timeout=WORDS_SECONDS)
        except RayError:
            return ""

    def _cause(self, failed: list[tuple[int, Exception]], silent: list[int]) -> Exception:
        """Which of several errors to raise. First in rank: a process was lost; then: a process
        raised an error of its own; last: a collective timed out, because another process failed or
        hangs. failed: (number of the process, its error). silent: processes without an answer.
        """
        from ray.exceptions import RayActorError, RayTaskError

        ranked: list[tuple[int, int, Exception]] = []  # least first: (rank, process, error)
        for number, error in failed:
            name = f"{self._title} {self._first + number}"
            if isinstance(error, RayActorError):
                death = f"{name} died: {first_line(error)} ({self._where(number)})"
                lost = WorkerLost(f"{death}; was it killed, or out of memory?")
                ranked.append((-1, number, lost))
                continue
            if isinstance(error, _TimedOut):
                late = [n for n, e in failed if isinstance(e, _TimedOut) and e.late]
                hung = error if error.late else self._hung(error, sorted({*silent, *late}))
                ranked.append((2 if error.late else 1, number, hung))
                continue
            cause = error.cause if isinstance(error, RayTaskError) else error
            if not isinstance(cause, PostgradError | OSError) or cause is error:
                failure = RunError(f"{name} failed: {cause!r}")
                failure.__cause__ = cause
                ranked.append((0, number, failure))
            elif WAITED in str(cause):
                peer_lost = any(text in str(cause) for text in GONE)
                waited = WorkerLost(str(cause)) if peer_lost else self._hung(cause, silent)
                ranked.append((1, number, waited))
            else:
                ranked.append((0, number, cause))
        _, _, error = min(ranked, key=lambda entry: entry[:2])
        return error

    def _hung(self, cause: Exception, silent: list[int]) -> Exception:
        if not silent:
            return cause
        at = " and".join(filter(None, map(self._place, silent)))
        names = self._named(silent)
        return RunError(f"{names} did not come and says nothing, it hangs{at}: {cause}")

    def _place(self, number: int) -> str:
        """Where a process was last seen, " at FILE:LINE in FUNCTION"; empty where it was not."""
        place = self._watch.place(number)
        return f" at {place}" if place else ""

    def _named(self, numbers: Sequence[int]) -> str:
        return " and ".join(f"{self._title} {self._first + n} ({self._where(n)})" for n in numbers)

    def _where(self, number: int) -> str:
        return "pid {1} on {0}".format(*self.places[number])


def _patience(error: Exception) -> float:
    """Seconds that the others have to report what was behind an error."""
    if isinstance(error, _TimedOut):
        return ENDED_SECONDS
    return HUNG_SECONDS if WAITED in str(error) else GRACE_SECONDS


class _TimedOut(RunError):
    """NCCL's watchdog ended a process. late: it was the others that had waited for it."""

    def __init__(self, message: str, *, late: bool = False) -> None:
        super().__init__(message)
        self.late = late


class _Worker:
    """The actor in each process: holds the worker's object and calls its methods."""

    _object: Any
    _held: socket.socket  # its port is that where the ranks meet
    _thread: int | None = None  # identifier of the thread that runs a call

    def stand(self, folder: str, visible: str | None) -> tuple[str, int, str, str, str]:
        """Changes into the run's folder, so that a recipe's paths mean the same here. visible: GPUs
        to work on; None: Ray's choice. Returns the machine's address, the pid, Ray's id of the
        machine, the file that stderr goes to, and CUDA_VISIBLE_DEVICES.
        """
        import ray

        if visible is not None:
            os.environ[VISIBLE] = visible  # nothing has asked for GPUs yet
        address: str = ray.util.get_node_ip_address()
        try:
            os.chdir(folder)
        except OSError as error:
            raise RunError(
                f"{folder}, from which the run was started, is not there on {address}: "
                f"{error.strerror}; start it in a folder that all machines share"
            ) from error
        _use_interface_of(address)
        node, gpus = ray.get_runtime_context().get_node_id(), os.environ.get(VISIBLE, "")
        return address, os.getpid(), node, stderr_file(), gpus

    def make(self, worker: str, arguments: list[Any]) -> None:
        with heavy_imports():  # the longest part of a start
            made_by = resolve(worker, {}, "worker")
        self._object = made_by(*arguments)

    def meeting(self, port: int) -> str:
        """HOST:PORT where the ranks meet: this machine, and the port, or for 0 one that is free."""
        import ray

        if not port:
            self._held, port = held_port()
        return f"{ray.util.get_node_ip_address()}:{port}"

    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        self._thread = threading.get_ident()
        try:
            return getattr(self._object, method)(*arguments)
        finally:
            self._thread = None

    def aside(self, method: str, arguments: tuple[Any, ...]) -> Any:
        return getattr(self._object, method)(*arguments)

    aside.__ray_concurrency_group__ = "aside"  # pyright: ignore[reportFunctionMemberAccess]

    def pulse(self) -> Pulse:
        return pulse_of(self._thread)

    pulse.__ray_concurrency_group__ = "pulse"  # pyright: ignore[reportFunctionMemberAccess]


def _side_by_side(addresses: Sequence[str]) -> list[int]:
    """Indices in an order in which processes of one machine are neighbours; otherwise stable."""
    first = {address: addresses.index(address) for address in addresses}
    return sorted(range(len(addresses)), key=lambda number: (first[addresses[number]], number))


def _use_interface_of(address: str) -> None:
    """Makes gloo listen where Ray does: a host's own name often resolves to an address that no
    other machine reaches. A GLOO_SOCKET_IFNAME that is set already stays.
    """
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


class RankGroup(Workers):
    """`size` ranks in one process group. The worker's class has to have `join`."""

    hang_error = RunError  # it would recur: the run ends

    def __init__(
        self,
        worker: str,
        arguments: Sequence[Any],
        size: int,
        device: str,
        settings: ClusterSettings,
        reservation: Reservation,
        role: str = POLICY,
    ) -> None:
        """device: "cpu" or "cuda". The other parameters are those of Workers."""
        title = "rank" if role == POLICY else f"{role} rank"
        still = device == "cpu"
        super().__init__(title, worker, arguments, size, settings, reservation, role, still=still)
        try:
            port = settings.port if role == POLICY else 0
            (address,) = self._each([self._actors[0].meeting.remote(port)])
            self._each(
                [
                    actor.call.remote("join", (rank, size, address, device, settings.limit_seconds))
                    for rank, actor in enumerate(self._actors)
                ]
            )
        except BaseException:
            self.close()
            raise
