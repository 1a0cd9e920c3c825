"""Sizes that a recipe leaves to the plan: "auto" as batch.micro_train_tokens or rollout.slots.

The largest that fit, from what is fastest down: each is halved in turn where the fullest moment is
its own.
"""

from dataclasses import dataclass, replace

from postgrad.core.batch import MICRO_TRAIN_TOKENS
from postgrad.plan.phases import Phase
from postgrad.plan.sizes import engine_sequences
from postgrad.recipe.recipe import Answering, Comparing, Recipe
from postgrad.recipe.scored import samples_answers
from postgrad.rollout.local.budget import MAX_SLOTS, places_for


@dataclass(frozen=True, slots=True)
class AutoSizes:
    """Sizes to try. None: the recipe does not ask for it. floor: tokens of the longest row, or
    pair, which has to lie in one forward.
    """

    tokens: int | None
    slots: int | None
    floor: int

    @classmethod
    def largest(cls, recipe: Recipe, *, cpu: bool) -> "AutoSizes":
        """What would be fastest, were there room."""
        floor = least_tokens(recipe)
        most = max(floor, MICRO_TRAIN_TOKENS["cpu" if cpu else "cuda"])
        asked = recipe.batch.micro_train_tokens == "auto"
        return cls(most if asked else None, _most_slots(recipe), floor)

    def smaller(self, peak: Phase) -> "AutoSizes | None":
        """Half of what takes most at the peak, else of the other; None where both are least."""
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
        """The recipe with these numbers."""
        if self.tokens is not None:
            batch = recipe.batch.model_copy(update={"micro_train_tokens": self.tokens})
            recipe = recipe.model_copy(update={"batch": batch})
        if self.slots is not None and isinstance(recipe, Answering):
            places = recipe.rollout.cache_tokens or self.slots * longest_places(recipe)
            sizes = {"slots": self.slots, "cache_tokens": places}
            rollout = recipe.rollout.model_copy(update=sizes)
            recipe = recipe.model_copy(update={"rollout": rollout})
        return recipe

    def to_json(self) -> dict[str, int]:
        """By the key of the recipe, those that it asks for."""
        named = {"batch.micro_train_tokens": self.tokens, "rollout.slots": self.slots}
        return {key: size for key, size in named.items() if size is not None}


def least_tokens(recipe: Recipe) -> int:
    """Tokens that one forward has to hold: a row, or both of a pair."""
    return recipe.data.max_len * (2 if isinstance(recipe, Comparing) else 1)


def longest_places(recipe: Answering) -> int:
    """Places of the engine's cache that the longest sequence takes, an evaluation's too."""
    return places_for(max(recipe.data.max_len, *(one.max_len for one in recipe.eval.sets), 0))


def _most_slots(recipe: Recipe) -> int | None:
    """A slot for each sequence, as far as a stated cache has places; None where it is not asked, or
    nothing is sampled.
    """
    if not isinstance(recipe, Answering) or recipe.rollout.slots != "auto":
        return None
    if not samples_answers(recipe):
        return None
    most = min(MAX_SLOTS, engine_sequences(recipe, recipe.geometry()))
    if recipe.rollout.cache_tokens is not None:
        most = min(most, max(1, recipe.rollout.cache_tokens // longest_places(recipe)))
    return most
