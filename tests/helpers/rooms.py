"""Environments whose episodes are several conversations, and do not all begin with the prompt."""

from typing import ClassVar

from postgrad.rollout.environments.base import ChatEnvironment, Reply


class Rooms(ChatEnvironment):
    """Goes on behind the newest turn, behind an earlier one, or begins anew, by what it hears."""

    def start(self, prompt, sample):
        return _Walk(sample)


class Forgetful(Rooms):
    """The same by code that could say something else: a resume goes on behind what it said."""

    deterministic: ClassVar[bool] = False

    def resume(self, prompt, sample, turns):
        walk = _Walk(sample)
        walk.heard = list(turns)
        return walk


class _Walk:
    def __init__(self, sample):
        self.sample = sample
        self.heard: list[str] = []

    def begin(self):
        """The prompt, the prompt with more behind it, or something else."""
        message = {"role": "user", "content": f"room {self.sample % 2}"}
        behind = ("newest", "newest", "nothing")[self.sample % 3]
        return Reply((message,) if self.sample % 3 else (), behind=behind)

    def step(self, text):
        self.heard.append(text)
        turns = len(self.heard)
        letters = "".join(letter for letter in text if letter.isalpha())[:3] or "none"
        message = {"role": "user", "content": f"example {letters}"}
        behind = ("newest", 0, "nothing", 1)[(len(text) + turns) % 4]
        if behind == 1 and turns < 2:
            behind = "newest"
        return Reply((message,), reward=0.1 * len(letters), behind=behind)
