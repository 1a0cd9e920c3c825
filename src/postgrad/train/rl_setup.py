"""What an RL job is made of."""

from contextlib import ExitStack

from postgrad.checkpoint.store import Checkpoint
from postgrad.core.records import Prompt
from postgrad.data.draws import Draws
from postgrad.evaluate import answers as environments
from postgrad.evaluate.answers import check_answers
from postgrad.fleet.learned import learned_reward
from postgrad.models.load import load_tokenizer, require_same_tokens
from postgrad.recipe.recipe import RLRecipe
from postgrad.rewards.scorer import Scorer
from postgrad.rollout.engine import Engine
from postgrad.rollout.replay import ReplaySource
from postgrad.rollout.source import LiveSource, Source
from postgrad.train import ranked as roles
from postgrad.train import ranked_engines as engines
from postgrad.train import rows
from postgrad.train import rows as common
from postgrad.train.publish import PROBES, Publisher
from postgrad.train.rl import Parts, RLJob, Roles
from postgrad.train.run import Run
from postgrad.train.saving import foresee_disk


def assemble(
    run: Run, recipe: RLRecipe, path: str, stack: ExitStack, checkpoint: Checkpoint | None
) -> RLJob:
    """See setup.job.assemble."""
    tokenizer = load_tokenizer(path)
    _check_tokens(recipe, path, tokenizer)
    learned = learned_reward(recipe, tokenizer)
    scorer = stack.enter_context(
        environments.scorer_of(recipe, learned)
    )  # starts beside what follows
    prompts = rows.prompts(recipe, tokenizer)
    common.show_rows(run, prompts.accounts)
    environments.check_rows(recipe, prompts)
    check_answers(scorer, prompts.all())
    evaluator = common.evaluator(run, recipe, tokenizer, scorer) if recipe.eval.sets else None
    run.count_rows(len(prompts))
    parts = _roles(run, recipe, path, checkpoint)
    if learned is not None:
        learned.role = roles.scorer(run, recipe, learned.path, parts.critic)
    engine = engines.engine(
        run,
        recipe,
        path,
        stack,
        sequences=max(run.geometry.samples_per_step, evaluator.sequences if evaluator else 0),
        max_len=max(recipe.data.max_len, evaluator.max_len if evaluator else 0),
    )
    readers = [one for one in (parts.reference, learned and learned.role) if one is not None]
    roles.try_tokens(run, parts.learners, readers)
    first = [prompts.draw(ticket, recipe.seed).token_ids for ticket in range(PROBES)]
    publish = Publisher(parts.policy, engine, first)
    run.sentinels.at_once(0, publish())  # proves the weights of a resumed run too
    source = _source(run, recipe, prompts, engine, scorer, tokenizer)
    return RLJob(
        run,
        Parts(
            roles=parts,
            algorithm=recipe.algorithm.for_rollout(recipe.rollout.max_new_tokens),
            engine=engine,
            publish=publish,
            source=source,
            scorer=scorer,
            evaluator=evaluator,
            tokenizer=tokenizer,
            sampling=recipe.rollout,
        ),
    )


def _check_tokens(recipe: RLRecipe, path: str, tokenizer: object) -> None:
    """Whoever reads the policy's tokens has its tokenizer."""
    needs = recipe.algorithm.needs()
    others = {
        "critic": recipe.critic.model.source if needs.critic else None,
        "reference": recipe.reference.model.source if needs.reference else None,
    }
    for role, other in others.items():
        if other is not None and other != path:
            require_same_tokens(other, f"{role}.model.path", tokenizer)


def _roles(run: Run, recipe: RLRecipe, path: str, checkpoint: Checkpoint | None) -> Roles:
    """What learns and what is measured from, from a checkpoint where there is one."""
    policy = roles.policy(run, path, recipe.rollout.temperature)
    needs, follows = recipe.algorithm.needs(), None
    critic = roles.critic(run, recipe, path) if needs.critic else None
    if needs.reference and recipe.reference.moves:
        reference = follows = roles.moving_reference(run, recipe, path, policy)
    else:
        reference = roles.reference(run, recipe, path, policy) if needs.reference else None
    found = Roles(policy, critic, reference, follows)
    foresee_disk(run, sum(one.state_bytes() for one in found.changing))
    if checkpoint is not None:
        for one in found.changing:
            one.load(checkpoint.tensors)
    return found


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
        environment=environments.environment_of(recipe, tokenizer),
        max_len=recipe.data.max_len,
        correctness=recipe.eval.component,
        on_done=run.advance,
    )
