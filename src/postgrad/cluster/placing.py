"""Which process goes to which machine: pure, so that an impossible placement fails at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from postgrad.cluster.settings import RolePlacement
from postgrad.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of a cluster. gpus, cpus: all that it has, free or not."""

    address: str
    gpus: int
    cpus: int


@dataclass(frozen=True, slots=True)
class RoleRequest:
    """What the processes of one role ask of a cluster."""

    role: str  # "policy", "critic", "reference", "reward_model", "teacher" or "rollout"
    key: str  # the recipe's key that sets how many there are, with its value: "learner.ranks = 8"
    processes: int
    gpus: int = 0  # of each process
    cpus: int = 0  # cores of each process
    machines: int = 0  # how many machines they are spread over, evenly; 0: as few as have room
    inside: str | None = None  # the role whose processes they share machines and GPUs with
    later: int = 0  # how many of the processes, the last ones, may come after the others
    together: int = 1  # neighbours that are on one machine: an engine works on the GPUs of them all

    @property
    def first(self) -> int:
        """How many processes have to have a place before any is started."""
        return self.processes - self.later


def role_request(
    role: str,
    key: str,
    processes: int,
    placement: RolePlacement,
    device: str,
    inside: str | None = None,
    least: int = 1,
    later: int = 0,
    together: int = 1,
) -> RoleRequest:
    """The request of a role with that placement.

    device: of the run, "cpu" or "cuda". least: GPUs that each process needs on "cuda". later: how
    many of the processes may come after the others. together: see RoleRequest. That the GPUs divide
    evenly over the processes was checked with the recipe. Raises UsageError where a process would
    have too few GPUs, or GPUs that it would not use.
    """
    gpus = least if device == "cuda" else 0
    if placement.gpus is not None and inside is None:
        gpus = placement.gpus // processes
    stated = f"cluster.{role}.gpus = {placement.gpus}"
    if device != "cuda" and gpus:
        raise UsageError(
            f"{stated}: a run works on the kind of device that its first process has, and here "
            "that is a CPU: start it on a machine with GPUs, or leave gpus out"
        )
    if device == "cuda" and inside is None and gpus < least:
        raise UsageError(
            f"{stated}: {processes} processes that work on {least} GPUs each need "
            f"{least * processes}: say so or leave gpus out; a run on CPUs is started with "
            "CUDA_VISIBLE_DEVICES="
        )
    cpus, machines = placement.cpus, placement.machines
    return RoleRequest(role, key, processes, gpus, cpus, machines, inside, later, together)


def assign(requests: Sequence[RoleRequest], nodes: Sequence[Node]) -> dict[str, list[str]]:
    """By role, the address of each first process's machine; processes of one machine are
    neighbours.

    The same cluster gives the same answer, whatever the order of its machines. Raises UsageError
    with what each machine has, where there is not enough room.
    """
    free = {node.address: (node.gpus, node.cpus) for node in nodes}
    addresses: dict[str, list[str]] = {}
    for request in sorted(requests, key=lambda request: (not request.machines, -request.gpus)):
        if request.inside is not None:
            continue
        rooms = {address: _room(request, *resources) for address, resources in free.items()}
        counts = _counts(request, rooms)
        if counts is None:
            raise UsageError(_no_room(request, nodes, rooms))
        addresses[request.role] = [address for address, count in counts for _ in range(count)]
        for address, count in counts:
            gpus, cpus = free[address]
            free[address] = gpus - count * request.gpus, cpus - count * request.cpus
    for request in requests:
        if request.inside is not None:
            each = max(1, request.gpus)  # processes whose GPUs one of these works on
            addresses[request.role] = addresses[request.inside][::each][: request.processes]
    return addresses


def _room(request: RoleRequest, gpus: int, cpus: int) -> float:
    """How many of the role's processes fit on a machine with so many GPUs and cores left."""
    by_gpus = gpus // request.gpus if request.gpus else inf
    by_cpus = cpus // request.cpus if request.cpus else inf
    room = min(by_gpus, by_cpus)
    return room if room == inf else room // request.together * request.together


def _counts(request: RoleRequest, rooms: dict[str, float]) -> list[tuple[str, int]] | None:
    """(address, number of processes) of each machine that is used; None where they do not fit."""
    if request.machines:
        each = request.first // request.machines
        fitting = sorted((room, address) for address, room in rooms.items() if room >= each)
        if len(fitting) < request.machines:
            return None
        return [(address, each) for _, address in fitting[: request.machines]]
    fits_all = sorted((room, address) for address, room in rooms.items() if room >= request.first)
    if fits_all:
        return [(fits_all[0][1], request.first)]
    left, counts = request.first, list[tuple[str, int]]()
    for room, address in sorted(((-room, address) for address, room in rooms.items())):
        count = int(min(-room, left))
        if count:
            counts.append((address, count))
            left -= count
    return None if left else counts


def _no_room(request: RoleRequest, nodes: Sequence[Node], rooms: dict[str, float]) -> str:
    """The message for a role that does not fit: what it needs, and what each machine has."""
    gpus, cpus, machines = request.gpus, request.cpus, request.machines
    needs = [
        *(["as many GPUs"] if gpus == 1 else []),
        *([f"{gpus} GPUs for each of {request.first} processes"] if gpus > 1 else []),
        *([f"{cpus} cores for each of {request.first} processes"] if cpus else []),
        *([f"{machines} machines with as many processes on each"] if machines else []),
        *([f"each {request.together} of them on one machine"] if request.together > 1 else []),
    ]
    asked = " and ".join(needs)
    there = "; ".join(
        f"{node.address} has {node.gpus} GPUs and {node.cpus} cores, "
        f"room for {_count(rooms[node.address])}"
        for node in sorted(nodes, key=lambda node: node.address)
    )
    return (
        f"{request.key} needs {asked}, and the Ray cluster has not: "
        f"{there or 'no machine is there'}; lower it, or join a larger cluster (cluster.address)"
    )


def _count(room: float) -> str:
    return "any number" if room == inf else f"{room:g}"
