"""Environments that wait, for whole runs."""

import asyncio
import random
from typing import ClassVar

from postgrad.rollout.environments.base import ChatEnvironment, Reply

CLOCK = random.Random()  # as arbitrary as a busy machine


class Late(ChatEnvironment):
    """Says the number of characters that it heard, after a time that differs in every run."""

    waits: ClassVar[bool] = True

    def start(self, prompt, sample):
        return self

    async def step(self, text):
        await asyncio.sleep(CLOCK.random() * 0.01)
        reply_message = {"role": "user", "content": f"from {len(text)}"}
        return Reply((reply_message,), reward=float(len(text)), counts={"hits": 1.0})


class Moody(Late):
    """Fails now and then, and never says the same twice."""

    deterministic: ClassVar[bool] = False

    def resume(self, prompt, sample, turns):
        return self if sample else None

    async def step(self, text):
        if CLOCK.random() < 0.1:
            raise OSError("not today")
        reply = await super().step(text)
        reply_message = {"role": "user", "content": f"from {CLOCK.randrange(9)}"}
        return Reply((reply_message,), reward=reply.reward)
