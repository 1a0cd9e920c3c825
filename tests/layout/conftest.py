"""Sequences from plain lists."""

import numpy as np
import pytest

from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences


@pytest.fixture(scope="session")
def make_sequences():
    """groups of token lists -> Sequences in which every token but the first bears loss."""

    def make(groups: list[list[list[int]]]) -> Sequences:
        rows = [row for group in groups for row in group]
        masks = [[False] + [True] * (len(row) - 1) for row in rows]
        return Sequences(
            tokens=Ragged.of(rows, np.int32),
            loss_mask=Ragged.of(masks, np.bool_),
            group=np.repeat(np.arange(len(groups)), [len(group) for group in groups]),
        )

    return make
