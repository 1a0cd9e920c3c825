"""Batch numbers of a whole run, beyond those that its geometry alone says: tokens, epochs, the
learning rate's horizon, checkpoints. Each with its unit and the formula it came from.
"""

import math
from collections.abc import Iterator
from typing import Any

from postgrad.learner.schedule import horizon, warmup_updates
from postgrad.plan.held import state_bytes
from postgrad.plan.plan import Outlook
from postgrad.plan.timing import Samples

Number = int | float | None  # None: only the data says it


def batch_rows(of: Outlook) -> list[list[str]]:
    """Name, number, unit and formula: those of the geometry, then those of the run."""
    rows = [list(row) for row in of.geometry.rows()]
    return rows + [[name, _text(value), formula] for name, value, formula in _numbers(of)]


def batch_json(of: Outlook) -> dict[str, Any]:
    """The same numbers by name."""
    return of.geometry.to_json() | {name: value for name, value, _ in _numbers(of)}


def _numbers(of: Outlook) -> Iterator[tuple[str, Number, str]]:
    geometry, lengths = of.geometry, of.lengths
    samples = Samples.of(of.recipe, geometry, lengths)
    prompts = "rollout_batch_size" if geometry.rollout_batch_size else "train_batch_size"
    answers = "n_samples_per_prompt" if geometry.n_samples_per_prompt else "answers"
    yield (
        "tokens_per_step",
        round(samples.tokens),
        f"tokens computed once = {prompts} * ({lengths.prompt:.0f} of a prompt + {answers} * "
        f"{lengths.answer:.0f} of an answer), mean lengths",
    )
    if geometry.micro_train_batch_size is None:
        share = samples.tokens * geometry.epochs_per_rollout / geometry.updates_per_step
        replicas = of.recipe.learner.context_parallel * geometry.data_parallel_size
        count = share / replicas / of.sizes.micro_tokens
        yield (
            "micro_batches",
            max(1, math.ceil(count)),
            f"per update, at least = its {share:.0f} tokens / (data_parallel_size * "
            "micro_train_tokens)",
        )
    each = geometry.rollout_batch_size or geometry.train_batch_size
    rows, steps = lengths.rows, geometry.steps
    yield (
        "epochs",
        None if rows is None or steps is None else round(steps * each / rows, 3),
        f"passes over the data = steps * {prompts} / "
        f"{'its rows' if rows is None else f'{rows} rows'}",
    )
    yield "learning_rate_horizon", horizon(of.recipe.algorithm, of.geometry), _schedule(of)
    yield "checkpoints", _saves(of), _kept(of)
    yield (
        "checkpoint_bytes",
        sum(state_bytes(role) for role in of.roles),
        "of one = 4 bytes a trained weight and what the optimizer and averages keep of it",
    )


def _schedule(of: Outlook) -> str:
    learner = of.recipe.learner
    total = horizon(of.recipe.algorithm, of.geometry)
    if total is None:
        updates = learner.warmup_updates or f"{learner.warmup_ratio:g} of them"
        warms = bool(learner.warmup_updates or learner.warmup_ratio)
    else:
        updates = warmup_updates(learner, total)
        warms = updates > 0
    warmup = f"after {updates} of warm-up" if warms else ""
    shape = {
        "constant": "the rate stays",
        "linear": f"down a line to {learner.min_lr_ratio:g} of the rate",
        "cosine": f"down a cosine to {learner.min_lr_ratio:g} of the rate",
    }[learner.schedule]
    without = " without the critic's own" if total != of.geometry.total_updates else ""
    parts = [f"updates = total_updates{without}; {shape}", warmup]
    return " ".join(part for part in parts if part)


def _saves(of: Outlook) -> int | None:
    """Checkpoints of the whole run; those of a better evaluation come on top."""
    steps, settings, hours = of.geometry.steps, of.recipe.checkpoint, of.timing.hours
    if steps is None:
        return None
    count = math.ceil(steps / settings.save_steps) if settings.save_steps else 1
    if settings.save_minutes and hours is not None:
        count += int(hours * 60 / settings.save_minutes)
    return min(count, steps)


def _kept(of: Outlook) -> str:
    settings = of.recipe.checkpoint
    ways = [f"steps / {settings.save_steps} (save_steps)"] if settings.save_steps else []
    if settings.save_minutes:
        ways.append(f"one in {settings.save_minutes:g} minutes")
    made = " + ".join(ways) or "one, at the end"
    if settings.best_metric:
        made += ", and where an evaluation is better"
    most = settings.max_ckpt_num + (settings.best_metric is not None)
    return f"in all = {made}; up to {most} are kept at a time (max_ckpt_num)"


def _text(value: Number) -> str:
    if value is None:
        return "from data"
    return f"{value}" if isinstance(value, int) else f"{value:g}"
