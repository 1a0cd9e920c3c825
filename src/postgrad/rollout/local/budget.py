"""The engine's budget: how many sequences it decodes together, and the size of its cache."""

from dataclasses import dataclass

from postgrad.core.errors import UsageError
from postgrad.rollout.settings import RolloutSettings

# Prompt tokens computed in one forward, at least one prompt. With more, a CPU's activations lie in
# fresh pages, which cost more time than the larger products save.
PREFILL_TOKENS = {"cpu": 512, "cuda": 4096}
# Places are multiples of it: every stretch begins on a cache line, and bits do not depend on the
# row. A decode step computes multiples of it in rows and places: oneDNN compiles code for every new
# shape, which takes 0.7 ms; rows that end at different lengths would give a new shape every step.
ALIGN = 16
MAX_SLOTS = 512  # beyond it a CPU decodes no more tokens a second, and the cache only grows
MEMORY_SHARE = 0.25  # of the free memory that the cache may take where the recipe does not say


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """The size of an engine, chosen once and kept as run state."""

    slots: int  # sequences decoded together
    cache_tokens: int  # token places of the key-value cache, for all slots together

    def to_json(self) -> dict[str, int]:
        """The sizes as the run state stores them."""
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
    place. free_bytes: of the device. Raises UsageError where the recipe's cache cannot hold one
    sequence.
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
    """A number of tokens or rows, rounded up to a multiple of ALIGN."""
    return -(-tokens // ALIGN) * ALIGN


def places_for(max_len: int) -> int:
    """The most places that a prompt and a response of together `max_len` tokens take."""
    return align(max_len) + ALIGN
