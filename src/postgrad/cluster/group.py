"""Ranks as Ray actors: started together, called together, ended together.

The one room that imports ray. What runs on a rank is an object of a class that is named, so that
this room knows nothing of roles: `Worker` says what it needs of it.
"""

import os
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from postgrad.cluster.settings import ClusterSettings
from postgrad.core.errors import PostgradError, RunError, UsageError
from postgrad.core.handles import Handle
from postgrad.core.names import resolve

GRACE_SECONDS = 2.0  # in which other ranks may say what really went wrong
MISSING = (
    'cluster.type = "ray" needs the package ray, which is an extra: pip install "postgrad[ray]"'
)


def start(settings: ClusterSettings) -> None:
    """Connects to the cluster that the settings name, or makes one of this machine.

    Raises UsageError where ray is not installed, RunError where nobody answers at the address.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anybody
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise UsageError(MISSING) from error
    if ray.is_initialized():
        return
    try:
        ray.init(
            address=settings.address,
            include_dashboard=False if settings.address is None else None,
            log_to_driver=False,
            configure_logging=False,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        where = settings.address or "this machine"
        raise RunError(
            f"no Ray cluster at {where}: {_first_line(error)}; start one there (ray start --head), "
            "or leave cluster.address out, which makes one of this machine"
        ) from error


def stop() -> None:
    """Leaves the cluster; one that was made of this machine ends."""
    import ray

    if ray.is_initialized():
        ray.shutdown()


def require_room(ranks: int, device: str) -> None:
    """Raises UsageError where the cluster cannot hold so many ranks, before anything is loaded.

    On GPUs each rank has one of its own; on CPUs ranks share the cores.
    """
    if device != "cuda":
        return
    import ray

    there = int(ray.cluster_resources().get("GPU", 0))
    if ranks > there:
        raise UsageError(
            f"learner.ranks = {ranks} needs as many GPUs, and the Ray cluster has {there}: lower "
            "it, or join a larger cluster (cluster.address)"
        )


class RankGroup:
    """`size` actors, each with a `worker` object, which hold one process group."""

    def __init__(
        self,
        worker: str,
        arguments: Sequence[Any],
        size: int,
        device: str,
        settings: ClusterSettings,
    ) -> None:
        """worker: "package.module:Class", made with `arguments` on each rank. Raises what making
        one raises, or RunError where not all come up in settings.start_seconds.
        """
        import ray

        self.size = size
        self._order = ThreadPoolExecutor(size + 4, "ranks")
        self._turn = threading.Lock()
        self._ended = False
        remote: Any = ray.remote  # its types know neither an actor's groups nor numbers by name
        room = {"num_cpus": 0, "num_gpus": 1 if device == "cuda" else 0}
        actor: Any = remote(**room, concurrency_groups={"aside": 1})(_Rank)
        self._actors = [actor.remote() for _ in range(size)]
        try:
            made = [one.make.remote(worker, list(arguments)) for one in self._actors]
            self._collect(made, settings.start_seconds)
            address = self._collect([self._actors[0].address.remote()], settings.start_seconds)
            refs = [
                one.call.remote("join", (rank, size, address, device, settings.limit_seconds))
                for rank, one in enumerate(self._actors)
            ]
            self._collect(refs, settings.start_seconds)
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *arguments: Any) -> Handle[Any]:
        """Calls a method of every rank's worker, in the order of calls; what rank 0 returns.

        An error of any rank is the handle's, and ends the group: the others would wait for ever.
        """
        return self._submit("call", method, arguments)

    def aside(self, method: str, *arguments: Any) -> Handle[Any]:
        """The same beside what the ranks are doing: for files."""
        return self._submit("aside", method, arguments)

    def close(self) -> None:
        """Ends every rank at once."""
        import ray

        self._ended = True
        for one in self._actors:
            ray.kill(one)
        self._order.shutdown(wait=False)

    def _submit(self, way: str, method: str, arguments: tuple[Any, ...]) -> Handle[Any]:
        import ray

        if self._ended:
            raise RunError("the ranks have ended: see the error before this one")
        held = ray.put(arguments)  # once for all ranks
        with self._turn:  # all ranks get calls in one order, whoever calls
            refs = [getattr(one, way).remote(method, held) for one in self._actors]
        return self._order.submit(self._collect_or_end, refs)

    def _collect_or_end(self, refs: list[Any]) -> Any:
        try:
            return self._collect(refs)
        except (OSError, PostgradError) as error:
            if not isinstance(error, OSError):
                self.close()
            raise
        except BaseException:
            self.close()
            raise

    def _collect(self, refs: list[Any], seconds: float | None = None) -> Any:
        """What the first returned, once all have. The first error counts, unless another rank says
        within GRACE_SECONDS what was behind it.
        """
        import ray

        left, failed = list(refs), list[tuple[int, Exception]]()
        end = None if seconds is None else time.monotonic() + seconds
        while left:
            wait = None if end is None else max(0.0, end - time.monotonic())
            ready, left = ray.wait(left, num_returns=1, timeout=wait)
            if not ready and failed:
                break
            if not ready:
                raise RunError(
                    f"{len(left)} of {len(refs)} ranks did not start within {seconds:g} seconds "
                    "(cluster.start_seconds): is the cluster full, or another run in it?"
                )
            for one in ready:
                try:
                    ray.get(one)
                except Exception as error:  # noqa: BLE001  collected, and raised below
                    failed.append((refs.index(one), error))
                    end = time.monotonic() + GRACE_SECONDS
        if failed:
            raise _cause(failed)
        return ray.get(refs[0])


class _Rank:
    """One actor."""

    _worker: Any

    def make(self, worker: str, arguments: list[Any]) -> None:
        self._worker = resolve(worker, {}, "worker")(*arguments)

    def address(self) -> str:
        """Where this rank can be met: its node and a port that is free now."""
        import ray

        with socket.socket() as held:
            held.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{held.getsockname()[1]}"

    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        return getattr(self._worker, method)(*arguments)

    def aside(self, method: str, arguments: tuple[Any, ...]) -> Any:
        return getattr(self._worker, method)(*arguments)

    aside.__ray_concurrency_group__ = "aside"  # pyright: ignore[reportFunctionMemberAccess]


def _cause(failed: list[tuple[int, Exception]]) -> Exception:
    """What to raise of several ranks' errors: one with a message of ours first, and one of a rank
    that did not merely wait for another before all.
    """
    from ray.exceptions import RayActorError, RayTaskError

    found: list[tuple[int, int, Exception]] = []
    for rank, error in failed:
        if isinstance(error, RayTaskError):
            cause = error.cause
            if isinstance(cause, PostgradError | OSError):
                found.append((1 if "waited in vain" in str(cause) else 0, rank, cause))
            else:
                found.append((0, rank, RunError(f"rank {rank} failed: {cause!r}")))
        elif isinstance(error, RayActorError):
            died = f"rank {rank} died: {_first_line(error)}; was it killed, or out of memory?"
            found.append((-1, rank, RunError(died)))
        else:
            found.append((0, rank, RunError(f"rank {rank}: {_first_line(error)}")))
    _, _, error = min(found, key=lambda one: one[:2])
    return error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
