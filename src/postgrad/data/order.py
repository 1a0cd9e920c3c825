"""Which row a ticket draws: a permutation for each epoch, computed from seed and epoch."""

import numpy as np
from numpy.typing import NDArray

from postgrad.core.seeds import permutation


class Order:
    """Draws each of `rows` rows once an epoch. Keeps no state but the newest permutation."""

    def __init__(self, rows: int, shuffle: bool) -> None:
        self._rows = rows
        self._shuffle = shuffle
        self._permuted: tuple[int, int] | None = None
        self._places: NDArray[np.int64] = np.arange(rows)

    def place(self, ticket: int, seed: int) -> int:
        """The position in [0, rows) that `ticket` draws under `seed`."""
        epoch, number = divmod(ticket, self._rows)
        if self._shuffle and self._permuted != (seed, epoch):
            self._places = permutation(self._rows, seed, "data", epoch)
            self._permuted = (seed, epoch)
        return int(self._places[number])
