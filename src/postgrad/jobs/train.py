"""One run from its start, or from its newest checkpoint, to its end."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from postgrad.checkpoint.state import RunState
from postgrad.checkpoint.store import Checkpoint, CheckpointStore, Untidy
from postgrad.core.cursor import Cursor
from postgrad.core.errors import RunError, UsageError
from postgrad.core.hub import split_revision
from postgrad.jobs import auto_sizes, foreseen, out_of_memory, schedules
from postgrad.jobs.card import card_of
from postgrad.jobs.checkpoints import store_of
from postgrad.jobs.choices import choose
from postgrad.jobs.export import own_role, role_of
from postgrad.jobs.loop import Job, loop
from postgrad.jobs.peaks import Peaks, gauge_for
from postgrad.jobs.profile import Profiled
from postgrad.jobs.push import push
from postgrad.jobs.ranks.start import join
from postgrad.jobs.restarts import with_restarts
from postgrad.jobs.run import Clock, Run
from postgrad.jobs.setup.job import assemble
from postgrad.jobs.sources import pin, require_unchanged
from postgrad.jobs.stopping import StopSignals
from postgrad.jobs.summary import summarise, table
from postgrad.observe.claim import claimed, require_unclaimed
from postgrad.observe.console import Console
from postgrad.observe.loggers.all import Loggers, new_id, require_installed
from postgrad.observe.loggers.base import RunIdentity
from postgrad.observe.report.tokens import tokenizer_files
from postgrad.observe.run_dir import RunDirectory
from postgrad.observe.sentinels.watch import Sentinels
from postgrad.observe.sinks import Logs
from postgrad.observe.watchdog import Watchdog
from postgrad.parallel import device as placing
from postgrad.recipe.compare import compare
from postgrad.recipe.load import recipe_from_json, require_runnable, with_overrides
from postgrad.recipe.recipe import Recipe, RLRecipe

NOTHING = "nothing was trained yet"


def train(
    recipe: Recipe,
    console: Console,
    *,
    overwrite: bool = False,
    allow_change: Sequence[str] = (),
    profile: bool = False,
) -> dict[str, Any]:
    """Runs a recipe and returns its summary; continues where run_dir already holds this run.

    Raises UsageError where run_dir holds another run, or the recipe, data or model is wrong, and
    RunError where the run cannot go on.
    """
    require_runnable(recipe)
    require_installed(recipe.observe.loggers)
    path, before = Path(recipe.run_dir), None
    require_unclaimed(path)
    if RunDirectory.holds_results(path) and not overwrite:
        if not recipe.checkpoint.load_checkpoint:
            raise UsageError(
                f"{path} already holds a run and checkpoint.load_checkpoint is false: choose "
                "another --run_dir, or replace it with --overwrite true"
            )
        directory = RunDirectory.open(path)
        before = recipe_from_json(directory.recipe())
        recipe, hub_sources = pin(recipe, directory.sources(), allow_change)
        compare(before, recipe, allow_change, path)
        directory.write_recipe(recipe.dump(), [source.to_json() for source in hub_sources])
    else:
        recipe, hub_sources = pin(recipe)
        resolved = [source.to_json() for source in hub_sources]
        directory = RunDirectory.create(path, recipe.dump(), overwrite=overwrite, sources=resolved)
        if store_of(recipe, directory).steps():
            raise UsageError(
                f"checkpoint.ckpt_path {recipe.checkpoint.ckpt_path} holds checkpoints of another "
                "run: choose another directory, or remove them"
            )
    return _execute(recipe, directory, console, allow_change, before, profile=profile)


def resume(
    run_dir: Path, overrides: Sequence[str], allow_change: Sequence[str], console: Console
) -> dict[str, Any]:
    """Continues the run in `run_dir` with its own recipe, changed by `overrides`."""
    directory = RunDirectory.open(run_dir)
    require_unclaimed(run_dir)
    before = recipe_from_json(directory.recipe())
    recipe = with_overrides(before, overrides)
    recipe, hub_sources = pin(recipe, directory.sources(), allow_change)
    compare(before, recipe, allow_change, run_dir, ways_out="")
    require_installed(recipe.observe.loggers)
    directory.write_recipe(recipe.dump(), [source.to_json() for source in hub_sources])
    return _execute(recipe, directory, console, allow_change, before)


def _execute(
    recipe: Recipe,
    directory: RunDirectory,
    console: Console,
    allow_change: Sequence[str],
    before: Recipe | None,
    *,
    profile: bool = False,
) -> dict[str, Any]:
    """Runs to the end, restarts included, and shows the summary. before: the recipe of the run so
    far, None for a new run.
    """

    def once(restarts: int, saved: int) -> dict[str, Any]:
        allowed = () if saved else allow_change  # what is chosen anew is chosen once
        old = None if restarts else before
        again = restarts > 0
        return _once(recipe, directory, console, allowed, old, profile=profile, again=again)

    with claimed(directory.path):
        summary = with_restarts(once, recipe, directory, console)
    console.table(f"{recipe.job} run in {directory.path}", ("", ""), table(summary))
    beside = foreseen.rows(summary["phases"])
    console.table("foreseen and measured, of a step", foreseen.COLUMNS, beside)
    return summary


def _once(
    recipe: Recipe,
    directory: RunDirectory,
    console: Console,
    allow_change: Sequence[str],
    before: Recipe | None,
    *,
    profile: bool,
    again: bool,
) -> dict[str, Any]:
    """Runs from the newest checkpoint, if any, to the end. again: after a process was lost."""
    with ExitStack() as stack:
        prepared = prepare(recipe, directory, console, stack, allow_change, again=again)
        run, job, base, state = prepared
        if before is not None and state.step:
            _tell_rates(run, job, before)
        if isinstance(recipe, RLRecipe):  # whose samples are shown token by token
            for file in tokenizer_files(run.recipe.model.model_dump())[:1]:
                directory.keep_tokenizer(file)
        state = _open_loggers(run, state, stack)
        if profile:
            job = Profiled(job, run, state)
        state = loop(run, job, state)
        model = None
        if recipe.checkpoint.save_hf:
            with run.phase("export"):
                role = role_of(recipe, own_role(recipe), base)
                weights = job.tensors()[role.stem]
                role_name = own_role(run.recipe)
                now = replace(state, choices=run.choices.to_json())
                card = card_of(directory, run.recipe, now, role.base, role=role_name, adapter=False)
                role.export(
                    weights,
                    state.algorithm,
                    directory.model,
                    run.choices,
                    overwrite=True,
                    card=card,
                )
            model = str(directory.model)
            _push(run, state)
        summary = summarise(run, state, model)
        directory.write_summary(summary)
    return summary


def _push(run: Run, state: RunState) -> None:
    """Pushes the exported model where the recipe asks for it. A failure is logged and warned of,
    and ends neither the run nor its model.
    """
    settings, folder = run.recipe.checkpoint, run.directory.model
    if not settings.push_to_hub:
        return
    with run.phase("push"):
        message = f"step {state.step} of {run.directory.path.resolve().name}"
        try:
            done = push(
                folder, settings.push_to_hub, private=settings.push_private, message=message
            )
        except RunError as error:
            run.logs.event("push_failed", str(error))
            run.console.warn(str(error))
            return
    run.logs.event("pushed", done["url"], **done)
    run.console.note(f"pushed {folder} to {done['url']}")


def _open_loggers(run: Run, state: RunState, stack: ExitStack) -> RunState:
    """Opens the recipe's loggers, which log from now on; the state with the run's id at them."""
    recipe = run.recipe
    if not recipe.observe.loggers:
        return state

    def tell(text: str) -> None:
        run.logs.event("logger_failed", text)
        run.console.warn(text)

    identifiers = state.loggers or {"id": new_id()}
    name = recipe.observe.name or run.directory.path.resolve().name
    identity = RunIdentity(
        run.directory.path,
        recipe.observe.project,
        name,
        identifiers["id"],
        state.step,
        recipe.dump(),
    )
    run.loggers = Loggers(tell)
    stack.callback(run.loggers.close)
    run.loggers.open(recipe.observe.loggers, identity)
    return replace(state, loggers=identifiers)


def prepare(
    recipe: Recipe,
    directory: RunDirectory,
    console: Console,
    stack: ExitStack,
    allow_change: Sequence[str] = (),
    *,
    again: bool = False,
) -> tuple[Run, Job, str, RunState]:
    """The run, its job, its base model's path, and the state to start from: that of a new run, or
    of the newest checkpoint in its directory.

    stack: closes what has to be closed. again: the run is restarted after it lost a process.
    """
    logs = Logs(directory.path, console.warn)
    stack.callback(logs.close)
    store = store_of(recipe, directory)
    checkpoint = _newest(store, console)
    recorded: Mapping[str, Any] = checkpoint.state.choices if checkpoint else {}
    recorded = {name: old for name, old in recorded.items() if name not in allow_change}
    read = require_unchanged(recipe, recorded.get("sources") or {}, allow_change)
    choices = replace(choose(recipe, recorded), sources=read)
    placing.apply(choices.placement)
    choices, untried = auto_sizes.planned(recipe, choices, recorded)
    logs.rewind(checkpoint.state.log_offsets if checkpoint else {})
    suited = recipe.sentinels.for_dtypes(choices.dtype, choices.rollout_dtype)
    sentinels = Sentinels(suited, logs, console)
    sentinels.require(checkpoint.state.sentinels if checkpoint else {})
    watchdog = stack.enter_context(Watchdog(recipe.sentinels.stall, logs, console, directory.path))
    run = Run(
        recipe,
        directory,
        recipe.geometry(),
        choices,
        console,
        logs,
        store,
        sentinels,
        watchdog,
        StopSignals(recipe.checkpoint.grace_seconds),
        Clock(peaks=Peaks(gauge_for(choices.device))),
        untried=untried,
    )
    _tell_start(run, checkpoint)
    join(run, stack, again=again)
    job, base = _assembled(run, stack, checkpoint)
    state = checkpoint.state if checkpoint else _beginning()
    _tell_chosen(run, state, resumed=checkpoint is not None)
    return run, job, base, state


def _assembled(run: Run, stack: ExitStack, checkpoint: Checkpoint | None) -> tuple[Job, str]:
    """The job and its base model's path. Raises OutOfMemory where memory ran out meanwhile."""
    try:
        return assemble(run, stack, checkpoint)
    except Exception as error:
        if not out_of_memory.ran_out(error):
            raise
        standing = f"the checkpoint of step {checkpoint.step} stands" if checkpoint else NOTHING
        step = checkpoint.step if checkpoint else 0
        phase = out_of_memory.phase_of(run)
        raise out_of_memory.explain(run, step, phase, error, standing) from error


def _foresee(run: Run, state: RunState) -> None:
    """Writes the forecast of the run after `state` to plan.json and keeps it in the run."""
    with run.phase("plan"):
        run.foreseen = foreseen.foresee(
            run.directory,
            run.recipe,
            run.choices,
            run.logs,
            after=state.step,
            steps=run.steps,
            held=run.clock.peaks.baseline,
        )


def _newest(store: CheckpointStore, console: Console) -> Checkpoint | None:
    """The checkpoint to go on from, or None. Tidies up after a save that was killed."""
    if not store.steps():
        return None
    checkpoint = store.load()
    try:
        store.tidy(checkpoint.state)
    except Untidy as error:
        console.warn(str(error))
    return checkpoint


def _tell_start(run: Run, checkpoint: Checkpoint | None) -> None:
    recipe = run.recipe
    how = f"continues after step {checkpoint.step}" if checkpoint else "starts"
    run.console.note(
        f"{recipe.job} run in {run.directory.path} {how}: {run.choices.device}, "
        f"{run.choices.threads} threads, {run.choices.dtype}, torch {torch.__version__}"
    )
    for key, name in run.choices.sources.items():
        if split_revision(name)[1] is not None:
            run.console.note(f"{key} is {name}")
    for problem in checkpoint.skipped if checkpoint else ():
        run.console.warn(problem)
        run.logs.event("damaged_checkpoint", problem)


def _tell_chosen(run: Run, state: RunState, *, resumed: bool) -> None:
    """Prints and logs batch numbers, forecast and choices: all are known once the job is built."""
    chosen = replace(run.geometry, micro_train_tokens=run.choices.micro_train_tokens)
    for line in chosen.lines():
        run.console.note(line)
    if state.step >= run.steps:
        run.console.note(f"all {run.steps} steps are done: a longer run is one with more of them")
    _foresee(run, state)
    event = "resumed" if resumed else "started"
    run.logs.event(event, f"step {state.step}", step=state.step, **run.choices.to_json())


def _tell_rates(run: Run, job: Job, before: Recipe) -> None:
    """Prints and logs jumps of learning rates where the schedule differs from that of `before`."""
    for line in schedules.jumps(before, run.recipe, run.rows, job.tensors()):
        run.console.note(line)
        run.logs.event("learning_rate", line)


def _beginning() -> RunState:
    return RunState(
        step=0,
        update=0,
        episodes=0,
        cursor=Cursor(),
        algorithm={},
        evaluations={},
        best=None,
        choices={},
        log_offsets={},
    )
