"""Columns of a batch are filled at once: against each sample's turns, written one by one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.core.errors import RunError
from postgrad.core.records import Prompt, Rollout, ScoredGroup, Turn
from postgrad.core.rollout_batch import RolloutBatch

WEIGHT = 0.5  # of turn rewards
turns = st.lists(
    st.tuples(st.sampled_from(["policy", "environment", "opening"]), st.integers(0, 3)), max_size=4
)
samples = st.tuples(
    turns, st.booleans(), st.sampled_from([(), ("turn_rewards",), ("step_rewards",)])
)


def rollout(
    ticket: int, number: int, kinds: list[tuple[str, int]], columns: tuple[str, ...]
) -> Rollout:
    """Tokens, logprobs, versions and rewards that differ at every place."""
    rng = np.random.default_rng([ticket, number])
    written = tuple(
        Turn(
            "policy" if kind == "policy" else "environment",
            rng.integers(1, 100, length).astype(np.int32),
            (-rng.random(length) * (kind == "policy")).astype(np.float32),
            opens=kind == "opening",
        )
        for kind, length in kinds
    )
    lengths = [len(turn.token_ids) for turn in written if turn.author == "policy"]
    tokens = sum(len(turn.token_ids) for turn in written)
    return Rollout(
        ticket, number, written, "stop" if number else "length",
        tuple((version, length) for version, length in enumerate(lengths)), "",
        columns={name: rng.random(tokens).astype(np.float32) for name in columns},
    )  # fmt: skip


def group(ticket: int, of_group: list) -> ScoredGroup:
    prompt = Prompt(ticket, np.arange(1 + ticket % 3, dtype=np.int32), "?", None, "rows", 0)
    rollouts = tuple(
        rollout(ticket, number, kinds, columns)
        for number, (kinds, _, columns) in enumerate(of_group)
    )
    rewards = np.arange(len(of_group), dtype=np.float64)
    kept = np.array([is_kept for _, is_kept, _ in of_group], np.bool_)
    return ScoredGroup(prompt, rollouts, {"m": rewards}, rewards, kept, turn_weight=WEIGHT)


@given(st.lists(st.lists(samples, min_size=1, max_size=3), max_size=3))
def test_every_column_has_a_samples_prompt_and_turns_in_their_order(drawn: list) -> None:
    groups = [group(ticket, of_group) for ticket, of_group in enumerate(drawn)]
    batch = RolloutBatch.of(groups)
    expected = [
        (of.prompt.token_ids[: 0 if sample.opening_tokens else None], sample)
        for of in groups
        for sample, is_kept in zip(of.rollouts, of.kept, strict=True)
        if is_kept and any(t.author == "policy" and len(t.token_ids) for t in sample.turns)
    ]
    assert len(batch) == len(expected)
    for row, (prompt, sample) in enumerate(expected):
        assert (batch.ticket[row], batch.sample[row]) == (sample.ticket, sample.sample)
        tokens, logprobs, mask, versions = [*prompt], [0.0] * len(prompt), [False] * len(prompt), []
        for turn in sample.turns:
            by_policy = turn.author == "policy"
            tokens += [*turn.token_ids]
            logprobs += [*turn.logprobs]
            mask += [by_policy] * len(turn.token_ids)
        for version, length in sample.versions:
            versions += [version] * length
        np.testing.assert_array_equal(batch.sequences.tokens.row(row), tokens)
        np.testing.assert_array_equal(batch.sequences.loss_mask.row(row), mask)
        np.testing.assert_array_equal(
            batch.sampled_logprobs.row(row), np.array(logprobs, np.float32)
        )
        assert batch.versions is not None
        of_row = batch.versions.row(row)
        np.testing.assert_array_equal(of_row[of_row >= 0], versions)
        np.testing.assert_array_equal(of_row >= 0, mask)
        rewards = np.zeros(len(tokens))
        for name, weight in (("turn_rewards", WEIGHT), ("step_rewards", 1.0)):
            if name in sample.columns:
                rewards[len(prompt) :] += weight * sample.columns[name].astype(np.float64)
        np.testing.assert_array_equal(batch.turn_rewards.row(row), rewards)


def test_versions_that_do_not_count_every_token_are_unknown() -> None:
    """A recorded sample may say nothing of who wrote it."""
    of_group = group(0, [([("policy", 2)], True, ()), ([("policy", 1)], True, ())])
    first, second = of_group.rollouts
    unknown = Rollout(0, 1, second.turns, "stop", (), "")
    batch = RolloutBatch.of([
        ScoredGroup(
            of_group.prompt, (first, unknown), of_group.rewards, of_group.total, of_group.kept
        )
    ])  # fmt: skip
    assert batch.versions is None


def test_a_logprob_that_is_not_finite_is_named_by_its_sample_and_place() -> None:
    of_group = group(
        4, [([("policy", 2)], True, ()), ([("environment", 1), ("policy", 3)], True, ())]
    )
    of_group.rollouts[1].turns[1].logprobs[1] = np.nan
    with pytest.raises(RunError, match="ticket 4, sample 1: the sampled logprob of token 2 is nan"):
        RolloutBatch.of([of_group])
