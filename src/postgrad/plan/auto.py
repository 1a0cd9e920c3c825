"""Sizes that a recipe leaves to the plan: "auto" as batch.micro_train_tokens or rollout.slots.

The largest that fit, from what is fastest down: each is halved in turn where the fullest moment is
its own.
"""

from dataclasses import dataclass, replace

from postgrad.core.batch import MICRO_TRAIN_TOKENS
from postgrad.plan.phases import Phase
from postgrad.recipe.recipe import Recipe
from postgrad.rollout.local.budget import MAX_SLOTS, places_for

EVALUATED = 512  # sequences of an evaluation, before its rows are read


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
        if self.slots is not None and (rollout := recipe.rollout_settings) is not None:
            places = rollout.cache_tokens or self.slots * longest_places(recipe)
            sizes = {"slots": self.slots, "cache_tokens": places}
            rollout = rollout.model_copy(update=sizes)
            recipe = recipe.model_copy(update={"rollout": rollout})
        return recipe

    def to_json(self) -> dict[str, int]:
        """By the key of the recipe, those that it asks for."""
        named = {"batch.micro_train_tokens": self.tokens, "rollout.slots": self.slots}
        return {key: size for key, size in named.items() if size is not None}


def least_tokens(recipe: Recipe) -> int:
    """Tokens that one forward has to hold: a row, or both of a pair."""
    return recipe.min_micro_tokens


def longest_places(recipe: Recipe) -> int:
    """Places of the engine's cache that the longest sequence takes, an evaluation's too."""
    return places_for(max(recipe.data.max_len, *(one.max_len for one in recipe.eval.sets), 0))


def _most_slots(recipe: Recipe) -> int | None:
    """A slot for each sequence, as far as a stated cache has places; None where it is not asked, or
    nothing is sampled.
    """
    rollout = recipe.rollout_settings
    if rollout is None or rollout.slots != "auto" or not recipe.samples_answers:
        return None
    sequences = recipe.geometry().samples_per_step if recipe.trains_on_rollouts else EVALUATED
    most = min(MAX_SLOTS, sequences)
    if rollout.cache_tokens is not None:
        most = min(most, max(1, rollout.cache_tokens // longest_places(recipe)))
    return most
