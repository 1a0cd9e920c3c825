"""Verifiers that see all samples of a prompt at once."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from postgrad.core.errors import RunError, UsageError
from postgrad.core.records import EpisodeFailure
from postgrad.rewards.registry import build
from postgrad.rewards.settings import RewardSettings

GSM8K = RewardSettings(type="gsm8k")
FAILING = {
    "one too few": ("error", "NoScore: returned 2 scores for 3 samples"),
    "one too many": ("error", "NoScore: returned 4 scores for 3 samples"),
    "none": ("error", "NoScore: returned None, which is no list of scores"),
    "number": ("error", "NoScore: returned a float, which is no list of scores"),
    "text": ("error", "NoScore: returned '111', which is no list of scores"),
    "mapping": ("error", "NoScore: returned a dict, which is no list of scores"),
    "set": ("error", "NoScore: returned a set, which is no list of scores"),
    "nan": ("error", "NoScore: returned nan for sample 2, which is no score"),
    "none among them": ("error", "NoScore: returned None for sample 1, which is no number"),
    "raise": ("error", "ValueError: cannot compare these (grouping.py:"),
    "exit": ("error", "SystemExit: bye"),
    "spin": ("cpu_time", "used more than 0.5 s of CPU time"),
}
OUTSIDE = {
    "set as detail": ("error", "the detail of the score is no JSON value"),
    "crash": ("crash", "the worker exited with code 3; it printed: these are my last words"),
}
INSIDE = {
    "set as detail": ("error", "TypeError: Object of type set is not JSON serializable"),
    "crash": ("crash", "the process of the score ended with exit code 3"),
    "forge": ("error", "NoScore: returned 1 scores for 3 samples"),
}


def grouping(name, **settings):
    return RewardSettings(type=f"grouping:{name}", **settings)


def obeying(**settings):
    return grouping("obey", cpu_seconds=0.5, wall_seconds=60.0, **settings)


@pytest.fixture
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    yield
    sys.modules.pop("grouping", None)


@pytest.mark.parametrize("sandbox", [False, True])
def test_a_function_of_rollouts_scores_a_group_at_once(
    make_scorer, make_prompt, make_rollouts, sandbox
):
    scorer = make_scorer(grouping("spread", factor=2.0, sandbox=sandbox, cpu_seconds=9.0), GSM8K)
    groups = [["1", "2", "6"], ["4"], ["0", "10"]]
    pairs = [(make_prompt(t), make_rollouts(texts, t)) for t, texts in enumerate(groups)]
    scored = scorer.score(pairs)
    assert [group.rewards["spread"].tolist() for group in scored] == [
        [4.0, 2.0, 6.0],  # from the mean 3
        [0.0],
        [10.0, 10.0],
    ]
    assert scored[0].rewards["gsm8k"].tolist() == [0.0, 0.0, 0.0]
    assert scorer.of_groups() == ["spread"]


def test_a_class_that_overrides_score_group_does_too(make_scorer, make_prompt, make_rollouts):
    scorer = make_scorer(grouping("Longest"))
    bad = scorer.check([make_prompt(0), make_prompt(1, answer="")])
    assert [(prompt.ticket, reason) for prompt, reason in bad] == [
        (1, "Longest: there is no answer")
    ]
    (group,) = scorer.score([(make_prompt(), make_rollouts(["ab", "a", "abc", "abc"]))])
    assert group.total.tolist() == [0.0, 0.0, 1.0, 1.0]
    assert group.details["Longest"] == ({"rank": 1}, {"rank": 2}, {"rank": 0}, {"rank": 0})


def test_samples_whose_environment_failed_are_not_in_the_group(
    make_scorer, make_prompt, make_rollouts
):
    scorer = make_scorer(grouping("seen"))
    rollouts = make_rollouts(["a", "b", "c", "d"])
    gone = EpisodeFailure("crash", "the server is gone")
    broken = [replace(r, failure=gone) if r.sample in (0, 2) else r for r in rollouts]
    none = [replace(r, failure=gone, ticket=1) for r in rollouts]
    group, lost = scorer.score([(make_prompt(), broken), (make_prompt(1), none)])
    np.testing.assert_array_equal(group.rewards["seen"], [math.nan, 2.0, math.nan, 2.0])
    assert group.details["seen"] == (None, [1, 3], None, [1, 3])
    assert {failure.component for failure in (*group.failures, *lost.failures)} == {"environment"}
    assert not lost.kept.any()


@pytest.mark.parametrize(
    ("sandbox", "deeds"), [(False, FAILING | OUTSIDE), (True, FAILING | INSIDE)]
)
def test_a_failure_is_one_of_every_sample_of_the_group(
    make_scorer, make_prompt, make_rollouts, sandbox, deeds
):
    scorer = make_scorer(obeying(sandbox=sandbox), GSM8K)
    pairs = [
        (make_prompt(t), make_rollouts([deed, "#### 7", "x"], t))
        for t, deed in enumerate([*deeds, "0.25"])
    ]
    *failed, well = scorer.score(pairs)
    for group, (deed, (cause, message)) in zip(failed, deeds.items(), strict=True):
        assert [(f.sample, f.component, f.cause) for f in group.failures] == [
            (sample, "obey", cause) for sample in range(3)
        ], deed
        assert all(f.message.startswith(message) for f in group.failures), group.failures[0]
        np.testing.assert_array_equal(group.rewards["obey"], [math.nan] * 3)
        np.testing.assert_array_equal(group.total, [math.nan] * 3)
        assert group.rewards["gsm8k"].tolist() == [0.0, 1.0, 0.0]
        assert not group.kept.any()
    assert well.total.tolist() == [0.25, 1.25, 0.25]
    with pytest.raises(RunError, match=f"failed on {3 * len(deeds)} of {3 * len(deeds) + 3} "):
        scorer.require_scored([*failed, well])


def test_limits_of_time_are_of_a_group(make_scorer, make_prompt, make_rollouts, timed):
    timed("sleep")
    scorer = make_scorer(grouping("obey", cpu_seconds=0.15, wall_seconds=0.3))
    pairs = [
        (make_prompt(t), make_rollouts([deed, "1"], t)) for t, deed in enumerate(["sleep", "2"])
    ]
    failed, well = scorer.score(pairs)
    assert [(f.cause, f.message) for f in failed.failures] == [
        ("wall_clock", "lasted more than 0.3 s of wall-clock time for the 2 samples of a group")
    ] * 2
    assert well.total.tolist() == [2.0, 2.0]
    long = make_scorer(obeying())
    (spun,) = long.score([(make_prompt(), make_rollouts(["spin", "1", "2"]))])
    assert spun.failures[2].message.endswith("of CPU time for the 3 samples of a group")


@pytest.mark.parametrize(
    ("policy", "wanted"), [("drop_sample", math.nan), ("drop_group", math.nan), ("score", -7.0)]
)
def test_the_policy_of_the_component_decides_what_a_failed_group_is_worth(
    make_scorer, make_prompt, make_rollouts, policy, wanted
):
    scorer = make_scorer(obeying(on_failure=policy, failure_score=-7.0))
    (group,) = scorer.score([(make_prompt(), make_rollouts(["raise", "1"]))])
    np.testing.assert_array_equal(group.total, [wanted, wanted])
    np.testing.assert_array_equal(group.rewards["obey"], [math.nan, math.nan])


def test_stop_run_names_the_component_and_why(make_scorer, make_prompt, make_rollouts):
    scorer = make_scorer(obeying(on_failure="stop_run"))
    with pytest.raises(RunError) as error:
        scorer.score([(make_prompt(5), make_rollouts(["one too few", "1"], 5))])
    assert str(error.value).endswith(
        "sample 0 of ticket 5 (row 15 of set): obey: error: NoScore: returned 1 scores for 2 "
        "samples"
    )


@pytest.mark.parametrize("sandbox", [False, True])
def test_arrays_and_details_of_each_sample_are_taken(
    make_scorer, make_prompt, make_rollouts, sandbox
):
    scorer = make_scorer(obeying(sandbox=sandbox).model_copy(update={"cpu_seconds": 9.0}))
    texts = ["array", "x", "y"], ["long details", *"abcdefg"]
    array, long = scorer.score(
        [(make_prompt(t), make_rollouts(these, t)) for t, these in enumerate(texts)]
    )
    assert array.total.tolist() == [0.0, 1.0, 1.0]  # of numpy's bools
    assert long.details["obey"] == ("x" * 60_000,) * 8


def test_scores_of_groups_do_not_depend_on_the_number_of_workers(
    make_scorer, make_prompt, make_rollouts
):
    pairs = [
        (make_prompt(t), make_rollouts([str(t * s % 7) for s in range(5)] if t % 9 else ["x"], t))
        for t in range(40)
    ]
    serial, parallel = (
        make_scorer(grouping("spread"), GSM8K, workers=workers).score(pairs) for workers in (1, 3)
    )
    for alone, among in zip(serial, parallel, strict=True):
        assert alone.total.tobytes() == among.total.tobytes()
        assert alone.failures == among.failures
    assert [len(group.failures) for group in serial].count(1) == 5


def test_only_a_second_parameter_called_rollouts_makes_a_verifier_of_groups(importable):
    assert build(grouping("spread")).scores_groups()
    assert build(grouping("Longest")).scores_groups()
    assert not build(grouping("every")).scores_groups()
    assert not build(GSM8K).scores_groups()
    with pytest.raises(UsageError, match=r"cannot be called with \(prompt, rollouts, factr=\)"):
        build(grouping("spread", factr=2.0))
