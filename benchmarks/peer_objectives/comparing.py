"""Compares two outcomes, judges what differs, and prints it as a table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from benchmarks.peer_objectives.ours import Outcome, outcome
from postgrad.core.errors import UsageError
from postgrad.translate.translate import Translation, translate

EQUAL = 1e-5  # relative: advantages and weights are float32 here


@dataclass(frozen=True)
class Known:
    """A difference that is decided."""

    why: str
    note: str = ""  # what a comment or a lost option of the recipe says of it; "": nothing does
    within: float = np.inf  # the greatest relative difference of the gradient


OF_SUM = Known(  # gdpo, of twenty samples
    "the sum's deviation is of a sample (n - 1) there, of all samples (n) here",
    "the sum's deviation",
    within=0.026,
)


@dataclass(frozen=True)
class Row:
    """What a case showed. loss, gradient: the greatest relative differences over all draws."""

    objective: str
    settings: Mapping[str, Any]  # the recipe's [algorithm], or its [[rewards]]
    ours: float | None  # the loss of the first draw, or the mean score of answers; None: no recipe
    theirs: float | None
    loss: float | None  # of scores: the share of answers whose score is another
    gradient: float | None
    verdict: str  # "equal", "told", "known", "lost" or "differs"
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """The entry of the results."""
        return {name: value for name, value in asdict(self).items() if value not in (None, "")}


@dataclass(frozen=True)
class Case:
    """One objective of a peer: its options, and what its own functions compute with them."""

    name: str
    words: Sequence[str]  # the options, as `postgrad translate` reads them
    peer: Callable[[Any], Outcome]  # of what `samples` draws
    samples: Callable[[int], Any]
    known_difference: Known | None = None
    knobs: Mapping[str, Any] = field(default_factory=dict)  # settings that replace the recipe's
    ours: Callable[[Mapping[str, Any], Any], Outcome] = outcome  # of [algorithm] and the samples

    def compared(self, system: str, draws: int) -> Row:
        """Its row: the losses of the first draw, the greatest differences of all."""
        translation = translated(system, self.words)
        table = dict(translation.recipe["algorithm"]) | dict(self.knobs)
        samples = [self.samples(seed) for seed in range(draws)]
        pairs = [
            (self.peer(samples_of_step), self.ours(table, samples_of_step))
            for samples_of_step in samples
        ]
        loss, gradient = np.max([difference(*pair) for pair in pairs], axis=0).tolist()
        theirs, ours = pairs[0]
        return Row(
            self.name, table, ours.loss, theirs.loss, loss, gradient,
            *verdict(self.known_difference, loss, gradient, translation),
        )  # fmt: skip


@dataclass(frozen=True)
class Lost:
    """An objective that no recipe has: `translate` refuses it, or names the option as lost."""

    name: str
    words: Sequence[str]
    option: str  # that the recipe names as lost, or a part of the message that refuses

    def compared(self, system: str, draws: int) -> Row:
        """Its row, without numbers: "lost" where the user is told so, else "differs"."""
        del draws
        try:
            translation = translated(system, self.words)
        except UsageError as error:
            why = f"refused: {error}"
            is_told = self.option in str(error)
        else:
            listed = translation.draft.missing
            whys = [option.why for option in listed if option.name == self.option]
            why = f"{self.option}: {'; '.join(whys) or 'the recipe does not name it'}"
            is_told = bool(whys)
        return Row(self.name, {}, None, None, None, None, "lost" if is_told else "differs", why)


def difference(theirs: Outcome, ours: Outcome) -> tuple[float, float]:
    """Relative differences of loss and gradient: |a - b| / |a|, of the largest entries of each leaf
    for a gradient. A loss is compared with the gradient's sum of magnitudes where it is nearly 0.
    """
    gradient, scale = 0.0, 0.0
    for name in theirs.gradients.keys() | ours.gradients.keys():
        a, b = (np.concatenate(side.gradients[name]) for side in (theirs, ours))
        largest = max(np.abs(a).max(), np.abs(b).max())
        scale += float(np.abs(a).sum())
        if largest > 0:
            gradient = max(gradient, float(np.abs(a - b).max() / largest))
    loss = abs(theirs.loss - ours.loss) / max(abs(theirs.loss), 0.1 * scale, 1e-12)
    return loss, gradient


class Comparable(Protocol):
    """A case that compares itself."""

    @property
    def name(self) -> str:
        """Of the objective, in tables."""
        ...

    def compared(self, system: str, draws: int) -> Row:
        """Its row over `draws` draws of samples."""
        ...


def compared(system: str, case: Comparable, draws: int) -> Row:
    """The row of a case over `draws` draws of samples. An error of either side names the case."""
    torch.manual_seed(0)  # verl's clip_cov draws tokens
    try:
        return case.compared(system, draws)
    except Exception as error:
        error.add_note(f"in the case {case.name!r} of {system}")
        raise


def translated(system: str, words: Sequence[str]) -> Translation:
    """The recipe of options. Raises RuntimeError for one whose [algorithm] cannot be read."""
    translation = translate(system, words, devices=1)
    problem = translation.problem or ""
    if "algorithm." in problem or "algorithm:" in problem:
        raise RuntimeError(f"the recipe is none: {translation.problem}")
    return translation


def verdict(
    known_difference: Known | None, loss: float, gradient: float, translation: Translation
) -> tuple[str, str]:
    """The verdict and why: "equal"; "told" by the recipe; "known" here alone; else "differs"."""
    if max(loss, gradient) <= EQUAL:  # not so of a NaN
        return "equal", ""
    if known_difference is None:
        return "differs", "nothing explains it"
    if not gradient <= known_difference.within:
        return (
            "differs",
            f"the gradient by more than {known_difference.within}: {known_difference.why}",
        )
    draft = translation.draft
    texts = [*draft.comments.values(), *(option.why for option in draft.missing)]
    if known_difference.note and not any(known_difference.note in text for text in texts):
        return (
            "differs",
            f"the recipe does not say {known_difference.note!r}: {known_difference.why}",
        )
    return ("told" if known_difference.note else "known"), known_difference.why


def shown(rows: Sequence[Row]) -> str:
    """The table, and below it why rows differ."""
    lines = ["verdict  our loss    their loss  differs by  gradient by  objective"]
    lines += [
        f"{row.verdict:8} {_number(row.ours, '10.6f')}  {_number(row.theirs, '10.6f')}  "
        f"{_number(row.loss, '10.1e')}  {_number(row.gradient, '11.1e')}  {row.objective}"
        for row in rows
    ]
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.why:
            reasons.setdefault(f"{row.verdict}: {row.why}", []).append(row.objective)
    return "\n".join([*lines, *(f"{why} [{'; '.join(names)}]" for why, names in reasons.items())])


def _number(value: float | None, form: str) -> str:
    return format("-", f">{form.split('.')[0]}") if value is None else format(value, form)
