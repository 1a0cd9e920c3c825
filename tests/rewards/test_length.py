"""Length shaping against the papers' formulas, by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.core.errors import UsageError
from postgrad.rewards.length import Overlong, RelativeLength, StopProperly, TargetLength
from postgrad.rewards.mixing import total
from postgrad.rewards.settings import RewardSettings
from postgrad.rewards.verifier import PromptView, RolloutView

PROMPT = PromptView("?", None)


def sample(tokens, finish_reason="stop"):
    return RolloutView("", finish_reason, tokens)


@pytest.mark.parametrize(
    ("tokens", "wanted"), [(0, 0.0), (75, 0.0), (76, -0.08), (90, -1.2), (100, -2.0), (101, -2.0)]
)
def test_overlong_falls_in_a_line_over_the_buffer(tokens, wanted):
    overlong = Overlong(max_new_tokens=100, buffer=25, factor=2.0)
    assert overlong.score(PROMPT, sample(tokens)) == pytest.approx(wanted, abs=1e-15)


def test_overlong_counts_the_longest_turn():
    overlong = Overlong(max_new_tokens=10, buffer=4)
    assert overlong.score(PROMPT, RolloutView("", "stop", 18, 0, (6, 6, 6))) == 0.0
    assert overlong.score(PROMPT, RolloutView("", "stop", 15, 0, (2, 9, 4))) == -0.75


def test_overlong_needs_to_know_the_limit():
    with pytest.raises(UsageError, match="buffer = 101 is more than max_new_tokens = 100"):
        Overlong(max_new_tokens=100, buffer=101)
    with pytest.raises(UsageError, match="does not know max_new_tokens"):
        Overlong(buffer=10).prepare()


def test_a_sample_that_the_limit_cut_off_is_penalised():
    stop_properly = StopProperly(penalty=-0.5)
    assert stop_properly.score(PROMPT, sample(5)).value == 0.0
    cut = stop_properly.score(PROMPT, sample(5, "length"))
    assert (cut.value, cut.detail) == (-0.5, {"finish_reason": "length"})
    assert stop_properly.score(PROMPT, sample(5, "dead_end")).value == -0.5


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [(90, 0.0), (110, 0.0), (120, -0.1), (80, -0.1), (150, -0.4), (0, -0.5), (5000, -0.5)],
)
def test_target_length_falls_on_both_sides_of_its_tolerance(tokens, wanted):
    target_length = TargetLength(target=100, tolerance=10, per_token=0.01, least=-0.5)
    assert target_length.score(PROMPT, sample(tokens)) == pytest.approx(wanted)


@given(st.integers(0, 300), st.integers(1, 200), st.integers(1, 200), st.floats(0.01, 10))
def test_overlong_is_within_bounds_and_never_rises_with_length(tokens, limit, buffer, factor):
    overlong = Overlong(max_new_tokens=max(limit, buffer), buffer=buffer, factor=factor)
    here, next_one = (overlong.score(PROMPT, sample(n)) for n in (tokens, tokens + 1))
    assert -factor <= next_one <= here <= 0.0


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [
        ([100, 300, 200, 150], [0.5, -0.5, 0.0, 0.25]),
        ([8, 4], [-0.5, 0.5]),
        ([7, 7, 7], [0.0, 0.0, 0.0]),
        ([9], [0.0]),
    ],
)
def test_relative_length_falls_in_a_line_from_the_shortest_to_the_longest(tokens, wanted):
    assert RelativeLength().score_group(PROMPT, [sample(n) for n in tokens]) == wanted


def test_behind_a_gate_on_correctness_only_right_answers_gain_from_being_short():
    right = RewardSettings(type="math", gate=True)
    rewards = [right, RewardSettings(type="relative_length", weight=0.2)]
    lengths = RelativeLength().score_group(PROMPT, [sample(n) for n in (10, 20, 30, 10, 30)])
    correct = [1.0, 1.0, 1.0, 0.0, 0.0]
    totals = [total(rewards, pair) for pair in zip(correct, lengths, strict=True)]
    assert totals == pytest.approx([1.1, 1.0, 0.9, 0.0, 0.0])
