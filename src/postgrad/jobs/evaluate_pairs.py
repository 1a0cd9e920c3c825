"""`postgrad eval` of recipes on preferences: which of two answers a model puts first."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from postgrad.core.errors import UsageError
from postgrad.core.records import Sequences
from postgrad.jobs import roles
from postgrad.jobs.choices import Choices
from postgrad.jobs.pairs import PairEvaluator
from postgrad.jobs.preference import implicit_rewards
from postgrad.jobs.results import Result
from postgrad.jobs.reward import last_scores
from postgrad.jobs.setup.common import print_rows
from postgrad.models.load import load_tokenizer
from postgrad.observe.console import Console
from postgrad.recipe.recipe import Comparing, PreferenceRecipe, RewardRecipe


def evaluate_pairs(
    recipe: Comparing, path: str, choices: Choices, console: Console
) -> list[Result]:
    """Results by set: of a reward model by its scores, of a policy by the implicit rewards of its
    loss.
    """
    evaluator = PairEvaluator(recipe.eval, load_tokenizer(path))
    print_rows(console, evaluator.accounts, f"rows of the evaluation data, read by {path}")
    with console.phase(f"evaluate {path}"):
        if isinstance(recipe, RewardRecipe):
            model = roles.frozen_reward_model(recipe, recipe.model, path, choices)
            return evaluator(lambda sequences: last_scores(model, sequences))
        return evaluator(_scores_of_policy(recipe, path, choices))


def _scores_of_policy(
    recipe: PreferenceRecipe, path: str, choices: Choices
) -> Callable[[Sequences], NDArray[np.float64]]:
    policy = roles.frozen_policy(recipe, recipe.model, path, choices)
    reference = None
    if recipe.algorithm.needs().reference:
        start = recipe.reference.model.source or recipe.model.source
        if start is None:
            raise UsageError(
                "the recipe's loss needs a reference, and the run's reference was a fresh model: "
                "name it with --reference.model.path RUN_DIR/init"
            )
        reference = roles.frozen_policy(recipe, recipe.reference.model, start, choices)

    def score(sequences: Sequences) -> NDArray[np.float64]:
        logprobs = policy.logprobs(sequences).result()
        ref = None if reference is None else reference.logprobs(sequences).result()
        return implicit_rewards(recipe.algorithm, sequences, logprobs, ref)

    return score
