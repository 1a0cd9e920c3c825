"""The Ray cluster of a run, one that runs already or one of this machine; and the places in it that
the run reserves for its roles."""

import os
import re
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

import psutil

from postgrad.cluster.placing import Node, RoleRequest, assign
from postgrad.cluster.settings import ADDRESS, ClusterSettings
from postgrad.core.errors import RunError, UsageError

ANSWER_SECONDS = 10.0  # for the first bytes from an address; Ray itself would try for minutes
MISSING = (
    'cluster.type = "ray" needs the package ray, which is an extra: pip install "postgrad[ray]"'
)
# A client's first words in HTTP/2, which Ray speaks, and what an answer has in its fourth byte.
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
SETTINGS_FRAME = 4
WAYS_OUT = (
    "start one there (ray start --head), or leave cluster.address out, which makes one of this "
    "machine"
)

VISIBLE = "CUDA_VISIBLE_DEVICES"  # empty: the user wants a run on CPUs
MARK = 0.0001  # the least that Ray counts: a bundle cannot be empty
LOOK_SECONDS = 1.0


def start(settings: ClusterSettings) -> bool:
    """Connects to the cluster that the settings name, or makes one of this machine. False where
    this process was in one before, which stays.

    Raises UsageError where ray is not installed, RunError where nobody answers at the address.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anybody
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # ranks are the work, nothing goes before it
    try:
        import ray
    except ImportError as error:
        raise UsageError(MISSING) from error
    if ray.is_initialized():
        return False
    address = settings.address
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "auto")
    if address is not None and address != "auto" and re.match(ADDRESS, address):
        _require_answer(address)
    began = time.monotonic()
    deadline = began + settings.start_seconds
    while (error := _connected(settings.address)) is not None:
        at_once = time.monotonic() - began < ANSWER_SECONDS  # time was not short: no retry helps
        if settings.address is not None or at_once or time.monotonic() > deadline:
            raise RunError(
                f"no Ray cluster at {settings.address or 'this machine'}: {first_line(error)}; "
                f"{WAYS_OUT if settings.address else 'is the machine overloaded?'}"
            ) from error
        began = time.monotonic()
    return True


def _connected(address: str | None) -> Exception | None:
    """Connects; returns the error that Ray raised, None where it is connected. On a busy machine
    Ray's own start may take longer than the 30 seconds that it allows itself. What it had started
    until then would run on beside the next attempt.
    """
    import ray

    before = _programs_of_ray()
    try:
        ray.init(
            address=address or "local",  # None would join whatever ran here last
            include_dashboard=False if address is None else None,
            log_to_driver=False,
            configure_logging=False,
        )
    except Exception as error:  # noqa: BLE001  Ray raises plain ones; the caller raises its own
        ray.shutdown()  # which knows nothing of a start that failed
        for program in _programs_of_ray() - before:
            _end(program)
        return error
    return None


def _programs_of_ray() -> set[psutil.Process]:
    """Ray's programs that this process has started: gcs_server, raylet, and what watches them."""
    import ray

    folder, programs = str(Path(ray.__file__).parent), set[psutil.Process]()
    for child in psutil.Process().children():
        try:
            if any(word.startswith(folder) for word in child.cmdline()):
                programs.add(child)
        except psutil.NoSuchProcess:  # it ended while we looked
            continue
    return programs


def _end(program: psutil.Process) -> None:
    """Kills a process and its children, and waits for their end."""
    processes = [program]
    with suppress(psutil.NoSuchProcess):  # it ended while we looked
        processes = [*program.children(recursive=True), program]
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=ANSWER_SECONDS)


def stop() -> None:
    """Disconnects from the cluster, and ends one that was made of this machine."""
    import ray

    if ray.is_initialized():
        ray.shutdown()


def nodes_alive() -> list[Node]:
    """The machines of the cluster that are up now."""
    import ray

    nodes: list[dict[str, Any]] = ray.nodes()
    return [
        Node(
            node["NodeManagerAddress"],
            int(node["Resources"].get("GPU", 0)),
            int(node["Resources"].get("CPU", 0)),
        )
        for node in nodes
        if node["Alive"]
    ]


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return str(error).strip().partition("\n")[0]


def _require_answer(address: str) -> None:
    """Raises RunError where nobody, or something else than Ray, answers at HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS) as connection:
            connection.sendall(GREETING)
            answer = connection.recv(9)
    except OSError as error:
        cause = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise RunError(f"no Ray cluster at {address}: {cause}; {WAYS_OUT}") from error
    if len(answer) < 4 or answer[3] != SETTINGS_FRAME:
        raise RunError(
            f"no Ray cluster at {address}: something else answers there; is it the port "
            "of ray start --head (6379 by default)?"
        )


class NoPlace(RunError):
    """The cluster has no room for a process now; it may have some later."""


class Reservation:
    """Holds the places of all roles until `close`. Processes that share a bundle share its GPU.

    The first processes of all roles have their places together in one of Ray's placement groups:
    all or none, so that two runs that want the same machines never hold half of them each. Each
    process that may come later has a group of its own, which Ray places when there is room, and
    places anew when its machine is lost.
    """

    def __init__(
        self, requests: Sequence[RoleRequest], seconds: float, *, patient: bool = False
    ) -> None:
        """seconds: how long to wait while other runs hold what is asked for. patient: wait too
        while the cluster is too small, because more machines may join.

        Raises UsageError where the placement is impossible, RunError where it is not free in time.
        """
        import ray

        end = time.monotonic() + seconds
        addresses = _assigned(requests, end, patient)
        self._bundles: dict[str, list[int]] = {}
        self._shares = {request.role: 1.0 for request in requests}
        bundles: list[dict[str, float]] = []
        separate = [request for request in requests if request.inside is None]
        for request in separate:
            first, together = len(bundles), request.together
            places = range(request.first)
            self._bundles[request.role] = [first + number // together for number in places]
            bundles += [_bundle(request, at) for at in addresses[request.role][::together]]
        self._hosts: dict[str, str] = {}  # of roles that have no GPU of their own to be given
        self._visible: dict[str, list[str]] = {}  # by role, what Ray gave each process
        for request in requests:
            if request.inside is not None:
                each = max(1, request.gpus)
                there = self._bundles[request.inside][::each]
                self._bundles[request.role] = there[: request.processes]
                if each == 1:
                    self._shares[request.role] = self._shares[request.inside] = 0.5
                else:  # Ray gives whole GPUs to one process each: the ranks have them
                    self._shares[request.role] = 0.0
                    self._hosts[request.role] = request.inside
        self._gpus = {request.role: request.gpus for request in requests}
        self._cpus = {request.role: request.cpus for request in separate}
        self._group: Any = ray.util.placement_group(bundles, strategy="PACK")
        self._further: dict[tuple[str, int], Any] = {}  # of later ones, by role and number
        if not self._group.wait(max(1.0, end - time.monotonic())):
            self.close()
            raise RunError(
                f"the Ray cluster is large enough, and not free within {seconds:g} seconds "
                "(cluster.start_seconds): another run uses what this one asks for; wait until it "
                "has ended"
            )
        for request in separate:
            for number in range(request.first, request.processes):
                further: Any = ray.util.placement_group([_bundle(request, None)], strategy="PACK")
                self._further[request.role, number] = further

    def options(self, role: str, number: int) -> dict[str, Any]:
        """Ray's options for the actor that is process `number` of the role."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group, bundle = self._place(role, number)
        return {
            "num_cpus": self._cpus.get(role, 0),
            "num_gpus": self._gpus[role] * self._shares[role],
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=bundle
            ),
        }

    def note_devices(self, role: str, visible: Sequence[str]) -> None:
        """Takes note of the GPUs that Ray gave the processes of a role, as CUDA_VISIBLE_DEVICES."""
        self._visible[role] = list(visible)

    def devices(self, role: str, number: int) -> str | None:
        """CUDA_VISIBLE_DEVICES of a process that works on the GPUs of several others, which have
        started; None where Ray gives it what it works on. Raises RunError where Ray gave them none.
        """
        if (host := self._hosts.get(role)) is None:
            return None
        each = self._gpus[role]
        visible = self._visible[host][number * each : (number + 1) * each]
        if not all(visible):
            raise RunError(
                f"cluster.{host}.colocate: Ray set no CUDA_VISIBLE_DEVICES for the processes whose "
                f"GPUs {role} {number} shares: give engines GPUs of their own (cluster.rollout)"
            )
        return ",".join(visible)

    def stands(self) -> bool:
        """Whether every place that the run cannot do without is on a machine that is up."""
        return _is_up(self._group)

    def wait_for(self, role: str, number: int, seconds: float, given_up: Event) -> None:
        """Waits until the place of a process is on a machine that is up. Raises NoPlace where it is
        not within so many seconds, or where it is given up.
        """
        end = time.monotonic() + seconds
        while not self.has_place(role, number):
            if time.monotonic() >= end or given_up.wait(LOOK_SECONDS):
                within = f" within {seconds:g} seconds (cluster.start_seconds)" if seconds else ""
                raise NoPlace(f"no machine of the cluster had room for it{within}")

    def has_place(self, role: str, number: int) -> bool:
        """Whether the place of a process is on a machine that is up."""
        return _is_up(*self._place(role, number))

    def close(self) -> None:
        """Releases the places of all roles."""
        import ray

        for group in (self._group, *self._further.values()):
            ray.util.remove_placement_group(group)

    def _place(self, role: str, number: int) -> tuple[Any, int]:
        """The group of a process, and its bundle there."""
        further = self._further.get((role, number))
        return (self._group, self._bundles[role][number]) if further is None else (further, 0)


def _is_up(group: Any, bundle: int | None = None) -> bool:
    """Whether all places of a group, or one of them, are on machines that are up. Ray's process on
    each machine is asked, because the cluster learns of a machine's loss only after several missed
    heartbeats.
    """
    import ray

    table: dict[str, Any] = ray.util.placement_group_table(group)
    # while one bundle of a group is placed anew the others stay where they are
    if table["state"] not in (("CREATED",) if bundle is None else ("CREATED", "RESCHEDULING")):
        return False
    used: dict[int, str] = table["bundles_to_node_id"]
    ids = {node for place, node in used.items() if bundle in (None, place)}
    nodes: list[dict[str, Any]] = [node for node in ray.nodes() if node["NodeID"] in ids]
    return len(nodes) == len(ids) > 0 and all(map(_answers, nodes))


def _answers(node: dict[str, Any]) -> bool:
    """Whether a machine's Ray process takes connections."""
    try:
        place = node["NodeManagerAddress"], node["NodeManagerPort"]
        socket.create_connection(place, LOOK_SECONDS).close()
    except OSError:
        return False
    return True


def _assigned(
    requests: Sequence[RoleRequest], end: float, patient: bool
) -> dict[str, list[str | None]]:
    """By role, the machine of each process; None where Ray chooses, which knows what is free."""
    while True:
        try:
            addresses = assign(requests, nodes_alive())
            break
        except UsageError:
            if not patient or time.monotonic() > end:
                raise
        time.sleep(LOOK_SECONDS)
    pinned = {request.role for request in requests if request.machines}
    return {
        role: [address if role in pinned else None for address in of_role]
        for role, of_role in addresses.items()
    }


def _bundle(request: RoleRequest, address: str | None) -> dict[str, float]:
    """The resources that Ray keeps for one process, or for those that belong together, by Ray's
    names. address: of its machine.
    """
    count = request.together
    resources = {"GPU": float(request.gpus * count), "CPU": float(request.cpus * count)}
    if address is not None:
        resources[f"node:{address}"] = MARK
    resources = {name: amount for name, amount in resources.items() if amount}
    return resources or {"CPU": MARK}
