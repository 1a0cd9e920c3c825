"""The moving average of weights against hand-worked numbers."""

from collections.abc import Callable

import pytest
import torch

from postgrad.core.errors import RunError
from postgrad.learner.learner import MovingAverage


def test_it_follows_the_weights_by_its_decay() -> None:
    weights = {"a": torch.tensor([1.0, 2.0])}
    average = MovingAverage(weights, 0.75)
    weights["a"].copy_(torch.tensor([5.0, 0.0]))
    average.update(weights)
    assert average.weights["a"].tolist() == [0.75 * 1 + 0.25 * 5, 0.75 * 2]
    average.update(weights)
    assert average.weights["a"].tolist() == [0.75 * 2 + 0.25 * 5, 0.75 * 1.5]


def test_another_models_average_is_refused() -> None:
    average = MovingAverage({"a": torch.zeros(2)}, 0.5)
    for wrong in ({"b": torch.zeros(2)}, {"a": torch.zeros(3)}, {}):
        with pytest.raises(RunError, match="average is of another model; go on with the model"):
            average.load(wrong)


def test_a_learner_saves_and_loads_it(make_learner: Callable[..., object]) -> None:
    first, second = make_learner(ema_decay=0.5), make_learner(ema_decay=0.5)
    assert first.average is not None  # pyright: ignore[reportAttributeAccessIssue]
    files = {
        stem: {name: tensor.clone() for name, tensor in named.items()}
        for stem, named in first.tensors().items()  # pyright: ignore[reportAttributeAccessIssue]
    }
    assert list(files) == ["policy.weights", "policy.optimizer", "policy.ema"]
    files["policy.ema"] = {name: tensor + 1 for name, tensor in files["policy.ema"].items()}
    second.load(files.__getitem__)  # pyright: ignore[reportAttributeAccessIssue]
    loaded = second.average.weights  # pyright: ignore[reportAttributeAccessIssue]
    assert all(torch.equal(loaded[name], files["policy.ema"][name]) for name in loaded)
