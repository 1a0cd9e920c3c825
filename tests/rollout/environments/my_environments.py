"""Environments and tools as a user would write them."""

import asyncio
import base64
import io
import os
import time
from contextlib import asynccontextmanager
from typing import ClassVar

import numpy as np
from PIL import Image

from postgrad.rollout.environments.base import ChatEnvironment, Reply


class Echo(ChatEnvironment):
    """Says what it heard, and ends at "bye"."""

    reward: float = 0.5

    def start(self, prompt, sample):
        return self

    def step(self, text):
        if text == "bye":
            return Reply(done=True, reward=1.0)
        message = {"role": "user", "content": text}
        return Reply((message,), reward=self.reward, counts={"heard": float(len(text))})


class Wrong(ChatEnvironment):
    """Returns what no environment may, by `kind`, or starts as none may."""

    kind: str

    def start(self, prompt, sample):
        if self.kind == "start":
            raise KeyError("level")
        return None if self.kind == "no course" else self

    def step(self, text):
        if self.kind == "exit":
            raise SystemExit("bye")
        message = {"role": "user", "content": "go on"}
        return {
            "nothing": None,
            "text": "go on",
            "reward": Reply(done=True, reward="1"),
            "nan": Reply(done=True, reward=float("nan")),
            "infinity": Reply(reward=float("-inf")),
            "huge": Reply(done=True, reward=1e39),
            "count": Reply((message,), counts={"hits": float("nan")}),
            "no counts": Reply((message,), counts=None),
            "count name": Reply((message,), counts={3: 1.0}),
            "counted": Reply((message,), counts={"turns": 5.0}),
            "no JSON": Reply(({**message, "more": {1, 2}},)),
            "letter": Reply(({"role": "user", "content": "é"},)),
            "one message": Reply(message),
            "no text": Reply(({"role": "user", "content": None},)),
            "half a pair": Reply(({"role": "user", "content": "\ud800"},)),
            "places": Reply((message,), behind=np.array([0, 1])),
            "ends": Reply((message,), done=np.array([True, False])),
        }[self.kind]


class NoStart(ChatEnvironment):
    """Has no method `start`."""


def shout(text: str, times: int = 1) -> str:
    """Says it loudly.

    Args:
        text: What to say.
        times: How often.
    """
    return text.upper() * times


def pair(flag: bool, size: float) -> dict:
    """Puts two things together.

    Args:
        flag: A flag.
        size: A size.
    """
    return {"flag": flag, "size": size}


def fails(how: str) -> str:
    """Fails.

    Args:
        how: The kind of failure.
    """
    kinds = {"value": ValueError, "key": KeyError, "zero": ZeroDivisionError, "type": TypeError}
    raise kinds[how]("it failed")


def undescribed(text: str) -> str:
    return text


def sleeps(seconds: float) -> str:
    """Sleeps.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "awake"


def dies(code: int) -> str:
    """Ends its process.

    Args:
        code: The exit code.
    """
    print("last words", flush=True)
    os._exit(code)


def variable(name: str) -> str:
    """Reads an environment variable.

    Args:
        name: Its name.
    """
    return os.environ.get(name, "nothing")


def prints(text: str) -> int:
    """Prints, and says in which process.

    Args:
        text: What to print.
    """
    print(text)
    return os.getpid()


class Gym(ChatEnvironment):
    """Gives numbers of NumPy, as gymnasium does, and cannot always go on after a resume."""

    deterministic: ClassVar[bool] = False
    resumes: str = "never"

    def start(self, prompt, sample):
        return self

    def resume(self, prompt, sample, turns):
        if self.resumes == "raises":
            raise ConnectionError("the sandbox is gone")
        return "a course" if self.resumes == "wrong" else None

    def step(self, text):
        message = {"role": "user", "content": text, "name": ["a", "list"]}
        numbers = {"reward": np.float32(0.5), "counts": {"hits": np.int64(2)}}
        return Reply((message,), behind=np.int64(0), **numbers)


class Awaiting(ChatEnvironment):
    """Replies when `kind` lets it: see `step`."""

    waits: ClassVar[bool] = True
    deterministic: ClassVar[bool] = False
    kind: str = "soon"

    @asynccontextmanager
    async def running(self):
        if self.kind == "closed":
            raise ConnectionRefusedError("nobody listens at port 9")
        yield

    def start(self, prompt, sample):
        return self

    async def step(self, text):
        if self.kind == "never":
            await asyncio.Event().wait()
        if self.kind == "stubborn":
            while True:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    if text == "end":
                        raise
        if self.kind == "blocks":
            time.sleep(1.0)
        if self.kind == "raises":
            raise OSError("the disk is gone")
        if self.kind == "leaks":  # as a library's timeout may
            raise asyncio.CancelledError
        if self.kind == "exits":
            raise SystemExit("bye")
        await asyncio.sleep(0)
        return Reply((({"role": "user", "content": text}),), reward=1.0)

    def close(self):
        if self.kind == "unclosable":
            raise OSError("it is stuck")


class Moving(Echo):
    """Changes the working directory where it is told to."""

    at: str
    to: str

    def start(self, prompt, sample):
        if self.at == "start":
            os.chdir(self.to)
        return self

    def step(self, text):
        if self.at == "step":
            os.chdir(self.to)
        return super().step(text)


class Saying(ChatEnvironment):
    """Replies with messages that a test has set."""

    messages: ClassVar[tuple] = ()

    def start(self, prompt, sample):
        return self

    def step(self, text):
        return Reply(type(self).messages)


def draws(colour: int, times: int = 1) -> list:
    """Draws squares.

    Args:
        colour: Their colour.
        times: How many.
    """
    file = io.BytesIO()
    Image.new("RGB", (16, 16), (colour, 2 * colour, 90)).save(file, "PNG")
    image = base64.b64encode(file.getvalue()).decode()
    parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}]
    return [{"type": "text", "text": f"colour {colour}: "}, *parts * times]
