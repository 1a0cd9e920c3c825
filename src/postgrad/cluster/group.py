"""Ranks as Ray actors: started together, called together, ended together."""

from collections.abc import Sequence
from typing import Any

from postgrad.cluster.reservation import Reservation
from postgrad.cluster.settings import ClusterSettings
from postgrad.cluster.workers import Workers

POLICY = "policy"  # the role whose places they take


class RankGroup(Workers):
    """`size` ranks, which hold one process group. Their worker has to have `join`."""

    def __init__(
        self,
        worker: str,
        arguments: Sequence[Any],
        size: int,
        device: str,
        settings: ClusterSettings,
        reservation: Reservation,
    ) -> None:
        """See Workers. device: "cpu" or "cuda"."""
        still = device == "cpu"
        super().__init__(
            "rank", worker, arguments, size, settings, reservation, POLICY, still=still
        )
        try:
            (address,) = self._each([self._actors[0].meeting.remote(settings.port)])
            self._each(
                [
                    one.call.remote("join", (rank, size, address, device, settings.limit_seconds))
                    for rank, one in enumerate(self._actors)
                ]
            )
        except BaseException:
            self.close()
            raise
