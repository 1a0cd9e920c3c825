"""How much a run computes at once: tokens of a forward pass, places of the engine's cache."""

from dataclasses import dataclass
from typing import Literal

from postgrad.core.batch import MICRO_TRAIN_TOKENS, BatchGeometry
from postgrad.plan.hardware import Device
from postgrad.plan.sharing import Sharing
from postgrad.recipe.recipe import Answering, Comparing, Recipe
from postgrad.recipe.scored import samples_answers
from postgrad.rollout.local.budget import PREFILL_TOKENS, EngineSizes, choose_sizes, places_for

EVALUATION_SEQUENCES = 512  # assumed of an evaluation: its rows are not read before the run
DType = Literal["auto", "float32", "bfloat16"]


def width(dtype: DType, *, cpu: bool) -> int:
    """Bytes of a number in what computes."""
    if dtype == "auto":
        return 4 if cpu else 2
    return 4 if dtype == "float32" else 2


@dataclass(frozen=True, slots=True)
class Sizes:
    """micro_tokens: of one forward of the learner on one rank, at most. longest: tokens of the
    longest sequence. engine: None where nothing is sampled.
    """

    micro_tokens: int
    longest: int
    engine: EngineSizes | None
    prefill_tokens: int


def sizes(
    recipe: Recipe,
    geometry: BatchGeometry,
    sharing: Sharing,
    *,
    device: Device,
    token_bytes: int,
    free_bytes: int,
) -> Sizes:
    """What the recipe states, else what would be chosen at the start of the run.

    token_bytes: of one place of the engine's cache; free_bytes: of the device when the engine is
    made.
    """
    comparing = isinstance(recipe, Comparing)
    longest = recipe.data.max_len
    sample = longest * (2 if comparing and recipe.algorithm.level == "pair" else 1)
    share = -(-geometry.train_batch_size // sharing.replicas) * sample
    if recipe.batch.micro_train_batch_size is not None:
        stated = recipe.batch.micro_train_batch_size * sample
    else:
        stated = recipe.batch.stated_tokens or max(
            longest * (2 if comparing else 1),
            MICRO_TRAIN_TOKENS["cpu" if device.is_cpu else "cuda"],
        )
    tokens = -(-min(stated, share) // sharing.context)
    if not isinstance(recipe, Answering) or not samples_answers(recipe):
        return Sizes(tokens, longest, None, 0)
    evaluated = max((one.max_len for one in recipe.eval.sets), default=0)
    places = max(longest, evaluated)
    engine = choose_sizes(
        recipe.rollout,
        sequences=engine_sequences(recipe, geometry),
        max_len=places,
        token_bytes=token_bytes,
        free_bytes=max(free_bytes, places_for(places) * token_bytes),
    )
    return Sizes(
        tokens, longest, engine, max(PREFILL_TOKENS["cpu" if device.is_cpu else "cuda"], places)
    )


def engine_sequences(recipe: Answering, geometry: BatchGeometry) -> int:
    """Sequences that the engine samples at once: of a step of RL, else of an evaluation."""
    return geometry.samples_per_step if recipe.job == "rl" else EVALUATION_SEQUENCES
