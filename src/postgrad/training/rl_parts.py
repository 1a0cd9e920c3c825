"""What a job of reinforcement learning is made of, in the order in which it is loaded."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import cast

from postgrad.checkpoint.store import Checkpoint
from postgrad.core.records import Prompt
from postgrad.data.draws import Draws
from postgrad.data.text_segments import TextReader
from postgrad.evaluation.answers import Evaluator, check_answers
from postgrad.fleet.learned import learned_reward, scorer_of
from postgrad.fleet.loading import least_shared
from postgrad.fleet.teachers import (
    check_teachers,
    load_teachers,
    require_served_text,
    text_readers,
)
from postgrad.layout.tree import MIN_SHARED
from postgrad.models.image_reader import ImageReader
from postgrad.models.tokenizer import load_tokenizer, require_same_tokens
from postgrad.recipe.recipe import RLRecipe
from postgrad.rewards.scorer import Scorer
from postgrad.rollout.ahead import OverlappedSource, Progress, sampling_thread
from postgrad.rollout.engine import Engine
from postgrad.rollout.environments.sets import check_rows
from postgrad.rollout.free import FreeEngine, FreeSource, RecordedSchedule
from postgrad.rollout.replay import ReplaySource
from postgrad.rollout.source import LiveSource, Source
from postgrad.training import auto_sizes, rows
from postgrad.training.publish import PROBES, Publisher
from postgrad.training.rl import Parts, RLJob, Roles
from postgrad.training.run import Run
from postgrad.training.saving import estimate_disk


def assemble_rl(
    run: Run, recipe: RLRecipe, path: str, stack: ExitStack, checkpoint: Checkpoint | None
) -> RLJob:
    """The job, from a checkpoint where there is one (prepare.assemble). Rows are read while the
    verifiers' processes start, and the engine takes its share of what the loaded roles leave free.
    """
    tokenizer = load_tokenizer(path)
    _check_tokens(recipe, path, tokenizer)
    learned = learned_reward(recipe, tokenizer)
    scorer = stack.enter_context(scorer_of(recipe, tokenizer, learned))  # starts meanwhile
    thread = sampling_thread(stack, scorer.halt) if recipe.samples_while_learning else None
    reader = rows.image_reader(path, tokenizer)
    prompts = rows.prompts(recipe, tokenizer, reader, scorer)
    rows.show_training(run, recipe, prompts, reader)
    check_rows(recipe.environment, prompts)
    if reader is not None:
        require_served_text(recipe, prompts.all())
    readers = _text_readers(run, recipe, tokenizer, prompts)
    check_answers(scorer, prompts.all(), recipe.data.sources)
    evaluator = rows.evaluator(run, recipe, tokenizer, scorer, reader) if recipe.eval.sets else None
    run.count_rows(len(prompts))
    first = [prompts.draw(ticket, recipe.seed) for ticket in range(PROBES)]
    roles = _roles(run, recipe, path, checkpoint)
    grader = roles.grader(recipe.algorithm.needs().self_graded)
    teachers = load_teachers(run.fleet, run, recipe, tokenizer, first, stack, grader, readers)
    roles = replace(roles, teachers=teachers)
    if learned is not None:
        learned.role = run.fleet.frozen_reward_model(learned.path)
    run.free_memory("nothing")  # what loading took, before an engine looks how much is free
    engine = _engine(run, path, stack, evaluator)
    publish = Publisher(
        roles.policy,
        engine,
        first,
        run.free_memory,
        run.console.warn,
        event=run.logs.event,
        adapter=recipe.rollout.sends_adapter,
    )
    engine.sleep()  # as it does while the policy learns
    reading = [roles.reference, learned and learned.role, *(teachers.roles if teachers else ())]
    auto_sizes.try_tokens(run, roles.learners, reading)
    run.sentinels.at_once(0, publish(checkpoint.step if checkpoint else 0))  # also after a resume
    inputs = SampleInputs(path, tokenizer, reader, prompts, scorer)
    source = rollout_source(run, recipe, inputs, engine, thread, stack)
    algorithm = recipe.algorithm.for_rollout(recipe.rollout.max_new_tokens, recipe.reward_weights)
    parts = Parts(roles, algorithm, engine, publish, source, scorer, evaluator, tokenizer, recipe)
    return RLJob(run, parts)


def _text_readers(
    run: Run, recipe: RLRecipe, tokenizer: object, prompts: Draws[Prompt]
) -> dict[int, TextReader]:
    """Readers of text by the teacher's number; what they have to say is told."""
    readers = text_readers(recipe, tokenizer, prompts) if recipe.algorithm.needs().teacher else {}
    for reader in readers.values():
        for note in reader.notes:
            run.console.note(note)
    return readers


def _check_tokens(recipe: RLRecipe, path: str, tokenizer: object) -> None:
    """Raises UsageError where critic, reference or a teacher has another tokenizer than the policy,
    whose tokens they read.
    """
    for role in ("critic", "reference"):
        model = recipe.loaded_models.get((role, "model"))
        if model is not None and model.source not in (None, path):
            key = f"{role}.model.path"
            reward = recipe.loaded_models.get(("reward_model", "model"))
            if role == "critic" and reward is not None and reward.source == model.source:
                key = "reward_model.model.path, from which the critic starts"
            require_same_tokens(model.source, key, tokenizer)
    check_teachers(recipe, tokenizer)


def _roles(run: Run, recipe: RLRecipe, path: str, checkpoint: Checkpoint | None) -> Roles:
    """What learns and what is measured from, from a checkpoint where there is one."""
    policy = run.fleet.policy(path, recipe.rollout.temperature)
    needs, moving = recipe.algorithm.needs(), None
    critic = run.fleet.critic(path) if needs.critic else None
    if needs.loads_reference and recipe.reference.moves:
        reference = moving = run.fleet.moving_reference(path)
    else:
        reference = run.fleet.reference(path) if needs.loads_reference else None
    roles = Roles(policy, critic, reference, moving)
    estimate_disk(run, sum(role.state_bytes() for role in roles.saved))
    if checkpoint is not None:
        for role in roles.saved:
            role.load(checkpoint.tensors)
    return roles


def _engine(run: Run, path: str, stack: ExitStack, evaluator: Evaluator | None) -> Engine:
    """The engine, sized for steps and evaluations."""
    return auto_sizes.engine(
        run,
        path,
        stack,
        sequences=max(run.geometry.samples_per_step, evaluator.sequences if evaluator else 0),
        max_len=max(run.recipe.data.max_len, evaluator.max_len if evaluator else 0),
    )


@dataclass(frozen=True, slots=True)
class SampleInputs:
    """What samples are drawn for and scored with, beside an engine."""

    path: str  # of the policy
    tokenizer: object
    reader: ImageReader | None  # of a model that reads images
    prompts: Draws[Prompt]
    scorer: Scorer


def rollout_source(
    run: Run,
    recipe: RLRecipe,
    inputs: SampleInputs,
    engine: Engine,
    thread: ThreadPoolExecutor | None,
    stack: ExitStack,
) -> Source:
    """Where the groups of each step come from. thread: samples while the policy learns, where the
    recipe overlaps the two. stack: ends the environment's processes.
    """
    if recipe.rollout.source == "replay":
        assert recipe.rollout.replay_path is not None  # a recipe without it is refused
        return ReplaySource(recipe.rollout.replay_path)
    progress = None if thread is None else Progress(run.advance)
    live = LiveSource(
        engine,
        inputs.prompts,
        inputs.scorer,
        seed=recipe.seed,
        prompts_per_step=recipe.batch.rollout_batch_size,
        samples_per_prompt=recipe.batch.n_samples_per_prompt,
        sampling=recipe.rollout,
        tokenizer=inputs.tokenizer,
        environments=rows.environments(run, recipe, inputs.tokenizer, stack, inputs.reader),
        max_len=recipe.data.max_len,
        min_shared=MIN_SHARED if recipe.environment is None else least_shared(recipe, inputs.path),
        correctness=recipe.eval.component,
        greedy=recipe.algorithm.needs().greedy,
        scores_ahead=not recipe.asks_reward_model,  # they are asked of the learner's ranks
        on_done=run.advance if progress is None else progress.count,
    )
    if thread is None or progress is None:
        return live
    if recipe.rollout.schedule == "fixed":
        return OverlappedSource(live, thread, progress)
    schedule = recipe.rollout.schedule_path
    recorded = None if schedule is None else RecordedSchedule(schedule)
    return FreeSource(live, thread, progress, cast(FreeEngine, engine), recorded)
