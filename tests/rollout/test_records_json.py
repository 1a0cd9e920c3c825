"""Sample lines there and back."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from postgrad.core.records import Failure, PlacedImage, Prompt, Rollout, ScoredGroup, Turn
from postgrad.rollout.records_json import group_from_lines, group_to_json, nine_digits


def policy_turn(ids, logprobs):
    return Turn("policy", np.array(ids, np.int32), np.array(logprobs, np.float32))


def group_of(rollouts, **changes):
    n = len(rollouts)
    prompt = Prompt(7, np.array([3, 4], np.int32), "1+1?", "2", "sums", 12, {"task": {"k": [1]}})
    fields = {
        "rewards": {"exact": np.array([1.0] * (n - 1) + [math.nan])},
        "total": np.array([1.0] * (n - 1) + [math.nan]),
        "kept": np.array([True] * (n - 1) + [False]),
        "failures": (Failure(n - 1, "exact", "cpu_time", "5 s are used up"),),
        "details": {"exact": ({"answer": [2, None]}, *[None] * (n - 1))},
        "turn_weight": 0.1,
    }
    return ScoredGroup(prompt, tuple(rollouts), **(fields | changes))


def two_samples():
    first = Rollout(7, 0, (policy_turn([5, 6], [-0.1, -2.5]),), "stop", ((3, 2),), "two")
    more = Rollout(
        7,
        1,
        (
            policy_turn([5], [-0.3]),
            Turn("environment", np.array([8, 9], np.int32), np.zeros(2, np.float32)),
            policy_turn([1], [-1e-7]),
        ),
        "length",
        ((3, 1), (4, 1)),
        "a b c",
        {"turn_rewards": np.array([0.5, 0, 0, 1], np.float32)},
        "c",
        {"turns": 2.0, "calls": 1.0},
    )
    return group_of([first, more])


def with_images():
    """Samples behind an image of two runs of tokens and one with a grid."""
    group = two_samples()
    images = (
        PlacedImage("ab" * 32, np.array([0, 1, 4, 5])),
        PlacedImage("cd" * 32, np.arange(6, 12), (2, 3), True),
    )
    prompt = replace(group.prompt, token_ids=np.arange(12, dtype=np.int32), images=images)
    return replace(group, prompt=prompt)


def lines_of(group):
    lines = group_to_json(group, step=4, decode=str)
    return [json.loads(json.dumps(line, allow_nan=False)) for line in lines]


def test_a_group_comes_back_as_it_was_written():
    group = two_samples()
    back = group_from_lines(lines_of(group)[::-1])
    assert back.prompt.ticket == 7
    assert back.prompt.token_ids.tolist() == [3, 4]
    assert (back.prompt.question, back.prompt.answer) == ("1+1?", "2")
    assert (back.prompt.dataset, back.prompt.row) == ("sums", 12)
    assert back.prompt.metadata == {"task": {"k": [1]}}
    for was, now in zip(group.rollouts, back.rollouts, strict=True):
        assert (was.sample, was.finish_reason, was.versions, was.text) == (
            now.sample, now.finish_reason, now.versions, now.text,
        )  # fmt: skip
        assert [t.author for t in was.turns] == [t.author for t in now.turns]
        assert was.token_ids.tolist() == now.token_ids.tolist()
        assert was.logprobs.tobytes() == now.logprobs.tobytes()
    assert back.rollouts[1].columns["turn_rewards"].tolist() == [0.5, 0, 0, 1]
    np.testing.assert_array_equal(back.rewards["exact"], group.rewards["exact"])
    np.testing.assert_array_equal(back.total, group.total)
    assert back.kept.tolist() == [True, False]
    assert back.turn_weight == 0.1
    assert back.failures == group.failures
    assert back.details == group.details == {"exact": ({"answer": [2, None]}, None)}


def test_a_line_has_the_keys_that_people_and_scripts_read():
    line = lines_of(two_samples())[1]
    assert line["step"] == 4
    assert line["policy_version"] == [[3, 1], [4, 1]]
    assert line["total"] is None
    assert line["failures"] == [
        {"component": "exact", "cause": "cpu_time", "message": "5 s are used up"}
    ]
    assert [t["author"] for t in line["turns"]] == ["policy", "environment", "policy"]
    assert [t["text"] for t in line["turns"]] == ["[5]", "[8, 9]", "[1]"]


def test_details_stand_where_a_verifier_noted_something_and_older_lines_have_none():
    lines = lines_of(two_samples())
    assert lines[0]["details"] == {"exact": {"answer": [2, None]}}
    assert "details" not in lines[1]
    assert group_from_lines([lines[1]]).details == {}
    falsy = group_of(two_samples().rollouts, details={"exact": (0, "")})
    assert group_from_lines(lines_of(falsy)).details == {"exact": (0, "")}


def test_columns_of_the_learner_are_cut_to_the_turns():
    learner_columns = {
        "learner_logprobs": [-0.25, 0.0, 0.0, -0.75],
        "advantages": [-0.5, 0.0, 0.0, -1.5],
        "mask": [1, 0, 0, 1],
    }
    bare, line = group_to_json(two_samples(), step=0, decode=str, columns=[{}, learner_columns])
    assert not learner_columns.keys() & (bare.keys() | bare["turns"][0].keys())
    assert [t["learner_logprobs"] for t in line["turns"]] == [[-0.25], [0.0, 0.0], [-0.75]]
    assert line["advantages"] == [-0.5, 0.0, 0.0, -1.5]
    assert line["mask"] == [1, 0, 0, 1]


@given(npst.arrays(np.float32, st.integers(1, 8), elements=st.floats(-(2.0**100), 0, width=32)))
def test_every_float32_survives_its_nine_digits(values):
    rollout = Rollout(7, 0, (policy_turn(range(len(values)), values),), "stop", ((0, 1),), "")
    group = group_of([rollout], total=np.zeros(1), kept=np.ones(1, bool), failures=())
    back = group_from_lines(lines_of(group)).rollouts[0]
    assert back.logprobs.tobytes() == values.tobytes()


def test_lines_of_two_tickets_or_twice_one_sample_are_refused():
    lines = lines_of(two_samples())
    with pytest.raises(ValueError, match="one ticket"):
        group_from_lines([lines[0], lines[1] | {"ticket": 8}])
    with pytest.raises(ValueError, match="the same sample number"):
        group_from_lines([lines[0], lines[0]])


@given(npst.arrays(np.float32, st.integers(0, 8), elements=st.floats(width=32)))
def test_decimals_name_float32_values_exactly(values):
    decimals = json.loads(json.dumps(nine_digits(values).tolist()))
    assert np.array_equal(np.array(decimals, np.float32), values, equal_nan=True)


def test_usual_values_have_nine_digits_at_most():
    values = (-np.random.default_rng(0).exponential(1.0, 10_000)).astype(np.float32)
    digits = [repr(number).partition("e")[0].strip("-0").replace(".", "").lstrip("0")
              for number in nine_digits(values).tolist()]  # fmt: skip
    assert max(map(len, digits)) == 9


def test_experts_come_back_as_they_were_written():
    experts = np.arange(12, dtype=np.int16).reshape(3, 2, 2)
    experts[2] = -1
    turn = Turn("policy", np.array([5, 6], np.int32), np.zeros(2, np.float32), experts[1:])
    sample = Rollout(7, 0, (turn,), "stop", ((3, 2),), "two", prompt_experts=experts[:1])
    again = group_from_lines(lines_of(group_of([sample, sample_two()]))).rollouts
    assert again[0].experts is not None
    assert again[0].experts.dtype == np.int16
    assert (again[0].experts == experts).all()
    assert again[1].experts is None


def sample_two():
    return Rollout(7, 1, (policy_turn([5, 6], [-0.1, -2.5]),), "stop", ((3, 2),), "two")


def test_images_come_back_by_hash_and_place():
    group = with_images()
    lines = lines_of(group)
    assert lines[0]["images"][0] == {
        "sha256": "ab" * 32, "runs": [[0, 2], [4, 2]], "grid": None, "mutual": False,
    }  # fmt: skip
    again = group_from_lines(lines).prompt.images
    for image, expected in zip(again, group.prompt.images, strict=True):
        assert image.at.tolist() == expected.at.tolist()
        assert replace(image, at=None) == replace(expected, at=None)
    assert "images" not in lines_of(two_samples())[0]


def test_images_of_a_turn_come_back_among_its_tokens():
    image = PlacedImage("cd" * 32, np.array([1, 2]), (1, 2))
    silent = np.zeros(4, np.float32)
    shown = Turn("environment", np.array([8, 9, 9, 8], np.int32), silent, images=(image,))
    text_turn = policy_turn([5, 6], [-0.1, -2.5])
    group = with_images()
    rollout = Rollout(7, 0, (text_turn, shown, text_turn), "stop", ((3, 4),), "two")
    lines = lines_of(replace(group, rollouts=(rollout, *group.rollouts[1:])))
    assert [turn.get("images", []) for turn in lines[0]["turns"]] == [
        [], [{"sha256": "cd" * 32, "runs": [[1, 2]], "grid": [1, 2], "mutual": False}], [],
    ]  # fmt: skip
    again = group_from_lines(lines)
    (first, *_), (back,) = again.rollouts, again.rollouts[0].turns[1].images
    assert (back.digest, back.at.tolist(), back.grid) == ("cd" * 32, [1, 2], (1, 2))
    before = len(group.prompt.token_ids) + 2
    assert [i.at.tolist() for i in first.images_behind(again.prompt)] == [
        *(i.at.tolist() for i in group.prompt.images), [before + 1, before + 2],
    ]  # fmt: skip
    lines[0]["turns"][1]["images"] *= 2
    with pytest.raises(ValueError, match="one behind the other"):
        group_from_lines(lines)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"sha256": "../../secret"}, "no SHA-256"),
        ({"sha256": "AB" * 32}, "no SHA-256"),
        ({"runs": [[0, 10**12]]}, "more tokens than its text"),
        ({"runs": [[11, 2]]}, "tokens of its text"),
        ({"runs": [[4, 1], [2, 1]]}, "rising order"),
    ],
)
def test_an_image_that_no_run_wrote_is_refused(change, why):
    lines = lines_of(with_images())
    lines[0]["images"][0] |= change
    with pytest.raises(ValueError, match=why):
        group_from_lines(lines)
