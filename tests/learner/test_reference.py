"""References that follow the policy, by hand-worked numbers."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from postgrad.core.errors import RunError
from postgrad.learner.reference import MovingReference
from postgrad.parallel.ranks import ALONE


def backbone(value: float, dtype: torch.dtype = torch.float32) -> Any:
    lm = nn.Linear(2, 1, bias=False, dtype=dtype)
    nn.init.constant_(lm.weight, value)
    return SimpleNamespace(lm=lm.requires_grad_(False), ranks=ALONE)


def policy(value: float) -> Any:
    """Of such weights."""
    return SimpleNamespace(weights=lambda: weights(value))


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((1, 2), value)}


def held(reference: MovingReference) -> float:
    return float(reference.backbone.lm.weight[0, 0])


def test_a_refreshed_reference_takes_the_policys_weights_every_n_steps() -> None:
    reference = MovingReference(
        backbone(0.0), 1.0, refresh_steps=3, ema_decay=0.0, policy=weights(0.0)
    )
    seen = []
    for step in range(1, 8):
        reference.after_step(step, policy(float(step)))
        seen.append(held(reference))
    assert seen == [0.0, 0.0, 3.0, 3.0, 3.0, 6.0, 6.0]


def test_a_moving_average_moves_a_little_with_every_step() -> None:
    reference = MovingReference(
        backbone(0.0), 1.0, refresh_steps=0, ema_decay=0.75, policy=weights(0.0)
    )
    seen = []
    for step in range(1, 4):
        reference.after_step(step, policy(8.0))
        seen.append(held(reference))
    assert seen == [2.0, 3.5, 4.625]


def test_an_average_moves_every_n_steps_where_both_are_set() -> None:
    reference = MovingReference(
        backbone(0.0), 1.0, refresh_steps=2, ema_decay=0.75, policy=weights(0.0)
    )
    seen = []
    for step in range(1, 6):
        reference.after_step(step, policy(8.0))
        seen.append(held(reference))
    assert seen == [0.0, 2.0, 2.0, 3.5, 3.5]


def test_the_average_is_kept_in_float32_though_the_reference_computes_in_bfloat16() -> None:
    reference = MovingReference(
        backbone(1.0, torch.bfloat16), 1.0, refresh_steps=0, ema_decay=0.999, policy=weights(1.0)
    )
    for step in range(1, 1001):
        reference.after_step(step, policy(2.0))
    expected = 2.0 - 0.999**1000
    average = reference.tensors()["reference.weights"]["weight"]
    assert average.dtype == torch.float32
    assert float(average[0, 0]) == pytest.approx(expected, rel=1e-4)
    assert held(reference) == pytest.approx(expected, rel=2**-8)


@pytest.mark.parametrize("settings", [(3, 0.0), (0, 0.75)])
def test_a_reference_goes_on_from_a_checkpoint_to_the_same_bits(
    settings: tuple[int, float],
) -> None:
    refresh, decay = settings

    def fresh_reference() -> MovingReference:
        return MovingReference(
            backbone(0.0), 1.0, refresh_steps=refresh, ema_decay=decay, policy=weights(0.0)
        )

    uninterrupted, cut = fresh_reference(), fresh_reference()
    for step in range(1, 5):
        uninterrupted.after_step(step, policy(step / 3))
    saved = {name: t.clone() for name, t in uninterrupted.tensors()["reference.weights"].items()}
    assert uninterrupted.state_bytes() == 8
    cut.load(lambda stem: {"reference.weights": saved}[stem])
    assert held(cut) == held(uninterrupted)
    for step in range(5, 9):
        uninterrupted.after_step(step, policy(step / 3))
        cut.after_step(step, policy(step / 3))
    assert held(cut) == held(uninterrupted)


@pytest.mark.parametrize("settings", [(3, 0.0), (0, 0.75)])
def test_a_reference_of_another_model_is_refused(settings: tuple[int, float]) -> None:
    reference = MovingReference(
        backbone(0.0), 1.0, refresh_steps=settings[0], ema_decay=settings[1], policy=weights(0.0)
    )
    with pytest.raises(RunError, match="of another model; go on with the model"):
        reference.load(lambda stem: {"weight": torch.zeros(3, 3)})
