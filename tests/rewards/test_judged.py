"""Judges through the workers: many at a time, failures by policy, and nobody else held up."""

import threading
import time

import numpy as np
import pytest

from helpers.chat_server import Answer, chat_server
from postgrad.core.errors import RunError, UsageError
from postgrad.rewards.settings import RewardSettings


@pytest.fixture
def hostile():
    """A server that does what the sample says, and a reward that asks it."""

    def script(prompt, times):
        for word, answer in {
            "good": Answer('{"score": 10}'),
            "poor": Answer('{"score": 0}'),
            "slow": Answer('{"score": 10}', delay=600.0),
            "broken": Answer(status=500, raw=b"out of memory"),
            "nonsense": Answer("As a language model"),
            "high": Answer('{"score": 10000}'),
            "busy": Answer('{"score": 5}') if times else Answer(status=429),
        }.items():
            if f">\n{word}\n<" in prompt:
                return answer
        raise AssertionError(prompt)

    with chat_server(script) as server:

        def reward(**settings):
            options = {"timeout": 60.0, "retries": 1, "backoff": 0.01, "model": "m"}
            return RewardSettings(
                **({"type": "judge", "base_url": server.url} | options | settings)
            )

        yield reward, server


@pytest.mark.slow
def test_a_judge_that_fails_is_recorded_with_its_cause_and_never_a_zero(
    hostile, make_scorer, make_prompt, make_rollouts
):
    reward, _ = hostile
    scorer, hasty = make_scorer(reward()), make_scorer(reward(timeout=0.2))
    texts = ["good", "broken", "nonsense", "high", "busy", "poor"]
    (group,) = scorer.score([(make_prompt(), make_rollouts(texts))])
    np.testing.assert_array_equal(group.total, [1.0, *[np.nan] * 3, 0.5, 0.0])
    np.testing.assert_array_equal(group.rewards["judge"], group.total)
    assert [failure.sample for failure in group.failures] == [1, 2, 3]
    assert {failure.cause for failure in group.failures} == {"error"}
    messages = [failure.message for failure in group.failures]
    assert "HTTP 500 Internal Server Error: out of memory (2 tries)" in messages[0]
    assert "no JSON object with score in the reply 'As a language model'" in messages[1]
    assert "10000 is not from 0 to 10" in messages[2]
    (late,) = hasty.score([(make_prompt(), make_rollouts(["slow"]))])
    np.testing.assert_array_equal(late.total, [np.nan])
    assert late.failures[0].cause == "error"
    assert "TimeoutError: timed out (2 tries)" in late.failures[0].message
    assert group.details["judge"][0] == {"grades": {"score": 10.0}, "reply": '{"score": 10}'}


@pytest.mark.parametrize(
    ("policy", "total"), [("score", [1.0, -3.0, -3.0]), ("drop_group", [np.nan] * 3)]
)
def test_a_judge_that_fails_is_dealt_with_by_policy(
    hostile, make_scorer, make_prompt, make_rollouts, policy, total
):
    reward, _ = hostile
    scorer = make_scorer(reward(on_failure=policy, failure_score=-3.0))
    (group,) = scorer.score([(make_prompt(), make_rollouts(["good", "nonsense", "broken"]))])
    np.testing.assert_array_equal(group.total, total)
    np.testing.assert_array_equal(group.rewards["judge"], [1.0, np.nan, np.nan])
    assert [failure.sample for failure in group.failures] == [1, 2]


def test_a_judge_that_is_down_fails_every_sample_and_the_step(
    make_scorer, make_prompt, make_rollouts
):
    down = RewardSettings(
        type="judge", base_url="http://127.0.0.1:9/v1", model="m", retries=0, backoff=0.0
    )
    scorer = make_scorer(down)
    groups = scorer.score([(make_prompt(), make_rollouts(["good", "poor"]))])
    with pytest.raises(RunError, match=r"failed on 2 of 2 scored samples .*refused"):
        scorer.require_scored(groups)


@pytest.mark.slow
def test_a_judge_that_stays_on_past_its_wall_clock_is_tried_twice_and_fails(
    hostile, make_scorer, make_prompt, make_rollouts, timed
):
    """The pool's own limit is the last resort: its worker hangs where no timeout is met."""
    timed("slow")
    reward, server = hostile
    scorer = make_scorer(reward(wall_seconds=0.4))
    (group,) = scorer.score([(make_prompt(), make_rollouts(["slow", "good"]))])
    (failure,) = group.failures
    assert (failure.sample, failure.cause) == (0, "wall_clock")
    assert failure.message == "lasted more than 0.4 s of wall-clock time"
    assert group.total[1] == 1.0
    assert len(server.requests) == 3


def test_judges_wait_side_by_side_and_hold_up_no_other_verifier(
    make_scorer, make_prompt, make_rollouts
):
    three = threading.Event()

    def when_three_wait(prompt, times):
        if server.held == 3:
            three.set()
        assert three.wait(300), "they did not wait side by side"
        return Answer('{"score": 10}')

    with chat_server(when_three_wait) as server:
        judge = RewardSettings(type="judge", base_url=server.url, model="m", timeout=600)
        scorer = make_scorer(RewardSettings(type="gsm8k"), judge, waiting_workers=3)
        assert scorer.check([make_prompt()]) == []
        texts = [f"#### {i}" for i in range(12)]
        (group,) = scorer.score([(make_prompt(), make_rollouts(texts))])
    assert group.rewards["judge"].tolist() == [1.0] * 12
    assert group.rewards["gsm8k"].tolist() == [float(i == 7) for i in range(12)]


def test_a_waiting_verifier_of_ones_own_gets_workers_of_its_own(
    make_scorer, make_prompt, make_rollouts, obeying
):
    """Were they in one worker, the pids would be the same."""
    pids = {}
    for waits in (False, True):
        rewards = obeying(name="a"), obeying(name="b", waits=waits)
        scorer = make_scorer(*rewards, workers=1, waiting_workers=1)
        (group,) = scorer.score([(make_prompt(), make_rollouts(["score of the pid"]))])
        pids[waits] = {group.details["a"][0], group.details["b"][0]}
    assert len(pids[False]) == 1
    assert len(pids[True]) == 2


def test_a_key_that_is_not_set_is_told_before_training(hostile, make_scorer, make_prompt):
    reward, _ = hostile
    scorer = make_scorer(reward(api_key_env="POSTGRAD_TEST_NO_SUCH_KEY"))
    with pytest.raises(UsageError, match=r"variable POSTGRAD_TEST_NO_SUCH_KEY \(api_key_env\)"):
        scorer.check([make_prompt()])


def test_polling_without_waiting_never_waits_for_a_judge(
    hostile, make_scorer, make_prompt, make_rollouts
):
    reward, _ = hostile
    scorer = make_scorer(reward())
    scorer.submit(make_prompt(), make_rollouts(["good"]))
    done = []
    while not done:
        done = scorer.completed(wait=False)
        time.sleep(0.01)
    assert done[0].total.tolist() == [1.0]
