"""The game's rules, and the rows of a player without a plan."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.core.errors import UsageError
from postgrad.core.records import Prompt
from postgrad.rollout.environments.guess_number import GuessNumber, rows


def prompt(low=10, high=40, secret=25, **more):
    metadata = {"low": low, "high": high, "secret": secret, **more}
    return Prompt(0, np.array([4], np.int32), "?", str(secret), "games", 0, metadata)


def test_a_guess_is_answered_by_the_way_to_go_until_it_hits():
    game = GuessNumber(miss_reward=-0.1).start(prompt(), 0)
    replies = [game.step(text) for text in ("20", " 30 ", "25")]
    answers = [[message["content"] for message in each.messages] for each in replies]
    assert answers == [["higher, from 21 to 40"], ["lower, from 21 to 29"], []]
    assert [each.reward for each in replies] == [-0.1, -0.1, 1.0]
    assert [each.done for each in replies] == [False, False, True]
    assert replies[2].counts == {"hits": 1.0, "malformed": 0.0}


@pytest.mark.parametrize("text", ["", "abc", "2 5", "25.", "-25", "9", "41", "1" * 5000, "²5"])
def test_what_is_no_number_of_the_range_is_invalid(text):
    reply = GuessNumber().start(prompt(), 0).step(text)
    assert reply.messages == ({"role": "user", "content": "invalid, from 10 to 40"},)
    assert reply.counts == {"hits": 0.0, "malformed": 1.0}
    assert (reply.done, reply.reward) == (False, 0.0)


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"low": "10"}, "'low'"), ({"secret": None}, "'secret'"), ({"secret": 41}, "not from 10 to")],
)
def test_a_row_that_cannot_be_played_says_why(changes, why):
    assert why in (GuessNumber().check(prompt(**changes)) or "")
    assert GuessNumber().check(prompt()) is None


@given(st.integers(0, 2**20), st.integers(1, 30))
def test_halving_finds_every_secret_of_made_rows_in_five_guesses(seed, size):
    for row in rows(size, seed):
        assert 10 <= row["low"] <= row["secret"] <= row["high"] <= 99
        assert 16 <= row["high"] - row["low"] + 1 <= 31
        game, low, high = GuessNumber().start(prompt(**row), 0), row["low"], row["high"]
        for _turn in range(5):
            middle = (low + high) // 2
            reply = game.step(str(middle))
            if reply.done:
                break
            higher = reply.messages[0]["content"].startswith("higher")
            low, high = (middle + 1, high) if higher else (low, middle - 1)
        else:
            pytest.fail(f"{row} was not found")


def test_the_player_of_the_rows_keeps_to_what_is_possible_and_ends_with_a_hit():
    game_rows = list(rows(200, 3))
    assert game_rows == list(rows(200, 3))
    assert game_rows[:50] == list(rows(50, 3))
    assert game_rows != list(rows(200, 4))
    for row in game_rows:
        game = GuessNumber().start(prompt(**row), 0)
        question, *moves = row["messages"]
        assert question["content"] == row["question"]
        low, high = row["low"], row["high"]
        for guess, answer in zip(moves[0::2], [*moves[1::2], None], strict=True):
            number = int(guess["content"])
            assert low <= number <= high
            reply = game.step(guess["content"])
            assert reply.messages == (() if answer is None else (answer,))
            low, high = (number + 1, high) if number < row["secret"] else (low, number - 1)
        assert reply.done


def test_a_range_that_does_not_exist_is_refused():
    with pytest.raises(UsageError, match="no range of 16 to 31 numbers from 10 to 30"):
        list(rows(1, 0, highest=30))
