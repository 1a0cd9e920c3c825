"""The fit of benchmarks/growth.py on made-up times."""

import numpy as np
import pytest

from benchmarks.growth import SCALES, fit, fitted, grown


def test_a_fit_finds_both_terms() -> None:
    points = grown((4, 128))
    for point in points:
        point.seconds.append(2e-4 * point.tokens + 3e-8 * point.squares)
        point.peaks.append(2**20)
    coefficients = fitted(points)
    assert coefficients["a_microseconds_per_token"] == pytest.approx(200)
    assert coefficients["b_nanoseconds_per_squared_length"] == pytest.approx(30)
    assert coefficients["largest_relative_error"] == pytest.approx(0, abs=1e-9)
    assert len(coefficients["points"]) == 2 * len(SCALES) - 1
    assert coefficients["points"][0]["peak_mib"] == 1.0


def test_no_term_is_negative() -> None:
    tokens, squares = [100, 200, 400], [100, 400, 1600]
    a, b = fit(tokens, squares, [1.0, 1.9, 3.5])  # grows less than linearly
    assert a == pytest.approx(np.mean([0.01, 0.0095, 0.00875]), rel=0.02)
    assert b == 0
