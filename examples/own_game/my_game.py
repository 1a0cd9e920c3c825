"""A game of several turns: count down to zero, one number a turn."""

import random
from collections.abc import Iterator
from typing import Any

from postgrad.core.records import Prompt
from postgrad.rollout.environments.base import ChatEnvironment, Reply


class Countdown(ChatEnvironment):
    right: float = 0.25  # reward of a right number: [environment] right = 0.5

    def check(self, prompt: Prompt) -> str | None:
        return None if prompt.metadata["start"] > 0 else "the countdown has to start above 0"

    def start(self, prompt: Prompt, sample: int) -> "Course":
        return Course(prompt.metadata["start"], self.right)


class Course:
    """One sample's game."""

    def __init__(self, number: int, right: float) -> None:
        self._number, self._right = number, right

    def step(self, text: str) -> Reply:
        if text.strip() != str(self._number):
            return Reply(done=True, counts={"mistakes": 1.0})
        self._number -= 1
        if self._number < 0:
            return Reply(done=True, reward=1.0, counts={"won": 1.0})
        return Reply(({"role": "user", "content": "next"},), reward=self._right)


def rows(size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Games that start from 1, 2 or 3."""
    for index in range(size):
        start = 1 + (index + seed) % 3
        yield {"question": f"Count down from {start}.", "answer": "", "start": start}


def lessons(size: int, seed: int) -> Iterator[dict[str, Any]]:
    """Games of a player who is right three times out of four."""
    dice = random.Random(seed)
    for row in rows(size, seed):
        messages = [{"role": "user", "content": row["question"]}]
        for number in range(row["start"], -1, -1):
            guess = number if dice.random() < 0.75 else dice.randrange(10)
            messages.append({"role": "assistant", "content": str(guess)})
            if guess != number:
                break
            messages.append({"role": "user", "content": "next"})
        yield {"messages": messages[: -1 if messages[-1]["role"] == "user" else None]}
