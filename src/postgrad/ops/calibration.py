"""Calibration of a reward model's confidence. Margins: [P] score of the chosen answer minus that of
the rejected one, for P pairs.
"""

import numpy as np
from numpy.typing import NDArray

BINS = 10


def calibration_error(margins: NDArray[np.float64]) -> float:
    """The expected calibration error of Bradley-Terry's confidence (Guo et al. 2017,
    arXiv:1706.04599): |mean confidence - share of right pairs| in ten bins of the confidence
    max(p, 1 - p), p = sigmoid(margin), averaged over pairs. A margin of 0 counts as half right.
    """
    p = np.exp(-np.logaddexp(0.0, -np.abs(margins)))
    right = np.where(margins == 0, 0.5, margins > 0)
    place = np.minimum(((p - 0.5) * 2 * BINS).astype(np.int64), BINS - 1)
    gaps = np.bincount(place, weights=right - p, minlength=BINS)
    return float(np.abs(gaps).sum() / len(margins))


def margin_histogram(
    margins: NDArray[np.float64], bins: int = 2 * BINS
) -> tuple[list[float], list[int]]:
    """(edges [bins + 1], counts [bins]) of a histogram of the margins."""
    counts, edges = np.histogram(margins, bins)
    return edges.tolist(), counts.tolist()
