"""How many sequences the engine decodes together, and in how many places of a cache: arithmetic."""

from dataclasses import dataclass

from postgrad.core.errors import UsageError
from postgrad.rollout.settings import RolloutSettings

# Prompt tokens computed in one forward, at least one prompt. What a CPU computes of more of them at
# once lies in fresh pages, which cost it more than the products gain.
PREFILL_TOKENS = {"cpu": 512, "cuda": 4096}
# Places: keeps every stretch on a cache line, so that bits do not depend on the row. A decode step
# computes whole multiples of it, of rows as of places: oneDNN makes code for every new shape, for
# 0.7 ms, and where rows end at different lengths every step would have new ones.
ALIGN = 16
MAX_SLOTS = 512  # beyond it a CPU decodes no more tokens a second, and the cache only grows
MEMORY_SHARE = 0.25  # of the free memory that the cache may take where the recipe does not say


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """slots: sequences decoded together; cache_tokens: token places for all of them."""

    slots: int
    cache_tokens: int

    def to_json(self) -> dict[str, int]:
        """For the run state."""
        return {"slots": self.slots, "cache_tokens": self.cache_tokens}


def choose_sizes(
    settings: RolloutSettings,
    *,
    sequences: int,
    max_len: int,
    token_bytes: int,
    free_bytes: int,
) -> EngineSizes:
    """As many slots as there are sequences in a step, up to MAX_SLOTS and what memory allows.

    max_len: tokens of the longest sequence, prompt and response. token_bytes: cache bytes of one
    place. Raises UsageError when the recipe's cache holds not even one sequence.
    """
    places = places_for(max_len)
    tokens = settings.cache_tokens or max(places, int(free_bytes * MEMORY_SHARE) // token_bytes)
    if tokens < places:
        raise UsageError(
            f"rollout.cache_tokens = {tokens} is less than one sequence of {max_len} tokens "
            f"needs: give at least {places}"
        )
    slots = settings.stated_slots or min(MAX_SLOTS, sequences, tokens // places)
    return EngineSizes(slots, settings.cache_tokens or min(tokens, slots * places))


def align(tokens: int) -> int:
    """`tokens`, or rows, rounded up to ALIGN."""
    return -(-tokens // ALIGN) * ALIGN


def places_for(max_len: int) -> int:
    """The most places that a prompt and a response of together `max_len` tokens take."""
    return align(max_len) + ALIGN
