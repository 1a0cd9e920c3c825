"""A rank of another run than the others."""

from typing import Any

from postgrad.fleet.worker import RankWorker


class Other(RankWorker):
    """On rank 1 with another seed, as of a machine with another version of postgrad."""

    def join(self, rank: int, *more: Any) -> None:
        if rank == 1:
            self._context.recipe = self._context.recipe.model_copy(update={"seed": 7})
        super().join(rank, *more)
