"""The live source: tickets, environments, scoring while decoding goes on."""

import numpy as np
import pytest

from postgrad.core.cursor import Cursor
from postgrad.core.errors import RunError
from postgrad.core.records import Prompt, ScoredGroup
from postgrad.core.rollout_batch import RolloutBatch
from postgrad.layout.tree import grow
from postgrad.rollout.engine import Completion
from postgrad.rollout.environment import Environments, Observation, SamplingSpec, at_once
from postgrad.rollout.local.engine import LocalEngine
from postgrad.rollout.sampling import sample_groups
from postgrad.rollout.settings import RolloutSettings, SamplingSettings
from postgrad.rollout.source import LiveSource


class Prompts:
    def __len__(self):
        return 10

    def draw(self, ticket, seed):
        ids = np.random.default_rng((ticket, seed)).integers(2, 32, 3 + ticket % 3)
        return Prompt(ticket, ids.astype(np.int32), "q", "a", "letters", ticket)


class LengthScorer:
    """Rewards short answers; holds groups back until `late` of them wait."""

    def __init__(self, late=1):
        self.late = late
        self.waiting: list[ScoredGroup] = []

    def submit(self, prompt, rollouts):
        total = np.array([1.0 / len(r.token_ids) for r in rollouts])
        kept = np.ones(len(rollouts), bool)
        self.waiting.insert(0, ScoredGroup(prompt, tuple(rollouts), {"short": total}, total, kept))

    def completed(self, wait):
        if not wait and len(self.waiting) < self.late:
            return []
        out, self.waiting = self.waiting, []
        return out

    def too_many_failed(self, groups, samples):
        return False


class AskTwice:
    """Says "ab" to the first answer and rewards it, then ends."""

    deterministic, concurrent, turn_tokens = True, 0, ()

    def reset(self, prompt, sample):
        return self._Episode()

    class _Episode:
        begins = False

        def __init__(self):
            self.turns = 0

        def step(self, response: Completion):
            self.turns += 1
            ids = np.array([2, 3], np.int32)
            counts = {"turns": 1.0, "long": float(len(response.token_ids) > 3)}
            return at_once(Observation(ids, self.turns == 2, float(self.turns), counts))

        def close(self):
            CLOSED.append(self.turns)


CLOSED: list[int] = []  # the turns of each episode that was closed
TWICE = Environments({None: AskTwice()})


def live(engine, tokenizer, scorer=None, n=3, **changes):
    options = {
        "seed": 3,
        "prompts_per_step": 4,
        "samples_per_prompt": n,
        "sampling": RolloutSettings(max_new_tokens=6),
        "tokenizer": tokenizer,
    }
    return LiveSource(engine, Prompts(), scorer or LengthScorer(), **(options | changes))


@pytest.fixture
def engine(model, tokenizer):
    return LocalEngine(model("qwen3"), tokenizer, slots=8, cache_tokens=8 * 48)


def signature(groups):
    return [
        (g.prompt.ticket, [r.token_ids.tolist() for r in g.rollouts], g.total.tolist())
        for g in groups
    ]


def test_a_step_takes_the_first_open_tickets_and_settles_them(engine, tokenizer):
    source = live(engine, tokenizer)
    sampled = source.next(0, Cursor(2, frozenset({3, 5})), {})
    assert [g.prompt.ticket for g in sampled.groups] == [2, 4, 6, 7]
    assert sampled.cursor == Cursor(8)
    assert (sampled.reasons, sampled.metrics, sampled.state) == ({}, {}, {})
    assert [[r.sample for r in g.rollouts] for g in sampled.groups] == [[0, 1, 2]] * 4


def test_groups_do_not_depend_on_when_scores_arrive_or_on_steps_before(engine, tokenizer):
    batch = live(engine, tokenizer).next(0, Cursor(), {})
    first, cursor = batch.groups, batch.cursor
    second = live(engine, tokenizer).next(1, cursor, {}).groups
    for late in (2, 100):
        source = live(engine, tokenizer, LengthScorer(late))
        assert signature(source.next(1, cursor, {}).groups) == signature(second)
        assert signature(source.next(0, Cursor(), {}).groups) == signature(first)


def test_groups_do_not_depend_on_the_number_of_slots(model, tokenizer, engine):
    narrow = LocalEngine(model("qwen3"), tokenizer, slots=2, cache_tokens=2 * 48)
    step_groups = live(engine, tokenizer).next(0, Cursor(), {}).groups
    assert signature(step_groups) == signature(live(narrow, tokenizer).next(0, Cursor(), {}).groups)


def test_a_single_turn_is_the_completion_itself(engine, tokenizer):
    heard = []
    groups = live(engine, tokenizer, on_done=heard.append).next(0, Cursor(), {}).groups
    for rollout in (r for g in groups for r in g.rollouts):
        (turn,) = rollout.turns
        assert turn.author == "policy"
        assert rollout.versions == ((0, len(turn.token_ids)),)
        assert rollout.text == tokenizer.decode(turn.token_ids, skip_special_tokens=True)
        assert rollout.columns == {}
        assert (rollout.answer, rollout.counts) == (None, {})
    assert sum(heard) == 12


def test_environments_answer_between_the_policys_turns(engine, tokenizer):
    groups = live(engine, tokenizer, environments=TWICE).next(0, Cursor(), {}).groups
    for group in groups:
        for rollout in group.rollouts:
            first, seen, second = rollout.turns
            assert [t.author for t in rollout.turns] == ["policy", "environment", "policy"]
            assert seen.token_ids.tolist() == [2, 3]
            assert seen.logprobs.tolist() == [0.0, 0.0]
            a, b = len(first.token_ids), len(second.token_ids)
            written = [turn.author == "policy" for turn in rollout.turns for _ in turn.token_ids]
            assert written == [True] * a + [False] * 2 + [True] * b
            assert rollout.versions == ((0, a + b),)
            expected = np.zeros(a + 2 + b)
            expected[a - 1], expected[-1] = 1.0, 2.0
            assert rollout.columns["turn_rewards"].tolist() == expected.tolist()
            assert rollout.answer == tokenizer.decode(second.token_ids, skip_special_tokens=True)
            assert rollout.counts == {"turns": 2.0, "long": float((a > 3) + (b > 3))}


def test_a_second_turn_has_read_everything_before_it(engine, tokenizer):
    groups = live(engine, tokenizer, environments=TWICE).next(0, Cursor(), {}).groups
    batch = RolloutBatch.of(groups)
    rows = list(batch.sequences.tokens)
    for i, (ids, rescored) in enumerate(zip(rows, engine.logprobs(rows, 1.0), strict=True)):
        mask = batch.sequences.loss_mask.row(i)
        assert len(ids) == len(mask)
        np.testing.assert_allclose(batch.sampled_logprobs.row(i)[mask], rescored[mask], atol=1e-4)


def test_an_episode_ends_where_its_length_is_used_up(engine, tokenizer):
    # The longest prompts have 5 tokens: 6 of an answer and 2 of an observation leave 1 of 14.
    source = live(engine, tokenizer, environments=TWICE, max_len=14)
    groups = source.next(0, Cursor(), {}).groups
    totals = [len(g.prompt.token_ids) + len(r.token_ids) for g in groups for r in g.rollouts]
    assert max(totals) == 14
    CLOSED.clear()
    tight = live(engine, tokenizer, environments=TWICE, max_len=9).next(0, Cursor(), {}).groups
    ended = [r for g in tight for r in g.rollouts if len(r.turns) == 1]
    assert ended
    assert all(r.finish_reason == "length" for r in ended)
    # The turn before the limit was heard: its reward and its counts stay.
    assert all(r.columns["turn_rewards"].sum() == 1.0 for r in ended)
    assert all(r.counts["turns"] == 1.0 for r in ended)
    assert [1] * len(ended) == CLOSED  # what the environment holds for them is given back


def test_the_samples_of_a_prompt_share_what_their_turns_have_in_common(engine, tokenizer):
    """One tree a prompt: samples that say the same go one way until they part."""
    source = live(engine, tokenizer, environments=TWICE, n=4)
    batch = RolloutBatch.of(source.next(0, Cursor(), {}).groups)
    for group in range(4):
        rows = [
            batch.sequences.tokens.row(i) for i in np.flatnonzero(batch.sequences.group == group)
        ]
        same = [*rows, rows[0]]  # an agent that took the same way twice
        tree = grow(same, min_shared=1)
        parts = [same[segment.owner][segment.begin : segment.end] for segment in tree.segments]
        spelled = [np.concatenate([parts[i] for i in path]) for path in tree.paths]
        assert all(np.array_equal(a, b) for a, b in zip(spelled, same, strict=True))
        assert tree.paths[-1] == tree.paths[0]
        assert len({path[0] for path in tree.paths}) == 1  # the prompt is the one root
        assert tree.n_tokens < sum(map(len, rows))


def test_two_prompts_of_one_ticket_are_refused(engine, tokenizer):
    prompts = [Prompts().draw(1, 0)] * 2
    with pytest.raises(ValueError, match="same ticket"):
        sample_groups(
            engine, LengthScorer(), prompts, SamplingSpec(1, SamplingSettings(), 0), tokenizer
        )


def test_groups_that_never_come_back_are_an_error_and_no_hang(engine, tokenizer):
    class Losing(LengthScorer):
        def submit(self, prompt, rollouts):
            if prompt.ticket != 2:
                super().submit(prompt, rollouts)

    with pytest.raises(RunError, match="1 groups never came back"):
        live(engine, tokenizer, Losing()).next(0, Cursor(), {})
