import pytest

from postgrad.learner.schedule import rate
from postgrad.learner.settings import LearnerSettings


def rates(total: int, **settings: object) -> list[float]:
    made = LearnerSettings(lr=1.0, **settings)
    return [rate(made, update, total) for update in range(total)]


def test_warm_up_update_u_of_w_uses_u_plus_one_over_w():
    assert rates(6, warmup_updates=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_reaches_its_floor_at_the_last_update():
    assert rates(5, schedule="linear") == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert rates(3, schedule="linear", min_lr_ratio=0.5) == [1.0, 0.75, 0.5]


def test_cosine_is_half_way_down_in_the_middle():
    assert rates(5, schedule="cosine") == pytest.approx(
        [1.0, 0.853553, 0.5, 0.146447, 0.0], abs=1e-6
    )


def test_a_run_longer_than_its_horizon_stays_at_the_floor():
    settings = LearnerSettings(lr=1.0, schedule="cosine", min_lr_ratio=0.1)
    assert rate(settings, 20, 10) == pytest.approx(0.1)
