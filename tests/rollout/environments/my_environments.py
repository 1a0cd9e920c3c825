"""Environments and tools as a user would write them."""

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


class Broken(Echo):
    """Gives no number."""

    def step(self, text):
        return Reply(reward=float("nan"))


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
