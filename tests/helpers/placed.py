"""Recipes with four ranks, as what places them reads them."""

from typing import Any

RL: dict[str, Any] = {
    "job": "rl",
    "run_dir": "run",
    "steps": 1,
    "model": {"path": "somewhere"},
    "data": {"path": "rows.jsonl"},
    "rewards": [{"type": "exact_match"}],
    "algorithm": {"type": "grpo"},
    "batch": {"rollout_batch_size": 8},
    "learner": {"ranks": 4},
}
# Every role of an RL job.
PPO: dict[str, Any] = {
    **RL,
    "algorithm": {"type": "ppo", "kl_coef": 0.05},
    "rewards": [{"type": "reward_model"}],
    "reward_model": {"model": {"path": "a reward model"}},
}
