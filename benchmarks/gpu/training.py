"""Part "training": how much of a card's peak SFT reaches, what it spends the time on, and memory.

MFU counts the model's own FLOPs: products with its weights and causal attention, forward and twice
that backward (once under an adapter, whose base gets no gradient); the output matrix for tokens
that bear loss; nothing that checkpointing computes again. Peak: dense bfloat16 of the data sheet.
"""

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu.card import Card, measure
from benchmarks.gpu.profiling import Profile
from benchmarks.gpu.session import Case, Result, Session, Store
from benchmarks.gpu.training_runs import run_recipe, sft
from benchmarks.gpu.work import JOBS, Job
from benchmarks.gpu.workload import (
    TEMPLATE_TOKENS,
    asked,
    model_of,
    pack_lengths,
    shape_of,
    sizes_of,
    write_conversations,
)

STEPS = 5  # of which the first warms up: --calibrate wants three more at least


def run_name(job: Job) -> str:
    """Of its run directory."""
    return f"sft-{job.name.replace(' ', '-')}"


def cases(session: Session) -> Iterator[Case]:
    """The card's own speed, then SFT, and the profile of its first run."""
    cards: list[Card] = []

    def card() -> Card:
        if not cards:
            cards.append(measure(session))
        return cards[0]

    yield Case("card", 10, lambda: asdict(card()))
    for job in JOBS:
        yield Case(job.name, job.seconds, lambda job=job: trained(session, job, card()))
        if job == JOBS[0]:
            yield Case(f"profile {job.name}", 25, lambda job=job: profile_of(session, job))


def trained(session: Session, job: Job, card: Card) -> Result:
    """A run of STEPS steps, with its MFU."""
    lengths, recipe = work_of(session, job)
    result = run_recipe(session, run_name(job), recipe, steps=STEPS)
    flops = flops_of(session, job, lengths)
    tokens = int(lengths.sum())
    if "free" in job.words:
        result["deterministic_cost"] = cost(session, job, result)
    return {
        **result,
        "rows": len(lengths),
        "tokens": tokens,
        "longest": int(lengths.max()),
        "flops": flops,
        "tokens_per_second": tokens / result["step_seconds"],
        "mfu": flops / result["step_seconds"] / card.peak_flops,
    }


def profile_of(session: Session, job: Job) -> Result:
    """The third step, kernel by kernel."""
    profile = Profile(session)

    def hook(ended: int) -> None:
        if ended == 2:
            profile.start()
        elif ended == 3:
            profile.stop()

    _, recipe = work_of(session, job)
    run_recipe(session, f"profile-{run_name(job)}", recipe, steps=3, hook=hook)
    return profile.result


def work_of(session: Session, job: Job) -> tuple[NDArray[np.int64], dict[str, Any]]:
    """The lengths of an update's rows, and the recipe."""
    sizes = sizes_of(session)
    pack = sizes.packs[job.pack]
    lengths = pack_lengths(pack, sizes.update_tokens)
    rows = session.scratch / f"rows-{pack}.jsonl"
    if not rows.exists():
        write_conversations(rows, np.tile(lengths, 2))
    model = model_of(session, job.model)
    return lengths, sft(session, model, rows, pack=pack, update=len(lengths), model=job.model_keys,
               learner=job.learner_keys)  # fmt: skip


def flops_of(session: Session, job: Job, lengths: NDArray[np.int64]) -> float:
    """The model's FLOPs of an update over rows of these lengths."""
    bearing = lengths - asked(lengths) - (TEMPLATE_TOKENS - 1)  # answers, and what ends them
    shape = shape_of(session, job.model)
    forward = shape.flops(float(lengths.sum()), float((lengths**2).sum()), float(bearing.sum()))
    return (2 if job.lora else 3) * (forward.body + forward.attention + forward.head)


def cost(session: Session, job: Job, free: Result) -> float | None:
    """What deterministic mode adds to a step, as a share of the step without it; None where the
    same run with it has no time.
    """
    same = replace(job, words=tuple(word for word in job.words if word != "free"))
    bound = Store(session.to).part("training")["cases"].get(same.name, {})
    seconds = bound.get("step_seconds")
    return None if seconds is None else seconds / free["step_seconds"] - 1
