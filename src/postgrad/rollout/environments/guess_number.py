"""A game of several turns that a small model learns: find a number by "higher" and "lower".

Every reply says what is left. A good player halves it: with t guesses it always finds one of
2**t - 1 numbers. A player that guesses anything still possible often runs out of turns.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field

from postgrad.core.errors import UsageError
from postgrad.core.records import Prompt
from postgrad.core.seeds import integer
from postgrad.rollout.environments.base import ChatEnvironment, Course, Reply

_COLUMNS = ("low", "high", "secret")


class GuessNumber(ChatEnvironment):
    """Rows have whole numbers `low` <= `secret` <= `high`; a turn is a number and nothing else.

    A hit has the reward 1 and ends the game; any other turn has `miss_reward`. What is no number
    that is left is answered with "invalid" and counted as malformed.
    """

    miss_reward: float = Field(default=0.0, le=0.0)

    def check(self, prompt: Prompt) -> str | None:
        for name in _COLUMNS:
            if type(prompt.metadata.get(name)) is not int:
                return f"the game needs a whole number in column {name!r}"
        low, high, secret = (prompt.metadata[name] for name in _COLUMNS)
        if not low <= secret <= high:
            return f"the secret {secret} is not from {low} to {high}"
        return None

    def start(self, prompt: Prompt, sample: int) -> Course:
        return _Game(self, prompt.metadata)


class _Game:
    def __init__(self, rules: GuessNumber, row: Mapping[str, Any]) -> None:
        self._rules = rules
        self._low, self._high, self._secret = (int(row[name]) for name in _COLUMNS)

    def step(self, text: str) -> Reply:
        """The reply to a guess: "higher", "lower" or "invalid" with the range that is left."""
        answer = text.strip()
        if not re.fullmatch(r"[0-9]{1,9}", answer) or not self._low <= int(answer) <= self._high:
            return self._say("invalid", malformed=1.0)
        guess = int(answer)
        if guess == self._secret:
            return Reply(done=True, reward=1.0, counts={"hits": 1.0, "malformed": 0.0})
        if guess < self._secret:
            self._low = guess + 1
            return self._say("higher", malformed=0.0)
        self._high = guess - 1
        return self._say("lower", malformed=0.0)

    def _say(self, verdict: str, malformed: float) -> Reply:
        return Reply(
            messages=({"role": "user", "content": f"{verdict}, {_span(self._low, self._high)}"},),
            reward=self._rules.miss_reward,
            counts={"hits": 0.0, "malformed": malformed},
        )


def rows(
    size: int, seed: int, *, lowest: int = 10, highest: int = 99, least: int = 16, most: int = 31
) -> Iterator[dict[str, Any]]:
    """Games over `least` to `most` numbers from `lowest` to `highest`: question, answer, low, high,
    secret, and in `messages` how a player without a plan got there.

    That player guesses any number that is still possible, each as likely as the other: it keeps the
    rules, and leaves room to learn. Raises UsageError where no such range exists.
    """
    if not 1 <= least <= most <= highest - lowest + 1:
        raise UsageError(
            f"data.task: there is no range of {least} to {most} numbers from {lowest} to {highest}"
        )
    for index in range(size):
        count = least + _below(most - least + 1, seed, index, 0)
        low = lowest + _below(highest - lowest + 2 - count, seed, index, 1)
        secret = low + _below(count, seed, index, 2)
        row = {"low": low, "high": low + count - 1, "secret": secret}
        question = f"Find my number, {_span(low, row['high'])}"
        yield {
            "question": question,
            "answer": str(secret),
            **row,
            "messages": [{"role": "user", "content": question}, *_played(row, seed, index)],
        }


def _played(row: Mapping[str, int], seed: int, index: int) -> Iterator[dict[str, str]]:
    game, low, high = _Game(GuessNumber(), row), row["low"], row["high"]
    for turn in range(high - low + 1):
        guess = low + _below(high - low + 1, seed, index, 3 + turn)
        yield {"role": "assistant", "content": str(guess)}
        reply = game.step(str(guess))
        if reply.done:
            return
        yield from reply.messages
        low, high = (guess + 1, high) if guess < row["secret"] else (low, guess - 1)


def _span(low: int, high: int) -> str:
    return f"from {low} to {high}"


def _below(n: int, seed: int, *counters: int) -> int:
    return integer(seed, "guess_number", *counters) % n
