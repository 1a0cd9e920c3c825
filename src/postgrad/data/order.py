"""Which row a ticket draws: the epoch's permutation, computed from seed and epoch."""

import numpy as np
from numpy.typing import NDArray

from postgrad.core.seeds import permutation


class Order:
    """Places of `rows` rows, each once an epoch. Nothing is kept but the newest permutation."""

    def __init__(self, rows: int, shuffle: bool) -> None:
        self._rows = rows
        self._shuffle = shuffle
        self._known: tuple[int, int] | None = None
        self._places: NDArray[np.int64] = np.arange(rows)

    def place(self, ticket: int, seed: int) -> int:
        """The row that `ticket` draws."""
        epoch, number = divmod(ticket, self._rows)
        if self._shuffle and self._known != (seed, epoch):
            self._places = permutation(self._rows, seed, "data", epoch)
            self._known = (seed, epoch)
        return int(self._places[number])
