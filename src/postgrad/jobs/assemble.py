"""Puts a run's parts together: data first, because wrong rows should cost seconds, then weights."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from postgrad.checkpoint.store import Checkpoint
from postgrad.core.errors import UsageError
from postgrad.core.records import Prompt
from postgrad.data import account, overlap
from postgrad.data.account import RowAccount
from postgrad.data.mixture import Draws, training_conversations, training_prompts
from postgrad.jobs import environments, roles
from postgrad.jobs.evaluation import Evaluator
from postgrad.jobs.loop import Job
from postgrad.jobs.publish import PROBES, Publisher
from postgrad.jobs.rl import Parts, RLJob
from postgrad.jobs.run import Run
from postgrad.jobs.saving import foresee_disk
from postgrad.jobs.sft import SFTJob
from postgrad.learner.reference import MovingReference
from postgrad.learner.role import Policy, PolicyLearner
from postgrad.models.load import load_tokenizer
from postgrad.recipe.recipe import Recipe, RLRecipe, SFTRecipe
from postgrad.rewards.scorer import Scorer
from postgrad.rollout.engine import Engine
from postgrad.rollout.replay import ReplaySource
from postgrad.rollout.source import LiveSource, Source


def assemble(run: Run, stack: ExitStack, checkpoint: Checkpoint | None) -> tuple[Job, str]:
    """The job of a run, from a checkpoint where there is one, and its base model's path.

    What has to be closed is put on `stack`. Raises UsageError for data, models or rewards that are
    wrong: row, file or key.
    """
    with run.phase("load"):
        path = roles.base_model(run.recipe, run.directory.init)
        if isinstance(run.recipe, RLRecipe):
            return _rl(run, run.recipe, path, stack, checkpoint), path
        return _sft(run, run.recipe, path, stack, checkpoint), path


def held_out(recipe: Recipe) -> overlap.HeldOut:
    """The questions of all evaluation sets: none of them may be trained on."""
    sets = [one.data for one in recipe.eval.sets]
    return overlap.held_out(sets, recipe.data.decontaminate_ngram)


def check_answers(scorer: Scorer, prompts: Draws[Prompt]) -> None:
    """Raises UsageError where a verifier cannot read a row's reference answer, or no reward applies
    to a row: it would score every sample of that row wrong, in silence.
    """
    rows = prompts.all()
    unreadable = scorer.check(rows)
    if unreadable:
        prompt, reason = unreadable[0]
        raise UsageError(
            f"{len(unreadable)} of {len(rows)} rows have a reference answer that a verifier "
            f"cannot read; the first is row {prompt.row} of {prompt.dataset}: {reason}; mend the "
            "rows, or choose another [[rewards]] type"
        )


def _sft(
    run: Run, recipe: SFTRecipe, path: str, stack: ExitStack, checkpoint: Checkpoint | None
) -> SFTJob:
    tokenizer = load_tokenizer(path)
    data = environments.through(recipe, recipe.data)
    conversations = training_conversations(data, tokenizer, exclude=held_out(recipe))
    _show_rows(run, conversations.accounts)
    scorer, evaluator = None, None
    if recipe.eval.sets:
        scorer = stack.enter_context(environments.scorer(recipe))
        evaluator = _evaluator(run, tokenizer, scorer)
    run.geometry = recipe.geometry(len(conversations))
    policy, _ = roles.learner(recipe, path, run.choices, run.geometry, temperature=1.0)
    foresee_disk(run, policy.state_bytes())
    _restore(policy, checkpoint)
    engine = None
    if evaluator is not None:
        engine, run.choices = roles.engine(
            recipe, path, run.choices, sequences=evaluator.sequences, max_len=evaluator.max_len
        )
    return SFTJob(run, recipe.algorithm, policy, conversations, engine, evaluator)


def _rl(
    run: Run, recipe: RLRecipe, path: str, stack: ExitStack, checkpoint: Checkpoint | None
) -> RLJob:
    tokenizer = load_tokenizer(path)
    prompts = training_prompts(
        environments.through(recipe, recipe.data),
        tokenizer,
        max_new_tokens=recipe.rollout.max_new_tokens,
        exclude=held_out(recipe),
    )
    _show_rows(run, prompts.accounts)
    environments.check_rows(recipe, prompts)
    scorer = stack.enter_context(environments.scorer(recipe))
    check_answers(scorer, prompts)
    evaluator = _evaluator(run, tokenizer, scorer) if recipe.eval.sets else None
    run.geometry = recipe.geometry(len(prompts))
    temperature = recipe.rollout.temperature
    policy, _ = roles.learner(recipe, path, run.choices, run.geometry, temperature)
    algorithm = recipe.algorithm.for_rollout(recipe.rollout.max_new_tokens)
    reference = None
    if algorithm.needs().reference:
        reference = _reference(run, recipe, path, policy)
    following = reference if isinstance(reference, MovingReference) else None
    foresee_disk(run, policy.state_bytes() + (following.state_bytes() if following else 0))
    _restore(policy, checkpoint)
    if following is not None and checkpoint is not None:
        following.load(checkpoint.tensors)
    engine, run.choices = roles.engine(
        recipe,
        path,
        run.choices,
        sequences=max(run.geometry.samples_per_step, evaluator.sequences if evaluator else 0),
        max_len=max(recipe.data.max_len, evaluator.max_len if evaluator else 0),
    )
    first = [prompts.draw(ticket, recipe.seed).token_ids for ticket in range(PROBES)]
    publish = Publisher(policy, engine, run.sentinels, first)
    publish()  # proves the weights of a resumed run too
    source = _source(run, recipe, prompts, engine, scorer, tokenizer)
    return RLJob(
        run,
        Parts(algorithm, policy, reference, engine, publish, source, scorer, evaluator, tokenizer),
    )


def _source(
    run: Run,
    recipe: RLRecipe,
    prompts: Draws[Prompt],
    engine: Engine,
    scorer: Scorer,
    tokenizer: object,
) -> Source:
    if recipe.rollout.source == "replay":
        assert recipe.rollout.replay_path is not None  # a recipe without it is refused
        return ReplaySource(recipe.rollout.replay_path)
    return LiveSource(
        engine,
        prompts,
        scorer,
        seed=recipe.seed,
        prompts_per_step=recipe.batch.rollout_batch_size,
        samples_per_prompt=recipe.batch.n_samples_per_prompt,
        sampling=recipe.rollout,
        tokenizer=tokenizer,
        environment=environments.environment(recipe, tokenizer),
        max_len=recipe.data.max_len,
        on_done=run.advance,
    )


def _reference(
    run: Run, recipe: RLRecipe, path: str, policy: PolicyLearner
) -> Policy | MovingReference:
    frozen = recipe.reference.model.path or path
    if run.choices.reference is not None:
        roles.check_frozen(frozen, run.choices.reference)
    run.choices = replace(run.choices, reference=roles.frozen_hash(frozen))
    return roles.reference(recipe, path, run.choices, policy)


def _evaluator(run: Run, tokenizer: object, scorer: Scorer) -> Evaluator:
    evaluator = Evaluator(run.recipe, tokenizer, scorer)
    _show_rows(run, [prompts.account for _, prompts in evaluator.sets], "evaluation")
    for _, prompts in evaluator.sets:
        environments.check_rows(run.recipe, prompts)
        check_answers(scorer, prompts)
    return evaluator


def _restore(policy: PolicyLearner, checkpoint: Checkpoint | None) -> None:
    if checkpoint is not None:
        policy.load(checkpoint.tensors, checkpoint.state.update)


def _show_rows(run: Run, accounts: Sequence[RowAccount], what: str = "training") -> None:
    title = f"rows of the {what} data"
    run.console.table(title, *account.table(accounts))
    for one in accounts:
        if remarks := one.remarks():
            run.console.note("\n".join([one.name, *remarks]))
        run.logs.event("data", title, **one.to_json())
