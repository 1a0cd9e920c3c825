"""What an RL job is made of."""

from contextlib import ExitStack
from dataclasses import replace

from postgrad.checkpoint.store import Checkpoint
from postgrad.core.records import Prompt
from postgrad.data.mixture import Draws, training_prompts
from postgrad.jobs import environments, roles
from postgrad.jobs.publish import PROBES, Publisher
from postgrad.jobs.rl import Parts, RLJob
from postgrad.jobs.run import Run
from postgrad.jobs.saving import foresee_disk
from postgrad.jobs.setup import common
from postgrad.learner.reference import MovingReference
from postgrad.learner.role import Policy, PolicyLearner
from postgrad.models.load import load_tokenizer
from postgrad.recipe.recipe import RLRecipe
from postgrad.rewards.scorer import Scorer
from postgrad.rollout.engine import Engine
from postgrad.rollout.replay import ReplaySource
from postgrad.rollout.source import LiveSource, Source


def assemble(
    run: Run, recipe: RLRecipe, path: str, stack: ExitStack, checkpoint: Checkpoint | None
) -> RLJob:
    """See setup.job.assemble."""
    tokenizer = load_tokenizer(path)
    prompts = training_prompts(
        environments.through(recipe, recipe.data),
        tokenizer,
        max_new_tokens=recipe.rollout.max_new_tokens,
        exclude=common.held_out(recipe),
    )
    common.show_rows(run, prompts.accounts)
    environments.check_rows(recipe, prompts)
    scorer = stack.enter_context(environments.scorer(recipe))
    common.check_answers(scorer, prompts)
    evaluator = common.evaluator(run, recipe, tokenizer, scorer) if recipe.eval.sets else None
    run.geometry = recipe.geometry(len(prompts))
    temperature = recipe.rollout.temperature
    policy = roles.policy(recipe, path, run.choices, run.geometry, temperature)
    algorithm = recipe.algorithm.for_rollout(recipe.rollout.max_new_tokens)
    reference = None
    if algorithm.needs().reference:
        reference = _reference(run, recipe, path, policy)
    following = reference if isinstance(reference, MovingReference) else None
    foresee_disk(run, policy.state_bytes() + (following.state_bytes() if following else 0))
    common.restore(policy, checkpoint)
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
        Parts(
            algorithm=algorithm,
            policy=policy,
            reference=reference,
            engine=engine,
            publish=publish,
            source=source,
            scorer=scorer,
            evaluator=evaluator,
            tokenizer=tokenizer,
            sampling=recipe.rollout,
        ),
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
