"""Columns that a frozen model gives for the rows of a run, computed once before its first update:
the logprobs of a reference, the most likely tokens of a teacher. They are cached in files, whose
names are hashes of the model, the rows and all else that decides the bits.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from postgrad.core.files import cache_folder
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.data.draws import Drawn
from postgrad.learner.reference import PART, ReferenceLogprobs
from postgrad.models.settings import ModelSettings
from postgrad.training.run import Run


def in_parts(rows: Sequence[Drawn], sequences: int) -> Iterator[Sequence[Drawn]]:
    """Rows in blocks that are one part of the cache each. sequences: of a row."""
    size = PART // sequences
    return (rows[start : start + size] for start in range(0, len(rows), size))


def cached_columns(
    run: Run,
    role: str,
    wanted: Iterable[Sequences],
    compute: Callable[[Sequences], Ragged],
    *,
    source: str,
    model: ModelSettings,
    label: str,
    **more: Any,
) -> ReferenceLogprobs:
    """The columns that `compute` gives for all of `wanted`, from the cache where it has them.

    role: whose hash is in the run's choices. model: the table that the role computes by. source,
    label: for the console. more: what else decides the bits, JSON values.
    """
    recipe, choices = run.recipe, run.choices
    learner = recipe.learner
    name = {
        "model": choices.frozen[role],
        "versions": [torch.__version__],
        "choices": [choices.device, choices.threads, choices.dtype, choices.micro_train_tokens],
        "compiled": choices.compiled and model.compile,
        "mkl": sorted(name for name, library in choices.products.items() if library == "mkl"),
        "micro_train_batch_size": recipe.batch.micro_train_batch_size,
        "attention": model.attention,
        "router_dtype": model.router_dtype,
        "quantize": model.quantize,
        **more,
    }
    if learner.ranks > 1:  # parts of a matrix round otherwise than the whole
        name["ranks"] = [
            learner.ranks,
            learner.context_parallel,
            learner.tensor_parallel,
            learner.expert_parallel,
        ]
    folder = cache_folder(role) if recipe.data.cache else None
    columns = ReferenceLogprobs()
    computed, cached = columns.prepare(wanted, compute, folder, name)
    run.console.note(
        f"{label}: {computed} sequences computed with {source}, {cached} from the cache "
        f"({folder or 'not kept: data.cache is off'})"
    )
    return columns
