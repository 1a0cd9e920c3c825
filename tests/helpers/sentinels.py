"""Groups of samples as sentinels see them."""

from collections.abc import Sequence

import numpy as np

from postgrad.core.records import Failure, Prompt, Rollout, ScoredGroup, Turn


def group(
    rewards: Sequence[float],
    *,
    logprobs: Sequence[Sequence[float]] | None = None,
    texts: Sequence[str] | None = None,
    answer: str | None = None,
    failures: Sequence[tuple[int, str]] = (),
) -> ScoredGroup:
    """One prompt's samples. failures: (sample, component)."""
    costs = logprobs or [[-1.0]] * len(rewards)
    rollouts = tuple(
        Rollout(
            ticket=0,
            sample=n,
            turns=(
                Turn(
                    "policy",
                    np.arange(len(logprobs), dtype=np.int32),
                    np.array(logprobs, np.float32),
                ),
            ),
            finish_reason="stop",
            versions=((0, len(logprobs)),),
            text=texts[n] if texts else str(n),
        )
        for n, logprobs in enumerate(costs)
    )
    return ScoredGroup(
        prompt=Prompt(0, np.zeros(1, np.int32), "question", answer, "made", 0),
        rollouts=rollouts,
        rewards={},
        total=np.array(rewards, np.float64),
        kept=np.ones(len(rewards), np.bool_),
        failures=tuple(Failure(n, component, "error", "no") for n, component in failures),
    )
