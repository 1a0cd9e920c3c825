"""What the cluster keeps for a run: one bundle for each process, all of them or none."""

import time
from collections.abc import Sequence
from typing import Any

from postgrad.cluster import connection
from postgrad.cluster.placing import Wanted, assign
from postgrad.core.errors import RunError, UsageError

MARK = 0.0001  # the least that Ray counts: a bundle cannot be empty
LOOK_SECONDS = 1.0


class Reservation:
    """Holds the places of all roles until `close`. Processes that share a bundle share its GPU."""

    def __init__(self, wants: Sequence[Wanted], seconds: float, *, patient: bool = False) -> None:
        """seconds: to wait where others hold what is asked for. patient: also where the cluster
        itself is too small now, to which machines may come.

        Raises UsageError where the placement is impossible, RunError where it is not to be had.
        """
        import ray

        end = time.monotonic() + seconds
        places = _assigned(wants, end, patient)
        self._bundles: dict[str, list[int]] = {}
        self._shares = {one.role: 1.0 for one in wants}
        bundles: list[dict[str, float]] = []
        own = [one for one in wants if one.inside is None]
        for one in own:
            first = len(bundles)
            self._bundles[one.role] = list(range(first, first + one.processes))
            bundles += [_bundle(one, address) for address in places[one.role]]
        for one in wants:
            if one.inside is not None:
                self._bundles[one.role] = self._bundles[one.inside][: one.processes]
                self._shares[one.role] = self._shares[one.inside] = 0.5
        self._gpus = {one.role: one.gpus for one in wants}
        self._cpus = {one.role: one.cpus for one in own}
        self._group: Any = ray.util.placement_group(bundles, strategy="PACK")
        if not self._group.wait(max(1.0, end - time.monotonic())):
            self.close()
            raise RunError(
                f"the Ray cluster is large enough, and not free within {seconds:g} seconds "
                "(cluster.start_seconds): another run holds what this one asks for; wait until it "
                "has ended"
            )

    def options(self, role: str, number: int) -> dict[str, Any]:
        """How an actor is made that is the role's process `number`."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return {
            "num_cpus": self._cpus.get(role, 0),
            "num_gpus": self._gpus[role] * self._shares[role],
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=self._bundles[role][number]
            ),
        }

    def close(self) -> None:
        """Gives it back."""
        import ray

        ray.util.remove_placement_group(self._group)


def _assigned(wants: Sequence[Wanted], end: float, patient: bool) -> dict[str, list[str | None]]:
    """By role, the machine of each process; None where Ray is to say, which knows what is free."""
    while True:
        try:
            found = assign(wants, connection.machines())
            break
        except UsageError:
            if not patient or time.monotonic() > end:
                raise
        time.sleep(LOOK_SECONDS)
    pinned = {one.role: bool(one.machines) for one in wants}
    return {role: [at if pinned[role] else None for at in where] for role, where in found.items()}


def _bundle(one: Wanted, address: str | None) -> dict[str, float]:
    """Of one process."""
    found = {"GPU": float(one.gpus), "CPU": float(one.cpus)}
    if address is not None:
        found[f"node:{address}"] = MARK
    found = {name: amount for name, amount in found.items() if amount}
    return found or {"CPU": MARK}
