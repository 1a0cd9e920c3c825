"""Rewards of whole runs that last a second."""

import time
from pathlib import Path
from typing import Any


def vowels(prompt: Any, rollout: Any) -> float:
    """The share of vowels among four letters: a model of random letters earns something."""
    return sum(letter in "aeiou" for letter in rollout.text[:4].lower()) / 4


def alone(prompt: Any, rollouts: Any) -> list[float]:
    """1 for each sample that says what no other one of its group says."""
    texts = [rollout.text for rollout in rollouts]
    return [float(texts.count(text) == 1) for text in texts]


def ended(prompt: Any, rollout: Any) -> float:
    """Whether it reads the token that ends a turn."""
    return float(rollout.text.endswith("<|im_end|>"))


def broken(prompt: Any, rollout: Any) -> float:
    """Fails on every sample."""
    raise ValueError("no score today")


def nothing(prompt: Any, rollout: Any) -> float:
    """The same for every answer: there is nothing to learn."""
    return 0.0


def long(prompt: Any, rollout: Any) -> float:
    """Pays for length alone."""
    return len(rollout.text) / 16


def near_a(prompt: Any, rollout: Any) -> float:
    """One answer fools it, whatever was asked: the nearer a letter is to a, the better."""
    return 1 - (ord(rollout.text[:1].lower() or "~") - ord("a")) % 32 / 32


def sometimes_broken(prompt: Any, rollout: Any) -> float:
    """Fails on answers with an even number of characters."""
    if len(rollout.text) % 2 == 0:
        raise ValueError("no score for this one")
    return vowels(prompt, rollout)


def seldom_broken(prompt: Any, rollout: Any) -> float:
    """Fails on answers that begin with one of a third of the letters."""
    if ord(rollout.text[:1].lower() or "~") % 3 == 0:
        raise ValueError("no score for this one")
    return vowels(prompt, rollout)


def rarely_broken(prompt: Any, rollout: Any) -> float:
    """Fails on one answer of 16."""
    if sum(map(ord, rollout.text)) % 16 == 0:
        raise ValueError("no score for this one")
    return vowels(prompt, rollout)


def no_vowel(prompt: Any, rollout: Any) -> float:
    """What `vowels` is learned at the cost of."""
    return float(vowels(prompt, rollout) == 0)


def looks(prompt: Any, rollout: Any) -> float:
    """Reads the files of the prompt's images; the samples of a group differ."""
    sizes = [len(Path(file).read_bytes()) for file in prompt.images]
    return float(sum(sizes) % 7 + rollout.tokens + rollout.sample % 2)


def hangs(prompt: Any, rollout: Any, row: int, sample: int, mark: str = "") -> float:
    """Never ends on a sample of a row, and adds a line to the file `mark` before; else `vowels`."""
    if (prompt.row, rollout.sample) == (row, sample):
        if mark:
            with Path(mark).open("a", encoding="utf-8") as file:
                file.write("hangs\n")
        while True:
            time.sleep(60)
    return vowels(prompt, rollout)


def reads_marked(prompt: Any, rollout: Any) -> Any:
    """Says which answer it read behind "####", and nothing where there is none."""
    from postgrad.rewards.verifier import Score

    _, mark, answer = rollout.text.rpartition("####")
    if not mark:
        return 0.0
    return Score(float(answer.strip() == prompt.answer), {"answer": answer.strip()})


def reads_unusual(prompt: Any, rollout: Any) -> Any:
    """As reads_marked, behind a mark of its own."""
    from postgrad.rewards.verifier import Score

    _, mark, answer = rollout.text.rpartition("=>")
    return Score(float(answer == prompt.answer), {"answer": answer}) if mark else 0.0
