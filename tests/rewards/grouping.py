"""Verifiers of groups that tests run in workers."""

import os
import sys
import time

from postgrad.rewards.verifier import Score, Verifier


def spread(prompt, rollouts, factor=1.0):
    """How far each text, a number, is from the mean of the group."""
    numbers = [float(rollout.text) for rollout in rollouts]
    mean = sum(numbers) / len(numbers)
    return [factor * abs(number - mean) for number in numbers]


def seen(prompt, rollouts):
    """The numbers of the samples that it was given."""
    numbers = [rollout.sample for rollout in rollouts]
    return [Score(len(numbers), numbers) for _ in rollouts]


def obey(prompt, rollouts):
    """Does what the first text says; where that is a number, it is the score of each sample."""
    text = rollouts[0].text
    return DEEDS[text](len(rollouts)) if text in DEEDS else [float(text)] * len(rollouts)


def every(prompt, *rollouts):
    """Takes samples one by one."""
    return float(len(rollouts))


class Longest(Verifier):
    """1 for the sample with the longest text, with its rank as detail."""

    def check(self, prompt):
        return None if prompt.answer else "there is no answer"

    def score_group(self, prompt, rollouts):
        lengths = sorted({len(rollout.text) for rollout in rollouts}, reverse=True)
        ranks = [lengths.index(len(rollout.text)) for rollout in rollouts]
        return tuple(Score(float(rank == 0), {"rank": rank}) for rank in ranks)


def spin(samples):
    while True:
        pass


def raise_error(samples):
    raise ValueError("cannot compare these")


def crash(samples):
    print("these are my last words")
    os._exit(3)


def forge(samples):
    """Whatever runs in the process of a group may write its answer."""
    os.write(3, b'{"scores": [[1.0, null]]}')
    os._exit(0)


def array(samples):
    import numpy as np

    return np.arange(samples) > 0


DEEDS = {
    "one too few": lambda samples: [1.0] * (samples - 1),
    "one too many": lambda samples: [1.0] * (samples + 1),
    "none": lambda samples: None,
    "number": lambda samples: 1.0,
    "text": lambda samples: "1" * samples,
    "mapping": lambda samples: dict.fromkeys(range(samples), 1.0),
    "set": lambda samples: set(range(samples)),
    "nan": lambda samples: [0.0] * (samples - 1) + [float("nan")],
    "none among them": lambda samples: [0.0, None, *[0.0] * (samples - 2)],
    "set as detail": lambda samples: [Score(1.0, {1, 2})] * samples,
    "array": array,
    "long details": lambda samples: [Score(1.0, "x" * 60_000)] * samples,
    "raise": raise_error,
    "exit": lambda samples: sys.exit("bye"),
    "spin": spin,
    "sleep": lambda samples: time.sleep(60),
    "crash": crash,
    "forge": forge,
}


def texts(prompt, rollouts):
    """What it read of each sample."""
    return [Score(0.0, rollout.text) for rollout in rollouts]


def text(prompt, rollout):
    """What it read of a sample."""
    return Score(0.0, rollout.text)
