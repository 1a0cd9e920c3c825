"""Turns of samples with an environment: how many there may be, and how long they are.

Rows do not say how often the policy answers, nor how long the replies are. A plan counts as many
tokens as the policy may write, as it does of an answer without an environment: all turns, each with
all of its tokens. A reply of which nothing is known counts as many as the prompt, the other text
that the policy reads.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from postgrad.data.chat_format import Message
from postgrad.data.settings import DataSettings, RowSettings
from postgrad.recipe.recipe import Recipe, RLRecipe
from postgrad.rollout.settings import EnvironmentSettings

# Replies of environments that always say much the same. No code of an environment runs in a plan.
GUESS: Message = {"role": "user", "content": "higher, from 10 to 99"}
RESULT: Message = {"role": "tool", "content": "1234.5"}  # of a calculator

Column = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Turns:
    """The turns that samples of a dataset may have."""

    limits: tuple[int, ...]  # most tokens of each
    # Tokens of a reply, with the marks of the chat template up to the next turn. None: not known,
    # and as long as the prompt.
    reply: float | None = 0.0

    @classmethod
    def of(
        cls, recipe: RLRecipe, dataset: RowSettings, tokens: Callable[[Message], float]
    ) -> "Turns":
        """tokens: of a message that the policy answers."""
        played = environment_of(recipe, dataset)
        if played is None:
            return cls(limits_of(recipe, dataset))
        reply = played.reply_tokens
        if reply is None and (message := _usual_reply(played)) is not None:
            reply = tokens(message)
        return cls(limits_of(recipe, dataset), reply)

    def played(self, prompt: Column, most: int) -> tuple[Column, Column, Column]:
        """Tokens that the policy writes, tokens of replies, and turns, of samples behind prompts of
        so many tokens, at most `most` with them. [rows] each. A reply behind which no token fits
        ends its sample.
        """
        left = np.maximum(most - prompt, 0.0)
        reply = prompt if self.reply is None else np.full_like(prompt, self.reply)
        written, replies, turns = np.zeros_like(left), np.zeros_like(left), np.zeros_like(left)
        for number, limit in enumerate(self.limits):
            read = reply if number else np.zeros_like(reply)
            goes_on = (turns == number) & (left > read)
            if not goes_on.any():
                break
            replies += np.where(goes_on, read, 0.0)
            left -= np.where(goes_on, read, 0.0)
            turn = np.where(goes_on, np.minimum(limit, left), 0.0)
            written += turn
            left -= turn
            turns += goes_on
        return written, replies, turns

    def prompt(self, most: int) -> float:
        """Tokens of the prompt of a row that nobody has read, where all turns and replies make a
        sample of `most` tokens.
        """
        left, later = most - sum(self.limits), len(self.limits) - 1
        if self.reply is None:
            return max(1.0, left // (1 + later))
        return max(1.0, left - later * self.reply)


def environment_of(recipe: RLRecipe, dataset: RowSettings) -> EnvironmentSettings | None:
    """The environment in which a dataset is played for several turns; None: there is none."""
    environments = recipe.environment
    if environments is None or not isinstance(dataset, DataSettings):
        return None
    name = environments.plays(dataset.environment)
    played = None if name is None else environments.by_name[name]
    return None if played is None or played.max_turns == 1 else played


def limits_of(recipe: RLRecipe, dataset: RowSettings) -> tuple[int, ...]:
    """Most tokens of each turn that a sample of a dataset may have."""
    played, most = environment_of(recipe, dataset), recipe.sampled_tokens
    if played is None:
        return (most,)
    count = min(played.max_turns, recipe.data.max_len)  # each has a token at least
    if not (stated := played.turn_tokens):
        return (most,) * count
    return tuple(min(stated[min(turn, len(stated) - 1)], most) for turn in range(count))


def most_turns(recipe: Recipe) -> int:
    """Turns that the policy may take in a sample, more than 1 where an environment replies."""
    if not isinstance(recipe, RLRecipe):
        return 1
    return max(len(limits_of(recipe, dataset)) for dataset in recipe.data.sources)


def longest_answer(recipe: Recipe) -> int:
    """Most tokens behind a prompt that is sampled to learn from: of the answer, or of all turns and
    the replies between them.
    """
    if most_turns(recipe) > 1:
        return recipe.data.max_len - 1
    return recipe.sampled_tokens or 0


def unknown_replies(recipe: RLRecipe) -> list[str]:
    """The types of the played environments of whose replies nothing is known."""
    played = (environment_of(recipe, dataset) for dataset in recipe.data.sources)
    unknown = (
        each.type
        for each in played
        if each is not None and each.reply_tokens is None and _usual_reply(each) is None
    )
    return list(dict.fromkeys(unknown))


def _usual_reply(environment: EnvironmentSettings) -> Message | None:
    """A reply of an environment whose replies are all about as long; None: they differ."""
    if environment.type == "guess_number":
        return GUESS
    settings: Mapping[str, Any] = environment.extra_settings
    calculates = environment.type == "tools" and not settings.get("mcp")
    return RESULT if calculates and [*settings.get("tools", ())] == ["calculator"] else None
