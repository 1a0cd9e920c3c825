"""What the cluster keeps for a run: one bundle for each process, all of them or none."""

import time
from collections.abc import Sequence
from typing import Any

from postgrad.cluster import connection
from postgrad.cluster.placing import RoleRequest, assign
from postgrad.core.errors import RunError, UsageError

MARK = 0.0001  # the least that Ray counts: a bundle cannot be empty
LOOK_SECONDS = 1.0


class Reservation:
    """Holds the places of all roles until `close`. Processes that share a bundle share its GPU."""

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
            first = len(bundles)
            self._bundles[request.role] = list(range(first, first + request.processes))
            bundles += [_bundle(request, address) for address in addresses[request.role]]
        for request in requests:
            if request.inside is not None:
                self._bundles[request.role] = self._bundles[request.inside][: request.processes]
                self._shares[request.role] = self._shares[request.inside] = 0.5
        self._gpus = {request.role: request.gpus for request in requests}
        self._cpus = {request.role: request.cpus for request in separate}
        self._group: Any = ray.util.placement_group(bundles, strategy="PACK")
        if not self._group.wait(max(1.0, end - time.monotonic())):
            self.close()
            raise RunError(
                f"the Ray cluster is large enough, and not free within {seconds:g} seconds "
                "(cluster.start_seconds): another run holds what this one asks for; wait until it "
                "has ended"
            )

    def options(self, role: str, number: int) -> dict[str, Any]:
        """Ray's options for the actor that is process `number` of the role."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return {
            "num_cpus": self._cpus.get(role, 0),
            "num_gpus": self._gpus[role] * self._shares[role],
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=self._bundles[role][number]
            ),
        }

    def close(self) -> None:
        """Releases the places of all roles."""
        import ray

        ray.util.remove_placement_group(self._group)


def _assigned(
    requests: Sequence[RoleRequest], end: float, patient: bool
) -> dict[str, list[str | None]]:
    """By role, the machine of each process; None where Ray chooses, which knows what is free."""
    while True:
        try:
            addresses = assign(requests, connection.nodes_alive())
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
    """The resources that Ray keeps for one process, by Ray's names. address: of its machine."""
    resources = {"GPU": float(request.gpus), "CPU": float(request.cpus)}
    if address is not None:
        resources[f"node:{address}"] = MARK
    resources = {name: amount for name, amount in resources.items() if amount}
    return resources or {"CPU": MARK}
