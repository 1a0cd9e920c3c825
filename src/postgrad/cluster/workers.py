"""Processes behind Ray: started where they belong, called, watched and ended.

What runs in one is an object of a class that is named, so that this room knows nothing of roles.
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
from postgrad.cluster.connection import first_line
from postgrad.cluster.pulse import Pulse, Watch, pulse_of
from postgrad.cluster.reservation import Reservation
from postgrad.cluster.settings import ClusterSettings
from postgrad.core.errors import PostgradError, RunError, WorkerLost
from postgrad.core.handles import Handle
from postgrad.core.names import resolve

GRACE_SECONDS = 2.0  # in which others may say what really went wrong
HUNG_SECONDS = 10.0  # in which all that wait for one have given up: whoever is silent then hangs
WAITED = "waited in vain"  # what one says that gave a collective up
GONE = ("closed by peer", "reset by peer", "Broken pipe")  # what a lost process leaves to others


class Workers:
    """`size` actors, each with an object of one class, in the places of `role`."""

    def __init__(
        self,
        title: str,
        worker: str,
        arguments: Sequence[Any],
        size: int,
        settings: ClusterSettings,
        reservation: Reservation,
        role: str,
        *,
        still: bool = False,
    ) -> None:
        """title: what one is called ("rank"). worker: "package.module:Class", made with `arguments`
        in each. still: see Watch. Raises what making one raises, or RunError where not all come up
        in settings.start_seconds.
        """
        import ray

        self.size = size
        self._title = title
        self._settings = settings
        self._order = ThreadPoolExecutor(size + 4, title)
        self._turn = threading.Lock()
        self._ended = False
        remote: Any = ray.remote  # its types know neither an actor's groups nor numbers by name
        actor: Any = remote(concurrency_groups={"aside": 1, "pulse": 1})(_Worker)
        self._actors = [actor.options(**reservation.options(role, n)).remote() for n in range(size)]
        self.places = [("?", 0)] * size  # the address of its machine and its pid, of each
        try:
            places = self._each([one.stand.remote(str(Path.cwd())) for one in self._actors])
            order = _side_by_side([address for address, *_ in places])
            self._actors = [self._actors[number] for number in order]
            self.places = [places[number][:2] for number in order]
            nodes = [places[number][2] for number in order]
            pids = [pid for _, pid in self.places]
            self._watch = Watch(self._actors, nodes, pids, still=still)
            self._each([one.make.remote(worker, list(arguments)) for one in self._actors])
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *arguments: Any) -> Handle[Any]:
        """Calls a method of every object, in the order of calls; what the first one returns.

        An error of any of them is the handle's, and ends all: the others would wait for ever.
        """
        return self._submit("call", self._actors, method, arguments)

    def aside(self, method: str, *arguments: Any) -> Handle[Any]:
        """The same beside what they are doing: for files."""
        return self._submit("aside", self._actors, method, arguments)

    def ask(self, number: int, method: str, *arguments: Any) -> Handle[Any]:
        """Calls a method of one of them."""
        return self._submit("call", [self._actors[number]], method, arguments)

    def told(self) -> str:
        """Where each is."""
        where = (f"{n} is pid {pid} on {address}" for n, (address, pid) in enumerate(self.places))
        return f"{self.size} {self._title}s: {', '.join(where)}"

    def close(self) -> None:
        """Ends every one at once."""
        import ray

        self._ended = True
        for one in self._actors:
            ray.kill(one)
        self._order.shutdown(wait=False)

    def _submit(
        self, way: str, actors: list[Any], method: str, arguments: tuple[Any, ...]
    ) -> Handle[Any]:
        import ray

        if self._ended:
            raise RunError(f"the {self._title}s have ended: see the error before this one")
        held = ray.put(arguments)  # once for all of them
        with self._turn:  # all get calls in one order, whoever calls
            refs = [getattr(one, way).remote(method, held) for one in actors]
        return self._order.submit(self._collect_or_end, refs, self._actors.index(actors[0]))

    def _collect_or_end(self, refs: list[Any], first: int) -> Any:
        try:
            return self._collect(refs, first=first)[0]
        except OSError:
            raise
        except BaseException:
            self.close()
            raise

    def _each(self, refs: list[Any]) -> list[Any]:
        return self._collect(refs, self._settings.start_seconds)

    def _collect(self, refs: list[Any], seconds: float | None = None, first: int = 0) -> list[Any]:
        """What each returned, once all have. The first error counts, unless another one says within
        GRACE_SECONDS what was behind it. first: the number of the one that was asked first.
        """
        import ray

        left, failed = list(refs), list[tuple[int, Exception]]()
        end = None if seconds is None else time.monotonic() + seconds
        while left:
            more = pulse.LOOK_SECONDS if end is None else max(0.0, end - time.monotonic())
            ready, left = ray.wait(left, num_returns=1, timeout=more)
            if not ready and end is None:
                self._require_none_hangs()
            elif not ready and failed:
                break
            elif not ready:
                raise RunError(
                    f"{len(left)} of {len(refs)} {self._title}s did not start within {seconds:g} "
                    "seconds (cluster.start_seconds): is the cluster full, or another run in it?"
                )
            for one in ready:
                try:
                    ray.get(one)
                except Exception as error:  # noqa: BLE001  collected, and raised below
                    failed.append((first + refs.index(one), error))
                    more = HUNG_SECONDS if WAITED in str(error) else GRACE_SECONDS
                    end = time.monotonic() + more
        if failed:
            raise self._cause(failed, [first + refs.index(one) for one in left])
        return [ray.get(one) for one in refs]

    def _require_none_hangs(self) -> None:
        if (found := self._watch.look()) is not None:
            hung, told = found
            raise RunError(f"{self._named(hung)} hangs: {told}")

    def _cause(self, failed: list[tuple[int, Exception]], silent: list[int]) -> Exception:
        """What to raise of several errors: a process that was lost before all, then one with a
        message of ours, and one that merely waited for another last, with those that are silent.
        """
        from ray.exceptions import RayActorError, RayTaskError

        found: list[tuple[int, int, Exception]] = []
        for number, error in failed:
            name = f"{self._title} {number}"
            if isinstance(error, RayActorError):
                told = f"{name} died: {first_line(error)} ({self._where(number)})"
                found.append((-1, number, WorkerLost(f"{told}; was it killed, or out of memory?")))
                continue
            cause = error.cause if isinstance(error, RayTaskError) else error
            if not isinstance(cause, PostgradError | OSError) or cause is error:
                told = RunError(f"{name} failed: {cause!r}")
                told.__cause__ = cause
                found.append((0, number, told))
            elif WAITED in str(cause):
                lost = any(said in str(cause) for said in GONE)
                waited = WorkerLost(str(cause)) if lost else self._hung(cause, silent)
                found.append((1, number, waited))
            else:
                found.append((0, number, cause))
        _, _, error = min(found, key=lambda one: one[:2])
        return error

    def _hung(self, cause: Exception, silent: list[int]) -> Exception:
        if not silent:
            return cause
        return RunError(f"{self._named(silent)} did not come and says nothing, it hangs: {cause}")

    def _named(self, numbers: Sequence[int]) -> str:
        return " and ".join(f"{self._title} {one} ({self._where(one)})" for one in numbers)

    def _where(self, number: int) -> str:
        return "pid {1} on {0}".format(*self.places[number])


class _Worker:
    """One actor."""

    _object: Any
    _thread: int | None = None  # that has a call

    def stand(self, folder: str) -> tuple[str, int, str]:
        """Takes the run's folder as its own, so that a recipe's paths mean the same here; its
        machine's address, its process's number, and Ray's name of the machine.
        """
        import ray

        address: str = ray.util.get_node_ip_address()
        try:
            os.chdir(folder)
        except OSError as error:
            raise RunError(
                f"{folder}, from which the run was started, is not there on {address}: "
                f"{error.strerror}; start it in a folder that all machines share"
            ) from error
        _use_interface_of(address)
        return address, os.getpid(), ray.get_runtime_context().get_node_id()

    def make(self, worker: str, arguments: list[Any]) -> None:
        self._object = resolve(worker, {}, "worker")(*arguments)

    def meeting(self, port: int) -> str:
        """Where others can meet this one: its machine, and the port, or one that is free now."""
        import ray

        if not port:
            with socket.socket() as held:
                held.bind(("", 0))
                port = held.getsockname()[1]
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
    """The order in which those of one machine are neighbours, and else that of before."""
    first = {address: addresses.index(address) for address in addresses}
    return sorted(range(len(addresses)), key=lambda number: (first[addresses[number]], number))


def _use_interface_of(address: str) -> None:
    """Has gloo listen where Ray does: a host's own name often means an address that no other
    machine reaches. What a person has set stays.
    """
    import psutil

    for name, known in psutil.net_if_addrs().items():
        if any(one.address == address for one in known):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
