"""A synthetic task with a known human preference: a short note that asks somebody for a thing.

"Ask Mia for the salt." is answered well by a note that names the right person, names the right
thing, asks politely, and is brief. `gold` is that preference as a number. Pairs are labelled from
it with the noise of human labels (Bradley and Terry, 1952). So a reward model can be compared with
the preference that it was to learn, and a policy with what people wanted.
"""

import math
import re
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.core.seeds import permutation, uniform
from postgrad.rewards.verifier import PromptView, RolloutView, Score, Verifier

PEOPLE = (
    "Ada", "Ben", "Carl", "Dora", "Emil", "Fay", "Gus", "Hana", "Ivan", "Jane", "Lena", "Mia",
    "Olga", "Paul", "Rosa", "Sam", "Tess", "Vera", "Will", "Zoe",
)  # fmt: skip
THINGS = (
    "salt", "bread", "milk", "tea", "rope", "ladder", "hammer", "map", "key", "lamp", "book",
    "pen", "chair", "tent", "bike", "boat", "drum", "flute", "paint", "brush",
)  # fmt: skip
POLITE = frozenset({"please", "thank", "thanks"})
RUDE = frozenset({"now", "hurry", "lazy"})
BRIEF = 9  # words that nobody minds
LONG = 19  # words after which nobody reads on
HELD_OUT = 5  # one question of so many is never trained on

_OPENINGS = ("Hi {person}, ", "Dear {person}, ", "Hello {person}, ")
_NOBODY = "Hey you, "
_KIND = (
    "could you pass me the {thing}, please?",
    "may I please borrow the {thing}?",
    "I would like the {thing}. Thank you!",
    "thanks for lending me the {thing}.",
)
_PLAIN = ("I need the {thing}.", "bring me the {thing}.", "where is the {thing}?")
_CURT = (
    "give me the {thing} now!",
    "hurry up with the {thing}!",
    "do not be lazy and get the {thing}!",
)
_RAMBLES = (
    " I have looked for it all day long and nobody could help me.",
    " It is raining, and I like to sit here and look at the garden.",
    " My uncle had a larger one but he lost it on his way to town.",
)


def gold(person: str, thing: str, text: str) -> dict[str, float]:
    """The four parts of a note's true reward, each from 0 to 1.

    "person" and "thing": that one is named and no other. "polite": kind words and no rude ones.
    "brief": falls from 1 at `BRIEF` words to 0 at `LONG`. An empty note has 0 everywhere.
    """
    words = re.findall(r"[A-Za-z]+", text)
    low = {word.casefold() for word in words}
    parts = {
        "person": {word for word in words if word in PEOPLE} == {person},
        "thing": {word for word in low if word in THINGS} == {thing},
        "polite": bool(low & POLITE) and not low & RUDE,
        "brief": min(1.0, max(0.0, (LONG - len(words)) / (LONG - BRIEF))) if words else 0.0,
    }
    return {name: float(value) for name, value in parts.items()}


def worth_of(person: str, thing: str, text: str) -> float:
    """The true reward of a note, from 0 to 1: the mean of the four parts of `gold`."""
    parts = gold(person, thing, text)
    return sum(parts.values()) / len(parts)


class Courtesy(Verifier):
    """The true reward of a note (`worth_of`). Rows have the columns `person` and `thing`."""

    def check(self, prompt: PromptView) -> str | None:
        for name, choices in (("person", PEOPLE), ("thing", THINGS)):
            if prompt.metadata.get(name) not in choices:
                return f"column {name!r} is {prompt.metadata.get(name)!r}, not one of the task's"
        return None

    def score(self, prompt: PromptView, rollout: RolloutView) -> Score:
        parts = gold(prompt.metadata["person"], prompt.metadata["thing"], rollout.text)
        return Score(sum(parts.values()) / len(parts), parts)


def questions(size: int, seed: int, *, held_out: bool = False) -> Iterator[dict[str, Any]]:
    """Rows of question, person and thing, each question before any comes again. Every
    `HELD_OUT`-th of all is held out, the same ones for all seeds and all functions here.
    """
    every = len(PEOPLE) * len(THINGS)
    kept = every // HELD_OUT
    shuffled = permutation(every, 0, "courtesy")  # the same for all seeds
    numbers = shuffled[:kept] if held_out else shuffled[kept:]
    numbers = numbers[permutation(len(numbers), seed, "courtesy")].tolist()
    for index in range(size):
        number = numbers[index % len(numbers)]
        person, thing = PEOPLE[number // len(THINGS)], THINGS[number % len(THINGS)]
        yield {"question": f"Ask {person} for the {thing}.", "person": person, "thing": thing}


def examples(size: int, seed: int, *, held_out: bool = False) -> Iterator[dict[str, Any]]:
    """The rows of `questions` with a random note as `answer`: good or bad, see `_note`."""
    for index, row in enumerate(questions(size, seed, held_out=held_out)):
        yield {**row, "answer": _note(row["person"], row["thing"], seed, index, 0)}


def pairs(
    size: int, seed: int, *, held_out: bool = False, sharpness: float = 10.0
) -> Iterator[dict[str, Any]]:
    """Rows of prompt, chosen and rejected, with two columns about the label.

    `ahead` is by how much the true reward of one note exceeds the other's (never 0), `right`
    whether the better one is `chosen`. sharpness: the better note is chosen with the probability
    sigmoid(sharpness * ahead); 0 makes no mistakes.
    """
    if sharpness < 0:
        raise UsageError(f"data.task: sharpness = {sharpness} is below 0, where 0 makes no mistake")
    for index, row in enumerate(questions(size, seed, held_out=held_out)):
        person, thing = row["person"], row["thing"]
        notes = (_note(person, thing, seed, index, draw) for draw in count())
        first = next(notes)
        worth = worth_of(person, thing, first)
        second = next(note for note in notes if worth_of(person, thing, note) != worth)
        better, worse = (
            (first, second) if worth > worth_of(person, thing, second) else (second, first)
        )
        ahead = worth_of(person, thing, better) - worth_of(person, thing, worse)
        slip = 1.0 / (1.0 + math.exp(sharpness * ahead)) if sharpness else 0.0
        right = float(uniform(seed, "courtesy", index, 1)) >= slip
        chosen, rejected = (better, worse) if right else (worse, better)
        yield {
            "prompt": row["question"],
            "chosen": chosen,
            "rejected": rejected,
            "ahead": round(ahead, 6),
            "right": right,
        }


def _note(person: str, thing: str, seed: int, index: int, draw: int) -> str:
    """A random note: to the right person and about the right thing in most cases, polite in a third
    of them, too long in four of ten.
    """
    chance = [float(value) for value in uniform(seed, "courtesy", index, 3, draw, range(8))]
    named = person if chance[0] < 0.8 else _pick(PEOPLE, chance[1])
    opening = _NOBODY if chance[0] > 0.9 else _pick(_OPENINGS, chance[2]).format(person=named)
    meant = thing if chance[3] < 0.85 else _pick(THINGS, chance[4])
    tone = _KIND if chance[5] < 0.35 else _PLAIN if chance[5] < 0.7 else _CURT
    ramble = _pick(_RAMBLES, chance[7] / 0.4) if chance[7] < 0.4 else ""
    return opening + _pick(tone, chance[6]).format(thing=meant) + ramble


def _pick(choices: Sequence[str], chance: float) -> str:
    return choices[int(chance * len(choices))]
