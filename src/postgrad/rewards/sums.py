"""A task whose steps can be checked: sums of small numbers, added up one number a line.

"Add 3+8+5." is answered by "3+8=11" and "11+5=16". `judged` says of each line whether it is right,
so a process reward model can be compared with the labels that it was to learn, and a policy that is
trained on that model's scores with what is true.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.core.seeds import integer, uniform
from postgrad.rewards.verifier import PromptView, RolloutView, Score, Verifier

SEPARATOR = "\n"  # between two steps
SLIPS = (-10, -2, -1, 1, 2, 10)  # what a wrong line is off by
LARGEST = 9  # of the numbers that are added


def judged(terms: Sequence[int], lines: Sequence[str]) -> list[bool]:
    """Of each line, whether it is right: it adds the next number to what the line before stated
    (right or wrong), and its sum is right. The last line is wrong too where numbers are left.
    """
    right: list[bool] = []
    before = str(terms[0])
    for place, line in enumerate(lines):
        term = terms[place + 1] if place + 1 < len(terms) else None
        start, _, stated = line.partition("=")
        wanted = term is not None and before.isdecimal() and start == f"{before}+{term}"
        right.append(wanted and stated == str(int(before) + (term or 0)))
        before = stated
    if lines and len(lines) < len(terms) - 1:
        right[-1] = False
    return right


def terms_of(row: Any) -> list[int]:
    """The numbers of a row's question. Raises ValueError where it has none."""
    return [int(term) for term in row["question"].removeprefix("Add ").rstrip(".").split("+")]


class Sums(Verifier):
    """1 where all lines of an answer are there and right, else 0. Detail: of each line."""

    def check(self, prompt: PromptView) -> str | None:
        try:
            terms_of({"question": prompt.question})
        except ValueError:
            return f'the question is {prompt.question[:80]!r}, not one like "Add 3+8+5."'
        return None

    def score(self, prompt: PromptView, rollout: RolloutView) -> Score:
        right = judged(terms_of({"question": prompt.question}), rollout.text.split(SEPARATOR))
        return Score(float(all(right)), right)


def questions(size: int, seed: int, *, least: int = 3, most: int = 5) -> Iterator[dict[str, Any]]:
    """Rows of question and answer, of `least` to `most` numbers from 1 to LARGEST."""
    if not 2 <= least <= most:
        raise UsageError(f"data.task: least = {least} and most = {most}: 2 <= least <= most")
    for index in range(size):
        count = least + _below(most - least + 1, seed, index, 0)
        terms = [1 + _below(LARGEST, seed, index, 1, place) for place in range(count)]
        yield {"question": f"Add {'+'.join(map(str, terms))}.", "answer": str(sum(terms))}


def examples(
    size: int, seed: int, *, least: int = 3, most: int = 5, slip: float = 0.2, stop: float = 0.1
) -> Iterator[dict[str, Any]]:
    """The rows of `questions`, each with an answer of somebody who errs: `answer`.

    slip: the probability that the sum of a line is wrong; later lines go on from it. stop: the
    probability that an answer ends before its last line.
    """
    for row in steps(size, seed, least=least, most=most, slip=slip, stop=stop):
        yield {"question": row["prompt"], "answer": SEPARATOR.join(row["completions"])}


def steps(
    size: int, seed: int, *, least: int = 3, most: int = 5, slip: float = 0.2, stop: float = 0.1
) -> Iterator[dict[str, Any]]:
    """The answers of `examples` as rows of steps: prompt, completions and the true labels."""
    for index, row in enumerate(questions(size, seed, least=least, most=most)):
        terms = terms_of(row)
        lines = _lines(terms, seed, index, slip)
        if len(lines) > 1 and float(uniform(seed, "sums", index, 2)) < stop:
            lines = lines[: 1 + _below(len(lines) - 1, seed, index, 3)]
        labels = judged(terms, lines)
        yield {"prompt": row["question"], "completions": lines, "labels": labels}


def _lines(terms: Sequence[int], seed: int, index: int, slip: float) -> list[str]:
    total, lines = terms[0], list[str]()
    for place, term in enumerate(terms[1:]):
        stated = total + term
        if float(uniform(seed, "sums", index, 4, place)) < slip:
            off = [by for by in SLIPS if stated + by > 0]
            stated += off[_below(len(off), seed, index, 5, place)]
        lines.append(f"{total}+{term}={stated}")
        total = stated
    return lines


def _below(n: int, seed: int, *counters: int) -> int:
    return integer(seed, "sums", *counters) % n
