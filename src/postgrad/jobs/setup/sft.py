"""What an SFT job is made of."""

from contextlib import ExitStack

from postgrad.checkpoint.store import Checkpoint
from postgrad.jobs import environments
from postgrad.jobs.held_out_loss import LossEvaluator
from postgrad.jobs.publish import PROBES, Publisher
from postgrad.jobs.ranks import engines, roles
from postgrad.jobs.run import Run
from postgrad.jobs.saving import foresee_disk
from postgrad.jobs.setup import common, rows
from postgrad.jobs.sft import SFTJob
from postgrad.models.load import load_tokenizer
from postgrad.recipe.recipe import SFTRecipe


def assemble(
    run: Run, recipe: SFTRecipe, path: str, stack: ExitStack, checkpoint: Checkpoint | None
) -> SFTJob:
    """See setup.job.assemble."""
    tokenizer = load_tokenizer(path)
    conversations = rows.conversations(recipe, tokenizer)
    common.show_rows(run, conversations.accounts)
    evaluator = losses = None
    if recipe.samples_answers:
        scorer = stack.enter_context(environments.scorer_of(recipe))
        evaluator = common.evaluator(run, recipe, tokenizer, scorer)
    if recipe.measures_loss:
        losses = LossEvaluator(recipe, tokenizer)
        common.show_rows(run, losses.accounts, "held-out")
    run.count_rows(len(conversations))
    policy = roles.policy(run, path)
    foresee_disk(run, policy.state_bytes())
    common.restore(policy, checkpoint)
    engine = publish = None
    if evaluator is not None:
        engine = engines.engine(
            run, recipe, path, stack, sequences=evaluator.sequences, max_len=evaluator.max_len
        )
        publish = Publisher(policy, engine, evaluator.probe(PROBES))
        engine.rest()
    roles.try_tokens(run, [policy])
    algorithm = recipe.algorithm
    return SFTJob(run, algorithm, policy, conversations, engine, evaluator, publish, losses)
