"""Which process goes to which machine: pure, so that an impossible placement is told at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from postgrad.cluster.settings import Placement
from postgrad.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class Machine:
    """One of a cluster: its address, and what it has in all."""

    address: str
    gpus: int
    cpus: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """Processes of a role. key: what a person would change, with its value. gpus, cpus: of each.
    machines: as in Placement. inside: they use what another role's processes have.
    """

    role: str
    key: str
    processes: int
    gpus: int = 0
    cpus: int = 0
    machines: int = 0
    inside: str | None = None


def wanted(
    role: str,
    key: str,
    processes: int,
    placement: Placement,
    device: str,
    inside: str | None = None,
    least: int = 1,
) -> Wanted:
    """What a placement asks for where the run's device is `device`, on which a process works with
    `least` GPUs or more. Recipes whose GPUs do not divide were refused. Raises UsageError where it
    would have none, too few, or such that it would not use.
    """
    gpus = least if device == "cuda" else 0
    if placement.gpus is not None:
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
    if device == "cuda" and inside is not None and least > 1:
        raise UsageError(
            f"cluster.{inside}.colocate: an engine shares the one GPU of a rank, and rollout.vllm "
            f"wants {least} (tensor_parallel * engines): leave colocate out, or use 1"
        )
    return Wanted(role, key, processes, gpus, placement.cpus, placement.machines, inside)


def assign(wants: Sequence[Wanted], machines: Sequence[Machine]) -> dict[str, list[str]]:
    """By role: the address of every process's machine, those of one machine side by side.

    The same cluster gives the same answer, in whatever order its machines come. Raises UsageError
    where they have no room, with what each has.
    """
    left = {one.address: (one.gpus, one.cpus) for one in machines}
    found: dict[str, list[str]] = {}
    choosy_first = sorted(wants, key=lambda one: (not one.machines, -one.gpus))
    for one in choosy_first:
        if one.inside is not None:
            continue
        rooms = {address: _room(one, *free) for address, free in left.items()}
        counts = _counts(one, rooms)
        if counts is None:
            raise UsageError(_no_room(one, machines, rooms))
        found[one.role] = [address for address, count in counts for _ in range(count)]
        for address, count in counts:
            gpus, cpus = left[address]
            left[address] = gpus - count * one.gpus, cpus - count * one.cpus
    for one in wants:
        if one.inside is not None:
            found[one.role] = found[one.inside][: one.processes]
    return found


def _room(one: Wanted, gpus: int, cpus: int) -> float:
    """How many of its processes a machine with so much left can hold."""
    by_gpus = gpus // one.gpus if one.gpus else inf
    by_cpus = cpus // one.cpus if one.cpus else inf
    return min(by_gpus, by_cpus)


def _counts(one: Wanted, rooms: dict[str, float]) -> list[tuple[str, int]] | None:
    """How many processes on which machine; None where there is no way."""
    if one.machines:
        each = one.processes // one.machines
        fitting = sorted((room, address) for address, room in rooms.items() if room >= each)
        if len(fitting) < one.machines:
            return None
        return [(address, each) for _, address in fitting[: one.machines]]
    whole = sorted((room, address) for address, room in rooms.items() if room >= one.processes)
    if whole:
        return [(whole[0][1], one.processes)]
    left, counts = one.processes, list[tuple[str, int]]()
    for room, address in sorted(((-room, address) for address, room in rooms.items())):
        count = int(min(-room, left))
        if count:
            counts.append((address, count))
            left -= count
    return None if left else counts


def _no_room(one: Wanted, machines: Sequence[Machine], rooms: dict[str, float]) -> str:
    needs = [
        *(["as many GPUs"] if one.gpus == 1 else []),
        *([f"{one.gpus} GPUs for each of {one.processes} processes"] if one.gpus > 1 else []),
        *([f"{one.cpus} cores for each of {one.processes} processes"] if one.cpus else []),
    ]
    spread = f"{one.machines} machines with as many processes on each" if one.machines else ""
    asked = " and ".join([*needs, *([spread] if spread else [])])
    there = "; ".join(
        f"{machine.address} has {machine.gpus} GPUs and {machine.cpus} cores, "
        f"room for {_count(rooms[machine.address])}"
        for machine in sorted(machines, key=lambda machine: machine.address)
    )
    return (
        f"{one.key} needs {asked}, and the Ray cluster has not: {there or 'no machine is there'}; "
        "lower it, or join a larger cluster (cluster.address)"
    )


def _count(room: float) -> str:
    return "any number" if room == inf else f"{room:g}"
