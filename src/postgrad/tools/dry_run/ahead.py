"""Checks of a dry run that need only the recipe, the machine and the rows: no model is run."""

import math
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from postgrad.core.batch import BatchGeometry
from postgrad.core.errors import UsageError
from postgrad.core.files import existing
from postgrad.core.records import Prompt
from postgrad.learner.settings import horizon, shortened
from postgrad.observe.loggers.all import require_installed
from postgrad.observe.run_dir import RunDirectory, require_unclaimed
from postgrad.plan.hardware import parse_hardware, this_machine
from postgrad.plan.page import Page
from postgrad.plan.planner import facts_of, page_of, show
from postgrad.recipe.compare import compare
from postgrad.recipe.load import recipe_from_json
from postgrad.recipe.recipe import Answering, Recipe
from postgrad.tools.dry_run.data import Sets
from postgrad.tools.dry_run.outcome import FAILURE, Report
from postgrad.training.saving import store_of

LONG_HOURS = 0.5  # of a run that should not be lost as a whole
CUT = 0.05  # of the reference answers longer than what may be sampled


def check_plan(report: Report, recipe: Recipe, hardware: str | None = None) -> Page | None:
    """Shows and returns the plan; None where none can be made, which fails no run."""
    page: Page | None = None
    with report.check("plan") as check:
        try:
            machine = parse_hardware(hardware) if hardware else this_machine()
            page = page_of(*facts_of(recipe, machine))
        except UsageError as error:
            report.warn(check, f"the plan failed: {error}")
            return None
        show(page, report.console)
        report.plan = page.to_json()
        check.detail = page.verdict()
        if not page.plan.fits:
            first = f"; first of the advice: {page.advice[0].change}" if page.advice else ""
            report.problem(check, f"{page.verdict()}{first} (postgrad plan says more)")
    return page


def check_run_dir(report: Report, recipe: Recipe) -> None:
    """Checks that run_dir can be written, and is new or holds this very run. Touches nothing."""
    path = Path(recipe.run_dir)
    with report.check("run_dir") as check:
        require_unclaimed(path)
        folder = existing(path)
        if not os.access(folder, os.W_OK | os.X_OK) or not folder.is_dir():
            report.problem(
                check, f"run_dir {path} cannot be created: {folder} is not writable", FAILURE
            )
        if not RunDirectory.holds_results(path):
            check.detail = f"a new run in {path}"
        elif not recipe.checkpoint.load_checkpoint:
            report.problem(check, f"{path} already holds a run: choose another --run_dir")
        else:
            compare(recipe_from_json(RunDirectory.open(path).recipe()), recipe, (), path)
            steps = store_of(recipe, RunDirectory(path)).steps()
            check.detail = f"{path} holds this run: it continues after step {max(steps, default=0)}"


def check_loggers(report: Report, recipe: Recipe) -> None:
    """Checks that the packages of all loggers are installed. Sends nothing to them."""
    if recipe.observe.loggers:
        with report.check("loggers") as check:
            require_installed(recipe.observe.loggers)
            check.detail = ", ".join(recipe.observe.loggers)


def check_batches(report: Report, recipe: Recipe, sets: Sets, page: Page | None) -> None:
    """Shows the batch numbers for the rows that were read; warns of saves and evaluations that
    would never happen.
    """
    with report.check("batches") as check:
        assert sets.training is not None
        geometry = recipe.geometry(len(sets.training))
        for line in geometry.lines():
            report.console.note(line)
        check.detail = f"{geometry.steps} steps, {geometry.total_updates} updates"
        for warning in _times(recipe, geometry, page):
            report.warn(check, warning)
        updates = horizon(recipe.algorithm, geometry)
        if updates is not None and (text := shortened(recipe.learner, updates)):
            report.warn(check, f"learner.{text}")


def _times(recipe: Recipe, geometry: BatchGeometry, page: Page | None) -> Iterator[str]:
    """A warning for each save or evaluation that is due only after the last step."""
    steps = geometry.steps or 0
    hours = page.plan.timing.hours if page is not None else None
    saves = recipe.checkpoint
    by_steps = 0 < saves.save_steps < steps
    otherwise = saves.save_minutes or saves.save_epochs
    if not by_steps and not otherwise and (hours or 0.0) > LONG_HOURS:
        yield (
            f"nothing is saved before the end of about {hours:.1f} hours: a machine that stops "
            "takes all of them; give checkpoint.save_minutes or checkpoint.save_steps"
        )
    if saves.save_steps > steps and not otherwise:
        yield f"checkpoint.save_steps = {saves.save_steps} is more than the run's {steps} steps"
    if recipe.eval.every > steps:
        yield f"eval.every = {recipe.eval.every} is more than the run's {steps} steps"


def check_best_metric(
    report: Report, recipe: Recipe, measured: Collection[str], sets: Sets
) -> None:
    """Checks that some evaluation measures checkpoint.best_metric. measured: the metric names of
    the small run's evaluation.
    """
    wanted = recipe.checkpoint.best_metric
    if wanted is None:
        return
    with report.check("best_metric") as check:
        check.detail = wanted
        if wanted not in {*measured, *_of_whole_sets(recipe, sets)}:
            names = ", ".join(sorted(measured)) or "none"
            report.problem(
                check,
                f"checkpoint.best_metric = {wanted!r} is none of what evaluations measure: {names}",
            )


def _of_whole_sets(recipe: Recipe, sets: Sets) -> Iterator[str]:
    """Names of metrics that the small evaluation lacks for its few rows: pass@k, maj@k, and rates
    by dataset.
    """
    if recipe.measures_loss and not recipe.evaluates_answers:
        return  # losses have neither
    for place, settings in enumerate(recipe.eval.sets):
        prefix = "eval/" if settings.name is None else f"eval/{settings.name}/"
        rates = ["accuracy"]
        if isinstance(recipe, Answering):
            sampling = recipe.eval.samplings[place]
            rates += [f"pass@{k}" for k in sampling.pass_at if k > 1]
            rates += [f"maj@{k}" for k in sampling.maj_at]
            rates += ["greedy_accuracy"] if recipe.eval.greedy else []
        part = sets.evaluation.get(place)
        rows: Sequence[Any] = part.all() if part is not None else ()
        names = {
            str(row.metadata[settings.by]) if settings.by else part_name(row, part) for row in rows
        }
        for rate in rates:
            yield prefix + rate
            yield from (f"{prefix}{rate}/{name}" for name in names if len(names) > 1)


def part_name(row: object, part: object) -> str:
    """The name of the dataset that a row is counted under in rates by dataset."""
    account = getattr(part, "account", None)
    return row.dataset if isinstance(row, Prompt) else getattr(account, "name", "")


def check_answer_lengths(report: Report, recipe: Answering, sets: Sets, tokenizer: Any) -> None:
    """Warns where samples as long as the reference answers would be cut off at
    rollout.max_new_tokens. Where sentinels.truncation is off, answers may end there, and only
    longer ones count. Looks at about a thousand of them.
    """
    by_source = sets.prompts_by_source(recipe)
    prompts = [prompt for _, rows in by_source for prompt in rows if prompt.answer]
    if not prompts:
        return
    with report.check("room for answers") as check:
        most = recipe.rollout.max_new_tokens
        some = prompts[:: max(1, len(prompts) // 1000)]
        texts = [prompt.answer for prompt in some]
        ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
        lengths = sorted(map(len, ids))
        meant = recipe.sentinels.truncation.action == "off"
        least = most + 1 if meant else most
        longer = sum(length >= least for length in lengths)
        check.detail = f"the longest has {lengths[-1]} of the {most} tokens that may be sampled"
        if longer > CUT * len(some):
            report.warn(
                check,
                f"{longer} of {len(some)} reference answers have {least} tokens or more "
                f"(rollout.max_new_tokens), the longest {lengths[-1]}: samples as long are cut off "
                "before they end",
            )


def check_disk(
    report: Report, recipe: Recipe, checkpoint: int, model: int, page: Page | None
) -> None:
    """Checks that all checkpoints and exported models have room on their disks.

    checkpoint, model: bytes of one checkpoint and of one exported model.
    """
    with report.check("disk") as check:
        saves, directory = recipe.checkpoint, RunDirectory(Path(recipe.run_dir))
        steps = page.plan.geometry.steps if page is not None else None
        count = min(saves.most_kept(steps or 0), _saves(recipe, page)) + 1
        wanted: dict[Path, int] = {}
        store = store_of(recipe, directory)
        root, count = existing(store.root), max(1, count - len(store.steps()))
        wanted[root] = checkpoint * count
        copies = {False: 0, True: 1, "each": count}[saves.save_hf]
        run_folder = existing(directory.path)
        wanted[run_folder] = wanted.get(run_folder, 0) + model * copies
        lower = "lower checkpoint.max_ckpt_num"
        if saves.keep_steps:
            lower += ", raise checkpoint.keep_steps"
        for folder, size in _by_device(wanted).items():
            free = shutil.disk_usage(folder).free
            check.detail = f"up to {_gb(size)} of {_gb(free)} in {folder}"
            if size > free:
                report.problem(
                    check,
                    f"checkpoints of {_gb(checkpoint)} each ({count} at one time) and models of "
                    f"{_gb(model)} ({copies}) take {_gb(size)} in {folder}, where {_gb(free)} are "
                    f"free: {lower}, or set checkpoint.ckpt_path to another disk",
                    FAILURE,
                )


def _saves(recipe: Recipe, page: Page | None) -> int:
    """How many checkpoints the run makes in all; 2**30 where that is not known."""
    steps = page.plan.geometry.steps if page is not None else None
    saves = recipe.checkpoint
    by_more = saves.save_minutes or saves.save_epochs or saves.best_metric is not None
    if steps is None or by_more:
        return 2**30
    return math.ceil(steps / saves.save_steps) if saves.save_steps else 1


def _by_device(wanted: dict[Path, int]) -> dict[Path, int]:
    """Bytes by disk: the first folder of each disk stands for all of them."""
    by_device: dict[int, tuple[Path, int]] = {}
    for folder, size in wanted.items():
        device = folder.stat().st_dev
        first, sum_so_far = by_device.get(device, (folder, 0))
        by_device[device] = first, sum_so_far + size
    return dict(by_device.values())


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
