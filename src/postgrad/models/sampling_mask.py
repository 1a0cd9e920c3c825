"""Sampling masks at an output head: distributions over the tokens that the sampler's filters left.

DeepSeek-V3.2, "Keep Sampling Mask" (arXiv:2512.02556, section 3.1): with top-p or top-k the sampler
draws from a part of the vocabulary. Probabilities that are divided by the sum over the same part
are those of the distribution that the token was drawn from.
"""

import numpy as np
import torch
from torch import Tensor

from postgrad.core.records import SamplingMask
from postgrad.models.attention import to_device

# The logit of a token that was taken away: exp of it is 0 at any temperature from 1e-8 on. Minus
# infinity would be NaN where an entropy multiplies it by this 0.
TAKEN_AWAY = -1e30


class LogitMask:
    """The masks of N rows of logits, on their device."""

    def __init__(self, mask: SamplingMask, device: torch.device) -> None:
        """mask: N rows; an empty one takes nothing away."""
        self._offsets = mask.offsets  # on the host: nothing waits for the device
        self._row = to_device(mask.rows.astype(np.int32), device)  # [K] of each id that is left
        self._ids = to_device(mask.values, device)  # [K]
        self._acts = to_device(mask.lengths > 0, device)  # [N]

    def taken_away(self, rows: slice, vocabulary: int) -> Tensor:
        """[rows, vocabulary] True at tokens that no probability is left for."""
        ids = slice(int(self._offsets[rows.start]), int(self._offsets[rows.stop]))
        gone = self._acts[rows, None].repeat(1, vocabulary)
        left = (self._row[ids].long() - rows.start) * vocabulary + self._ids[ids]
        return gone.view(-1).scatter_(0, left, False).view_as(gone)
