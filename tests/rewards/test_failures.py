"""Whatever a verifier does, its sample fails with the right cause and the others are scored."""

import math
import os

import numpy as np
import psutil
import pytest

from postgrad.core.errors import ScoresMissing
from postgrad.rewards.settings import RewardSettings


def causes(group):
    return [(failure.sample, failure.cause) for failure in group.failures]


def test_what_raises_is_an_error_with_its_message_and_place(score):
    group = score("1", "raise", "exit", "x", "2")
    assert causes(group) == [(1, "error"), (2, "error"), (3, "error")]
    assert group.failures[0].message.startswith("ValueError: cannot read this (misbehaving.py:")
    assert group.failures[1].message.startswith("SystemExit: bye")
    assert "could not convert string to float: 'x'" in group.failures[2].message
    assert group.total[[0, 4]].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("deed", "message"),
    [
        ("none", "returned None, which is no number"),
        ("string", "returned '1.0', which is no number"),
        ("nan", "returned nan, which is no score"),
        ("inf", "returned inf, which is no score"),
        ("nan of numpy", "returned nan, which is no score"),
        ("1e39", "returned 1e+39, more than 32 bits hold, which is no score"),
        ("long integer", "returned a longer integer, more than 32 bits hold"),
        ("list", "returned a list, which is no number"),
        ("score of none", "returned None, which is no number"),
        ("set as detail", "the detail of the score is no JSON value"),
        ("nan as detail", "the detail of the score is no JSON value"),
        ("huge detail", "1000002 characters, at most 65536"),
        ("deep detail", "the detail of the score is no JSON value"),
    ],
)
def test_what_is_no_score_is_an_error(worker_answer, deed, message):
    error = worker_answer(deed)["error"]
    assert message in error
    assert "call.py" not in error  # no place of ours, where nothing went wrong


def test_numbers_and_scores_are_taken_as_they_are(worker_answer):
    assert worker_answer("true")["scores"] == [[1.0, None]]
    assert worker_answer("0.1")["scores"] == [[0.1, None]]
    assert worker_answer("score")["scores"] == [[0.5, {"why": ["a", 1, None]}]]


@pytest.mark.parametrize(
    ("deed", "wanted"),
    [
        ("true of numpy", [1.0, None]),
        ("false of numpy", [0.0, "compared"]),
        ("float32 of numpy", [0.5, None]),
        ("int of numpy", [3.0, None]),
    ],
)
def test_numbers_of_numpy_are_taken_as_pythons_are(worker_answer, deed, wanted):
    assert worker_answer(deed)["scores"] == [wanted]


@pytest.mark.parametrize("deed", ["spin", "spin in regex", "spin in child"])
def test_used_up_cpu_time_is_a_failure_of_that_sample_alone(score, deed):
    group = score("1", "2", deed, "4", "5")
    assert causes(group) == [(2, "cpu_time")]
    assert group.failures[0].message == "used more than 0.15 s of CPU time"
    assert group.total[[0, 1, 3, 4]].tolist() == [1.0, 2.0, 4.0, 5.0]


def test_sleeping_uses_no_cpu_time_and_is_no_failure(score):
    group = score("sleep a little", "1")
    assert causes(group) == []
    assert group.total.tolist() == [0.75, 1.0]


def test_a_wall_clock_overrun_is_tried_twice_and_then_a_failure(score, timed):
    timed("sleep")
    group = score("1", "sleep", "3", wall_seconds=0.3)
    assert causes(group) == [(1, "wall_clock")]
    assert group.failures[0].message == "lasted more than 0.3 s of wall-clock time"
    assert group.total[[0, 2]].tolist() == [1.0, 3.0]


@pytest.mark.slow
def test_a_verifier_that_hangs_on_every_call_ends_the_run_after_a_few(
    make_scorer, make_prompt, make_rollouts, obeying, timed
):
    def score(texts, fraction=0.1, before=(), **limits):
        """before: texts of a row that is scored before the others are."""
        reward = obeying(**({"wall_seconds": 0.1} | limits))
        scorer = make_scorer(reward, workers=4, max_failed_fraction=fraction)
        scorer.score([(make_prompt(9), make_rollouts(before, 9))] if before else [])
        return scorer.score([(make_prompt(n), make_rollouts(t, n)) for n, t in enumerate(texts)])

    timed("sleep")

    pattern = "score of 'obey' has answered none of its first 8 calls: the last one {}"
    slept = pattern.format("lasted more than 0.1 s of wall-clock time, twice")
    with pytest.raises(
        ScoresMissing, match=slept + "; one is for row 1[01] of set.* or raise its wall_seconds"
    ):
        score([["sleep"] * 5, ["sleep"] * 5])
    spun = pattern.format("used more than 0.05 s of CPU time")
    with pytest.raises(ScoresMissing, match=spun + ".* or raise its cpu_seconds"):
        score([["spin"] * 5, ["spin"] * 5], cpu_seconds=0.05)
    assert len(score([["sleep"] * 9])[0].failures) == 9  # of one row
    assert len(score([["sleep"] * 5, ["sleep"] * 5], before=["1"])[1].failures) == 5
    assert len(score([["sleep"] * 5, ["sleep"] * 5], 1.0)[1].failures) == 5


@pytest.mark.slow
def test_that_its_checks_answered_does_not_hide_that_its_scores_hang(
    make_scorer, make_prompt, make_rollouts, timed
):
    timed("1")  # and no check
    reward = RewardSettings(type="misbehaving:HangingScore", wall_seconds=0.1)
    scorer = make_scorer(reward, workers=4)
    prompts = [make_prompt(n) for n in range(2)]
    assert scorer.check(prompts) == []
    with pytest.raises(ScoresMissing, match="score of 'HangingScore' has answered none"):
        scorer.score([(prompt, make_rollouts(["1"] * 5, prompt.ticket)) for prompt in prompts])


@pytest.mark.slow
def test_a_check_that_hangs_on_every_row_ends_after_a_few(make_scorer, make_prompt):
    rewards = [RewardSettings(type="misbehaving:HangingCheck", wall_seconds=0.05)]
    with pytest.raises(
        ScoresMissing, match="check of 'HangingCheck' has answered none of its first 8 calls"
    ):
        make_scorer(*rewards, workers=4).check([make_prompt(n) for n in range(20)])


def test_a_crash_is_a_failure_of_that_sample_alone(score):
    group = score("1", "crash", "print and crash", "abort", "5")
    assert causes(group) == [(1, "crash"), (2, "crash"), (3, "crash")]
    messages = [failure.message for failure in group.failures]
    assert messages[0] == "the worker exited with code 3"
    assert messages[1] == "the worker exited with code 3; it printed: these are my last words"
    assert messages[2].startswith("the worker died of SIGABRT")
    assert group.total[[0, 4]].tolist() == [1.0, 5.0]


def test_a_crash_that_does_not_come_again_is_no_failure(score, tmp_path, monkeypatch):
    monkeypatch.setenv("POSTGRAD_TEST_MARK", str(tmp_path / "mark"))
    group = score("1", "crash once", "3", env=("POSTGRAD_TEST_MARK",))
    assert causes(group) == []
    assert group.total.tolist() == [1.0, 0.5, 3.0]


def test_a_forked_child_that_keeps_the_pipes_open_hides_no_crash(score):
    group = score("1", "close and hang", "3")
    assert causes(group) == [(1, "crash")]
    assert group.total[[0, 2]].tolist() == [1.0, 3.0]


def test_what_a_verifier_prints_or_reads_does_not_reach_the_protocol(score):
    group = score("print", "input", "3", cpu_seconds=5.0)
    assert causes(group) == [(1, "error")]
    assert group.failures[0].message.startswith("EOFError")
    assert group.total[[0, 2]].tolist() == [0.25, 3.0]


@pytest.mark.slow
def test_the_same_group_fails_the_same_way_with_any_number_of_workers(score):
    texts = ["1", "crash", "raise", "4", "print and crash", "nan", "7", "8"]
    serial, parallel = score(*texts), score(*texts, workers=3)
    assert serial.failures == parallel.failures
    assert serial.total.tobytes() == parallel.total.tobytes()
    assert math.isnan(serial.total[1])


@pytest.mark.parametrize(
    ("policy", "failed_score", "deeds"),
    [
        ("drop_sample", math.nan, ["nan", "string", "list", "none", "crash", "sleep"]),
        ("drop_group", math.nan, ["nan", "string"]),
        ("score", -7.0, ["nan", "list"]),
    ],
)
def test_a_hostile_verifier_is_recorded_by_policy_and_never_a_silent_zero(
    score, timed, policy, failed_score, deeds
):
    timed("sleep")
    settings = {"on_failure": policy, "failure_score": -7.0, "wall_seconds": 0.5}
    group = score("1", *deeds, "0", **settings)
    wanted = {"crash": "crash", "sleep": "wall_clock"}
    assert causes(group) == [(i, wanted.get(deed, "error")) for i, deed in enumerate(deeds, 1)]
    n, well = len(deeds), math.nan if policy == "drop_group" else 1.0
    np.testing.assert_array_equal(group.total, [well, *[failed_score] * n, well - 1.0])
    np.testing.assert_array_equal(group.rewards["obey"], [1.0, *[math.nan] * n, 0.0])
    assert group.kept.tolist() == [not math.isnan(score) for score in group.total]


def test_closing_leaves_no_process_behind(make_scorer, make_prompt, make_rollouts, obeying):
    before = {*psutil.Process(os.getpid()).children(recursive=True)}
    scorer = make_scorer(obeying(cpu_seconds=60.0), workers=2)
    scorer.check([])  # until a worker is ready
    scorer.submit(make_prompt(), make_rollouts(["spin in child", "sleep", "crash"]))
    scorer.completed(wait=False)
    scorer.close()
    after = {*psutil.Process(os.getpid()).children(recursive=True)} - before
    _, alive = psutil.wait_procs(after, timeout=600)  # what is killed takes a moment to end
    assert alive == []
