"""What stands behind the server. No torch."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class SequenceScorer(Protocol):
    """A model that gives every sequence a number."""

    def score(self, sequences: Sequence[NDArray[np.int32]]) -> NDArray[np.float64]:
        """[len(sequences)], each read at its last token; sequence: [tokens], at least one."""
        ...


class ScoringModel(SequenceScorer, Protocol):
    """A scorer and what is known about it.

    hash: names its files. mean, std: of its scores on what it was trained on; None where they are
    not known. max_tokens: the longest sequence it knows positions for; None where it knows any.
    """

    @property
    def tokenizer(self) -> Any: ...

    @property
    def hash(self) -> str: ...

    @property
    def mean(self) -> float | None: ...

    @property
    def std(self) -> float | None: ...

    @property
    def max_tokens(self) -> int | None: ...
