"""How far the confidence of a reward model can be trusted. Margins: [P] score of the chosen answer
less that of the rejected one, P pairs.
"""

import numpy as np
from numpy.typing import NDArray

BINS = 10


def calibration_error(margins: NDArray[np.float64]) -> float:
    """The expected calibration error of Bradley-Terry's confidence (Guo et al. 2017,
    arXiv:1706.04599): in ten bins of max(p, 1 - p), p = sigmoid(margin), the distance of the mean
    confidence from the share of right pairs, weighed by pairs. A margin of 0 is half right.
    """
    p = np.exp(-np.logaddexp(0.0, -np.abs(margins)))
    right = np.where(margins == 0, 0.5, margins > 0)
    place = np.minimum(((p - 0.5) * 2 * BINS).astype(np.int64), BINS - 1)
    gaps = np.bincount(place, weights=right - p, minlength=BINS)
    return float(np.abs(gaps).sum() / len(margins))


def margin_histogram(
    margins: NDArray[np.float64], bins: int = 2 * BINS
) -> tuple[list[float], list[int]]:
    """Edges (one more than counts) and how many margins lie between them."""
    counts, edges = np.histogram(margins, bins)
    return edges.tolist(), counts.tolist()
