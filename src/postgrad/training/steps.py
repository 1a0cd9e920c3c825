"""The job on labelled steps: `StepRewardJob` trains a process reward model."""

import numpy as np

from postgrad.algorithms.base import RewardAlgorithm
from postgrad.checkpoint.store import Checkpoint
from postgrad.core.records import Experience
from postgrad.data.draws import Draws
from postgrad.data.step_tokens import Stepwise
from postgrad.evaluation.results import Result
from postgrad.evaluation.steps import StepEvaluator, sequences_of
from postgrad.learner.protocols import ScoringRole
from postgrad.learner.score import step_scores
from postgrad.models.load import load_tokenizer
from postgrad.models.score import require_step_labels
from postgrad.recipe.recipe import RewardRecipe
from postgrad.training import memory, rows
from postgrad.training.run import Run
from postgrad.training.saving import foresee_disk
from postgrad.training.supervised import SupervisedJob


class StepRewardJob(SupervisedJob[Stepwise]):
    """Trains a process reward model on answers whose steps have labels; evaluates it on held-out
    ones.
    """

    def __init__(
        self,
        run: Run,
        algorithm: RewardAlgorithm,
        model: ScoringRole,
        answers: Draws[Stepwise],
        evaluator: StepEvaluator | None,
    ) -> None:
        super().__init__(run, model, algorithm, answers)
        self._reward = algorithm
        self._model = model
        self._evaluator = evaluator

    def experience(self, drawn: list[Stepwise]) -> Experience:
        labels = np.concatenate([answer.labels for answer in drawn]).astype(np.float64)
        return self._reward.experience(sequences_of(drawn), labels)

    def evaluate(self) -> list[Result]:
        assert self._evaluator is not None
        with self._run.phase("evaluate"):
            return self._evaluator(lambda sequences: step_scores(self._model, sequences))


def assemble(
    run: Run, recipe: RewardRecipe, path: str, checkpoint: Checkpoint | None
) -> StepRewardJob:
    """The job, from a checkpoint where there is one. See train.prepare.assemble."""
    require_step_labels(path)
    tokenizer = load_tokenizer(path)
    answers = rows.steps(recipe, tokenizer)
    rows.show_rows(run, answers.accounts)
    evaluator = None
    if recipe.eval.sets:
        evaluator = StepEvaluator(recipe.eval, tokenizer)
        rows.show_rows(run, evaluator.accounts, "evaluation")
    run.count_rows(len(answers))
    model = run.fleet.reward_model(path)
    foresee_disk(run, model.state_bytes())
    memory.try_tokens(run, [model])
    rows.restore(model, checkpoint)
    return StepRewardJob(run, recipe.algorithm, model, answers, evaluator)
