"""A recipe with four ranks, as what places them reads it."""

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
