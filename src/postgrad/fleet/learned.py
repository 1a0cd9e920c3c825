"""The reward model of a run, as [[rewards]] of type "reward_model" or "process_reward" ask it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from postgrad.core.errors import UsageError
from postgrad.core.ragged import Ragged
from postgrad.core.records import PlacedImage, Sequences, column_of
from postgrad.data.step_ends import step_ends
from postgrad.learner.protocols import ScalarRole
from postgrad.learner.score import probabilities, score_sequences, step_scores
from postgrad.models.config import load_config
from postgrad.models.score import judges_steps, scale_of, separator_of
from postgrad.models.tokenizer import require_same_tokens
from postgrad.recipe.recipe import Answering
from postgrad.rewards.learned import REWARD_MODELS
from postgrad.rewards.registry import component_names, for_rollout
from postgrad.rewards.scorer import Scorer
from postgrad.rewards.settings import RewardSettings
from postgrad.rollout.environments.base import environment_rewards


class LearnedReward:
    """Scores sequences of token ids. What it says of itself is read from its directory at once, its
    weights come with `role`: wrong rows should cost seconds.
    """

    def __init__(self, path: str, tokenizer: Any) -> None:
        """tokenizer: the policy's. Raises UsageError where the model at `path` has another."""
        serve = f'serve it with postgrad serve-reward {path} and ask it with type = "remote"'
        require_same_tokens(path, "reward_model.model.path", tokenizer, remedy=serve)
        self.path = path
        config = load_config(path)
        self._tokenizer = tokenizer
        self._scale = scale_of(config)
        self.separator = separator_of(config) if judges_steps(config) else None
        self.role: ScalarRole | None = None

    @property
    def mean(self) -> float | None:
        """Of the scores on its training data; None where it does not say."""
        return None if self._scale is None else self._scale.mean

    @property
    def std(self) -> float | None:
        """The standard deviation, as `mean`."""
        return None if self._scale is None else self._scale.std

    def score(
        self,
        sequences: Sequence[NDArray[np.int32]],
        images: Sequence[tuple[PlacedImage, ...]],
    ) -> NDArray[np.float64]:
        """[S] the score at each last token; see score_sequences."""
        assert self.role is not None  # given before anything is sampled
        return score_sequences(self.role, sequences, images)

    def step_ends(self, ids: NDArray[np.int32], separator: str) -> NDArray[np.int64]:
        """[steps] the place of the last token of each step of a turn [R]: data.step_ends."""
        return step_ends(self._tokenizer, ids, separator)

    def score_steps(
        self,
        sequences: Sequence[NDArray[np.int32]],
        masks: Sequence[NDArray[np.bool_]],
        images: Sequence[tuple[PlacedImage, ...]],
    ) -> list[NDArray[np.float64]]:
        """The probability that a step is right, [steps] of each sequence of one prompt. masks: True
        at the last tokens of steps.
        """
        assert self.role is not None  # given before anything is sampled
        tokens = Ragged.of(sequences, np.int32)
        group = np.zeros(len(tokens), np.int64)  # a layout shares openings within a group
        mask, shown = Ragged.of(masks, np.bool_), column_of(images)
        marked = Sequences(tokens, mask, group, images=shown)
        return [probabilities(scores) for scores in step_scores(self.role, marked)]


def learned_reward(recipe: Answering, tokenizer: Any) -> LearnedReward | None:
    """The reward model that the recipe's [[rewards]] ask; None where none of them does."""
    if not recipe.asks_reward_model:
        return None
    settings = recipe.model_tables.get(("reward_model", "model"))
    path = None if settings is None else settings.source
    if path is None:
        raise UsageError(
            '[[rewards]] of type "reward_model" ask the model of [reward_model.model], for jobs of '
            "RL: give its path"
        )
    return LearnedReward(path, tokenizer)


def _by_component(
    rewards: Sequence[RewardSettings], learned: LearnedReward | None
) -> dict[str, LearnedReward]:
    """`learned` by the name of each of the reward components that ask it."""
    if learned is None:
        return {}
    names = zip(component_names(rewards), rewards, strict=True)
    return {name: learned for name, reward in names if reward.type in REWARD_MODELS}


def scorer_of(recipe: Answering, tokenizer: Any, learned: LearnedReward | None = None) -> Scorer:
    """The recipe's scorer; rewards of the environment are one of its components.

    tokenizer: the policy's. learned: the run's own reward model. Raises UsageError where the
    recipe's rewards are wrong.
    """
    rewards = for_rollout(recipe.rewards, recipe.rollout.max_new_tokens)
    _require_readable(rewards, tokenizer)
    learned_scores = _by_component(recipe.rewards, learned)
    return Scorer(
        rewards,
        recipe.scoring,
        environment_rewards(recipe.environment),
        learned_scores,
        decode=tokenizer.decode,
    )


def _require_readable(rewards: Sequence[RewardSettings], tokenizer: Any) -> None:
    """Raises UsageError where a verifier would look for a special token in texts that have none:
    it would read nothing of every sample.
    """
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    for reward in rewards:
        after = reward.after
        if after is None or reward.special_tokens or reward.type in REWARD_MODELS:
            continue
        hidden = next((token for token in special if token in after), None)
        if hidden is not None:
            raise UsageError(
                f"rewards.after = {after!r} of {reward.type!r}: {hidden!r} is a special token of "
                "this model's tokenizer, which the text of a sample leaves out: say "
                "special_tokens = true"
            )
