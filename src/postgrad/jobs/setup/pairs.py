"""What jobs on preferences are made of: a reward model, or a policy without one."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

from postgrad.checkpoint.store import Checkpoint
from postgrad.core.batch import BatchGeometry
from postgrad.core.cursor import Cursor
from postgrad.core.records import Sequences
from postgrad.data.cache import cache_folder
from postgrad.data.pairs import Labelled, Pair
from postgrad.jobs import preference as preferred
from postgrad.jobs.pairs import PairEvaluator
from postgrad.jobs.preference import PreferenceJob
from postgrad.jobs.ranks import roles
from postgrad.jobs.reward import RewardJob
from postgrad.jobs.roles import frozen_policy, hold_to
from postgrad.jobs.run import Run
from postgrad.jobs.saving import foresee_disk
from postgrad.jobs.setup import common, rows
from postgrad.learner.protocols import PolicyRole
from postgrad.learner.reference_logprobs import ReferenceLogprobs
from postgrad.models.load import load_tokenizer, require_same_tokens
from postgrad.models.score import require_padding
from postgrad.recipe.recipe import Comparing, PreferenceRecipe, RewardRecipe


def reward(run: Run, recipe: RewardRecipe, path: str, checkpoint: Checkpoint | None) -> RewardJob:
    """See setup.job.assemble."""
    tokenizer = load_tokenizer(path)
    require_padding(tokenizer, path)
    pairs = rows.pairs(recipe, tokenizer)
    common.show_rows(run, pairs.accounts)
    evaluator = _evaluator(run, recipe, tokenizer)
    run.count_rows(len(pairs))
    model = roles.reward_model(run, path)
    foresee_disk(run, model.state_bytes())
    roles.try_tokens(run, [model])
    common.restore(model, checkpoint)
    return RewardJob(run, recipe.algorithm, model, pairs, evaluator)


def preference(
    run: Run, recipe: PreferenceRecipe, path: str, checkpoint: Checkpoint | None
) -> PreferenceJob[Pair] | PreferenceJob[Labelled]:
    """See setup.job.assemble."""
    tokenizer, algorithm = load_tokenizer(path), recipe.algorithm
    one_by_one = algorithm.level != "pair"
    if one_by_one:
        draws: Any = rows.labelled(recipe, tokenizer)
        read: Any = preferred.of_labelled
    else:
        draws = rows.pairs(recipe, tokenizer)
        read = preferred.of_pairs
    common.show_rows(run, draws.accounts)
    evaluator = _evaluator(run, recipe, tokenizer)
    other = recipe.reference.model.source
    if algorithm.needs().reference and other is not None and other != path:
        require_same_tokens(other, "reference.model.path", tokenizer)
    run.count_rows(len(draws))
    policy = roles.policy(run, path)
    foresee_disk(run, policy.state_bytes())
    roles.try_tokens(run, [policy])
    reference = None
    if algorithm.needs().reference:
        wanted = _read_by_reference(recipe, draws, read, run.geometry, evaluator)
        reference = _reference(run, recipe, path, policy, list(wanted))
    common.restore(policy, checkpoint)
    return PreferenceJob(run, algorithm, policy, draws, read, reference, evaluator)


def _evaluator(run: Run, recipe: Comparing, tokenizer: object) -> PairEvaluator | None:
    if not recipe.eval.sets:
        return None
    found = PairEvaluator(recipe.eval, tokenizer)
    common.show_rows(run, found.accounts, "evaluation")
    return found


def _read_by_reference(
    recipe: PreferenceRecipe,
    draws: Any,
    read: Any,
    geometry: BatchGeometry,
    evaluator: PairEvaluator | None,
) -> Iterator[Sequences]:
    """Everything that the reference is asked for in the whole run."""
    yield read(draws.all())[0]
    yield from evaluator.sequences() if evaluator else ()
    if not recipe.algorithm.needs().mismatched:
        return
    cursor = Cursor()
    for _ in range(geometry.steps or 0):
        tickets = list(islice(cursor.open_tickets(), geometry.train_batch_size))
        cursor = cursor.settle(tickets)
        drawn = [draws.draw(ticket, recipe.seed) for ticket in tickets]
        yield preferred.mismatched(read(drawn)[0])


def _reference(
    run: Run, recipe: PreferenceRecipe, path: str, policy: PolicyRole, wanted: list[Sequences]
) -> ReferenceLogprobs:
    """The reference's logprobs. Where it is the policy's own start, the policy computes them before
    it is restored: there never is a second model.
    """
    start = recipe.reference.model.source or path
    hold_to(run, "reference", start)
    if start == path:
        reference = policy.start()
    else:
        reference = frozen_policy(recipe, recipe.reference.model, start, run.choices)
    one, quantize = run.choices, recipe.reference.model.quantize
    if start == path:
        quantize = recipe.model.quantize
    name = {
        "model": run.choices.frozen["reference"],
        "versions": [torch.__version__],
        "choices": [one.device, one.threads, one.dtype, one.micro_train_tokens],
        "micro_train_batch_size": recipe.batch.micro_train_batch_size,
        "attention": recipe.model.attention,
        "quantize": quantize,
    }
    cache = cache_folder() if recipe.data.cache else None
    folder = cache and cache.parent / "reference"
    found = ReferenceLogprobs()
    made, kept = found.prepare(wanted, lambda part: reference.logprobs(part).result(), folder, name)
    run.console.note(
        f"reference logprobs: {made} sequences computed with {start}, {kept} from the cache "
        f"({folder or 'not kept: data.cache is off'})"
    )
    return found
