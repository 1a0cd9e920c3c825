"""Scores of benchmarks/peer_objectives, with rewards that are written here."""

import pytest

from benchmarks.peer_objectives.answers import (
    LENGTHS,
    Answer,
    Scored,
    answers_to,
    because,
    scores,
    weighed,
)
from benchmarks.peer_objectives.comparing import compared, shown, translated

GSM8K = ("ppo", "data.train_files=gsm8k/train.parquet", "actor_rollout_ref.model.path=m")
ANSWERS = answers_to("5", ("right", "#### 5"), ("decimals", "#### 5.0"), ("wrong", "#### 6"))


def exact(answer: Answer) -> float:
    """The last word is the reference, as text."""
    return float(answer.text.split()[-1] == answer.reference)


def test_scores_that_are_equal_are_equal() -> None:
    row = compared("verl", Scored("gsm8k", GSM8K, exact, [ANSWERS[0], ANSWERS[2]]), draws=1)
    assert (row.verdict, row.ours, row.theirs, row.loss) == ("equal", 0.5, 0.5, 0.0)
    assert row.settings["rewards"] == [{"type": "gsm8k"}]


@pytest.mark.parametrize(
    ("differing", "explanation", "verdict", "why"),
    [
        ({}, "", "differs", "nothing explains 'decimals'"),
        ({"decimals": "text"}, "written as the reference is", "told", "text (decimals)"),
        ({"": "any"}, "written as the reference is", "told", "any (decimals)"),
        ({"decimals": "text"}, "a word of no comment", "differs", "does not say"),
        ({"decimals": "text", "right": "text"}, "written", "differs", "equal after all: 'right'"),
    ],
)
def test_a_score_that_differs_is_named_and_told(
    differing: dict[str, str], explanation: str, verdict: str, why: str
) -> None:
    row = compared("verl", Scored("gsm8k", GSM8K, exact, ANSWERS, differing, explanation), draws=1)
    assert (row.verdict, why in row.why) == (verdict, True)
    assert row.ours == pytest.approx(2 / 3)
    assert row.theirs == pytest.approx(1 / 3)
    assert row.to_json().keys() >= {"objective", "ours", "theirs", "loss", "settings"}
    assert "gsm8k" in shown([row])


def test_a_row_that_is_skipped_there_alone_differs() -> None:
    skipped = Scored("gsm8k", GSM8K, lambda answer: None, [ANSWERS[2]])
    assert compared("verl", skipped, draws=1).verdict == "differs"


def test_a_reference_that_cannot_be_read_has_no_score() -> None:
    translation = translated("verl", GSM8K)
    rewards = translation.recipe["rewards"]
    assert scores(rewards, Answer("words", "#### 5", "five"), translation) is None


def test_penalties_of_length_stand_beside_a_given_score() -> None:
    buffer = "reward.reward_kwargs.overlong_buffer_cfg."
    words = ["ppo", "actor_rollout_ref.model.path=m", "data.max_response_length=100",
             "reward.reward_model.enable=True", "reward.reward_model.model_path=r",
             f"{buffer}enable=True", f"{buffer}len=20"]  # fmt: skip
    translation = translated("verl", words)
    scores_by_answer = {answer.name: scores(translation.recipe["rewards"], answer, translation)
                        for answer in weighed(LENGTHS, "1")}  # fmt: skip
    assert scores_by_answer["80 tokens, stop, score 1"] == 1.0
    assert scores_by_answer["90 tokens, stop, score 1"] == 0.5
    assert scores_by_answer["100 tokens, length, score 1"] == 0.0


def test_reasons_name_their_answers() -> None:
    assert because({"why": "one; two, three"}) == {"one": "why", "two, three": "why"}
