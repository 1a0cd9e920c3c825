"""A reward model in this process as a component of [[rewards]].

It reads the token ids of prompt and response as they were sampled, environment tokens included; no
text is tokenised again. A truncated response is scored at its last token.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from postgrad.core.errors import SettingsError, UsageError
from postgrad.core.records import PlacedImage, Prompt, Rollout
from postgrad.rewards.protocol import Outcome
from postgrad.rewards.settings import RewardSettings
from postgrad.rewards.verifier import Verifier

# types of [[rewards]] that ask it: for the score of a sample, or of each of its steps
REWARD_MODELS = ("reward_model", "process_reward")
_WORKERS = (
    "cpu_seconds",
    "wall_seconds",
    "waits",
    "after",
    "special_tokens",
    "sandbox",
    "env",
)  # settings of components that have workers


class Learned(Protocol):
    """A model that scores sequences. mean, std: of its scores on its training data, None where they
    are not known. separator: of the steps that it judges; None of a model that judges no steps.
    """

    @property
    def separator(self) -> str | None: ...

    @property
    def mean(self) -> float | None: ...

    @property
    def std(self) -> float | None: ...

    def score(
        self,
        sequences: Sequence[NDArray[np.int32]],
        images: Sequence[tuple[PlacedImage, ...]],
    ) -> NDArray[np.float64]:
        """Scores [S] of S sequences of token ids with these images, each read at its last token."""
        ...

    def step_ends(self, ids: NDArray[np.int32], separator: str) -> NDArray[np.int64]:
        """[steps] the places of the last token of each step of a turn [R]."""
        ...

    def score_steps(
        self,
        sequences: Sequence[NDArray[np.int32]],
        masks: Sequence[NDArray[np.bool_]],
        images: Sequence[tuple[PlacedImage, ...]],
    ) -> list[NDArray[np.float64]]:
        """The probability that a step is right, [steps] of each sequence. masks: True at the last
        tokens of steps.
        """
        ...


class AskedHere(Verifier):
    """A verifier whose scores the run's own reward model gives, in this process."""

    @classmethod
    def check_component(cls, reward: RewardSettings) -> None:
        """Raises SettingsError where a component has settings of a worker."""
        # A recipe in recipe.json has every default, hence no check of presence.
        for key in _WORKERS:
            if getattr(reward, key) != RewardSettings.model_fields[key].default:
                why = (
                    "the run's own reward model gives this score, from tokens and in no worker, "
                    "and does not read it: leave it out"
                )
                raise SettingsError("rewards", [((key,), why)])

    def component(self, name: str, reward: RewardSettings, learned: Learned | None) -> "Component":
        """What scores groups. Raises UsageError where the model cannot."""
        raise NotImplementedError


class RewardModel(AskedHere):
    """The score of the run's own reward model."""

    normalise: bool = False  # (score - mean) / std, with the scale that is kept with the model

    def component(self, name: str, reward: RewardSettings, learned: Learned | None) -> "Component":
        model = asked(name, learned)
        if model.separator is not None:
            raise UsageError(
                f"rewards: {name!r} asks a process reward model, which scores steps: say type = "
                '"process_reward"'
            )
        return Component(name, self, model)

    def scale(self, name: str, learned: Learned) -> tuple[float, float]:
        """(mean, std) for scaling its scores; (0, 1) without `normalise`.

        Raises UsageError where `normalise` is set and the model knows no finite mean and std. name:
        of the component, for the message.
        """
        if not self.normalise:
            return 0.0, 1.0
        mean, std = learned.mean, learned.std
        has_scale = (
            mean is not None and std is not None and math.isfinite(mean) and 0 < std < math.inf
        )
        if not has_scale:
            raise UsageError(
                f"rewards: {name!r} has normalise = true, and its model says mean {mean}, std "
                f'{std}; leave it out, or train the model with the job "reward" and export it '
                "without --adapter"
            )
        assert mean is not None
        assert std is not None
        return mean, std


def asked(name: str, learned: Learned | None) -> Learned:
    """The model that a component asks. Raises UsageError where the run has none."""
    if learned is None:
        raise UsageError(
            f"rewards: {name!r} needs a reward model and there is none: give one in "
            '[reward_model], or ask a server with type = "remote"'
        )
    return learned


class Component:
    """A component that the run's reward model scores in this process, group by group."""

    def __init__(self, name: str, settings: RewardModel, learned: Learned) -> None:
        """Raises UsageError where the scores are to be scaled and their scale is not known."""
        self._name, self._learned = name, learned
        self._mean, self._std = settings.scale(name, learned)
        self._normalise = settings.normalise

    def outcomes(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Outcome]:
        """An outcome for each rollout, whose key is the rollout's index. Of several conversations
        the last one is scored.

        Exceptions of the model pass through: they are no failure of a sample.
        """
        read = [rollout.conversations(prompt)[-1] for rollout in rollouts]
        sequences, images = [tokens for _, tokens, _ in read], [shown for _, _, shown in read]
        values = np.asarray(self._learned.score(sequences, images), np.float64)
        if values.shape != (len(rollouts),):
            raise ValueError(
                f"rewards: {self._name!r} gave scores of shape {values.shape} for "
                f"{len(rollouts)} sequences"
            )
        return [self._outcome(place, float(value)) for place, value in enumerate(values)]

    def _outcome(self, place: int, value: float) -> Outcome:
        scaled = (value - self._mean) / self._std
        if not math.isfinite(scaled):
            message = f"the reward model returned {value}, which is no score"
            return Outcome(place, cause="error", message=message)
        return Outcome(place, scaled, {"raw": value} if self._normalise else None)
