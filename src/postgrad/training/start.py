"""One run from its start, or from its newest checkpoint, to its end: restarts after a lost process,
the exported model, the summary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from postgrad.checkpoint.state import RunState
from postgrad.core.errors import RunError, UsageError, WorkerLost
from postgrad.fleet.choices import Choices
from postgrad.fleet.engines import require_startable
from postgrad.fleet.session import ClusterSession
from postgrad.learner.optimizer import UPDATES
from postgrad.learner.settings import LearnerSettings, horizon, learning_rate
from postgrad.observe.console import Console
from postgrad.observe.follow import read_lines, read_object
from postgrad.observe.loggers.all import Loggers, new_id, require_installed
from postgrad.observe.loggers.base import RunIdentity
from postgrad.observe.report.samples import tokenizer_files
from postgrad.observe.run_dir import SUMMARY, RunDirectory, claimed, require_unclaimed
from postgrad.observe.sinks import Logs
from postgrad.recipe.compare import changes, compare, recipe_hash, require_known
from postgrad.recipe.load import recipe_from_json, require_runnable, with_overrides
from postgrad.recipe.recipe import Recipe
from postgrad.training import estimates
from postgrad.training.loop import Job, loop
from postgrad.training.pinned import HubSource, pin
from postgrad.training.prepare import prepare
from postgrad.training.profile import Profiled
from postgrad.training.restoring import claim, restore
from postgrad.training.run import Run, Stopped
from postgrad.training.saving import store_of
from postgrad.training.summary import finish, is_behind, table

T = TypeVar("T")
CHOSEN = [field.name for field in fields(Choices)]  # keys of --allow-change beside a recipe's


def train(
    recipe: Recipe,
    console: Console,
    *,
    overwrite: bool = False,
    allow_change: Sequence[str] = (),
    profile: bool = False,
    choices: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Runs a recipe and returns its summary; continues where run_dir already holds this run. One
    that has ended with this recipe is left as it is.

    choices: those of a run that this one is compared with, taken where no checkpoint has others.
    Raises UsageError where run_dir holds another run, or the recipe, data or model is wrong, and
    RunError where the run cannot go on.
    """
    require_runnable(recipe)
    require_installed(recipe.observe.loggers)
    path, before = Path(recipe.run_dir), None
    require_unclaimed(path)
    restore(
        recipe, store_of(recipe, RunDirectory(path)), console, allow_change, overwrite=overwrite
    )
    if RunDirectory.holds_results(path) and not overwrite:
        if not recipe.checkpoint.load_checkpoint:
            raise UsageError(
                f"{path} already holds a run and checkpoint.load_checkpoint is false: choose "
                "another --run_dir, or replace it with --overwrite true"
            )
        directory = RunDirectory.open(path)
        before = recipe_from_json(directory.recipe())
        recipe, hub_sources = pin(recipe, directory.sources(), allow_change)
        changed = compare(before, recipe, allow_change, path)
        ended = None if changed or allow_change or profile else _summary_of(recipe, directory)
        if ended is not None:
            console.note(
                f"{path} has ended with this recipe, at step {ended['steps']}: nothing to do; "
                "--steps N makes it longer, --overwrite true starts it over"
            )
            return ended
        require_startable(recipe)
        _rewrite_recipe(directory, before, recipe, changed, hub_sources, console)
    else:
        recipe, directory = _new_directory(recipe, path, overwrite=overwrite)
    return _execute(
        recipe, directory, console, allow_change, before, profile=profile, choices=choices
    )


def _new_directory(recipe: Recipe, path: Path, *, overwrite: bool) -> tuple[Recipe, RunDirectory]:
    """The recipe with the commits of what it reads from the hub, and a directory for its run."""
    recipe, hub_sources = pin(recipe)
    require_startable(recipe)
    resolved = [source.to_json() for source in hub_sources]
    directory = RunDirectory.create(path, recipe.dump(), overwrite=overwrite, sources=resolved)
    if store_of(recipe, directory).steps():
        raise UsageError(
            f"checkpoint.ckpt_path {recipe.checkpoint.ckpt_path} holds checkpoints of another run: "
            "choose another directory, or remove them"
        )
    return recipe, directory


def resume(
    run_dir: Path, overrides: Sequence[str], allow_change: Sequence[str], console: Console
) -> dict[str, Any]:
    """Continues the run in `run_dir` with its own recipe, changed by `overrides`."""
    directory = RunDirectory.open(run_dir)
    require_unclaimed(run_dir)
    before = recipe_from_json(directory.recipe())
    recipe = with_overrides(before, overrides)
    if recipe.run_dir != before.run_dir:
        raise UsageError(
            f"run_dir = {recipe.run_dir!r}: a resume goes on in {run_dir}; "
            f"{directory.fork_command} makes a copy elsewhere, and a directory that was moved is "
            "resumed by its new name"
        )
    restore(recipe, store_of(recipe, directory), console, allow_change)
    before = recipe_from_json(directory.recipe())
    recipe, hub_sources = pin(recipe, directory.sources(), allow_change)
    require_known(allow_change, before, recipe, CHOSEN)
    elsewhere = f"change a copy that {directory.fork_command} makes, or "
    changed = compare(before, recipe, allow_change, run_dir, ways_out=elsewhere)
    require_installed(recipe.observe.loggers)
    require_startable(recipe)
    _rewrite_recipe(directory, before, recipe, changed, hub_sources, console)
    return _execute(recipe, directory, console, allow_change, before)


def _summary_of(recipe: Recipe, directory: RunDirectory) -> dict[str, Any] | None:
    """The summary of the run where it ended with just this recipe and its model is still there."""
    summary = read_object(directory.path / SUMMARY)
    if summary is None or summary.get("recipe_sha256") != recipe_hash(recipe):
        return None
    is_whole = not recipe.checkpoint.save_hf or (directory.model / "config.json").exists()
    return summary if is_whole and not is_behind(summary) else None


def _rewrite_recipe(
    directory: RunDirectory,
    before: Recipe,
    recipe: Recipe,
    changed: Sequence[str],
    sources: Sequence[HubSource],
    console: Console,
) -> None:
    """Replaces recipe.json. Where keys changed, the one of before is kept and the change logged.
    Raises UsageError for fewer steps than the run has done, and where its checkpoints are gone.
    """
    done = _saved(recipe, directory)
    if not done:
        _require_none_saved(recipe, directory)
    if "steps" in changed and recipe.steps is not None and recipe.steps < done:
        raise UsageError(
            f"steps = {recipe.steps}: {directory.path} has done {done}, and no run goes back; "
            f"give {done} to end it there, or make a new run of an earlier checkpoint with "
            f"{directory.fork_command}"
        )
    if changed:
        # The event comes first: by it a fork finds the recipe of an earlier checkpoint, also where
        # this process is killed before the next line.
        kept = directory.keep_recipe()
        logs = Logs(directory.path, console.warn)
        values = changes(before, recipe, changed)
        text = ", ".join(f"{key} from {old!r} to {new!r}" for key, (old, new) in values.items())
        logs.event(
            "recipe_changed",
            f"{text}; the previous recipe is {kept.name}",
            changes={key: {"before": old, "after": new} for key, (old, new) in values.items()},
            kept=kept.name,
        )
        logs.close()
    directory.write_recipe(recipe.dump(), [source.to_json() for source in sources])


def _execute(
    recipe: Recipe,
    directory: RunDirectory,
    console: Console,
    allow_change: Sequence[str],
    before: Recipe | None,
    *,
    profile: bool = False,
    choices: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Runs to the end, restarts included, and shows the summary. before: the recipe of the run so
    far, None for a new run.
    """

    session = ClusterSession()

    def once(restarts: int, saved: int) -> dict[str, Any]:
        allowed = () if saved else allow_change  # what is chosen anew is chosen once
        old = None if restarts else before
        return _once(
            recipe, directory, console, session, allowed, old, profile=profile, choices=choices
        )

    with claimed(directory.path), closing(session):
        claim(recipe, directory)
        try:
            summary = with_restarts(once, recipe, directory, console)
        except KeyboardInterrupt:
            raise Stopped(f"interrupted: {_standing(recipe, directory)}") from None
    console.table(f"{recipe.job} run in {directory.path}", ("", ""), table(summary))
    beside = estimates.rows(summary["phases"])
    console.table("estimated and measured, per step", estimates.COLUMNS, beside)
    return summary


def _saved(recipe: Recipe, directory: RunDirectory) -> int:
    """The step of the newest checkpoint; 0 without one."""
    return max(store_of(recipe, directory).steps(), default=0)


def _require_none_saved(recipe: Recipe, directory: RunDirectory) -> None:
    """Raises UsageError where the run has saved checkpoints, and none of them is where the recipe
    has them: it would start over and cut back its logs.
    """
    events = read_lines(directory.path / "events.jsonl")
    saved = [event.get("step") for event in events if event.get("event") in ("saved", "forked")]
    if saved:
        raise UsageError(
            f"{directory.path} has saved checkpoints, the last one of step {saved[-1]!r}, and "
            f"{store_of(recipe, directory).root} has none: put them there, or name the folder that "
            "has them with --checkpoint.ckpt_path; postgrad train with --overwrite true starts over"
        )


def _standing(recipe: Recipe, directory: RunDirectory) -> str:
    """Where a run stands that was stopped at once, and how it goes on."""
    step = _saved(recipe, directory)
    if not step:
        return "nothing was saved yet; the same command starts the run from its beginning"
    return f"the checkpoint of step {step} is kept; {directory.resume_command} continues"


def _once(
    recipe: Recipe,
    directory: RunDirectory,
    console: Console,
    session: ClusterSession,
    allow_change: Sequence[str],
    before: Recipe | None,
    *,
    profile: bool,
    choices: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Runs from the newest checkpoint, if any, to the end."""
    with ExitStack() as stack:
        prepared = prepare(
            recipe, directory, console, stack, allow_change, session=session, choices=choices
        )
        run, job, base, state = prepared
        if before is not None and state.step:
            _tell_rates(run, job, before)
        if recipe.samples_answers:  # which are shown token by token
            for file in tokenizer_files(run.recipe.model.model_dump())[:1]:
                directory.keep_tokenizer(file)
        state = _open_loggers(run, state, stack)
        if profile:
            job = Profiled(job, run, state)
        state = loop(run, job, state)
        return finish(run, job, base, state)


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


def _tell_rates(run: Run, job: Job, before: Recipe) -> None:
    """Prints and logs jumps of learning rates where the schedule differs from that of `before`."""
    for line in jumps(before, run.recipe, run.rows, job.tensors()):
        run.console.note(line)
        run.logs.event("learning_rate", line)


def with_restarts(
    once: Callable[[int, int], T], recipe: Recipe, directory: RunDirectory, console: Console
) -> T:
    """Calls `once(restarts, steps)` until it returns, and returns its result. restarts: how often
    the run was restarted; steps: how many steps were saved since this call.

    Raises RunError where cluster.max_restarts restarts in a row brought no newer checkpoint.
    """
    store = store_of(recipe, directory)
    first = before = max(store.steps(), default=0)
    restarts = in_a_row = 0
    while True:
        try:
            return once(restarts, before - first)
        except WorkerLost as error:
            step, cause = max(store.steps(), default=0), str(error)
        in_a_row = in_a_row + 1 if step == before else 1
        before = step
        standing = f"the checkpoint of step {step} is kept" if step else "nothing was saved yet"
        most = recipe.cluster.max_restarts
        if in_a_row > most:
            raise RunError(
                f"{cause}; {standing}; cluster.max_restarts = {most}: it is not restarted; "
                f"continue with {directory.resume_command}"
            )
        restarts += 1
        text = f"{cause}; {standing}; restart {in_a_row} of {most} (cluster.max_restarts)"
        console.warn(text)
        logs = Logs(directory.path, console.warn)
        logs.event("restarted", text, step=step, restarts=restarts)
        logs.close()


def jumps(
    before: Recipe, after: Recipe, rows: int | None, tensors: Mapping[str, Mapping[str, Tensor]]
) -> Iterator[str]:
    """A message for each role whose next update has another learning rate than by `before`.

    rows: number of training rows. tensors: the state of all roles by file stem (`Job.tensors`).
    """
    was = _schedules(before, rows)
    for role, (settings, updates) in _schedules(after, rows).items():
        stem = f"{role}.optimizer"
        if was.get(role) in (None, (settings, updates)) or stem not in tensors:  # no critic, say
            continue
        done = int(tensors[stem][UPDATES])
        old_settings, old_updates = was[role]
        old, new = (
            learning_rate(old_settings, done, old_updates),
            learning_rate(settings, done, updates),
        )
        if old != new:
            yield (
                f"{role}: the learning rate jumps at update {done + 1}, from {old:.4g} by the "
                f"schedule of {old_updates} updates to {new:.4g} by that of {updates}"
            )


def _schedules(recipe: Recipe, rows: int | None) -> dict[str, tuple[LearnerSettings, int]]:
    """Learner settings and number of updates of the schedule, by role that may learn."""
    geometry = recipe.geometry(rows)
    updates = horizon(recipe.algorithm, geometry)
    assert updates is not None  # rows are known
    assert geometry.total_updates is not None
    by_role: dict[str, tuple[LearnerSettings, int]] = {
        recipe.trained_role: (recipe.learner, updates)
    }
    if (critic := recipe.learner_tables.get(("critic", "learner"))) is not None:
        by_role["critic"] = (critic, geometry.total_updates)
    return by_role
