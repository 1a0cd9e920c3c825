"""The preference behind recipes/rlhf_tiny: what it says of notes, and how people label by it."""

import math

import pytest

from postgrad.core.errors import UsageError
from postgrad.rewards.courtesy import (
    PEOPLE,
    THINGS,
    Courtesy,
    examples,
    gold,
    pairs,
    questions,
    worth_of,
)
from postgrad.rewards.verifier import PromptView, RolloutView

ALL = {"person": 1.0, "thing": 1.0, "polite": 1.0, "brief": 1.0}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("Dear Mia, could you pass me the salt, please?", {}),
        ("Dear Ben, could you pass me the salt, please?", {"person": 0.0}),
        ("Mia and Ben, pass me the salt, please?", {"person": 0.0}),
        ("Dear Mia, could you pass me the rope, please?", {"thing": 0.0}),
        ("Dear Mia, I need the salt.", {"polite": 0.0}),
        ("Dear Mia, hurry up with the salt, please!", {"polite": 0.0}),
        ("Dear Mia, thank you for the salt that I can not find at all.", {"brief": 0.5}),
        ("please Mia salt " + "and on " * 8, {"brief": 0.0}),
        ("", dict.fromkeys(ALL, 0.0)),
    ],
)  # fmt: skip
def test_each_part_is_seen_on_its_own(text, wrong):
    assert gold("Mia", "salt", text) == {**ALL, **wrong}
    assert worth_of("Mia", "salt", text) == sum({**ALL, **wrong}.values()) / 4


def test_the_verifier_scores_what_the_row_asked_for():
    prompt = PromptView("Ask Mia for the salt.", None, {"person": "Mia", "thing": "salt"})
    score = Courtesy().score(prompt, RolloutView("Hello Mia, hurry up with the salt!"))
    assert score.value == 0.75
    assert score.detail == {**ALL, "polite": 0.0}


def test_a_row_without_a_person_is_refused():
    reason = Courtesy().check(PromptView("?", None, {"person": "Nobody", "thing": "salt"}))
    assert reason == "column 'person' is 'Nobody', not one of the task's"
    assert Courtesy().check(PromptView("?", None, {"person": "Mia", "thing": "salt"})) is None


def test_no_seed_trains_on_what_is_held_out():
    every = len(PEOPLE) * len(THINGS)
    held_out = {row["question"] for row in questions(every, 3, held_out=True)}
    trained = {row["question"] for row in questions(every, 8)}
    assert len(held_out) == every // 5
    assert len(trained) == every - every // 5
    assert not held_out & trained


def test_the_same_arguments_give_the_same_rows():
    assert list(examples(50, 1)) == list(examples(50, 1)) != list(examples(50, 2))
    assert list(pairs(50, 1)) == list(pairs(50, 1))


def test_without_slips_the_better_note_is_always_chosen():
    for asked, row in zip(questions(300, 4), pairs(300, 4, sharpness=0.0), strict=True):
        better, worse = (
            worth_of(asked["person"], asked["thing"], row[name]) for name in ("chosen", "rejected")
        )
        assert row["right"]
        assert better - worse == pytest.approx(row["ahead"])
        assert better > worse


@pytest.mark.slow
def test_people_slip_as_bradley_and_terry_say():
    """Slips of each distance against the expected number, within four standard deviations."""
    rows = list(pairs(6000, 4, sharpness=4.0))
    chances = [1 / (1 + math.exp(4.0 * row["ahead"])) for row in rows]
    slips = sum(not row["right"] for row in rows)
    spread = math.sqrt(sum(p * (1 - p) for p in chances))
    assert abs(slips - sum(chances)) < 4 * spread
    assert 300 < slips < 2000


def test_a_slip_puts_the_worse_note_first():
    asked = list(questions(2000, 4))
    for question, row in zip(asked, pairs(2000, 4), strict=True):
        if not row["right"]:
            ahead = worth_of(question["person"], question["thing"], row["rejected"])
            assert ahead > worth_of(question["person"], question["thing"], row["chosen"])


def test_a_negative_sharpness_is_refused():
    with pytest.raises(UsageError, match="sharpness = -1"):
        next(pairs(1, 0, sharpness=-1))
