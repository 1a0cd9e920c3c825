"""Batch numbers of a whole run, beyond those that its geometry alone says: tokens, epochs, the
learning rate's horizon, checkpoints. Each with its unit and the formula it came from.
"""

import math
from collections.abc import Iterator
from typing import Any

from postgrad.learner.settings import decay_updates, horizon, warmup_updates
from postgrad.plan.held import state_bytes
from postgrad.plan.pass_time import Samples
from postgrad.plan.plan import RunPlan

Number = int | float | None  # None: it depends on the data, which is not known


def batch_rows(planned: RunPlan) -> list[list[str]]:
    """A row for each number: its name, value, unit and formula. The geometry's come first."""
    rows = [list(row) for row in planned.geometry.rows()]
    return rows + [[name, _text(value), formula] for name, value, formula in _numbers(planned)]


def batch_json(planned: RunPlan) -> dict[str, Any]:
    """The same numbers by name."""
    return planned.geometry.to_json() | {name: value for name, value, _ in _numbers(planned)}


def _numbers(planned: RunPlan) -> Iterator[tuple[str, Number, str]]:
    geometry, lengths = planned.geometry, planned.lengths
    samples = Samples.of(planned.recipe, geometry, lengths)
    prompts = "rollout_batch_size" if geometry.rollout_batch_size else "train_batch_size"
    answers = "n_samples_per_prompt" if geometry.n_samples_per_prompt else "answers"
    answer = f"{lengths.answer:.0f} of an answer"
    behind = answer
    if lengths.replies:
        answer = f"{lengths.written:.0f} of turns + {lengths.replies:.0f} of replies"
        behind = f"({answer})"
    yield (
        "tokens_per_step",
        round(samples.tokens),
        f"tokens computed once = {prompts} * ({lengths.prompt:.0f} of a prompt + {answers} * "
        f"{behind}), mean lengths"
        if lengths.shared
        else f"tokens computed = {prompts} * {answers} * ({lengths.prompt:.0f} of a prompt + "
        f"{answer}), mean lengths: answers do not share a prompt",
    )
    if geometry.micro_train_batch_size is None:
        share = samples.tokens * geometry.epochs_per_rollout / geometry.updates_per_step
        replicas = planned.recipe.learner.context_parallel * geometry.data_parallel_size
        count = share / replicas / planned.sizes.micro_tokens
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
    yield (
        "learning_rate_horizon",
        horizon(planned.recipe.algorithm, planned.geometry),
        _schedule(planned),
    )
    yield "checkpoints", _saves(planned), _kept(planned)
    yield (
        "checkpoint_bytes",
        sum(state_bytes(role) for role in planned.roles),
        "of one = 4 bytes a trained weight and what the optimizer and averages keep of it",
    )


def _schedule(planned: RunPlan) -> str:
    learner = planned.recipe.learner
    total = horizon(planned.recipe.algorithm, planned.geometry)
    if total is None:
        updates = learner.warmup_updates or f"{learner.warmup_ratio:g} of them"
        warms = bool(learner.warmup_updates or learner.warmup_ratio)
    else:
        updates = warmup_updates(learner, total)
        warms = updates > 0
    start = learner.warmup_start_ratio
    rises = "" if start is None else f" from {start:g} of the rate"
    warmup = f"after {updates} of warm-up{rises}" if warms else ""
    shape = {
        "constant": "the rate stays",
        "linear": f"down a line to {learner.min_lr_ratio:g} of the rate",
        "cosine": f"down a cosine to {learner.min_lr_ratio:g} of the rate",
        "1-sqrt": f"down 1 - a square root to {learner.min_lr_ratio:g} of the rate",
    }[learner.schedule]
    if learner.decay_updates or learner.decay_ratio:
        falling = (
            (learner.decay_updates or f"{learner.decay_ratio:g} of them")
            if total is None
            else decay_updates(learner, total)
        )
        shape = f"{shape} in the last {falling}"
    without = " without the critic's own" if total != planned.geometry.total_updates else ""
    parts = [f"updates = total_updates{without}; {shape}", warmup]
    return " ".join(part for part in parts if part)


def _saves(planned: RunPlan) -> int | None:
    """How many checkpoints the run saves, without those of better evaluations; None: not known."""
    steps, settings, hours = planned.geometry.steps, planned.recipe.checkpoint, planned.timing.hours
    if steps is None:
        return None
    count = math.ceil(steps / settings.save_steps) if settings.save_steps else 1
    if settings.save_minutes and hours is not None:
        count += int(hours * 60 / settings.save_minutes)
    if settings.save_epochs and planned.recipe.epochs is not None:
        count += int(planned.recipe.epochs // settings.save_epochs)
    return min(count, steps)


def _kept(planned: RunPlan) -> str:
    settings = planned.recipe.checkpoint
    ways = [f"steps / {settings.save_steps} (save_steps)"] if settings.save_steps else []
    if settings.save_minutes:
        ways.append(f"one in {settings.save_minutes:g} minutes")
    if settings.save_epochs:
        ways.append(f"one in {settings.save_epochs} epochs")
    saved = " + ".join(ways) or "one, at the end"
    if settings.best_metric:
        saved += ", and where an evaluation is better"
    steps = planned.geometry.steps
    most = settings.most_kept(steps or 0)
    keys = "max_ckpt_num"
    if settings.keep_steps and steps is None:
        keys += f", beside those of every {settings.keep_steps} steps: keep_steps"
    elif settings.keep_steps:
        most = min(most, _saves(planned) or most) if settings.best_metric is None else most
        keys += ", keep_steps"
    if settings.mirror:
        keys += f", and one that is uploaded to {settings.mirror}"
    return f"in all = {saved}; up to {most} are kept at a time ({keys})"


def _text(value: Number) -> str:
    if value is None:
        return "from data"
    return f"{value}" if isinstance(value, int) else f"{value:g}"
