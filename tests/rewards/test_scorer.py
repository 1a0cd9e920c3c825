import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from postgrad.core.errors import RunError, UsageError
from postgrad.core.records import EpisodeFailure, Failure, Rollout, Turn
from postgrad.rewards.scorer import Scorer
from postgrad.rewards.settings import EnvironmentRewards, RewardSettings, ScoringSettings

GSM8K = RewardSettings(type="gsm8k")


def played(weight, on_failure="drop_sample"):
    """The environment that plays all prompts."""
    return {None: EnvironmentRewards(weight, on_failure)}


def test_components_are_weighed_and_named(make_scorer, make_prompt, make_rollouts):
    loose = RewardSettings(type="gsm8k", name="loose", weight=0.5, flexible=True)
    scorer = make_scorer(GSM8K, loose)
    texts = ["#### 7", "it is 7", "#### 8"]
    (group,) = scorer.score([(make_prompt(), make_rollouts(texts))])
    assert group.rewards["gsm8k"].tolist() == [1.0, 0.0, 0.0]
    assert group.rewards["loose"].tolist() == [1.0, 1.0, 0.0]
    assert group.total.tolist() == [1.5, 0.5, 0.0]
    assert group.details["gsm8k"] == ({"answer": "7"}, {"answer": None}, {"answer": "8"})
    assert [rollout.text for rollout in group.rollouts] == texts


def test_many_groups_come_back_in_order_whatever_the_number_of_workers(
    make_scorer, make_prompt, make_rollouts
):
    pairs = [
        (make_prompt(t, f"#### {t % 5}"), make_rollouts([f"#### {i}" for i in range(5)], t))
        for t in range(60)
    ]
    for workers in (1, 3):
        groups = make_scorer(GSM8K, workers=workers).score(pairs)
        assert [group.prompt.ticket for group in groups] == list(range(60))
        totals = np.stack([group.total for group in groups])
        np.testing.assert_array_equal(totals, np.eye(5)[np.arange(60) % 5])


def test_groups_are_scored_while_others_are_submitted(make_scorer, make_prompt, make_rollouts):
    scorer = make_scorer(GSM8K)
    done = []
    for ticket in range(20):
        scorer.submit(make_prompt(ticket), make_rollouts(["#### 7", "no"], ticket))
        done += scorer.completed(wait=False)
    while late := scorer.completed(wait=True):
        done += late
    assert sorted(group.prompt.ticket for group in done) == list(range(20))
    assert all(group.total.tolist() == [1.0, 0.0] for group in done)
    assert scorer.completed(wait=True) == []


def test_check_names_the_prompts_that_a_verifier_cannot_read(make_scorer, make_prompt):
    picky = RewardSettings(type="misbehaving:Picky", wanted="7", cpu_seconds=0.15)
    scorer = make_scorer(GSM8K, picky)
    answers = ["7", "#### 7", "seven", "raise", "spin", None]
    bad = scorer.check([make_prompt(i, answer) for i, answer in enumerate(answers)])
    assert [(prompt.ticket, reason.split(":")[0]) for prompt, reason in bad] == [
        (1, "Picky"), (2, "gsm8k"), (2, "Picky"), (3, "gsm8k"), (3, "Picky"), (4, "gsm8k"),
        (4, "Picky"), (5, "gsm8k"), (5, "Picky"),
    ]  # fmt: skip
    assert bad[0][1] == "Picky: '#### 7' is not '7'"
    assert bad[4][1].startswith("Picky: ValueError: cannot read this")
    assert bad[6][1] == "Picky: used more than 0.15 s of CPU time"


def test_metadata_reaches_the_verifier(make_scorer, make_prompt, make_rollouts):
    scorer = make_scorer(RewardSettings(type="misbehaving:Picky"))
    (group,) = scorer.score([(make_prompt(bonus=10), make_rollouts(["ab", "c\ud800"]))])
    assert group.total.tolist() == [12.0, 12.0]


def test_metadata_that_is_no_json_is_refused_with_its_row(make_scorer, make_prompt, make_rollouts):
    scorer = make_scorer(GSM8K)
    with pytest.raises(UsageError, match="row 13 of set: a verifier is sent JSON"):
        scorer.submit(make_prompt(3, when={1, 2}), make_rollouts(["x"]))


def test_stop_run_stops_at_the_first_failure(make_scorer, make_prompt, make_rollouts, obeying):
    scorer = make_scorer(obeying(on_failure="stop_run"))
    with pytest.raises(RunError) as error:
        scorer.score([(make_prompt(5), make_rollouts(["1", "raise"], 5))])
    assert "'obey' is stop_run, and it failed on sample 1 of ticket 5 (row 15 of set)" in str(
        error.value
    )


def test_a_step_in_which_too_many_samples_fail_stops_the_run(
    make_scorer, make_prompt, make_rollouts, obeying
):
    scorer = make_scorer(obeying(), max_failed_fraction=0.25)
    well, ill = [
        scorer.score([(make_prompt(), make_rollouts(texts))])
        for texts in (["1", "raise", "3", "4"], ["1", "raise", "nan", "4"])
    ]
    scorer.require_scored(well)
    with pytest.raises(RunError, match="failed on 2 of 4 scored samples"):
        scorer.require_scored(ill)


def test_a_step_is_refused_before_its_end_once_no_other_sample_can_save_it(
    make_scorer, make_prompt, make_rollouts, obeying
):
    scorer = make_scorer(obeying(), max_failed_fraction=0.25)
    groups = scorer.score([(make_prompt(), make_rollouts(["1", "raise", "nan", "4"]))])
    assert not scorer.too_many_failed(groups, 8)
    assert scorer.too_many_failed(groups, 7)


def test_whoever_waits_for_scores_is_told_that_scoring_was_ended(
    make_scorer, obeying, make_prompt, make_rollouts
):
    scorer = make_scorer(obeying(wall_seconds=60.0))
    scorer.submit(make_prompt(), make_rollouts(["sleep"]))
    scorer.halt()
    with pytest.raises(RunError, match="scoring was ended"):
        scorer.completed(wait=True)


def test_a_verifier_that_cannot_be_made_is_refused_at_the_first_call(make_scorer, make_prompt):
    def refusal(type_name, error=UsageError):
        scorer = make_scorer(RewardSettings(type=type_name))
        with pytest.raises(error) as refused:
            scorer.check([make_prompt()])
        return str(refused.value)

    assert "did you mean 'obey'?" in refusal("misbehaving:obbey")
    assert "OSError: its data is missing (misbehaving.py" in refusal("misbehaving:Unprepared")
    message = refusal("misbehaving:DiesEarly", RunError)
    assert message.startswith("a reward worker exited with code 7 before it was ready")
    assert message.endswith("it printed: no licence found")


def test_rewards_go_by_dataset_and_column(make_scorer, make_prompt, make_rollouts):
    """What does not apply is neither a score nor a failure: it is not there."""
    scorer = make_scorer(
        RewardSettings(type="gsm8k", when={"kind": ["sum", "product"]}),
        RewardSettings(type="exact_match", when={"kind": "word"}),
        RewardSettings(type="regex", pattern="x", weight=0.5, datasets=["set"]),
        RewardSettings(type="f1", datasets=["other"]),
    )
    sums, words = make_prompt(0, "7", kind="sum"), make_prompt(1, "x", kind="word")
    assert scorer.check([sums, words]) == []  # gsm8k could not read "x"
    texts = ["#### 7", "x"]
    first, second = scorer.score([(sums, make_rollouts(texts)), (words, make_rollouts(texts, 1))])
    assert {name: values.tolist() for name, values in first.rewards.items()} == {
        "gsm8k": [1.0, 0.0],
        "regex": [0.0, 1.0],
    }
    assert {name: values.tolist() for name, values in second.rewards.items()} == {
        "exact_match": [0.0, 1.0],
        "regex": [0.0, 1.0],
    }
    assert (first.total.tolist(), second.total.tolist()) == ([1.0, 0.5], [0.0, 1.5])
    assert first.failures == second.failures == ()
    assert first.kept.all()


def test_a_row_to_which_no_reward_applies_is_refused_by_name(
    make_scorer, make_prompt, make_rollouts
):
    scorer = make_scorer(
        RewardSettings(type="gsm8k", when={"kind": "sum"}),
        RewardSettings(type="stop_properly", multiply=True),
    )
    message = r"row 13 of set: no reward applies to it, .* \(its other columns: kind\)"
    lost = make_prompt(3, kind="word")
    with pytest.raises(UsageError, match=message):
        scorer.check([make_prompt(kind="sum"), lost])
    with pytest.raises(UsageError, match=message):
        scorer.submit(lost, make_rollouts(["x"]))


def test_overlong_holds_the_longest_turn_and_not_their_sum_against_a_turn_s_limit(
    make_scorer, make_prompt
):
    def turn(author, tokens):
        return Turn(author, np.zeros(tokens, np.int32), np.zeros(tokens, np.float32))

    turns = (turn("policy", 8), turn("environment", 50), turn("policy", 5))
    rollout = Rollout(0, 0, turns, "length", ((0, 13),), "x")
    scorer = make_scorer(
        RewardSettings(type="overlong", buffer=4, max_new_tokens=10),
        RewardSettings(type="target_length", target=10, per_token=0.5, least=-9.0, weight=0.0),
        RewardSettings(type="stop_properly", stopped=1.0, penalty=0.5, multiply=True),
    )
    (group,) = scorer.score([(make_prompt(), [rollout])])
    assert group.rewards["overlong"].tolist() == [-0.5]  # 8 tokens: 2 of the buffer of 4
    assert group.rewards["target_length"].tolist() == [-1.5]  # 13 tokens in all
    assert group.total.tolist() == [-0.25]
    assert group.details["stop_properly"] == ({"finish_reason": "length"},)


def test_wrong_settings_of_our_own_verifiers_are_refused_before_any_worker(make_scorer):
    with pytest.raises(UsageError, match="did you mean 'flexible'"):
        make_scorer(RewardSettings(type="gsm8k", flexibel=True))


def test_a_worker_imports_neither_numpy_nor_torch(own_workers, score):
    assert score("is torch there").total.tolist() == [0.0]


def test_real_answers_are_read_through_the_workers(make_scorer, make_prompt, make_rollouts):
    folder = os.environ.get("POSTGRAD_TEST_DATA")
    if not folder:
        pytest.skip("POSTGRAD_TEST_DATA is not set")
    lines = (Path(folder) / "gsm8k.jsonl").read_text().splitlines()[:300]
    answers = [json.loads(line)["answer"] for line in lines]
    prompts = [make_prompt(i, answer) for i, answer in enumerate(answers)]
    scorer = make_scorer(GSM8K)
    assert scorer.check(prompts) == []
    groups = scorer.score([(p, make_rollouts([p.answer, "#### 0.123"], p.ticket)) for p in prompts])
    assert all(group.total.tolist() == [1.0, 0.0] for group in groups)


def test_an_environment_alone_scores_without_any_worker(make_prompt, make_rollouts):
    rollouts = make_rollouts(["a", "b"])
    rollouts[1] = replace(rollouts[1], columns={"turn_rewards": np.array([0, 1, 0, 2], np.float32)})
    with Scorer((), ScoringSettings(), played(0.5)) as scorer:
        assert scorer.names == ["environment"]
        assert scorer.check([make_prompt()]) == []
        (group,) = scorer.score([(make_prompt(), rollouts)])
        scorer.require_scored([group])
    assert group.rewards["environment"].tolist() == [0.0, 3.0]
    assert group.total.tolist() == [0.0, 1.5]
    assert group.kept.all()


def test_an_environments_rewards_come_after_those_of_verifiers(make_prompt, make_rollouts):
    rollouts = make_rollouts(["#### 7", "#### 8"])
    earned = {"turn_rewards": np.array([0, 0, 0, 4], np.float32)}
    rollouts = [replace(rollout, columns=earned) for rollout in rollouts]
    with Scorer((GSM8K,), ScoringSettings(workers=1), played(-0.25)) as scorer:
        (group,) = scorer.score([(make_prompt(), rollouts)])
    assert list(group.rewards) == scorer.names == ["gsm8k", "environment"]
    assert group.total.tolist() == [0.0, -1.0]


def test_verifiers_read_the_last_of_several_turns(make_scorer, make_prompt, make_rollouts):
    transcript = "#### 8 user: is it? assistant: #### 7"
    right, wrong = make_rollouts([transcript, transcript])
    rollouts = [replace(right, answer="#### 7"), replace(wrong, answer="it is")]
    (group,) = make_scorer(GSM8K).score([(make_prompt(), rollouts)])
    assert group.total.tolist() == [1.0, 0.0]


def test_a_verifier_reads_what_stands_behind_a_text_and_nothing_where_it_is_missing(
    make_scorer, make_prompt, make_rollouts
):
    texts = ["#### 7</think>#### 8", "#### 8</think>a</think>#### 7", "<think>#### 7", "#### 7"]
    behind = RewardSettings(type="gsm8k", name="behind", after="</think>")
    (group,) = make_scorer(behind, GSM8K).score([(make_prompt(), make_rollouts(texts))])
    assert group.rewards["behind"].tolist() == [0.0, 1.0, 0.0, 0.0]
    assert group.rewards["gsm8k"].tolist() == [0.0, 1.0, 1.0, 1.0]


def test_a_sample_whose_environment_failed_has_no_reward_and_no_verifier_reads_it(
    make_prompt, make_rollouts
):
    rollouts = make_rollouts(["#### 7", "#### 7", "#### 8"])
    rollouts[1] = replace(rollouts[1], failure=EpisodeFailure("wall_clock", "no reply"))
    groups = {}
    for policy in ("drop_sample", "drop_group"):
        with Scorer((GSM8K,), ScoringSettings(workers=1), played(1.0, policy)) as scorer:
            (groups[policy],) = scorer.score([(make_prompt(), rollouts)])
    dropped, group = groups["drop_group"], groups["drop_sample"]
    np.testing.assert_array_equal(group.rewards["gsm8k"], [1.0, np.nan, 0.0])
    np.testing.assert_array_equal(group.rewards["environment"], [0.0, np.nan, 0.0])
    np.testing.assert_array_equal(group.total, [1.0, np.nan, 0.0])
    assert group.kept.tolist() == [True, False, True]
    assert group.failures == (Failure(1, "environment", "wall_clock", "no reply"),)
    assert not dropped.kept.any()


def test_failures_of_environments_can_stop_the_run_and_count_in_a_step(make_prompt, make_rollouts):
    failed = [
        replace(rollout, failure=EpisodeFailure("crash", "it fell"))
        for rollout in make_rollouts(["a"])
    ]
    stops = Scorer((), ScoringSettings(), played(1.0, "stop_run"))
    with stops, pytest.raises(RunError, match=r"'environment' is stop_run.*crash: it fell"):
        stops.score([(make_prompt(), failed)])
    counts = Scorer((), ScoringSettings(), played(1.0))
    too_many = r"failed on 1 of 1 scored samples \(environment: crash x1\)"
    with counts, pytest.raises(RunError, match=too_many):
        counts.require_scored(counts.score([(make_prompt(), failed)]))


def test_each_environment_decides_what_becomes_of_its_own_rewards_and_failures(
    make_prompt, make_rollouts
):
    """The rewards of one count, another gives none, and a prompt that none plays has none."""
    environments = {
        "game": EnvironmentRewards(0.5, "drop_group"),
        "tools": EnvironmentRewards(None, "drop_sample"),
    }
    earned = {"turn_rewards": np.array([0, 1, 0, 2], np.float32)}
    broken = EpisodeFailure("crash", "it fell")
    groups = {}
    with Scorer((GSM8K,), ScoringSettings(workers=1), environments) as scorer:
        assert scorer.names == ["gsm8k", "environment"]
        for name in ("game", "tools", None):
            prompt = replace(make_prompt(), environment=name)
            rollouts = [replace(r, columns=earned) for r in make_rollouts(["#### 7", "no"])]
            if name is not None:
                rollouts.append(replace(rollouts[0], sample=2, failure=broken))
            (groups[name],) = scorer.score([(prompt, rollouts)])
    game, tools, asked = groups.values()
    assert game.rewards["environment"].tolist()[:2] == [3.0, 3.0]
    assert game.kept.tolist() == [False] * 3  # its failure drops the group
    assert (game.turn_weight, tools.turn_weight) == (0.5, 0.0)
    assert list(tools.rewards) == list(asked.rewards) == ["gsm8k"]
    assert tools.kept.tolist() == [True, True, False]
    assert tools.total.tolist()[:2] == asked.total.tolist() == [1.0, 0.0]


def test_a_module_of_the_current_directory_takes_no_place_of_pythons(
    make_scorer, own_workers, make_prompt, make_rollouts, monkeypatch, tmp_path
):
    for name in ("random", "token", "queue"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('this is no module of Python')")
    monkeypatch.chdir(tmp_path)
    (group,) = make_scorer(GSM8K).score([(make_prompt(), make_rollouts(["#### 7"]))])
    assert group.total.tolist() == [1.0]
