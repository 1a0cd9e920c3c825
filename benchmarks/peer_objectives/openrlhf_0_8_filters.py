"""OpenRLHF 0.8.4's dynamic filtering."""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.peer_objectives.filters import Filters
from benchmarks.peer_objectives.openrlhf_0_8 import BASE
from benchmarks.peer_objectives.openrlhf_filters import BEFORE, of_version


def cases(checkout: Path) -> Iterator[Filters]:
    """All that is compared."""
    base = {name: value for name, value in BASE.items() if name != "reward_pretrain"}
    yield from of_version(checkout, base | {"remote_rm_url": "./rewards.py"}, BEFORE)
