"""Puts a run together: choices, logs, then the job, whose data is read before its weights are
loaded, because wrong rows should cost seconds.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import torch

from postgrad.checkpoint.state import RunState
from postgrad.checkpoint.store import Checkpoint, CheckpointStore, Untidy
from postgrad.core.batch import BatchGeometry
from postgrad.core.cursor import Cursor
from postgrad.core.errors import UsageError
from postgrad.core.hub import split_revision
from postgrad.core.media import images_kept_in
from postgrad.core.process import usable_cpus
from postgrad.core.progress import reported_to
from postgrad.core.text import how_many
from postgrad.fleet.choices import Choices, choose
from postgrad.fleet.engines import require_images_sampled
from postgrad.fleet.fleet import Fleet
from postgrad.fleet.loading import base_model
from postgrad.fleet.local import LocalFleet
from postgrad.fleet.ranked import RankedFleet
from postgrad.fleet.session import ClusterSession, device_of
from postgrad.learner.experts import require_mixture
from postgrad.learner.settings import horizon, shortened
from postgrad.learner.tensor import require_divisible
from postgrad.models.config import load_config, require_directory
from postgrad.models.rope import require_length, unseen_length
from postgrad.models.routers import balance_of
from postgrad.models.settings import ROUTER
from postgrad.models.supported import experts_of, reads_images
from postgrad.models.tokenizer import load_tokenizer
from postgrad.observe.console import Console
from postgrad.observe.run_dir import RunDirectory
from postgrad.observe.sentinels.watch import Sentinels
from postgrad.observe.sinks import Logs
from postgrad.observe.watchdog import Watchdog
from postgrad.recipe.recipe import (
    PreferenceRecipe,
    Recipe,
    RewardRecipe,
    RLRecipe,
    SFTRecipe,
)
from postgrad.training import auto_sizes, estimates
from postgrad.training.answer_ends import answer_ends
from postgrad.training.channels import thoughts_read
from postgrad.training.loop import Job
from postgrad.training.out_of_memory import explain, phase_of, ran_out
from postgrad.training.pairs import assemble_preference, assemble_reward
from postgrad.training.peaks import Gauge, Peaks, gauges_for
from postgrad.training.pinned import require_same_sources
from postgrad.training.rl_parts import assemble_rl
from postgrad.training.run import Clock, Run, StopSignals
from postgrad.training.saving import store_of
from postgrad.training.sft import assemble_sft


def assemble(run: Run, stack: ExitStack, checkpoint: Checkpoint | None) -> tuple[Job, str]:
    """The job of a run, from a checkpoint where there is one, and its base model's path.

    What has to be closed is put on `stack`. Raises UsageError for data, models or rewards that are
    wrong: row, file or key.
    """
    recipe = run.recipe
    with run.phase("load"), reported_to(run.count):
        path = base_model(recipe, run.directory.init)
        require_images_trained(recipe, path)
        require_mixture(load_config(path), recipe.learner.expert_parallel)
        require_divisible(recipe.learner, path)
        check_lengths(run, path)
        warn_of_experts(run, path)
        warn_of_answer_ends(run, path)
        warn_of_thoughts(run, path)
        match recipe:
            case SFTRecipe():
                job = assemble_sft(run, recipe, path, stack, checkpoint)
            case RewardRecipe():
                job = assemble_reward(run, recipe, path, checkpoint)
            case PreferenceRecipe():
                job = assemble_preference(run, recipe, path, checkpoint)
            case RLRecipe():
                job = assemble_rl(run, recipe, path, stack, checkpoint)
        run.fleet.free_memory()  # holes that loading left would stay for the whole run
    return job, path


def require_images_trained(recipe: Recipe, path: str) -> None:
    """Raises UsageError where the policy reads images, and another model of the recipe does not, or
    an engine that cannot sample with it.
    """
    if not reads_images(load_config(path)):
        return
    for place, model in recipe.loaded_models.items():
        if model.source is not None and not reads_images(load_config(model.source)):
            raise UsageError(
                f"{path} is a model that reads images, and [{place[0]}.model] {model.source} reads "
                "text alone: name one that reads images, or leave it out (docs/models.md)"
            )
    require_images_sampled(recipe, path)


def longest_row(recipe: Recipe) -> int:
    """Tokens of the longest sequence that may be trained on, sampled or evaluated."""
    return max([recipe.data.max_len, *(eval_set.max_len for eval_set in recipe.eval.sets)])


def check_lengths(run: Run, path: str) -> None:
    """Raises UsageError where a model that the run loads cannot compute the longest row, and warns
    where it was never trained on rows that long.
    """
    longest = longest_row(run.recipe)
    others = (model.source for model in run.recipe.loaded_models.values())
    for source in dict.fromkeys([path, *(other for other in others if other is not None)]):
        config = load_config(source).get_text_config()
        require_length(config, longest, source)
        if text := unseen_length(config, longest, source):
            run.logs.event("unseen_length", text)
            run.console.warn(text)


def warn_of_experts(run: Run, path: str) -> None:
    """Warns where the routers of a mixture of experts train and nothing keeps them balanced."""
    config, model = load_config(path), run.recipe.model
    experts = experts_of(config)
    if not experts or ROUTER in model.freeze or balance_of(config, model) > 0:
        return
    text = (
        f"{path} is a {config.model_type} model with {experts} experts a layer: it is trained "
        "without a balance loss, so that nothing keeps its routers from using few of them: set "
        "model.router_aux_loss_coef if its type has one (docs/models.md), watch "
        "policy/router_unused, and keep learner.lr low"
    )
    run.logs.event("no_auxiliary_loss", text, experts=experts)
    run.console.warn(text)


def warn_of_answer_ends(run: Run, path: str) -> None:
    """Warns where sampling runs on behind the end of the answers that the policy learns."""
    if run.recipe.trained_role != "policy":
        return
    ends = answer_ends(run.recipe, path, load_tokenizer(path))
    for problem in dict.fromkeys(end.problem for end in ends if end.problem):
        run.logs.event("answer_end", problem)
        run.console.warn(problem)


def warn_of_thoughts(run: Run, path: str) -> None:
    """Warns where verifiers read the thoughts of gpt-oss as part of its answers."""
    if problem := thoughts_read(run.recipe, load_tokenizer(path)):
        run.logs.event("thoughts_read", problem)
        run.console.warn(problem)


def _require_local_models(recipe: Recipe) -> None:
    """Raises UsageError, before any is loaded, for the key of a model that is not on this machine.
    A cluster's other machines may have it. A critic's comes last: it may be the reward model's.
    """
    tables = recipe.loaded_models if recipe.cluster.type == "local" else {}
    for place in sorted(tables, key=lambda place: place[0] == "critic"):
        if path := tables[place].path:
            require_directory(path, "model", ".".join(map(str, (*place, "path"))))


def prepare(
    recipe: Recipe,
    directory: RunDirectory,
    console: Console,
    stack: ExitStack,
    allow_change: Sequence[str] = (),
    *,
    session: ClusterSession | None = None,
    choices: Mapping[str, Any] | None = None,
) -> tuple[Run, Job, str, RunState]:
    """The run, its job, its base model's path, and the state to start from: a new one, or that of
    the newest checkpoint. stack: closes what has to be closed. session: what outlives the stack.
    choices: of another run, for a new one.
    """
    session = session or stack.enter_context(closing(ClusterSession()))
    logs = Logs(directory.path, console.warn, compress=recipe.observe.compress != "none")
    stack.callback(logs.close)
    stack.enter_context(images_kept_in(directory.images))
    store = store_of(recipe, directory)
    checkpoint = _newest(store, console)
    recorded = checkpoint.state.choices if checkpoint else choices or {}
    recorded = {name: old for name, old in recorded.items() if name not in allow_change}
    read = require_same_sources(recipe, recorded.get("sources") or {}, allow_change)
    chosen = replace(choose(recipe, recorded, device=device_of(recipe, session)), sources=read)
    gauges = _set_up(recipe, chosen)
    chosen, untried = auto_sizes.planned(recipe, chosen, recorded)
    logs.rewind(checkpoint.state.log_offsets if checkpoint else {})
    watchdog = stack.enter_context(Watchdog(recipe.sentinels.stall, logs, console, directory.path))
    run = Run(
        recipe,
        directory,
        recipe.geometry(),
        chosen,
        console,
        logs,
        store,
        _sentinels(recipe, chosen, checkpoint, logs, console),
        watchdog,
        StopSignals(recipe.checkpoint.grace_seconds, console.warn),
        Clock(peaks=Peaks(*gauges)),
        untried=untried,
    )
    _tell_start(run, checkpoint)
    run.fleet = _fleet(run, stack, session)
    job, base = _assembled(run, stack, checkpoint)
    state = checkpoint.state if checkpoint else _beginning()
    _tell_chosen(run, state, resumed=checkpoint is not None)
    return run, job, base, state


def _sentinels(
    recipe: Recipe, choices: Choices, checkpoint: Checkpoint | None, logs: Logs, console: Console
) -> Sentinels:
    """The run's sentinels, which have what a checkpoint remembers of them."""
    suited = recipe.sentinels.for_dtypes(choices.dtype, choices.rollout_dtype)
    sentinels = Sentinels(suited, logs, console)
    sentinels.require(checkpoint.state.sentinels if checkpoint else {})
    return sentinels


def _set_up(recipe: Recipe, choices: Choices) -> tuple[Gauge, ...]:
    """Sets torch up in this process. Returns the gauges of its memory; none where it has none, or
    where the models are on a device that this process lacks. Raises UsageError for a model that
    is not there.
    """
    _require_local_models(recipe)
    placement = choices.placement if recipe.cluster.type == "local" else choices.placement.here()
    replace(choices, device=placement.device).apply()
    return gauges_for(placement.device) if placement == choices.placement else ()


def _fleet(run: Run, stack: ExitStack, session: ClusterSession) -> Fleet:
    """Where the run's models live: decided here, and nowhere else."""
    folder = run.directory.path
    if run.recipe.cluster.type == "local":
        return LocalFleet(run, logs=folder)
    return RankedFleet.start(run, stack, run.console, run.logs, folder, session=session)


def _assembled(run: Run, stack: ExitStack, checkpoint: Checkpoint | None) -> tuple[Job, str]:
    """The job and its base model's path. Raises OutOfMemory where memory ran out meanwhile."""
    try:
        return assemble(run, stack, checkpoint)
    except Exception as error:
        if not ran_out(error):
            raise
        step, standing = 0, "nothing was trained yet"
        if checkpoint is not None:
            step, standing = checkpoint.step, f"the checkpoint of step {checkpoint.step} is kept"
        phase = phase_of(run)
        raise explain(run, step, phase, error, standing) from error


def _estimate(run: Run, state: RunState) -> None:
    """Writes the estimates of the run after `state` to plan.json and keeps them in the run."""
    with run.phase("plan"):
        run.estimates = estimates.estimate(
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
        f"{how_many(run.choices.threads, 'thread')}, {run.choices.dtype}, torch {torch.__version__}"
    )
    if recipe.cluster.type == "local" and (text := crowded(recipe, run.choices, usable_cpus())):
        run.console.warn(text)
        run.logs.event("threads", text)
    for key, name in run.choices.sources.items():
        if split_revision(name)[1] is not None:
            run.console.note(f"{key} is {name}")
    for problem in checkpoint.skipped if checkpoint else ():
        run.console.warn(problem)
        run.logs.event("damaged_checkpoint", problem)


def _tell_chosen(run: Run, state: RunState, *, resumed: bool) -> None:
    """Prints and logs batch numbers, estimates and choices: all are known once the job is built."""
    chosen = replace(run.geometry, micro_train_tokens=run.choices.micro_train_tokens)
    for line in chosen.lines():
        run.console.note(line)
    updates = horizon(run.recipe.algorithm, run.geometry)
    for place, learner in run.recipe.learner_tables.items():
        if updates is not None and (text := shortened(learner, updates)):
            run.console.warn(".".join((*map(str, place), text)))
            break  # a critic takes the policy's over
    if (text := repeated_rows(run.geometry, run.rows or 0)) is not None:
        run.console.warn(text)
    if state.step >= run.steps:
        run.console.note(f"all {run.steps} steps are done: a longer run is one with more of them")
    _estimate(run, state)
    event = "resumed" if resumed else "started"
    run.logs.event(event, f"step {state.step}", step=state.step, **run.choices.to_json())


def crowded(recipe: Recipe, choices: Choices, cpus: int) -> str | None:
    """A message where a run computes with more threads than it has CPUs, which is allowed: only so
    do a resume, and a run that is compared, have the bits of a larger machine. Else None.
    """
    if choices.threads <= cpus:
        return None
    is_stated = recipe.learner.threads is not None
    key = "learner.threads" if is_stated else "threads"
    return (
        f"{key} = {choices.threads}, and this process may use {how_many(cpus, 'CPU')}: threads "
        "that wait for each other make a step slow. The number is kept, because it decides "
        f"rounding; --learner.threads {cpus} is faster, and a run that has begun takes it with "
        f"--allow-change {key}"
    )


def repeated_rows(geometry: BatchGeometry, rows: int) -> str | None:
    """A message where one step draws more rows than there are training rows; else None."""
    key = "train_batch_size" if geometry.rollout_batch_size is None else "rollout_batch_size"
    draws = geometry.rollout_batch_size or geometry.train_batch_size
    if not rows or draws <= rows:
        return None
    return (
        f"batch.{key} = {draws} is more than the {rows} training rows: each step has a row "
        f"{draws / rows:.1f} times on average, and an epoch is less than a step"
    )


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
