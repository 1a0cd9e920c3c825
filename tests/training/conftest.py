"""Whole runs that last a second: see helpers.tiny_runs."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.tiny_runs import console, make_recipe, models, reward_on_path, trained

__all__ = ["console", "make_recipe", "models", "reward_on_path", "trained"]


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    """A cluster that all runs of a file share: a start of Ray takes longer than any of them."""
    from postgrad.cluster import connection
    from postgrad.cluster.settings import ClusterSettings

    with pytest.MonkeyPatch.context() as patch:
        paths = [str(Path(__file__).parents[1] / "helpers"), os.environ.get("PYTHONPATH")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        connection.start(ClusterSettings(type="ray", start_seconds=600.0))
        yield
        connection.stop()
