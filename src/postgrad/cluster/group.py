"""Ranks as Ray actors: started together, called together, ended together."""

from collections.abc import Sequence
from typing import Any

from postgrad.cluster.reservation import Reservation
from postgrad.cluster.settings import ClusterSettings
from postgrad.cluster.workers import Workers

POLICY = "policy"  # the role whose places the ranks take


class RankGroup(Workers):
    """`size` ranks in one process group. The worker's class has to have `join`."""

    def __init__(
        self,
        worker: str,
        arguments: Sequence[Any],
        size: int,
        device: str,
        settings: ClusterSettings,
        reservation: Reservation,
    ) -> None:
        """device: "cpu" or "cuda". The other parameters are those of Workers."""
        still = device == "cpu"
        super().__init__(
            "rank", worker, arguments, size, settings, reservation, POLICY, still=still
        )
        try:
            (address,) = self._each([self._actors[0].meeting.remote(settings.port)])
            self._each(
                [
                    actor.call.remote("join", (rank, size, address, device, settings.limit_seconds))
                    for rank, actor in enumerate(self._actors)
                ]
            )
        except BaseException:
            self.close()
            raise
