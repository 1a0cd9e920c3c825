"""Open-Instruct's active_sampling: groups whose scores are all the same are replaced."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from benchmarks.peer_objectives.filters import Filters, Group, condition
from benchmarks.peer_objectives.learning import words_of
from benchmarks.peer_objectives.open_instruct import BASE


def cases(checkout: Path) -> Iterator[Filters]:
    """All that is compared. Scores are of all verifiers and penalties together."""
    test = condition(checkout / "open_instruct" / "data_loader.py",
                     "if filter_zero_std_samples and np.std")  # fmt: skip

    def peer(group: Group) -> bool:
        result = SimpleNamespace(reward_scores=group.total.tolist())
        return not test({"filter_zero_std_samples": True, "np": np, "result": result})

    options = BASE | {"active_sampling": True, "filter_zero_std_samples": True, "async_steps": 2}
    yield Filters("active_sampling", words_of("grpo", options), peer)
