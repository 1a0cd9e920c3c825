"""NeMo RL's dynamic sampling: samples whose group has no deviation are replaced."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.peer_objectives.comparing import Known
from benchmarks.peer_objectives.filters import Filters, Group
from benchmarks.peer_objectives.loading import statements
from benchmarks.peer_objectives.nemo_rl import BASE
from benchmarks.peer_objectives.nemo_rl_learning import words

ALONE = Known("a sample whose siblings have equal scores is left out there, alone",
              "whose siblings have equal scores")  # fmt: skip


def cases(checkout: Path) -> Iterator[Filters]:
    """All that is compared. Scores are those before shaping."""
    space: dict[str, Any] = {"torch": torch}
    statements(checkout / "nemo_rl" / "algorithms" / "utils.py",
               "def calculate_baseline_and_std_per_prompt")(space)  # fmt: skip

    def peer(leave_one_out: bool, group: Group) -> Any:
        rewards = torch.from_numpy(group.first).double()
        prompts, valid = torch.zeros(len(rewards), 1), torch.ones(len(rewards))
        _, std = space["calculate_baseline_and_std_per_prompt"](
            prompts, rewards.float(), valid, leave_one_out_baseline=leave_one_out
        )
        return (std != 0.0).numpy()

    for leave_one_out in (False, True):
        switch = str(leave_one_out).lower()
        options = BASE | {"grpo.use_dynamic_sampling": "true",
                          "grpo.use_leave_one_out_baseline": switch}  # fmt: skip
        name = "leave one out" if leave_one_out else "whole groups"
        yield Filters(f"dynamic sampling, {name}", words(options), partial(peer, leave_one_out),
                      known_difference=ALONE if leave_one_out else None)  # fmt: skip
