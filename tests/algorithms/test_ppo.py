"""PPO against float64 loops over tokens, which use nothing of ops/ or algorithms/."""

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from helpers.layouts import has_corner, slope, split, total, undivided
from postgrad.algorithms.base import Needs, adapted
from postgrad.algorithms.ppo import PPO
from postgrad.algorithms.reinforce_pp import ReinforcePP
from postgrad.core.errors import UsageError
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.core.rollout_batch import RolloutBatch

SAMPLES = st.lists(  # reward, cut short, and of each response token: policy's, its turn's reward
    st.tuples(
        st.sampled_from([0.0, 1.0, -2.0, 0.1]),
        st.booleans(),
        st.lists(st.tuples(st.booleans(), st.sampled_from([0.0, 0.0, 0.5, -1.0])), max_size=5),
    ),
    min_size=1,
    max_size=5,
)
KNOBS: list[dict[str, Any]] = [
    {},
    {"gamma": 0.9, "lam": 0.5, "whiten": False, "bootstrap_truncated": True},
    {"kl_coef": 0.2},
    {"kl_coef": 0.2, "kl_estimator": "k3", "whiten": False, "reward_clip": 0.75},
    {"reward_scaling": "running", "whiten": False},
    {"reward_scaling": "running", "reward_clip": 0.5, "whiten_rewards": True, "kl_coef": 0.1},
    {"std_norm": False, "reward_clip": [-1.5, 0.5]},
]


def batch_of(samples: Any) -> RolloutBatch:
    """Prompts of one token; the policy wrote the first response token of each sample."""
    rows = [[(True, 0.0), *tokens] for _, _, tokens in samples]
    mask = Ragged.of([[False, *(wrote for wrote, _ in row)] for row in rows], np.bool_)
    turns = Ragged.of([[0.0, *(w * reward for w, reward in row)] for row in rows], np.float64)
    nothing = mask.like(np.zeros(len(mask.values), np.float32))
    n = np.arange(len(rows))
    return RolloutBatch(
        sequences=Sequences(mask.like(np.zeros(len(mask.values), np.int32)), mask, n),
        sampled_logprobs=nothing,
        turn_rewards=turns,
        rewards=np.array([reward for reward, _, _ in samples]) + turns.sums(),
        ticket=n,
        sample=n,
        truncated=np.array([cut for _, cut, _ in samples]),
    )


def columns_of(batch: RolloutBatch, seed: int) -> list[Ragged]:
    """Old and reference logprobs and values, with numbers where the policy wrote nothing too."""
    rng = np.random.default_rng(seed)
    mask = batch.sequences.loss_mask
    draws = rng.normal(0, 1, (3, len(mask.values))).astype(np.float32)
    return [mask.like(draw) for draw in draws]


def white(
    rows: list[list[float]], std_norm: bool = True, shift_mean: bool = True
) -> list[list[float]]:
    flat = [x for row in rows for x in row]
    if min(flat) == max(flat):
        return [[0.0] * len(row) for row in rows] if shift_mean else rows
    mean = math.fsum(flat) / len(flat)
    variance = math.fsum((x - mean) ** 2 for x in flat) / len(flat)
    scale, back = math.sqrt(variance + 1e-8) if std_norm else 1.0, 0.0 if shift_mean else mean
    return [[(x - mean) / scale + back for x in row] for row in rows]


def kl_of(kind: str, d: float) -> float:
    return d if kind == "k1" else math.exp(-d) - 1 + d


def expected(k: PPO, batch: RolloutBatch, columns: list[Ragged], earlier: list[float]) -> Any:
    """Advantages and returns of the policy's tokens of each sample. earlier: rewards of the run."""
    scaled, unit, mean = list(batch.rewards), 1.0, 0.0
    if k.reward_scaling == "running":
        every = [*earlier, *scaled]
        mean = math.fsum(every) / len(every)
        if len(every) > 1 and max(every) > min(every):
            unit = math.sqrt(math.fsum((x - mean) ** 2 for x in every) / (len(every) - 1))
        scaled = [(x - mean) / unit for x in scaled]
    if k.reward_clip:
        scaled = [min(max(x, k.reward_clip[0]), k.reward_clip[1]) for x in scaled]
    rewards, values = [], []
    for i in range(len(batch)):
        places = np.flatnonzero(batch.sequences.loss_mask.row(i))
        old, ref, value = (column.row(i).astype(float) for column in columns)
        turns = [float(batch.turn_rewards.row(i)[t]) / unit for t in places]
        row = [
            turn - k.kl_coef * kl_of(k.kl_estimator, old[t] - ref[t])
            for turn, t in zip(turns, places, strict=True)
        ]
        row[-1] += scaled[i] - math.fsum(turns)
        rewards.append(row)
        values.append([value[t] for t in places])
    if k.whiten_rewards:
        rewards = white(rewards, shift_mean=False)
    advantages = []
    for i, (row, value) in enumerate(zip(rewards, values, strict=True)):
        bootstraps = k.bootstrap_truncated and batch.truncated[i]
        behind, advantage, episode_advantages = value[-1] if bootstraps else 0.0, 0.0, []
        for reward, v in zip(reversed(row), reversed(value), strict=True):
            advantage = reward + k.gamma * behind - v + k.gamma * k.lam * advantage
            episode_advantages.insert(0, advantage)
            behind = v
        advantages.append(episode_advantages)
    pairs = zip(advantages, values, strict=True)
    returns = [[a + v for a, v in zip(*pair, strict=True)] for pair in pairs]
    return white(advantages, k.std_norm) if k.whiten else advantages, returns


@pytest.mark.parametrize("knobs", KNOBS)
@settings(max_examples=30, deadline=None)
@given(samples=SAMPLES, seed=st.integers(0, 10**6))
def test_advantages_and_returns_are_those_of_a_loop(
    knobs: dict[str, Any], samples: Any, seed: int
) -> None:
    algorithm, batch = PPO(**knobs), batch_of(samples)
    old, ref, values = columns = columns_of(batch, seed)
    earlier = np.random.default_rng(seed).normal(1.0, 2.0, 4)
    state: Any = {}
    if algorithm.reward_scaling == "running":  # a step before this one, and a checkpoint between
        before = replace(batch_of([(0.0, False, [])] * 4), rewards=earlier)
        state = algorithm.credit(before, *columns_of(before, 0), state).state
        state = json.loads(json.dumps(state))
    credit = algorithm.credit(batch, old, ref, values, state)
    advantages, returns = expected(algorithm, batch, columns, list(earlier))
    for name, wanted in (("advantages", advantages), ("returns", returns)):
        column = credit.experience.columns[name]
        for i, row in enumerate(wanted):
            mask = batch.sequences.loss_mask.row(i)
            np.testing.assert_allclose(column.row(i)[mask], row, rtol=1e-4, atol=1e-5)
            assert not column.row(i)[~mask].any()
    assert credit.experience.has_gradient.all()
    assert credit.rows.tolist() == list(range(len(batch)))


@settings(max_examples=30, deadline=None)
@given(samples=SAMPLES, seed=st.integers(0, 10**6), clip=st.sampled_from([0.2, None]))
def test_the_critic_s_loss_is_a_token_mean_however_the_update_is_split(
    samples: Any, seed: int, clip: float | None
) -> None:
    algorithm, batch = PPO(value_clip=clip, aggregation="sequence"), batch_of(samples)
    experience = algorithm.credit(batch, *columns_of(batch, seed), {}).experience
    mask = batch.sequences.loss_mask.values
    old, returns = (
        experience.columns[name].values.astype(np.float64) for name in ("values", "returns")
    )
    scores = np.random.default_rng(seed).normal(0, 1, len(mask))

    def wanted(at: np.ndarray) -> float:
        losses = []
        for v, o, r in zip(at[mask], old[mask], returns[mask], strict=True):
            near = o + min(max(v - o, -clip), clip) if clip else v
            losses.append(0.5 * max((v - r) ** 2, (near - r) ** 2))
        return math.fsum(losses) / len(losses)

    assume(not has_corner(wanted, scores, 1e-6, 1e-7))  # where it is clipped, or the larger error
    loss, gradient, metrics = total(algorithm, experience, undivided(experience), scores, "score")
    assert loss == pytest.approx(wanted(scores), rel=1e-6)
    np.testing.assert_allclose(gradient, slope(wanted, scores, 1e-6), rtol=1e-4, atol=1e-6)
    parts = split(experience, seed)
    again, same_gradient, same = total(algorithm, experience, parts, scores, "score")
    assert again == pytest.approx(loss, rel=1e-12)
    np.testing.assert_allclose(same_gradient, gradient, rtol=1e-12)
    assert same == pytest.approx(metrics, rel=1e-9, abs=1e-12)
    report = algorithm.report(metrics)
    assert report["critic/value"] == pytest.approx(scores[mask].mean())
    assert report["critic/return"] == pytest.approx(returns[mask].mean())
    left, spread = (returns - scores)[mask].var(), returns[mask].var()
    if spread > 1e-6:
        explained_variance = report["critic/explained_variance"]
        assert explained_variance == pytest.approx(1 - left / spread, rel=1e-6, abs=1e-6)
    assert not {"critic/error_square", "critic/return_square"} & report.keys()


@settings(max_examples=15, deadline=None)
@given(samples=SAMPLES, seed=st.integers(0, 10**6))
def test_the_policy_s_loss_does_not_depend_on_the_split_either(samples: Any, seed: int) -> None:
    algorithm, batch = PPO(dual_clip=3.0), batch_of(samples)
    experience = algorithm.credit(batch, *columns_of(batch, seed), {}).experience
    old = experience.columns["old_logprobs"].values
    logprobs = old + np.random.default_rng(seed).normal(0, 0.5, len(old))
    loss, gradient, metrics = total(algorithm, experience, undivided(experience), logprobs)
    again, same_gradient, same = total(algorithm, experience, split(experience, seed), logprobs)
    assert again == pytest.approx(loss, rel=1e-12, abs=1e-15)
    np.testing.assert_allclose(same_gradient, gradient, rtol=1e-12)
    assert same == pytest.approx(metrics, rel=1e-9, abs=1e-12)


def test_metrics_of_the_critic_worked_by_hand() -> None:
    """Values 0 before, returns 1 and 3; values 0.5 and 3 now, with a range of 1."""
    algorithm = PPO(value_clip=1.0, lam=1.0, whiten=False)
    batch = batch_of([(1.0, False, []), (3.0, False, [])])
    zeros = batch.sequences.tokens.like(np.zeros(4, np.float32))
    experience = algorithm.credit(batch, zeros, zeros, zeros, {}).experience
    scores = np.array([9.0, 0.5, 9.0, 3.0])
    loss, _, metrics = total(algorithm, experience, undivided(experience), scores, "score")
    assert loss == pytest.approx((0.5 * 0.25 + 0.5 * 4.0) / 2)  # the second counts as 1
    assert algorithm.report(metrics) == pytest.approx(
        {
            "critic/value": 1.75,
            "critic/return": 2.0,
            "critic/error": 0.25,
            "critic/clip_fraction": 0.5,
            "critic/explained_variance": 1 - 0.0625 / 1.0,
        }
    )


def test_equal_returns_have_no_variance_to_explain_however_many_tokens_there_are() -> None:
    """1 / 25 rounded to float32 is less than it: 25 of them are 1 - 2e-8."""
    algorithm = PPO(lam=1.0, whiten=False)
    for tokens in (1, 10, 25, 43):
        batch = batch_of([(1.0, False, [(True, 0.0)] * (tokens - 1))])
        zeros = batch.sequences.tokens.like(np.zeros(tokens + 1, np.float32))
        experience = algorithm.credit(batch, zeros, zeros, zeros, {}).experience
        assert set(experience.columns["returns"].row(0)[1:].tolist()) == {1.0}
        scores = np.random.default_rng(0).normal(0, 0.1, tokens + 1)
        *_, metrics = total(algorithm, experience, undivided(experience), scores, "score")
        report = algorithm.report(metrics)
        assert report["critic/explained_variance"] == 0.0
        assert "critic/weight" not in report


def test_a_cut_sample_is_worth_its_last_value_only_if_asked() -> None:
    batch = batch_of([(1.0, True, [(True, 0.0)])])
    values = batch.sequences.tokens.like(np.array([9, 0.25, 0.5], np.float32))
    for asked, returns in ((False, [1.0, 1.0]), (True, [1.5, 1.5])):
        algorithm = PPO(bootstrap_truncated=asked, lam=1.0)
        episode_returns = algorithm.credit(batch, None, None, values, {}).experience.columns[
            "returns"
        ]
        assert episode_returns.row(0)[1:].tolist() == returns


def test_whitened_rewards_keep_the_mean_of_token_rewards() -> None:
    """Rewards of 1 behind 2 and behind 10 tokens: mean 1/6, variance 5/36; with the mean taken the
    two would have returns of +1.79 and -1.79 (lm-human-preferences, shift_mean = False).
    """
    batch = batch_of([(1.0, False, [(True, 0.0)] * n) for n in (1, 9)])
    values = batch.sequences.tokens.like(np.zeros(14, np.float32))
    algorithm = PPO(whiten_rewards=True, whiten=False, lam=1.0)
    returns = algorithm.credit(batch, None, None, values, {}).experience.columns["returns"]
    assert returns.row(0)[1] == pytest.approx((2 / 3) / (5 / 36) ** 0.5 + 2 / 6, rel=1e-6)
    assert returns.row(1)[1] == pytest.approx((-2 / 3) / (5 / 36) ** 0.5 + 10 / 6, rel=1e-6)
    last = returns.row(0)[-1], returns.row(1)[-1]
    assert last == pytest.approx([(5 / 6) / (5 / 36) ** 0.5 + 1 / 6] * 2, rel=1e-6)


def test_std_norm_belongs_to_whitening() -> None:
    with pytest.raises(UsageError, match="only where whiten = true"):
        PPO(whiten=False, std_norm=False)


def test_a_critic_is_needed_and_learns_where_the_policy_has_nothing_to() -> None:
    assert PPO().needs() == Needs(critic=True)
    assert PPO(kl_coef=0.1).needs() == Needs(reference=True, old_logprobs=True, critic=True)
    batch = batch_of([(1.0, False, []), (1.0, False, [])])
    values = batch.sequences.tokens.like(np.zeros(4, np.float32))
    with pytest.raises(ValueError, match="needs 'values'"):
        PPO().credit(batch, None, None, None, {})
    experience = PPO().credit(batch, None, None, values, {}).experience
    assert not experience.columns["advantages"].values.any()  # equal rewards, whitened
    assert experience.columns["returns"].values.tolist() == [0, 1, 0, 1]
    assert experience.has_gradient.all()


def test_reinforce_pp_credits_a_turn_only_with_what_came_after_it() -> None:
    turns = [(True, 2.0), (False, 0.0), (True, 0.0)]  # and a first token before them
    batch = batch_of([(1.0, False, turns), (0.0, False, [])])
    advantages = ReinforcePP().credit(batch, None, None, None, {}).experience.columns["advantages"]
    follows = [[3.0, 3.0, 1.0], [0.0]]
    np.testing.assert_allclose(advantages.row(0)[[1, 2, 4]], white(follows)[0], rtol=1e-6)
    np.testing.assert_allclose(advantages.row(1)[1:], white(follows)[1], rtol=1e-6)
    assert advantages.row(0)[3] == 0


def test_coefficients_stay_where_the_policy_did_not_learn() -> None:
    before, after = {"kl_coef": 0.1, "mean": 1.0}, {"kl_coef": 0.05, "mean": 2.0}
    assert adapted(before, after, learned=True) == after
    assert adapted(before, after, learned=False) == {"kl_coef": 0.1, "mean": 2.0}
    assert adapted({}, {"entropy_coef": 0.3, "mean": 2.0}, learned=False) == {"mean": 2.0}
