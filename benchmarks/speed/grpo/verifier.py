"""The reward as postgrad's workers call it."""

from benchmarks.speed.grpo.task import points
from postgrad.rewards.verifier import PromptView, RolloutView


def score(prompt: PromptView, rollout: RolloutView) -> float:
    """See task.points."""
    return points(rollout.text, prompt.metadata["equal"])
