"""The reward of timed steps: of a sample's number alone, so that every group has a gradient."""

from postgrad.rewards.verifier import PromptView, RolloutView


def score(prompt: PromptView, rollout: RolloutView) -> float:
    """1 for every second sample of a prompt."""
    return float(rollout.sample % 2)
