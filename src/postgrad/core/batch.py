"""Batch numbers: what each one counts, and how they follow from each other.

Pure arithmetic. Users should not have to guess what a batch number counts (verl#1524, OpenRLHF#397,
open-instruct#524), so each is printed with its unit and formula at the start of a run. Gradient
accumulation is derived and never set.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from postgrad.core.settings import Settings

# Tokens in one forward where the recipe names no micro-batch. On a CPU the temporaries of more
# tokens would not fit the cache.
MICRO_TRAIN_TOKENS = {"cpu": 2048, "cuda": 8192}


class BatchSettings(Settings):
    """Batch numbers of a job whose step is one update: SFT.

    State the size of an update by `train_batch_size` or `local_mini_batch_size`, not both, and that
    of a micro-batch in samples or in tokens. Without any, a token budget is chosen at start by a
    rule; "auto" fits it to the free memory.
    """

    train_batch_size: int | None = Field(default=None, ge=1)  # samples per update, over all ranks
    local_mini_batch_size: int | None = Field(default=None, ge=1)  # samples per replica and update
    # Samples per data-parallel replica in one forward and backward pass.
    micro_train_batch_size: int | None = Field(default=None, ge=1)
    # Tokens per data-parallel replica in one forward and backward pass.
    micro_train_tokens: Annotated[int, Field(ge=2)] | Literal["auto"] | None = None

    @property
    def stated_tokens(self) -> int | None:
        """micro_train_tokens, where it is a number; None where it is left out or "auto"."""
        return None if self.micro_train_tokens == "auto" else self.micro_train_tokens


class RolloutBatchSettings(BatchSettings):
    """Batch numbers of RL. Where no setting states the size of an update, it takes all samples of a
    step.
    """

    rollout_batch_size: int = Field(default=64, ge=1)  # prompts per step
    n_samples_per_prompt: int = Field(default=8, ge=1)  # responses written for each prompt
    epochs_per_rollout: int = Field(default=1, ge=1)  # passes over a step's samples
    num_mini_batches: int | None = Field(default=None, ge=1)  # updates per pass


@dataclass(frozen=True, slots=True)
class Parallel:
    """How many processes train a role. ranks / (tensor_parallel * context_parallel) replicas each
    take other samples of the batch.
    """

    ranks: int = 1  # processes
    tensor_parallel: int = 1  # ranks that share each matrix
    context_parallel: int = 1  # ranks that share the tokens of a sequence


@dataclass(frozen=True, slots=True)
class RunLength:
    """The length of a run: exactly one of steps, total_episodes and epochs is set."""

    steps: int | None = None  # passes of the loop
    total_episodes: int | None = None  # samples
    epochs: float | None = None  # passes over the training data
    rows: int | None = None  # of the training data, to turn epochs into steps; None: not read yet


@dataclass(frozen=True, slots=True)
class BatchGeometry:
    """Every batch number of a run. None: unknown before the data is read, or chosen at start, or
    as a field says.
    """

    samples_per_step: int
    train_batch_size: int  # samples per update, over all ranks
    epochs_per_rollout: int  # passes over a step's samples
    updates_per_step: int  # optimizer steps per step of the loop
    data_parallel_size: int  # replicas
    rollout_batch_size: int | None = None  # prompts per step; None where a step is one update
    n_samples_per_prompt: int | None = None  # None where a step is one update
    num_mini_batches: int | None = None  # updates per pass; None where a step is one update
    # Samples per replica and update; None where replicas get unequal shares.
    local_mini_batch_size: int | None = None
    # One forward/backward pass of a replica, stated in samples or in tokens.
    micro_train_batch_size: int | None = None
    micro_train_tokens: int | None = None
    # Micro-batches per update; None where they are cut by tokens.
    gradient_accumulation: int | None = None
    steps: int | None = None
    total_updates: int | None = None  # optimizer steps of the run
    total_episodes: int | None = None  # samples of the run
    left_over: int = 0  # samples of a stated total_episodes that fill no whole step

    def to_json(self) -> dict[str, Any]:
        """Name -> number, for plan.json and summary.json."""
        return asdict(self)

    def rows(self) -> list[tuple[str, str, str]]:
        """(name, number, unit and formula) of every number that applies."""
        return [(name, _number(name, getattr(self, name)), text) for name, text in self._texts()]

    def lines(self) -> list[str]:
        """The table that a run prints at its start."""
        rows = self.rows()
        width = max(len(number) for _, number, _ in rows)
        return [f"{name:<22} {number:>{width}}  {text}" for name, number, text in rows]

    def _texts(self) -> Iterator[tuple[str, str]]:
        sampled = self.rollout_batch_size is not None
        if sampled:
            yield "rollout_batch_size", "prompts per step"
            yield "n_samples_per_prompt", "samples written for each prompt"
            yield "samples_per_step", "samples = rollout_batch_size * n_samples_per_prompt"
            yield "epochs_per_rollout", "passes over a step's samples"
            yield "num_mini_batches", "updates per pass = samples_per_step / train_batch_size"
        yield "train_batch_size", "samples per update, over all ranks"
        yield "data_parallel_size", "replicas = ranks / (tensor_parallel * context_parallel)"
        if self.local_mini_batch_size is not None:
            yield "local_mini_batch_size", "samples per replica and update"
        if self.micro_train_batch_size is not None:
            yield "micro_train_batch_size", "samples per replica in one forward/backward"
            yield (
                "gradient_accumulation",
                "micro-batches per update = "
                "train_batch_size / (micro_train_batch_size * data_parallel_size)",
            )
        else:
            yield "micro_train_tokens", "tokens per replica in one forward/backward, at most"
        if sampled:
            yield "updates_per_step", "optimizer steps = num_mini_batches * epochs_per_rollout"
        yield "steps", "passes of the loop" if sampled else "updates: a step is one update"
        yield "total_updates", "optimizer steps = steps * updates_per_step"
        rest = f"; {self.left_over} of the budget left over" if self.left_over else ""
        each = "samples_per_step" if sampled else "train_batch_size"
        yield "total_episodes", f"samples = steps * {each}{rest}"


def _number(name: str, value: int | None) -> str:
    if value is not None:
        return f"{value}"
    return "at start" if name == "micro_train_tokens" else "from data"
