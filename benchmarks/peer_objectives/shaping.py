"""KL coefficients that adapt from step to step: a peer's controller beside the recipe's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.peer_objectives.comparing import Known, Row, translated, verdict
from benchmarks.peer_objectives.samples import LONGEST, Samples, drawn
from postgrad.algorithms.registry import algorithm_class

STEPS = 20
MEANS = Known("the controller reads the mean of its estimator over responses there, that of k1 "
              "over tokens here", "averaged over responses")  # fmt: skip


@dataclass(frozen=True)
class Adapts:
    """A controller of a peer: the coefficients of STEPS steps."""

    name: str
    words: Sequence[str]
    peer: Callable[[Sequence[Samples]], NDArray[np.float64]]
    samples: Callable[[int], Samples] = drawn
    known_difference: Known | None = None

    def compared(self, system: str, draws: int) -> Row:
        """Its row: the last coefficients, and the greatest relative difference."""
        del draws
        translation = translated(system, self.words)
        table = dict(translation.recipe["algorithm"])
        steps = [self.samples(seed) for seed in range(STEPS)]
        knobs = {key: value for key, value in table.items() if key != "type"}
        algorithm: Any = algorithm_class(str(table["type"]))(**knobs)
        algorithm = algorithm.for_rollout(LONGEST, dict.fromkeys(steps[0].components, 1.0))
        ours, state = [float(table["kl_coef"])], {}
        for batch in steps[:-1]:
            columns = [
                batch.column(rows, np.float32) for rows in (batch.old, batch.ref, batch.entropy)
            ]
            values = (
                batch.column(batch.old_values, np.float32) if algorithm.needs().critic else None
            )
            credit = algorithm.credit(batch.batch(), *columns[:2], values, state, columns[2])
            state = credit.state
            ours.append(float(state["kl_coef"]))
        theirs = self.peer(steps)
        worst = float(np.abs(theirs / np.array(ours) - 1).max())
        outcome = (
            ("equal", "")
            if worst <= 1e-6
            else verdict(self.known_difference, worst, 0.0, translation)
        )
        return Row(self.name, table, ours[-1], float(theirs[-1]), worst, None, *outcome)


def near(seed: int) -> Samples:
    """Samples whose mean KL is about 0.3, near the target of the cases."""
    samples = drawn(seed, environment=False)
    ref = [
        row - 0.3 + 0.5 * (before - row)
        for row, before in zip(samples.ref, samples.old, strict=True)
    ]
    return replace(samples, ref=ref)


def alike(seed: int) -> Samples:
    """The same with responses of one length, so that a mean over them is one over tokens."""
    samples = near(seed)

    def wide(rows: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        return [np.resize(row, LONGEST) for row in rows]

    names = ("mask", "logprobs", "old", "sampled", "ref", "entropy", "values", "old_values")
    rows: dict[str, Any] = {name: wide(getattr(samples, name)) for name in names}
    return replace(samples, **rows)


def responses(samples: Samples, kl: Any) -> float:
    """The mean over responses of the mean over their tokens. kl: [S, LONGEST] float64."""
    mask = samples.padded_mask
    return float(((kl * mask).sum(-1) / mask.sum(-1)).mean())
