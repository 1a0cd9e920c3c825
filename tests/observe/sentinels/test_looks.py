"""Each sentinel's look at numbers, against hand-worked cases and over random histories."""

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.sentinels import group
from postgrad.core.rollout_batch import RolloutBatch
from postgrad.observe.sentinels.base import Look, Seen, Sentinel
from postgrad.observe.sentinels.entropy import Entropy, sampled_entropy
from postgrad.observe.sentinels.evaluation import Evaluation
from postgrad.observe.sentinels.gradient import Gradient
from postgrad.observe.sentinels.kl import KL
from postgrad.observe.sentinels.length import Length
from postgrad.observe.sentinels.mismatch import Mismatch, Staleness
from postgrad.observe.sentinels.no_gradient import NoGradient, stuck
from postgrad.observe.sentinels.on_policy import OnPolicy, ratio_distance
from postgrad.observe.sentinels.publish import Publish
from postgrad.observe.sentinels.repetition import Repetition, repeated
from postgrad.observe.sentinels.router import Router
from postgrad.observe.sentinels.truncation import Truncation
from postgrad.observe.sentinels.verifier import VerifierFailures, failed
from postgrad.observe.settings import SentinelSettings
from postgrad.training.publish import probed
from postgrad.training.rl_metrics import differences


def looks(sentinel: Sentinel, history: Sequence[Seen]) -> list[Look | None]:
    """What it makes of each, its memory kept as JSON in between, as in a checkpoint."""
    memory: dict[str, Any] = {}
    all_looks: list[Look | None] = []
    for seen in history:
        all_looks.append(look := sentinel.look(seen, memory))
        if look is not None:
            memory = json.loads(json.dumps(dict(look.after), allow_nan=False))
    return all_looks


def speaks(sentinel: Sentinel, history: Sequence[Seen]) -> list[int]:
    """The places of the history at which it speaks."""
    all_looks = looks(sentinel, history)
    return [place for place, look in enumerate(all_looks) if look is not None and look.message]


def test_every_sentinel_leaves_numbers_alone_that_are_not_its_own() -> None:
    for name, sentinel in SentinelSettings().looking().items():
        assert sentinel.look({"loss": 1.0, "samples": 8}, {}) is None, name


def test_an_action_may_stand_for_its_table() -> None:
    settings = SentinelSettings.model_validate({"kl": "stop", "gradient": {"factor": 3.0}})
    assert (settings.kl, settings.gradient.factor) == (KL(action="stop"), 3.0)
    with pytest.raises(ValueError, match="'off', 'observe', 'warn' or 'stop'"):
        SentinelSettings.model_validate({"kl": "shout"})


# on_policy, mismatch, publish: two computations of one thing


def logs_of(*probabilities: float) -> Any:
    return np.log(np.array(probabilities, np.float64)).astype(np.float32)


def test_the_ratio_is_measured_where_both_know_it() -> None:
    old, now = np.zeros(4, np.float32), np.array([0.0, 0.5, np.nan, 9.0], np.float32)
    mask = np.array([True, True, True, False])
    ratio = ratio_distance(old, now, mask)["sentinel/on_policy"]
    assert ratio == pytest.approx(math.expm1(0.5) / 2)
    assert ratio_distance(old, now, np.zeros(4, np.bool_)) == {}
    lost = ratio_distance(np.full(4, np.nan, np.float32), np.zeros(4, np.float32), mask)
    assert lost["sentinel/on_policy"] > 1e8  # old logprobs that are no numbers do not agree


@pytest.mark.parametrize(
    ("dtype", "value", "spoken"),
    [
        ("float32", 9e-5, []),
        ("float32", 2e-4, [0]),
        ("bfloat16", 0.01, []),
        ("bfloat16", 0.03, [0]),
        ("float32", math.nan, [0]),
    ],
)
def test_what_rounding_gives_is_on_policy(dtype: str, value: float, spoken: list[int]) -> None:
    assert speaks(OnPolicy().for_dtype(dtype), [{"sentinel/on_policy": value}]) == spoken
    assert OnPolicy(limit=0.5).for_dtype(dtype).limit == 0.5


def test_differences_are_means_over_tokens() -> None:
    metrics = differences(
        logs_of(0.5, 0.2, 0.1), logs_of(0.4, 0.3, 0.9), np.array([True, True, False])
    )
    assert metrics["sentinel/prob_difference"] == pytest.approx(0.1, rel=1e-6)
    assert metrics["sentinel/ratio_excess"] == pytest.approx((0.5 / 0.4 + 0.3 / 0.2) / 2, rel=1e-6)
    assert differences(logs_of(0.5), logs_of(0.9), np.array([False])) == {}


@pytest.mark.parametrize(
    ("learner", "sampled", "spoken"),
    [
        (0.5, 0.5, []),
        (0.5, 0.515, [0]),  # |p - p'| = 0.015 > 0.01
        (0.001, 0.0012, [0]),  # a ratio of 1.2 > 1.05
        (math.nan, 0.5, [0]),
        (0.5, math.nan, [0]),
    ],
)
def test_either_limit_of_a_mismatch_is_enough(
    learner: float, sampled: float, spoken: list[int]
) -> None:
    metrics = differences(logs_of(learner), logs_of(sampled), np.array([True]))
    assert speaks(Mismatch(), [metrics]) == spoken


def test_a_token_that_one_side_holds_impossible_counts_without_overflow() -> None:
    metrics = differences(logs_of(0.5), np.array([-np.inf], np.float32), np.array([True]))
    assert metrics["sentinel/prob_difference"] == pytest.approx(0.5)
    assert metrics["sentinel/ratio_excess"] == pytest.approx(math.exp(20.0))


ONE = [np.array([-1.0, -2.0], np.float32)]


def moved(by: float) -> list[Any]:
    return [ONE[0] + np.float32(by)]


@pytest.mark.parametrize(
    ("engine", "learner", "spoken"),
    [
        (0.25, 0.25, []),  # arrived
        (0.0, 0.002, [0]),  # a stale engine, however little the policy moved
        (0.0, 3.0, [0]),
        (0.9375, 1.0, [0]),  # most of the way, and over the limit of 0.05
        (0.0, 0.0005, []),  # rounding
        (0.49, 0.5, []),
        (math.nan, 0.0, [0]),
    ],
)
def test_an_engine_has_the_weights_or_is_found_out(
    engine: float, learner: float, spoken: list[int]
) -> None:
    assert speaks(Publish(), [probed(ONE, moved(engine), moved(learner))]) == spoken


def test_weights_that_are_not_finite_are_not_called_an_engines_fault() -> None:
    look = Publish().look(probed(ONE, moved(math.nan), moved(math.nan)), {})
    assert look is not None
    assert look.message is not None
    assert look.message.startswith("logprobs of the policy or of the rollout engine are not finite")


def test_rounding_to_bfloat16_is_not_taken_for_a_stale_engine() -> None:
    seen = {"sentinel/publish_difference": 0.0018, "sentinel/policy_moved": 0.0018}
    assert speaks(SentinelSettings().for_dtypes("float32", "float32").publish, [seen])
    wide = {"sentinel/publish_difference": 0.022, "sentinel/policy_moved": 0.022}
    small_step = {"sentinel/publish_difference": 0.018, "sentinel/policy_moved": 0.026}
    for learner, engine in (("bfloat16", "bfloat16"), ("float32", "bfloat16")):
        for rounded in (seen, wide, small_step):
            assert not speaks(SentinelSettings().for_dtypes(learner, engine).publish, [rounded])
    stale = {"sentinel/publish_difference": 0.06, "sentinel/policy_moved": 0.06}
    assert speaks(SentinelSettings().for_dtypes("bfloat16", "bfloat16").publish, [stale])


def test_distances_are_means_over_all_tokens_of_the_probe() -> None:
    """Sequences of one and three tokens: (0.25 + 3 * 0) / 4, no mean of means."""
    short, three = np.zeros(1, np.float32), np.zeros(3, np.float32)
    metrics = probed([short, three], [short, three], [short + np.float32(0.25), three])
    assert metrics == {"sentinel/publish_difference": 0.0625, "sentinel/policy_moved": 0.0625}


# windows


def norms(*values: float, role: str = "policy") -> list[Seen]:
    return [{f"{role}/grad_norm": value} for value in values]


def test_a_spike_is_told_against_the_median_and_does_not_become_it() -> None:
    sentinel = Gradient(after=4, window=8, factor=10.0)
    assert speaks(sentinel, norms(1, 2, 1, 2, 100, 1, 2, 90)) == [4, 7]
    assert speaks(sentinel, norms(1, 2, 1, 100)) == []  # too early to know
    assert speaks(sentinel, norms(1, 0, 0, 0, 0, 100, 1)) == []  # no gradient is no norm
    values = [look.value for look in looks(sentinel, norms(1, 1, 1, 1, 5)) if look is not None]
    assert values == [None, None, None, None, 5.0]


def test_each_role_has_its_own_window() -> None:
    history = [{"policy/grad_norm": 1.0, "critic/grad_norm": 50.0}] * 5
    sentinel = Gradient(after=4, window=8, factor=10.0)
    assert speaks(sentinel, [*history, {"policy/grad_norm": 40.0, "critic/grad_norm": 50.0}]) == [5]


@given(
    st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=60),
    st.floats(1e-3, 1e3),
    st.integers(4, 16),
)
def test_spikes_do_not_depend_on_the_unit_and_windows_stay_small(
    values: list[float], unit: float, window: int
) -> None:
    sentinel = Gradient(window=window, after=4, factor=7.0)
    times = [
        value / np.median(values[max(0, n - window) : n]) if n else 0
        for n, value in enumerate(values)
    ]
    if any(abs(when - 7.0) < 1e-6 for when in times):
        return
    assert speaks(sentinel, norms(*values)) == speaks(sentinel, norms(*(v * unit for v in values)))
    assert speaks(sentinel, norms(*values)) == [
        n for n, when in enumerate(times) if n >= 4 and when > 7
    ]
    last = looks(sentinel, norms(*values))[-1]
    assert last is not None
    assert len(last.after["policy"]) == min(window, len(values))


def entropies(*values: float, best: float = 0.1) -> list[Seen]:
    return [{"sampled_entropy": value, "best_reward_fraction": best} for value in values]


def test_entropy_collapses_against_the_runs_first_steps() -> None:
    sentinel = Entropy(share=0.1, steps=2)
    assert speaks(sentinel, entropies(1.0, 1.0, 0.2, 0.02, 0.02, 0.02)) == [4, 5]
    assert speaks(sentinel, entropies(1.0, 1.0, 0.02, 0.02, best=0.6)) == []  # the task is learned
    assert speaks(sentinel, entropies(0.0, 0.0, 0.0, 0.0)) == []
    assert speaks(sentinel, entropies(1.0, math.nan, 1.0, 0.01, 0.01)) == [4]


def lengths(*values: float) -> list[Seen]:
    return [{"response_length": value, "reward": 0.5} for value in values]


def test_length_runs_away_from_what_it_was_a_window_ago() -> None:
    sentinel = Length(factor=2.0, window=10)
    assert speaks(sentinel, lengths(*[10] * 10, *[30] * 5)) == [12, 13, 14]
    slow = [10 * 1.02**n for n in range(60)]  # more than threefold, and never twice in a window
    assert speaks(sentinel, lengths(*slow)) == []
    assert speaks(sentinel, lengths(*[0] * 5, *[1.5] * 5)) == []  # next to nothing is not counted


@given(st.lists(st.floats(0, 1e4), max_size=40), st.integers(10, 20))
def test_no_history_of_lengths_that_only_fall_makes_it_speak(
    values: list[float], window: int
) -> None:
    assert speaks(Length(window=window), lengths(*sorted(values, reverse=True))) == []


@pytest.mark.parametrize(
    ("key", "value"), [("policy/kl", 1.5), ("kl/token_mean", 1.5), ("policy/kl_old", 0.7)]
)
def test_kl_runs_away_from_the_reference_or_within_a_step(key: str, value: float) -> None:
    far, near = ({"response_length": 9.0, key: kl} for kl in (value, value / 10))
    assert speaks(KL(), [far, far, near, far, far, far, far]) == [5, 6]
    assert speaks(KL(), [{key: value}] * 5) == []  # preferences: not the policy's own answers
    assert speaks(KL(steps=1), [{"response_length": 9.0, key: math.nan}]) == [0]


@given(st.lists(st.floats(0, 1), max_size=40), st.integers(1, 5), st.floats(0.01, 1.0))
def test_a_level_speaks_where_it_was_passed_so_many_times_in_a_row(
    values: list[float], steps: int, limit: float
) -> None:
    sentinel = Truncation(limit=limit, steps=steps)
    seen = [{"truncated_fraction": value, "samples": 1, "response_length": 1} for value in values]
    wanted = [
        n
        for n in range(steps - 1, len(values))
        if all(value > limit for value in values[n - steps + 1 : n + 1])
    ]
    assert speaks(sentinel, seen) == wanted


def evaluated(accuracy: float, half: float) -> Seen:
    ends = {"eval/accuracy_low": accuracy - half, "eval/accuracy_high": accuracy + half}
    return {"eval/accuracy": accuracy, **ends}


def rewards(*values: float) -> list[Seen]:
    return [{"reward": value, "samples": 4} for value in values]


def test_a_reward_that_rises_while_accuracy_falls_is_told_beyond_doubt_only() -> None:
    rising, falling = rewards(0.1, 0.2, 0.7, 0.8), rewards(0.8, 0.7, 0.2, 0.1)

    def history(earned: list[Seen], half: float) -> list[Seen]:
        return [*earned[:2], evaluated(0.6, half), *earned[2:], evaluated(0.4, half)]

    assert speaks(Evaluation(), history(rising, 0.05)) == [5]
    assert speaks(Evaluation(), history(rising, 0.2)) == []  # the intervals overlap
    assert speaks(Evaluation(), history(falling, 0.05)) == []  # both fall: that is no hacking
    assert speaks(Evaluation(), [evaluated(0.6, 0.05), *rising, evaluated(0.4, 0.05)]) == [5]
    assert speaks(Evaluation(), [evaluated(0.6, 0.05), evaluated(0.4, 0.05)]) == []


def test_sets_are_compared_each_with_its_own_best() -> None:
    def both(first: float, second: float) -> Seen:
        second_set = {
            f"eval/b/{k.removeprefix('eval/')}": v for k, v in evaluated(second, 0.01).items()
        }
        return {**evaluated(first, 0.01), **second_set}

    history = [*rewards(0.1), both(0.5, 0.9), *rewards(0.5), both(0.6, 0.5)]
    last = looks(Evaluation(), history)[-1]
    assert last is not None
    assert last.message is not None
    assert "eval/b/accuracy fell to 0.5" in last.message
    assert "eval/accuracy" not in last.message


# measures of samples


def test_entropy_is_what_the_sampled_tokens_cost_on_average() -> None:
    groups = [group([0.0, 1.0], logprobs=[[-1.0, -3.0], [-2.0]]), group([0.5], logprobs=[[-2.0]])]
    metrics = sampled_entropy(RolloutBatch.of(groups))
    assert metrics["sampled_entropy"] == pytest.approx(8.0 / 4)
    assert metrics["best_reward_fraction"] == pytest.approx(1 / 3)


def test_the_entropy_is_of_samples_that_are_drawn_by_chance() -> None:
    """A greedy answer is likelier than them: with it the entropy would be 8 / 4."""
    groups = [group([0.0, 1.0], logprobs=[[-1.0, -1.0], [-4.0]]), group([0.5], logprobs=[[-2.0]])]
    metrics = sampled_entropy(RolloutBatch.of(groups), greedy=True)
    assert metrics["sampled_entropy"] == pytest.approx(4.0)
    assert metrics["best_reward_fraction"] == pytest.approx(1 / 3)
    alone = sampled_entropy(RolloutBatch.of(groups[1:]), greedy=True)
    assert math.isnan(alone["sampled_entropy"])


def test_a_group_is_stuck_where_all_earn_the_same_and_less_than_the_best() -> None:
    assert stuck([group([0.0, 0.0]), group([0.0, 1.0])]) == {"groups/stuck_fraction": 0.5}
    assert stuck([group([1.0, 1.0]), group([0.0, 1.0])]) == {"groups/stuck_fraction": 0.0}
    assert stuck([group([1.0, 1.0]), group([1.0, 1.0])]) == {"groups/stuck_fraction": 1.0}
    assert stuck([group([1.0]), group([])]) == {}
    seen = {"groups/stuck_fraction": 0.95, "reward": 0.0}
    assert speaks(NoGradient(steps=2), [seen, seen]) == [1]


def test_one_answer_to_different_questions_is_repetition_but_yes_and_no_are_not() -> None:
    same = [group([1.0, 1.0], texts=["x", " x "], answer=str(n)) for n in range(4)]
    metrics = {**repeated(same), "reward": 1.0}
    assert metrics["commonest_answer_fraction"] == 1.0
    assert metrics["commonest_reference_fraction"] == 0.25
    assert speaks(Repetition(steps=1), [metrics]) == [0]
    yes = [group([1.0, 0.0], texts=["yes", "yes"], answer="yes" if n else "no") for n in range(4)]
    assert speaks(Repetition(steps=1), [{**repeated(yes), "reward": 0.5}]) == []
    one_group = [group([1.0, 1.0], texts=["x", "x"], answer=None)]  # one prompt: of course
    assert speaks(Repetition(steps=1), [{**repeated(one_group), "reward": 1.0}]) == []


def test_a_sample_that_failed_twice_has_failed_once() -> None:
    groups = [group([1.0, 1.0, 1.0, 1.0], failures=[(0, "a"), (0, "b"), (2, "a")])]
    assert failed(groups) == {"failed_fraction": 0.5}
    assert speaks(VerifierFailures(), [{**failed(groups), "reward": 0.0}]) == [0]
    assert speaks(VerifierFailures(), [{"failed_fraction": 0.01}]) == []


def test_staleness_speaks_of_a_drift_that_lasts() -> None:
    history = [{"sentinel/drift": drift} for drift in (1.2, 1.6, 1.7, 1.4, 1.6, 1.6, 1.6, math.nan)]
    assert speaks(Staleness(), history) == [6, 7]
    assert speaks(Staleness(limit=2.0), history[:-1]) == []


def test_a_rise_of_unused_experts_over_the_first_steps_is_a_collapse() -> None:
    """A level is none: many experts are unused from the start where updates are small."""
    shares = [0.5, 0.6, 0.7, 0.7, 0.81, 0.81, 0.79, 0.81, 0.9, 1.0]
    history = [{"policy/router_unused": share, "critic/router_unused": 0.1} for share in shares]
    assert speaks(Router(steps=3, rise=0.2), history) == [9]  # 0.6 at first: over 0.8 three times
    assert speaks(Router(steps=2, rise=0.2), history) == [5, 6, 7, 8, 9]
    (look, *_) = looks(Router(), history[:1])
    assert look is not None
    assert look.value is None


def test_answers_at_dead_ends_of_their_grammar_are_named_as_such() -> None:
    base = {"truncated_fraction": 0.8, "samples": 1.0, "response_length": 1.0}
    (limit, ends) = (Truncation(steps=1).tell(0.8, base | {"dead_end_fraction": share})
                     for share in (0.3, 0.5))  # fmt: skip
    assert "80% of the answers are cut off at the token limit" in limit
    assert "most of them at a dead end of their grammar" in ends
