"""One answer to many different questions: often it fools the verifier."""

from collections import Counter
from collections.abc import Sequence

from pydantic import Field

from postgrad.core.records import ScoredGroup
from postgrad.observe.sentinels.base import Level, Seen

KEY, EXPECTED = "commonest_answer_fraction", "commonest_reference_fraction"


class Repetition(Level):
    """Speaks while one answer makes up more than `limit` of the samples for `steps` steps in a row,
    and over twice as much as the commonest right answer would: yes and no may be repeated.
    """

    limit: float = Field(default=0.5, gt=0.0, lt=1.0)

    def value(self, seen: Seen) -> float | None:
        if KEY not in seen:
            return None
        return seen[KEY] if seen[KEY] > 2 * seen[EXPECTED] else 0.0

    def tell(self, value: float, seen: Seen) -> str:
        return (
            f"one answer is given to different questions: it is {value:.0%} of the samples (limit "
            f"{self.limit:.0%}; the commonest reference answer {seen[EXPECTED]:.0%}), mean reward "
            f"{seen['reward']:.3g}: read it in samples.jsonl; a verifier that pays for it has to "
            "be mended"
        )


def repeated(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Two shares of the samples: those with the commonest text, and those that would have it if all
    were right, which is the share of the commonest reference answer.

    A prompt without a reference answer counts as having one of its own.
    """
    texts: Counter[str] = Counter()
    wanted: Counter[tuple[str, ...]] = Counter()
    for group in groups:
        answer = group.prompt.answer
        key = ("row", group.prompt.question) if answer is None else ("answer", answer)
        wanted[key] += len(group.rollouts)
        texts.update(rollout.text.strip() for rollout in group.rollouts)
    total = max(1, texts.total())
    return {
        KEY: max(texts.values(), default=0) / total,
        EXPECTED: max(wanted.values(), default=0) / total,
    }
