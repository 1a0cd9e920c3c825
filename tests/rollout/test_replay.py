"""Replaying another run's samples."""

import json

import numpy as np
import pytest

from postgrad.core.cursor import Cursor
from postgrad.core.errors import RunError, UsageError
from postgrad.core.members import member
from postgrad.core.records import Prompt, Rollout, ScoredGroup, Turn
from postgrad.rollout.records_json import group_to_json
from postgrad.rollout.replay import ReplaySource


def group(ticket, samples=2):
    prompt = Prompt(ticket, np.array([2, 3], np.int32), "q", None, "d", ticket, {})
    rollouts = tuple(
        Rollout(
            ticket, i,
            (Turn("policy", np.array([ticket, i], np.int32), np.zeros(2, np.float32)),),
            "stop", ((0, 2),), "",
        )
        for i in range(samples)
    )  # fmt: skip
    rewards = np.ones(samples)
    return ScoredGroup(prompt, rollouts, {"r": rewards}, rewards, rewards.astype(bool))


@pytest.fixture
def run(tmp_path):
    lines = [
        json.dumps(line)
        for step, tickets in [(0, (1, 0)), (1, (2,)), (2, (4, 3))]
        for ticket in tickets
        for line in group_to_json(group(ticket), step=step, decode=str)
    ]
    (tmp_path / "samples.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_steps_come_back_in_ticket_order_and_settle_their_tickets(run):
    source, cursor = ReplaySource(run), Cursor()
    seen = []
    for step in range(3):
        sampled = source.next(step, cursor, {})
        groups, cursor = sampled.groups, sampled.cursor
        seen.append([g.prompt.ticket for g in groups])
        assert all(len(g.rollouts) == 2 for g in groups)
    assert seen == [[0, 1], [2], [3, 4]]
    assert cursor == Cursor(5)


def test_any_step_can_be_the_first_so_that_a_resumed_run_replays_on(run):
    groups = ReplaySource(run / "samples.jsonl").next(2, Cursor(3), {}).groups
    assert [g.rollouts[1].token_ids.tolist() for g in groups] == [[3, 1], [4, 1]]


def test_a_step_that_was_not_recorded_is_named_with_the_last_one(run):
    with pytest.raises(RunError, match=r"no samples of step 3 \(its last is 2\)"):
        ReplaySource(run).next(3, Cursor(), {})


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"replay_path: no file .*samples.jsonl"):
        ReplaySource(tmp_path)


def test_a_broken_line_is_named_with_its_number(run):
    path = run / "samples.jsonl"
    path.write_text(path.read_text() + '{"step": 3, "tick')
    with pytest.raises(UsageError, match=r"samples.jsonl:11: not a JSON object"):
        ReplaySource(run)
    path.write_text('{"step": 3, "ticket": "x"}\n')
    with pytest.raises(UsageError, match=r"samples.jsonl:1: a sample needs .* 'ticket'"):
        ReplaySource(run)


def test_a_line_that_lacks_a_key_is_named_with_its_step(run):
    (run / "samples.jsonl").write_text('{"step": 3, "ticket": 5, "sample": 0}\n')
    with pytest.raises(UsageError, match=r"step 3, from line 1: .*prompt_token_ids"):
        ReplaySource(run).next(3, Cursor(), {})


def test_an_empty_file_is_an_error(tmp_path):
    (tmp_path / "samples.jsonl").touch()
    with pytest.raises(UsageError, match="holds no samples"):
        ReplaySource(tmp_path)


def test_a_compressed_file_is_replayed(run):
    plain = run / "samples.jsonl"
    packed = run / "samples.jsonl.gz"
    packed.write_bytes(member(plain.read_bytes()))
    plain.unlink()
    for path in (run, packed):
        groups = ReplaySource(path).next(2, Cursor(3), {}).groups
        assert [g.rollouts[1].token_ids.tolist() for g in groups] == [[3, 1], [4, 1]]


def test_thinned_samples_are_refused_with_the_way_out(run):
    path = run / "samples.jsonl"
    lines = [{**json.loads(line), "of": 4} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UsageError, match=r"2 of the 4 samples of step 1.*observe.samples"):
        ReplaySource(run)
