"""What may change in a run that goes on, and what makes it another run."""

from collections.abc import Callable
from pathlib import Path

import pytest

from postgrad.core.errors import UsageError
from postgrad.recipe.compare import compare, differences
from postgrad.recipe.load import load_recipe, with_overrides

Write = Callable[..., Path]
RUN = Path("runs/a")


def test_differences_are_dotted_keys() -> None:
    before = {"a": 1, "b": {"c": [1, 2], "d": 3}, "e": 5}
    after = {"a": 1, "b": {"c": [1, 3], "d": 4}, "f": 6}
    assert list(differences(before, after)) == ["b.c", "b.d", "e", "f"]
    assert list(differences(before, before)) == []


@pytest.mark.parametrize(
    "change",
    [
        ["--steps", "99"],
        ["--epochs", "3"],
        ["--checkpoint.save_steps", "7"],
        ["--eval.every", "2"],
        ["--data.cache", "false"],
        ["--scoring.workers", "1"],
        ["--sentinels.stall.action", "stop"],
    ],
)
def test_how_long_and_what_is_watched_may_change(change: list[str], write: Write) -> None:
    before = load_recipe(write())
    assert compare(before, with_overrides(before, change), [], RUN)


def test_whatever_decides_a_weight_may_not_unless_it_is_allowed(write: Write) -> None:
    before = load_recipe(write())
    after = with_overrides(before, ["--learner.lr", "0.5", "--batch.rollout_batch_size", "8"])
    with pytest.raises(UsageError) as refused:
        compare(before, after, [], RUN)
    assert "  learner.lr: 1e-06 there, 0.5 here" in str(refused.value)
    assert "  batch.rollout_batch_size: 16 there, 8 here" in str(refused.value)
    with pytest.raises(UsageError, match=r"batch\.rollout_batch_size"):
        compare(before, after, ["learner.lr"], RUN)
    changed = compare(before, after, ["learner", "batch.rollout_batch_size"], RUN)
    assert sorted(changed) == ["batch.rollout_batch_size", "learner.lr"]
