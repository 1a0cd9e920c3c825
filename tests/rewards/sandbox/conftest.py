"""Sandboxes in every layer that this machine has."""

import os
from collections.abc import Iterator

import pytest

from helpers.hostile import SECRET
from postgrad.rewards.sandbox import layers
from postgrad.rewards.sandbox.choice import _weakness
from postgrad.rewards.sandbox.client import Sandbox

LAYERS = [
    pytest.param(layers.NAMESPACES, id="namespaces"),
    pytest.param(layers.BUBBLEWRAP, id="bubblewrap", marks=pytest.mark.slow),
]


@pytest.fixture(scope="session", params=LAYERS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """A running sandbox; the tests' own environment has a secret meanwhile."""
    missing = request.param.missing()
    if missing is not None:
        pytest.skip(missing)
    os.environ[SECRET] = "7f3a"
    with Sandbox(request.param) as made:
        weakness = _weakness(made)
        if weakness is not None:
            pytest.skip(weakness)
        yield made
    del os.environ[SECRET]
