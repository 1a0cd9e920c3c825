"""Learning rates against numbers worked by hand, and the formulas of transformers."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.optimization import get_wsd_schedule

from postgrad.core.errors import UsageError
from postgrad.learner.settings import (
    LearnerSettings,
    decay_updates,
    learning_rate,
    shortened,
    warmup_updates,
)


def rates(total: int, **settings: object) -> list[float]:
    learner_settings = LearnerSettings(lr=1.0, **settings)
    return [learning_rate(learner_settings, update, total) for update in range(total)]


def test_warm_up_update_u_of_w_uses_u_plus_one_over_w():
    assert rates(6, warmup_updates=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_a_warm_up_may_start_at_a_share_of_the_rate_and_has_the_rate_behind_its_last_update():
    start = {"warmup_updates": 4, "warmup_start_ratio": 0.2}
    assert rates(6, **start) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0], abs=1e-15)
    assert rates(4, warmup_ratio=0.5, warmup_start_ratio=0.0) == [0.0, 0.5, 1.0, 1.0]
    assert rates(3, warmup_updates=2, warmup_start_ratio=1.0) == [1.0, 1.0, 1.0]
    falls = rates(6, **start, schedule="linear", min_lr_ratio=0.5)
    assert falls == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 0.75], abs=1e-15)


@given(st.integers(1, 9), st.floats(1e-6, 1.0))  # LinearLR refuses a start of 0
def test_such_a_warm_up_is_that_of_torch(updates: int, start: float):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start, total_iters=updates)
    theirs = list[float]()
    for _ in range(updates + 3):
        theirs.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    ours = rates(updates + 3, warmup_updates=updates, warmup_start_ratio=start)
    assert ours == pytest.approx(theirs, rel=1e-12)


def test_a_start_without_a_warm_up_is_refused():
    with pytest.raises(UsageError, match=r"warmup_start_ratio = 0\.1 says where a warm-up begins"):
        LearnerSettings(warmup_start_ratio=0.1)


def test_a_warm_up_longer_than_the_run_rises_until_the_last_update():
    assert rates(2, warmup_updates=4) == [0.5, 1.0]
    short = LearnerSettings(warmup_updates=4)
    assert "more than the 3 updates of the run" in str(shortened(short, 3))
    assert shortened(short, 4) is None


def test_linear_would_reach_its_floor_one_update_after_the_last():
    assert rates(4, schedule="linear") == [1.0, 0.75, 0.5, 0.25]
    assert rates(4, schedule="linear", min_lr_ratio=0.5) == [1.0, 0.875, 0.75, 0.625]
    assert rates(6, schedule="linear", warmup_updates=2) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]


def test_cosine_would_reach_its_floor_one_update_after_the_last():
    assert rates(4, schedule="cosine") == pytest.approx([1.0, 0.853553, 0.5, 0.146447], abs=1e-6)
    assert rates(5, schedule="cosine", warmup_updates=2, min_lr_ratio=0.1) == pytest.approx(
        [0.5, 1.0, 1.0, 0.775, 0.325]  # 0.1 + 0.9 * (1, 0.75, 0.25)
    )


def test_with_a_decay_the_rate_stays_until_the_last_updates():
    line = [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert rates(9, schedule="linear", warmup_updates=2, decay_updates=4) == line
    assert rates(9, schedule="linear", warmup_ratio=0.2, decay_ratio=0.4) == line  # of 1.8, of 3.6
    floor = [1.0, 1.0, 1.0, 1.0, 0.875, 0.75, 0.625]
    assert rates(7, schedule="linear", decay_updates=4, min_lr_ratio=0.5) == floor
    assert rates(6, schedule="cosine", decay_updates=4) == pytest.approx(
        [1.0, 1.0, 1.0, 0.853553, 0.5, 0.146447], abs=1e-6
    )
    assert rates(6, schedule="1-sqrt", decay_updates=4, min_lr_ratio=0.2) == pytest.approx(
        [1.0, 1.0, 1.0, 0.6, 0.434315, 0.307180],
        abs=1e-6,  # 0.2 + 0.8 * (1 - sqrt(p))
    )


def test_a_decay_that_is_no_shorter_than_what_follows_the_warm_up_changes_nothing():
    for schedule in ("linear", "cosine", "1-sqrt"):
        unlimited = rates(7, schedule=schedule, warmup_updates=2)
        assert rates(7, schedule=schedule, warmup_updates=2, decay_updates=5) == unlimited
        assert rates(7, schedule=schedule, warmup_updates=2, decay_updates=50) == unlimited
        assert rates(7, schedule=schedule, warmup_updates=2, decay_ratio=1.0) == unlimited
    long = LearnerSettings(schedule="linear", warmup_updates=2, decay_updates=6)
    assert "more than the 7 updates of the run after 2 of warm-up" in str(shortened(long, 7))
    assert shortened(long, 8) is None
    assert shortened(LearnerSettings(schedule="linear", decay_ratio=1.0), 7) is None


def test_a_share_of_all_updates_in_which_the_rate_falls_is_rounded_up():
    for share, total, wanted in ((0.1, 100, 10), (0.07, 100, 7), (0.1, 5, 1), (0.03, 101, 4)):
        settings = LearnerSettings(schedule="linear", decay_ratio=share)
        assert decay_updates(settings, total) == wanted
    halves = LearnerSettings(schedule="linear", warmup_ratio=0.5, decay_ratio=0.5)
    assert (warmup_updates(halves, 5), decay_updates(halves, 5)) == (3, 2)
    LearnerSettings(schedule="linear", warmup_ratio=0.7, decay_ratio=0.3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decay_updates": 5, "decay_ratio": 0.1}, r"updates = 5 and decay_ratio = 0\.1 both"),
        ({"schedule": "constant", "decay_ratio": 0.1}, r'"constant" does not fall: set schedule'),
        ({"schedule": "constant", "decay_updates": 3}, r"decay_updates = 3 says how long"),
        ({"warmup_ratio": 0.6, "decay_ratio": 0.5}, "more than the whole run together"),
    ],
)
def test_a_decay_that_cannot_be_is_refused(settings, message):
    with pytest.raises(UsageError, match=message):
        LearnerSettings(**{"schedule": "linear", **settings})


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "1-sqrt"])
def test_a_run_of_one_update_trains_at_the_whole_rate(schedule):
    assert rates(1, schedule=schedule) == [1.0]


@pytest.mark.parametrize("schedule", ["linear", "cosine", "1-sqrt"])
def test_a_run_longer_than_its_horizon_stays_at_the_floor(schedule):
    settings = LearnerSettings(lr=1.0, schedule=schedule, min_lr_ratio=0.1)
    assert [learning_rate(settings, update, 10) for update in (10, 11, 20)] == pytest.approx(
        [0.1] * 3
    )


def test_a_share_of_all_updates_that_warms_up_is_rounded_up():
    for share, total, wanted in ((0.03, 100, 3), (0.07, 100, 7), (0.1, 5, 1), (0.03, 101, 4)):
        assert warmup_updates(LearnerSettings(warmup_ratio=share), total) == wanted
    assert rates(6, warmup_ratio=0.3, schedule="linear") == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert rates(2, warmup_ratio=1.0) == [0.5, 1.0]


def test_a_warm_up_is_stated_once():
    with pytest.raises(UsageError, match=r"updates = 5 and warmup_ratio = 0\.1 both"):
        LearnerSettings(warmup_updates=5, warmup_ratio=0.1)


@given(
    total=st.integers(1, 500),
    share=st.floats(0.0, 0.9),
    least=st.floats(0.0, 1.0),
    decay=st.integers(0, 500),
    schedule=st.sampled_from(["constant", "linear", "cosine", "1-sqrt"]),
)
def test_every_update_of_a_run_moves_and_none_after_warm_up_is_faster_than_the_last(
    total, share, least, decay, schedule
):
    settings = LearnerSettings(
        lr=1.0,
        warmup_ratio=share,
        min_lr_ratio=least,
        schedule=schedule,
        decay_updates=0 if schedule == "constant" else decay,
    )
    all_rates = [learning_rate(settings, update, total) for update in range(total)]
    warm = all_rates[max(0, warmup_updates(settings, total) - 1) :]
    assert min(all_rates) > 0
    assert warm[0] == 1.0
    assert all(a >= b for a, b in pairwise(warm))


@given(total=st.integers(1, 200), warmup=st.integers(0, 50))
def test_the_way_down_is_that_of_transformers(total, warmup):
    """get_linear_ and get_cosine_schedule_with_warmup, whose update u after warm-up W is u here."""
    warmup = min(warmup, total - 1)
    for update in range(warmup, total):
        progress = (update - warmup) / (total - warmup)
        wanted = {"linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}
        for schedule, left in wanted.items():
            learner_settings = LearnerSettings(lr=1.0, schedule=schedule, warmup_updates=warmup)
            assert learning_rate(learner_settings, update, total) == pytest.approx(
                left, rel=1e-12, abs=1e-15
            )


@given(
    stages=st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(1, 40)),
    least=st.floats(0.0, 1.0),
    schedule=st.sampled_from(["linear", "cosine", "1-sqrt"]),
)
def test_stable_and_decaying_updates_are_those_of_transformers(stages, least, schedule):
    """get_wsd_schedule; its warm-up begins at min_lr_ratio, ours at 1 / W."""
    warmup, stable, decay = stages
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = get_wsd_schedule(
        optimizer, warmup, decay, num_stable_steps=stable, decay_type=schedule, min_lr_ratio=least
    ).lr_lambdas[0]
    settings = LearnerSettings(
        lr=1.0,
        schedule=schedule,
        warmup_updates=warmup,
        decay_updates=decay,
        min_lr_ratio=least,
    )
    total = warmup + stable + decay
    for update in range(warmup, total + 3):
        our_rate = learning_rate(settings, update, total)
        assert our_rate == pytest.approx(theirs(update), rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("betas", [(0.9, 1.0), (1.5, 0.9), (-0.1, 0.9)])
def test_betas_that_adamw_does_not_take_are_refused_with_the_recipe(betas: tuple[float, float]):
    with pytest.raises(UsageError, match=r"less than 1|greater than or equal to 0"):
        LearnerSettings(betas=betas)
