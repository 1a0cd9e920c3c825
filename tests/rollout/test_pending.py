"""Samples under way with environments that may not be stepped again: their replies are recorded."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from helpers.rollouts import Chosen, Numbers, Ticking, Words
from postgrad.core.errors import RunError
from postgrad.core.process import done
from postgrad.core.records import EpisodeFailure, Experts, FinishReason, PlacedImage, Prompt
from postgrad.rollout.engine import Completion
from postgrad.rollout.environment import (
    Environment,
    Environments,
    Observation,
    SamplingSpec,
    Step,
)
from postgrad.rollout.pending import REPLIES, to_arrays, to_groups
from postgrad.rollout.sampling import GroupSampler, OpenGroup
from postgrad.rollout.settings import SamplingSettings

SAMPLING = SamplingSettings(max_new_tokens=40)


class Dice:
    """Says another number at every step of any sample, so that no second run says the same."""

    deterministic, concurrent = False, 4
    turn_tokens: Sequence[int] = ()
    begins = False

    def __init__(self, first: int, goes_on: bool = True) -> None:
        self.drawn, self.goes_on = first, goes_on
        self.resumed: list[tuple[int, list[int]]] = []

    def reset(self, prompt: Prompt, sample: int) -> "Dice":
        return self

    def resume(
        self,
        prompt: Prompt,
        sample: int,
        opening: Observation | None,
        recorded: Sequence[tuple[Completion, Observation]],
    ) -> "Dice | None":
        self.resumed.append((sample, [int(reply.token_ids[0]) for _, reply in recorded]))
        return self if self.goes_on else None

    def step(self, response: Completion) -> Step:
        self.drawn += 1
        failure = None
        if response.sample == 2:
            failure = EpisodeFailure("crash", "it fell")
        reply_ids = np.array([self.drawn], np.int32)
        over = response.turn == 2 or failure is not None
        observation = Observation(reply_ids, over, 0.5, {"turns": 1.0}, failure)
        return Step(done(observation), lambda ended: ended)

    def close(self) -> None:
        """Keeps nothing of an episode."""


def cut_run(environment: Environment) -> GroupSampler:
    """Sample 0 has had a turn and is in its second, sample 1 in its first, sample 2 has failed."""
    engine = Ticking(lambda ticket, sample, turn: (2, 9, 3)[sample] if turn == 0 else 8)
    spec = SamplingSpec(3, SAMPLING, 0, Environments({None: environment}))
    sampler = GroupSampler(engine, Chosen(lambda t, s: 1.0), spec, Words())
    sampler.start([Numbers(100).draw(0, 0)])
    for _ in range(2):
        sampler._take(engine.completed())
        sampler._observe(list(sampler._steps))
    for request in engine.cut():
        sampler.groups[0].samples[request.sample_ids[0]].request = request
    return sampler


def back(arrays, environment):
    spec = SamplingSpec(3, SAMPLING, 0, Environments({None: environment}))
    groups, redrawn = to_groups(arrays, lambda t: Numbers(100).draw(t, 0), spec, Words())
    return groups[0], redrawn


def test_recorded_replies_are_taken_and_the_environment_is_not_stepped():
    before = cut_run(Dice(10)).groups
    arrays = to_arrays(before, {0: 0})
    other = Dice(500)
    group, redrawn = back(arrays, other)
    assert (other.drawn, redrawn) == (500, 0)
    assert other.resumed == [(0, [11])]
    assert group.left == before[0].left == 2
    for now, then in zip(group.samples, before[0].samples, strict=True):
        assert [o.token_ids.tolist() for o in now.observations] == [
            o.token_ids.tolist() for o in then.observations
        ]
        assert (now.request is None) == (then.request is None)
        if now.request is not None and then.request is not None:
            assert now.request.prefix.tolist() == then.request.prefix.tolist()
            assert now.request.turn == then.request.turn
    rollout = group.samples[2].rollout(Words())
    assert rollout.failure == EpisodeFailure("crash", "it fell")
    assert rollout.counts == {"turns": 1.0}


def test_a_sample_whose_environment_cannot_go_on_is_drawn_from_its_start_and_counted():
    arrays = to_arrays(cut_run(Dice(10)).groups, {0: 0})
    group, redrawn = back(arrays, Dice(500, goes_on=False))
    assert redrawn == 1
    first = group.samples[0]
    assert (first.completions, first.observations) == ([], [])
    assert first.request is not None
    assert (first.request.turn, first.request.written) == (0, None)
    assert group.samples[1].request is not None
    assert group.samples[1].request.position == 3  # it had asked the environment nothing yet
    assert group.left == 2


def test_without_the_record_an_environment_that_is_not_deterministic_is_never_stepped_again():
    arrays = dict(to_arrays(cut_run(Dice(10)).groups, {0: 0}))
    del arrays[REPLIES]
    with pytest.raises(RunError, match="it lacks what the environment said"):
        back(arrays, Dice(500))


def test_images_that_were_shown_come_back_by_their_hashes():
    image = PlacedImage("ab" * 32, np.array([1, 2]), (2, 1))
    spec = SamplingSpec(3, SAMPLING, 0, Environments({None: Dice(10)}))
    group = OpenGroup(Numbers(100).draw(0, 0), spec)
    turn = np.array([5, 6], np.int32), np.array([-0.5, -0.25], np.float32)
    group.samples[1].take(Completion(0, 1, 0, *turn, "stop", ((0, 2),), ""))
    shown = Observation(np.array([7, 90, 90], np.int32), done=False, images=(image,))
    request = group.samples[1].observe(shown)
    again, _ = back(to_arrays({0: group}, {0: 0}), Dice(500))
    for asked in (request, again.samples[1].request):
        assert asked is not None
        (placed,) = asked.images
        before = len(group.prompt.token_ids) + 2
        assert (placed.digest, placed.at.tolist()) == ("ab" * 32, [before + 1, before + 2])
        assert asked.token_ids[placed.at].tolist() == [90, 90]
        assert placed.grid == (2, 1)


@pytest.mark.parametrize("end", ["stop", "length", "dead_end"])
def test_how_a_sample_ended_comes_back_with_it(end: FinishReason) -> None:
    """Of a group whose other samples are under way."""
    spec = SamplingSpec(3, SAMPLING, 0, Environments({None: Dice(10)}))
    group = OpenGroup(Numbers(100).draw(0, 0), spec)
    turn = np.array([5, 6], np.int32), np.array([-0.5, -0.25], np.float32)
    group.samples[1].take(Completion(0, 1, 0, *turn, end, ((0, 2),), ""))
    group.samples[1].observe(Observation(np.zeros(0, np.int32), done=True))
    group.left -= 1
    again, _ = back(to_arrays({0: group}, {0: 0}), Dice(500))
    rollout = again.samples[1].rollout(Words())
    assert rollout.finish_reason == end
    assert rollout.turns[0].token_ids.tolist() == [5, 6]
    assert again.left == 2


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"{", "cannot be read"),
        (b"[]", "fewer replies"),
        (b'[{"token_ids": ["a"]}]', "cannot be read"),
        (b"[[1], 2]", "cannot be read"),
        (
            b'[{"token_ids": [1], "done": true, "reward": 0, "counts": {}, "failure": null, '
            b'"images": [{"sha256": "../a", "runs": [[0, 1]], "grid": null, "mutual": false}]}]',
            "no SHA-256",
        ),
    ],
)
def test_replies_that_are_none_are_refused(text, why):
    arrays = dict(to_arrays(cut_run(Dice(10)).groups, {0: 0}))
    arrays[REPLIES] = np.frombuffer(text, np.uint8)
    with pytest.raises(RunError, match=why):
        back(arrays, Dice(500))


def test_of_several_environments_only_those_that_are_not_deterministic_have_their_replies() -> None:
    """And only their turns take them: the others are stepped again."""

    class Sure(Dice):
        deterministic = True

    def groups_of(sure: Dice, dice: Dice) -> tuple[SamplingSpec, dict[int, OpenGroup]]:
        spec = SamplingSpec(1, SAMPLING, 0, Environments({"sure": sure, "dice": dice}))
        prompts = [
            replace(Numbers(9).draw(t, 0), environment=name)
            for t, name in enumerate(["sure", "dice", "sure"])
        ]
        return spec, {prompt.ticket: OpenGroup(prompt, spec) for prompt in prompts}

    _, groups = groups_of(Sure(10), Dice(20))
    turn = np.array([5, 6], np.int32), np.array([-0.5, -0.25], np.float32)
    for ticket, group in groups.items():
        step = group.samples[0].take(Completion(ticket, 0, 0, *turn, "stop", ((0, 2),), ""))
        group.samples[0].observe(step.result())
    arrays = to_arrays(groups, dict.fromkeys(groups, 0))
    assert [reply["token_ids"] for reply in json.loads(arrays[REPLIES].tobytes())] == [[21]]
    sure, dice = Sure(30), Dice(500)
    spec, again = groups_of(sure, dice)
    back_again, redrawn = to_groups(arrays, lambda t: again[t].prompt, spec, Words())
    replies = [group.samples[0].observations[0].token_ids.tolist() for group in back_again]
    assert (replies, redrawn) == ([[31], [21], [32]], 0)
    assert (sure.drawn, dice.drawn, dice.resumed) == (32, 500, [(0, [21])])


def with_experts(group: OpenGroup) -> None:
    """Two turns of sample 0 with what stands before them, the second one under way; sample 1 has
    ended. Every token's expert is its number in the sequence, 100 more where it is computed again.
    """

    def routed(start: int, tokens: int, again: int = 0) -> Experts:
        numbers = np.arange(start, start + tokens, dtype=np.int16)
        numbers[:again] += 100
        numbers[-1] = -1
        return np.repeat(numbers, 2).reshape(-1, 2, 1)

    ids = np.array([4, 5, 6], np.int32)
    turn = (ids, np.zeros(3, np.float32))
    for sample in group.samples[:2]:
        first = Completion(0, 0, 0, *turn, "stop", ((0, 3),), "", routed(0, 5))
        sample.take(first)
        sample.observe(Observation(np.array([9], np.int32), done=False))
        assert sample.request is not None
        begun = sample.request.turn_with(*turn, ((0, 3),), routed(0, 9, again=5))
        if sample is group.samples[0]:
            sample.continue_turn(begun)
        else:
            last = Completion(0, 1, 1, *turn, "stop", ((0, 3),), "", begun.experts)
            sample.take(last)
            sample.observe(Observation(np.zeros(0, np.int32), done=True))
            group.left -= 1


def test_experts_are_kept_as_they_were_chosen_first_and_come_back() -> None:
    """The last token of a turn and the environment's are computed with the next turn."""
    spec = SamplingSpec(3, SAMPLING, 0, Environments({None: Dice(10)}))
    group = OpenGroup(Numbers(100).draw(0, 0), spec)
    with_experts(group)
    arrays = to_arrays({0: group}, {0: 0})
    assert arrays["experts"].shape == (5 + 5 + 5 + 5, 2, 1)  # one that was missing, then the news
    again, _ = back(arrays, Dice(500))
    for ended in (group.samples[1], again.samples[1]):
        rollout = ended.rollout(Words())
        assert rollout.experts is not None
        # token 4 had none before the second turn, which computed it again
        assert rollout.experts[:, 0, 0].tolist() == [0, 1, 2, 3, 104, 5, 6, 7, -1]
        assert [len(turn.token_ids) for turn in rollout.turns] == [3, 1, 3]
        assert rollout.prompt_experts is not None
        assert len(rollout.prompt_experts) == 2
    for sample in (group.samples[0], again.samples[0]):
        request = sample.request
        assert request is not None
        assert request.written is not None
        # The engine goes on: it computes all of the prefix again, and draws two tokens more.
        numbers = np.repeat(np.arange(200, 211, dtype=np.int16), 2).reshape(-1, 2, 1)
        drawn = np.array([7, 8], np.int32)
        turn = request.turn_with(drawn, np.zeros(2, np.float32), ((1, 2),), numbers)
        sample.take(Completion(0, 0, 1, turn.token_ids, turn.logprobs, "stop", turn.versions, "",
                               turn.experts))  # fmt: skip
        sample.observe(Observation(np.zeros(0, np.int32), done=True))
        experts = sample.rollout(Words()).experts
        assert experts is not None
        assert experts[:, 0, 0].tolist() == [0, 1, 2, 3, 104, 5, 6, 7, 208, 209, 210]


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.pop("routed"),
        lambda a: a.update(experts=a["experts"][1:]),
        lambda a: a.update(experts=a["experts"].astype(np.int64)),
        lambda a: a.update(experts=a["experts"][:, :, 0]),
        lambda a: a.update(routed=a["routed"][::-1] * 0 + np.array([1, 0, 19, 0])),
    ],
)
def test_experts_that_do_not_fit_the_turns_are_refused(change: Any) -> None:
    spec = SamplingSpec(3, SAMPLING, 0, Environments({None: Dice(10)}))
    group = OpenGroup(Numbers(100).draw(0, 0), spec)
    with_experts(group)
    arrays = dict(to_arrays({0: group}, {0: 0}))
    change(arrays)
    with pytest.raises(RunError, match="do not fit"):
        back(arrays, Dice(500))
