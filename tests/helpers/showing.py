"""Environments that reply with pictures: their folder is on the path of Ray's processes too."""

import io
from dataclasses import replace
from typing import ClassVar

from PIL import Image

from postgrad.rollout.environments.base import ChatEnvironment, Reply


def square(colour: int, side: int = 16) -> bytes:
    """A PNG of one colour."""
    file = io.BytesIO()
    Image.new("RGB", (side, side), (colour % 256, 7 * colour % 256, 90)).save(file, "PNG")
    return file.getvalue()


class Showing(ChatEnvironment):
    """Shows a picture whose colour follows from what it heard, in `pictures` of its replies, and
    rewards letters of the first half.
    """

    pictures: int = 9
    side: int = 16

    def start(self, prompt, sample):
        return _Shown(self)


class _Shown:
    def __init__(self, rules):
        self.rules = rules
        self.replies = 0

    def step(self, text):
        self.replies += 1
        content = f"{self.replies} so {len(text)}? "
        if self.replies <= self.rules.pictures:
            image = square(sum(map(ord, text)), self.rules.side)
            parts = [{"type": "text", "text": content}, {"type": "image", "image": image}]
            content = [*parts, {"type": "text", "text": "and?"}]
        reward = sum(letter in text for letter in "abcdefghijklm")
        return Reply(({"role": "user", "content": content},), reward=reward)


class Jumping(Showing):
    """The same, whose replies go on behind the first answer, or are another conversation."""

    def start(self, prompt, sample):
        return _Jumped(self)


class _Jumped(_Shown):
    def step(self, text):
        reply = super().step(text)
        return replace(reply, behind=("newest", 0, "nothing")[self.replies % 3])


class Wandering(Showing):
    """The same, which says of itself that it may not be stepped again."""

    deterministic: ClassVar[bool] = False

    def resume(self, prompt, sample, turns):
        shown = _Shown(self)
        shown.replies = len(turns)
        return shown
