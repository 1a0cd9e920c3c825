"""OpenRLHF's penalties of length, beside a reward model whose score is the answer's text."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.peer_objectives.answers import LENGTHS, Answer, Scored, weighed
from benchmarks.peer_objectives.openrlhf import BASE, OpenRLHF, flag

PENALTIES: tuple[dict[str, Any], ...] = (
    {"reward.overlong_buffer_len": 20},
    {"reward.overlong_buffer_len": 20, "reward.overlong_penalty_factor": 0.5},
    *({"reward.stop_properly_penalty_coef": value} for value in (0.0, 0.5, 1.0, -0.5)),
    {"reward.overlong_buffer_len": 20, "reward.stop_properly_penalty_coef": 0.5},
)  # fmt: skip


def cases(checkout: Path) -> Iterator[Scored]:
    """apply_length_penalties on rewards of 0.75 and -0.25."""
    OpenRLHF(checkout)  # makes its files importable
    shaping: Any = import_module("openrlhf.trainer.ppo_utils.length_penalty")
    for options in PENALTIES:

        def peer(answer: Answer, options: dict[str, Any] = options) -> float:
            reward_options = {
                name.removeprefix("reward."): value for name, value in options.items()
            }
            args = SimpleNamespace(
                rollout=SimpleNamespace(max_new_tokens=100),
                reward=SimpleNamespace(**{
                    "overlong_buffer_len": None, "overlong_penalty_factor": 1.0,
                    "stop_properly_penalty_coef": None} | reward_options),
            )  # fmt: skip
            experience = SimpleNamespace(
                rewards=torch.tensor([float(answer.text)]), info={},
                response_length=torch.tensor([answer.tokens]),
                truncated=torch.tensor([answer.finish == "length"]),
            )  # fmt: skip
            shaping.apply_length_penalties([experience], args)
            return float(experience.rewards[0])

        stated = BASE | {"rollout.max_new_tokens": 100, "reward.clip_range": [-10, 10]} | options
        words = ["ppo_ray", *(word for key, value in stated.items() for word in flag(key, value))]
        name = ", ".join(f"{key.removeprefix('reward.')} {value}" for key, value in options.items())
        yield Scored(name, words, peer, [*weighed(LENGTHS, "0.75"), *weighed(LENGTHS, "-0.25")])
