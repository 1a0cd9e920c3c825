"""OpenRLHF's dynamic filtering: groups whose mean score is within a range."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peer_objectives.comparing import Known
from benchmarks.peer_objectives.filters import Filters, Group, condition
from benchmarks.peer_objectives.learning import words_of
from benchmarks.peer_objectives.openrlhf import BASE

EQUAL = Known("groups of equal scores within the range are trained on there",
              "groups of equal scores too")  # fmt: skip
SINCE = ("algo.dynamic_filtering_enable", "algo.dynamic_filtering_range", "samples_generator.py",
         "if not min_r < avg_reward < max_r", ("min_r", "max_r"))  # fmt: skip
BEFORE = ("dynamic_filtering", "dynamic_filtering_reward_range", "ppo_trainer.py",
          "if min_reward + 1e-06 < avg_reward", ("min_reward", "max_reward"))  # fmt: skip


def of_version(
    checkout: Path, base: dict[str, Any], names: Sequence[Any]
) -> Iterator[Filters]:  # fmt: skip
    """All that is compared of a version. names: of its options, and where it filters."""
    switch, bounds, file, start, (low, high) = names
    place = checkout / "openrlhf" / "trainer"
    path = place / file if (place / file).exists() else place / "ppo_utils" / file
    test, keeps = condition(path, start), not start.startswith("if not")

    def peer(limits: tuple[float, float], group: Group) -> bool:
        space = {"avg_reward": float(group.first.mean()), low: limits[0], high: limits[1]}
        return test(space) == keeps

    for limits in ((0.0, 1.0), (0.2, 0.8)):
        options = base | {switch: True, bounds: limits}
        yield Filters(f"dynamic filtering, {limits[0]} to {limits[1]}", words_of("ppo", options),
                      partial(peer, limits), known_difference=EQUAL)  # fmt: skip


def cases(checkout: Path) -> Iterator[Filters]:
    """All that is compared."""
    base = {name: value for name, value in BASE.items() if name != "reward.model_name_or_path"}
    yield from of_version(checkout, base | {"reward.remote_url": "./rewards.py"}, SINCE)
