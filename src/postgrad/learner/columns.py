"""An update's columns on the device, and their values at a layout's loss entries."""

from collections.abc import Mapping
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor

from postgrad.core.ragged import Ragged
from postgrad.layout.layout import Layout
from postgrad.learner.update import Update


class Entries(TypedDict):
    """The fields that LossInputs and ScoreInputs have in common; see there."""

    columns: Mapping[str, Tensor]
    sequence: Tensor
    n_sequences: int
    weight: Tensor
    token_weight: Tensor


class FlatColumns:
    """An update's columns and loss weights on the device, by flat token number. weights: what every
    token counts for in the loss of the update.
    """

    def __init__(self, update: Update, weights: Ragged, device: torch.device) -> None:
        experience = update.experience
        self._device = device
        self._columns = {
            name: torch.from_numpy(column.values.astype(np.float32)).to(device)
            for name, column in experience.columns.items()
        }
        self._weight = torch.from_numpy(weights.values).to(device)
        lengths = experience.sequences.loss_mask.sums()
        # Means over the computed tokens: skipping does not dilute metrics.
        tokens = max(1.0, float(lengths[update.rows_with_gradient].sum()))
        self._token_weight = torch.tensor([1.0 / tokens], dtype=torch.float32, device=device)

    def at(self, layout: Layout) -> Entries:
        """The columns at a layout's entries, as LossInputs and ScoreInputs want them."""
        column = torch.from_numpy(layout.column).to(self._device)
        at_entries = {name: flat.index_select(0, column) for name, flat in self._columns.items()}
        return {
            "columns": at_entries,
            "sequence": torch.from_numpy(layout.sequence).to(self._device),
            "n_sequences": layout.n_sequences,
            "weight": self._weight.index_select(0, column),
            "token_weight": self._token_weight.expand(len(column)),
        }
