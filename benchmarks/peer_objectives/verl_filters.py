"""verl's filter_groups: groups whose metric is the same in all samples are replaced."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.peer_objectives.filters import Filters, Group
from benchmarks.peer_objectives.loading import statements
from benchmarks.peer_objectives.verl import BASE


def cases(checkout: Path) -> Iterator[Filters]:
    """All that is compared: metrics of the answer alone, and of the whole reward."""
    path = checkout / "verl" / "trainer" / "ppo" / "v1" / "replay_buffer.py"
    classify = statements(path, "classification_cache[uid] =")

    def peer(metric: str, group: Group) -> bool:
        values = group.first if metric in ("acc", "score") else group.total
        space = {"classification_cache": {}, "uid": 0, "values": values.tolist(), "np": np}
        classify(space)
        return space["classification_cache"][0] is None

    shaped = ("reward.reward_manager.name=dapo", "reward.reward_kwargs.overlong_buffer_cfg.len=4",
              "reward.reward_kwargs.overlong_buffer_cfg.enable=True",
              "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0")  # fmt: skip
    for metric in ("acc", "score", "seq_reward", "seq_final_reward"):
        words = (*BASE, "algorithm.adv_estimator=grpo", "algorithm.filter_groups.enable=True",
                 f"algorithm.filter_groups.metric={metric}", *shaped)  # fmt: skip
        yield Filters(f"filter_groups, {metric}", words, partial(peer, metric))
