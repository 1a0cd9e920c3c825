"""benchmarks/random_invariants.py: recipes learn the same, however computed."""

import random
from pathlib import Path

import pytest

from benchmarks import random_invariants
from benchmarks.drawn_recipes import Table, World, draw, with_key
from benchmarks.random_invariants import changed, compare, exact
from benchmarks.random_recipes import Failed

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("random") / "world")


def raw_of(seed: int, world: World, folder: Path) -> Table:
    return exact(draw(seed, world, str(folder / "first")))


@pytest.mark.parametrize(
    ("job", "seed"), [("reward", 103), ("preference", 105), ("rl", 107), ("rl", 109)]
)
def test_another_way_of_computing_learns_the_same(
    job: str, seed: int, world: World, tmp_path: Path
) -> None:
    raw = raw_of(seed, world, tmp_path)
    assert raw["job"] == job
    other, names = changed(raw, random.Random(seed), 1)
    assert names
    assert compare(raw, other, tmp_path) == "same"


def test_what_learns_otherwise_is_a_failure(world: World, tmp_path: Path) -> None:
    raw = raw_of(105, world, tmp_path)
    with pytest.raises(Failed, match=r"metrics.jsonl, step 2: loss .*policy/loss"):
        compare(raw, with_key(raw, "learner.max_grad_norm", 0.01), tmp_path)


def test_weights_that_went_another_way_are_a_failure(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_invariants, "METRIC_LIMIT", 1.0)
    raw = raw_of(105, world, tmp_path)
    with pytest.raises(Failed, match=r"weights of policy: .* apart after a way of"):
        compare(raw, with_key(raw, "learner.max_grad_norm", 0.01), tmp_path)


def test_other_samples_are_counted_apart(world: World, tmp_path: Path) -> None:
    raw = raw_of(107, world, tmp_path)
    assert compare(raw, with_key(raw, "seed", 1), tmp_path) == "sampled otherwise"
