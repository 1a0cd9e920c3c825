import math
from dataclasses import replace

import numpy as np
import pytest

from postgrad.core.errors import RunError, UsageError
from postgrad.rewards.mixing import Tally, mix, total, with_turn_rewards
from postgrad.rewards.protocol import Outcome
from postgrad.rewards.settings import RewardSettings

FAILED = Outcome(0, cause="error", message="ValueError: no")


def outcome(value, detail=None):
    return Outcome(0, value, detail)


@pytest.fixture
def mixed(make_prompt, make_rollouts):
    """mixed(policy): components a (weight 2) and b (weight -0.5); b fails on the second sample."""

    def run(policy):
        components = {
            "a": RewardSettings(type="gsm8k", weight=2.0),
            "b": RewardSettings(type="gsm8k", weight=-0.5, on_failure=policy, failure_score=-4.0),
        }
        outcomes = {
            (0, 0): outcome(1.0, {"answer": "7"}), (0, 1): outcome(0.25), (0, 2): outcome(0.5),
            (1, 0): outcome(3.0), (1, 1): FAILED, (1, 2): outcome(0.0),
        }  # fmt: skip
        return mix(make_prompt(4), make_rollouts("xyz", 4), components, outcomes)

    return run


def test_the_total_is_the_weighted_sum_of_the_components(mixed):
    group = mixed("drop_sample")
    np.testing.assert_array_equal(group.total, [2 * 1.0 - 0.5 * 3.0, math.nan, 1.0])
    np.testing.assert_array_equal(group.rewards["a"], [1.0, 0.25, 0.5])
    np.testing.assert_array_equal(group.rewards["b"], [3.0, math.nan, 0.0])
    assert group.kept.tolist() == [True, False, True]


def test_dropping_the_group_keeps_no_sample(mixed):
    group = mixed("drop_group")
    assert group.kept.tolist() == [False, False, False]
    assert np.isnan(group.total).all()
    assert len(group.failures) == 1


def test_a_failure_score_enters_the_total_and_not_the_component(mixed):
    group = mixed("score")
    np.testing.assert_array_equal(group.total, [0.5, 2 * 0.25 + 0.5 * 4.0, 1.0])
    assert math.isnan(group.rewards["b"][1])
    assert group.kept.all()


def test_a_failure_names_sample_component_and_cause(mixed):
    (failure,) = mixed("drop_sample").failures
    assert (failure.sample, failure.component, failure.cause) == (1, "b", "error")
    assert failure.message == "ValueError: no"


def test_details_are_kept_for_the_components_that_gave_any(mixed):
    assert mixed("drop_sample").details == {"a": ({"answer": "7"}, None, None)}


def test_a_step_with_too_many_failed_samples_stops_the_run_and_names_the_first(mixed):
    tally = Tally([mixed("drop_sample")])
    tally.require_scored(1 / 3)
    with pytest.raises(RunError) as error:
        tally.require_scored(0.33)
    assert "1 of 3 scored samples (b: error x1)" in str(error.value)
    assert "sample 1 of ticket 4 (row 14 of set): b: error: ValueError: no" in str(error.value)
    assert "= 0.33: correct what failed, or allow more there (1: any number)" in str(error.value)


def test_a_step_without_samples_has_not_failed():
    Tally([]).require_scored(0.0)


GATE = RewardSettings(type="format", gate=True, gate_value=-1.0, weight=0.25)
PLAIN = RewardSettings(type="gsm8k", weight=2.0)
SCALE = RewardSettings(type="stop_properly", multiply=True)


@pytest.mark.parametrize(
    ("rewards", "scores", "wanted"),
    [
        ([GATE, PLAIN], [1.0, 1.0], 0.25 + 2.0),
        ([GATE, PLAIN], [0.0, 1.0], -1.0),
        ([PLAIN, GATE], [1.0, 0.999], -1.0),
        ([PLAIN.model_copy(update={"gate": True, "gate_at": 0.5}), GATE], [0.5, 1.0], 1.25),
        ([PLAIN.model_copy(update={"gate": True, "gate_at": 0.5}), GATE], [0.4, 0.0], 0.0),
        ([PLAIN, SCALE], [1.0, 0.5], 1.0),
        ([SCALE, PLAIN, SCALE], [0.5, -1.0, 0.5], -0.5),
        ([GATE, PLAIN, SCALE], [0.0, 1.0, 0.5], -1.0),
    ],
)
def test_a_closed_gate_is_the_total_and_a_factor_scales_the_sum(rewards, scores, wanted):
    assert total(rewards, scores) == wanted


def test_behind_a_closed_gate_all_scores_are_recorded_and_failures_have_their_policy(
    make_prompt, make_rollouts
):
    components = {"format": GATE, "gsm8k": PLAIN}
    outcomes = {
        (0, 0): outcome(0.0), (0, 1): outcome(0.0), (0, 2): FAILED,
        (1, 0): outcome(1.0), (1, 1): FAILED, (1, 2): outcome(1.0),
    }  # fmt: skip
    group = mix(make_prompt(), make_rollouts("xyz"), components, outcomes)
    np.testing.assert_array_equal(group.rewards["gsm8k"], [1.0, math.nan, 1.0])
    np.testing.assert_array_equal(group.total, [-1.0, math.nan, math.nan])
    assert group.kept.tolist() == [True, False, False]


def test_the_score_given_to_a_failed_gate_closes_or_opens_it(make_prompt, make_rollouts):
    totals = []
    for score in (0.0, 1.0):
        gate = GATE.model_copy(update={"on_failure": "score", "failure_score": score})
        outcomes = {(0, 0): FAILED, (1, 0): outcome(1.0)}
        components = {"format": gate, "gsm8k": PLAIN}
        totals += mix(make_prompt(), make_rollouts("x"), components, outcomes).total.tolist()
    assert totals == [-1.0, 2.25]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gate_at": 0.5}, "only where gate = true"),
        ({"gate_value": 0.5}, "only where gate = true"),
        ({"multiply": True, "weight": 2.0}, "cannot go with gate or weight"),
        ({"multiply": True, "gate": True}, "cannot go with gate or weight"),
        ({"datasets": ()}, "at least 1"),
    ],
)
def test_settings_that_would_mean_nothing_are_refused(settings, message):
    with pytest.raises(UsageError, match=message):
        RewardSettings(type="gsm8k", **settings)


@pytest.mark.parametrize(
    ("settings", "applies"),
    [
        ({}, True),
        ({"datasets": ("set", "other")}, True),
        ({"datasets": ("other",)}, False),
        ({"when": {"kind": "sum"}}, True),
        ({"when": {"kind": ("product", "sum")}}, True),
        ({"when": {"kind": "product"}}, False),
        ({"when": {"kind": "sum", "level": 3}}, True),
        ({"when": {"kind": "sum", "level": 2}}, False),
        ({"when": {"missing": "sum"}}, False),
        ({"when": {"list": (2, 1)}}, True),
        ({"when": {"list": 2}}, False),
        ({"datasets": ("other",), "when": {"kind": "sum"}}, False),
    ],
)
def test_a_reward_applies_by_dataset_and_by_columns(settings, applies):
    reward = RewardSettings(type="gsm8k", **settings)
    assert reward.applies("set", {"kind": "sum", "level": 3, "list": [1]}) is applies


def test_settings_of_a_reward_survive_their_way_to_the_workers():
    reward = RewardSettings(
        type="gsm8k", gate=True, gate_at=0.5, when={"a": ("b", 1)}, flexible=True
    )
    assert RewardSettings.model_validate(reward.model_dump(mode="json")) == reward


def with_turns(rollouts, *turns):
    """The rollouts, whose environment gave these rewards for the turns of each."""
    columns = ({"turn_rewards": np.array(earned, np.float32)} for earned in turns)
    return tuple(replace(r, columns=c) for r, c in zip(rollouts, columns, strict=True))


def test_turn_rewards_are_one_more_component_of_the_sum(make_prompt, make_rollouts):
    components = {"a": PLAIN, "b": RewardSettings(type="gsm8k", weight=-0.5)}
    outcomes = {
        (0, 0): outcome(1.0), (0, 1): outcome(0.25), (0, 2): outcome(0.5),
        (1, 0): outcome(3.0), (1, 1): FAILED, (1, 2): outcome(0.0),
    }  # fmt: skip
    rollouts = with_turns(make_rollouts("xyz"), [0.5, 0.0, -0.25, 1.0], [0.0], [0.0])
    group = mix(make_prompt(), rollouts, components, outcomes, turn_weight=2.0)
    np.testing.assert_array_equal(group.total, [0.5 + 2.5, math.nan, 1.0])
    more = with_turn_rewards(group, weight=2.0)
    assert more.rewards["environment"].tolist() == [1.25, 0.0, 0.0]
    assert list(more.rewards) == ["a", "b", "environment"]
    np.testing.assert_array_equal(more.total, group.total)
    assert more.kept.tolist() == group.kept.tolist()
    assert (group.turn_weight, more.turn_weight) == (0.0, 2.0)


def test_behind_a_closed_gate_turn_rewards_do_not_count_and_a_factor_scales_them(
    make_prompt, make_rollouts
):
    components = {"format": GATE, "stop_properly": SCALE, "gsm8k": PLAIN}
    outcomes = {
        (0, 0): outcome(0.0), (0, 1): outcome(1.0), (0, 2): outcome(1.0),
        (1, 0): outcome(1.0), (1, 1): outcome(0.5), (1, 2): outcome(1.0),
        (2, 0): outcome(1.0), (2, 1): outcome(1.0), (2, 2): outcome(0.0),
    }  # fmt: skip
    rollouts = with_turns(make_rollouts("xyz"), [1.0, 2.0], [1.0, 2.0], [0.0, 4.0])
    group = mix(make_prompt(), rollouts, components, outcomes, turn_weight=0.5)
    assert group.total.tolist() == [-1.0, 0.5 * (0.25 + 2.0 + 1.5), 0.25 + 2.0]


def test_equal_turn_rewards_have_an_equal_sum_wherever_the_turns_end(make_prompt, make_rollouts):
    turns = np.zeros((2, 24), np.float32)
    for row, places in enumerate([(6, 11, 14, 17), (0, 3, 15, 18)]):
        turns[row, places] = [-0.1, -0.1, -0.1, 1.0]
    assert turns[0].sum() != turns[1].sum()  # in float32
    rollouts = with_turns(make_rollouts("xy"), *turns)
    group = mix(make_prompt(), rollouts, {}, {}, turn_weight=1.0)
    assert len(set(group.total.tolist())) == 1
    assert group.total[0] == pytest.approx(0.7)
