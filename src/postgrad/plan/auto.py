"""Sizes that a recipe leaves to the plan: "auto" as batch.micro_train_tokens or rollout.slots.

The plan chooses the largest that fit. It starts with the fastest sizes and halves one at a time:
the one that takes most of the memory at the peak.
"""

from dataclasses import dataclass, replace

from postgrad.core.batch import MICRO_TRAIN_TOKENS
from postgrad.plan.held import MemoryPhase
from postgrad.plan.sizes import engine_sequences, longest_sampled
from postgrad.recipe.recipe import Recipe
from postgrad.rollout.local.budget import MAX_SLOTS, places_for


@dataclass(frozen=True, slots=True)
class AutoSizes:
    """Sizes that the plan tries for those that are "auto"."""

    tokens: int | None  # batch.micro_train_tokens; None: the recipe states it
    slots: int | None  # rollout.slots; None: the recipe states it
    floor: int  # tokens of the longest row, or pair, which one forward pass has to hold

    @classmethod
    def largest(cls, recipe: Recipe, *, cpu: bool) -> "AutoSizes":
        """The fastest sizes, whether or not they fit."""
        floor = least_tokens(recipe)
        most = max(floor, MICRO_TRAIN_TOKENS["cpu" if cpu else "cuda"])
        asked = recipe.batch.micro_train_tokens == "auto"
        return cls(most if asked else None, _most_slots(recipe), floor)

    def smaller(self, peak: MemoryPhase) -> "AutoSizes | None":
        """With half of the size that takes most at the phase `peak`, else of the other size; None
        where neither can be halved.
        """
        tokens = self.tokens is not None and self.tokens > self.floor
        slots = self.slots is not None and self.slots > 1
        if tokens and (peak != "rollout" or not slots):
            assert self.tokens is not None
            return replace(self, tokens=max(self.floor, self.tokens // 2))
        if slots:
            assert self.slots is not None
            return replace(self, slots=self.slots // 2)
        return None

    def applied(self, recipe: Recipe) -> Recipe:
        """The recipe with these sizes as numbers."""
        if self.tokens is not None:
            batch = recipe.batch.model_copy(update={"micro_train_tokens": self.tokens})
            recipe = recipe.model_copy(update={"batch": batch})
        if self.slots is not None and (rollout := recipe.rollout_settings) is not None:
            places = rollout.cache_tokens or self.slots * longest_places(recipe)
            sizes = {"slots": self.slots, "cache_tokens": places}
            rollout = rollout.model_copy(update=sizes)
            recipe = recipe.model_copy(update={"rollout": rollout})
        return recipe

    def to_json(self) -> dict[str, int]:
        """The sizes that the recipe leaves open, by its key."""
        named = {"batch.micro_train_tokens": self.tokens, "rollout.slots": self.slots}
        return {key: size for key, size in named.items() if size is not None}


def least_tokens(recipe: Recipe) -> int:
    """Tokens that one forward pass has to hold: those of a row, or of both answers of a pair."""
    return recipe.min_micro_tokens


def longest_places(recipe: Recipe) -> int:
    """Places of the engine's cache that the longest sequence takes, of training or evaluations."""
    return places_for(longest_sampled(recipe))


def _most_slots(recipe: Recipe) -> int | None:
    """A slot for each sequence, as far as a stated cache has places for them; None where the recipe
    states the slots, or samples nothing.
    """
    rollout = recipe.rollout_settings
    if rollout is None or rollout.slots != "auto" or not recipe.samples_answers:
        return None
    most = min(MAX_SLOTS, engine_sequences(recipe, recipe.geometry()))
    if rollout.cache_tokens is not None:
        most = min(most, max(1, rollout.cache_tokens // longest_places(recipe)))
    return most
