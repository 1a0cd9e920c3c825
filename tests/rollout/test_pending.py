"""Samples under way with environments that may not be stepped again: their replies are recorded."""

from collections.abc import Sequence

import numpy as np
import pytest

from helpers.rollouts import Chosen, Numbers, Ticking, Words
from postgrad.core.errors import RunError
from postgrad.core.process import done
from postgrad.core.records import EpisodeFailure, Prompt
from postgrad.rollout.engine import Completion
from postgrad.rollout.environment import Drawing, Environment, Observation, Step
from postgrad.rollout.pending import REPLIES, to_arrays, to_groups
from postgrad.rollout.sampling import GroupSampler
from postgrad.rollout.settings import SamplingSettings

SAMPLING = SamplingSettings(max_new_tokens=40)


class Dice:
    """Says another number at every step of any sample, so that no second run says the same."""

    deterministic, concurrent = False, 4
    turn_tokens: Sequence[int] = ()

    def __init__(self, first: int, goes_on: bool = True) -> None:
        self.said, self.goes_on = first, goes_on
        self.resumed: list[tuple[int, list[int]]] = []

    def reset(self, prompt: Prompt, sample: int) -> "Dice":
        return self

    def resume(
        self, prompt: Prompt, sample: int, recorded: Sequence[tuple[Completion, Observation]]
    ) -> "Dice | None":
        self.resumed.append((sample, [int(said.token_ids[0]) for _, said in recorded]))
        return self if self.goes_on else None

    def step(self, response: Completion) -> Step:
        self.said += 1
        failure = None
        if response.sample == 2:
            failure = EpisodeFailure("crash", "it fell")
        told = np.array([self.said], np.int32)
        over = response.turn == 2 or failure is not None
        said = Observation(told, over, 0.5, {"turns": 1.0}, failure)
        return Step(done(said), lambda ended: ended)


def cut_run(environment: Environment) -> GroupSampler:
    """Sample 0 has had a turn and is in its second, sample 1 in its first, sample 2 has failed."""
    engine = Ticking(lambda ticket, sample, turn: (2, 9, 3)[sample] if turn == 0 else 8)
    drawing = Drawing(3, SAMPLING, 0, environment)
    sampler = GroupSampler(engine, Chosen(lambda t, s: 1.0), drawing, Words())
    sampler.start([Numbers(100).draw(0, 0)])
    for _ in range(2):
        sampler._take(engine.completed())
        sampler._observe(list(sampler._steps))
    for request in engine.cut():
        sampler.groups[0].samples[request.sample_ids[0]].request = request
    return sampler


def back(arrays, environment):
    drawing = Drawing(3, SAMPLING, 0, environment)
    groups, redrawn = to_groups(arrays, lambda t: Numbers(100).draw(t, 0), drawing, Words())
    return groups[0], redrawn


def test_recorded_replies_are_taken_and_the_environment_is_not_stepped():
    before = cut_run(Dice(10)).groups
    arrays = to_arrays(before, {0: 0}, replies=True)
    other = Dice(500)
    group, redrawn = back(arrays, other)
    assert (other.said, redrawn) == (500, 0)
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
    arrays = to_arrays(cut_run(Dice(10)).groups, {0: 0}, replies=True)
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
    arrays = to_arrays(cut_run(Dice(10)).groups, {0: 0})
    with pytest.raises(RunError, match="it lacks what the environment said"):
        back(arrays, Dice(500))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"{", "cannot be read"),
        (b"[]", "fewer replies"),
        (b'[{"token_ids": ["a"]}]', "cannot be read"),
        (b"[[1], 2]", "cannot be read"),
    ],
)
def test_replies_that_are_none_are_refused(text, why):
    arrays = dict(to_arrays(cut_run(Dice(10)).groups, {0: 0}, replies=True))
    arrays[REPLIES] = np.frombuffer(text, np.uint8)
    with pytest.raises(RunError, match=why):
        back(arrays, Dice(500))
