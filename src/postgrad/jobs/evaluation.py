"""Evaluation: held-out prompts, answers sampled with another seed than training's, scored.

The same prompts and the same random numbers every time, so that two evaluations of a run differ by
the weights alone.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from postgrad.core.records import Prompt, ScoredGroup
from postgrad.core.seeds import integer
from postgrad.data.prompts import PromptSet, load_prompts
from postgrad.jobs import environments
from postgrad.ops.pass_at import mean_pass_at_k
from postgrad.recipe.recipe import Recipe
from postgrad.recipe.settings import EvalSettings
from postgrad.rewards.scorer import Scorer
from postgrad.rollout.engine import Engine
from postgrad.rollout.environment import SingleTurn
from postgrad.rollout.sampling import Drawing, mean_counts, sample_groups
from postgrad.rollout.settings import SamplingSettings


@dataclass(frozen=True, slots=True)
class Result:
    """What one set gave. failed: samples that a verifier gave no score; they are in no mean.

    metrics: accuracy (pass@1 at the evaluation's temperature), pass@k, greedy_accuracy where it was
    asked for, reward, response_length in tokens, truncated_fraction.
    """

    name: str | None
    rows: int
    failed: int
    metrics: Mapping[str, float]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """A line of eval.jsonl, without its step."""
        counts = {"set": self.name, "rows": self.rows, "failed": self.failed}
        return {**counts, **self.metrics, "evaluate_seconds": self.seconds}

    def by_metric(self) -> dict[str, float]:
        """eval/NAME/METRIC -> value; eval/METRIC for a set without a name."""
        prefix = "eval/" if self.name is None else f"eval/{self.name}/"
        return {prefix + metric: value for metric, value in self.metrics.items()}


class Evaluator:
    """The evaluation sets of a recipe, read once."""

    def __init__(self, recipe: Recipe, tokenizer: Any, scorer: Scorer) -> None:
        """Raises UsageError for data that cannot be read, see data.prompts."""
        self.settings: EvalSettings = recipe.eval
        self._seed = integer(recipe.seed, "evaluation")
        self._tokenizer = tokenizer
        self._scorer = scorer
        new = self.settings.max_new_tokens or recipe.rollout.max_new_tokens
        stop = recipe.rollout.stop
        self._sampling = SamplingSettings(
            temperature=self.settings.temperature, max_new_tokens=new, stop=stop
        )
        self._environment = environments.environment(recipe, tokenizer) or SingleTurn()
        self._sets: list[tuple[str | None, PromptSet]] = [
            (
                one.name,
                load_prompts(
                    environments.through(recipe, one.data),
                    tokenizer,
                    max_prompt_tokens=one.max_len - new,
                ),
            )
            for one in self.settings.sets
        ]

    @property
    def sets(self) -> Sequence[tuple[str | None, PromptSet]]:
        """Name and prompts of each set."""
        return self._sets

    @property
    def sequences(self) -> int:
        """Samples of the largest set: what the engine is sized for."""
        return max(len(prompts) for _, prompts in self._sets) * self.settings.n_samples

    @property
    def max_len(self) -> int:
        """Tokens of the longest prompt and answer that any set allows."""
        return max(one.max_len for one in self.settings.sets)

    @property
    def total(self) -> int:
        """Samples that one evaluation draws."""
        each = self.settings.n_samples + self.settings.greedy
        return sum(len(prompts) for _, prompts in self._sets) * each

    def __call__(self, engine: Engine, on_done: Callable[[int], None]) -> list[Result]:
        """The results of every set, in the recipe's order, with the engine's newest weights.

        on_done hears how many samples have ended. Raises RunError where too many verifiers failed.
        """
        return [self._one(name, prompts.all(), engine, on_done) for name, prompts in self._sets]

    def _one(
        self,
        name: str | None,
        prompts: Sequence[Prompt],
        engine: Engine,
        on_done: Callable[[int], None],
    ) -> Result:
        began = time.perf_counter()
        groups = self._sample(prompts, self.settings.n_samples, self._sampling, engine, on_done)
        counts = [self._count(group) for group in groups]
        metrics = {"accuracy": mean_pass_at_k(counts, 1)}
        for k in self.settings.pass_at:
            if k > 1:
                metrics[f"pass@{k}"] = mean_pass_at_k(counts, k)
        failed = sum(self._failed(group) for group in groups)
        if self.settings.greedy:
            greedy = self._sampling.model_copy(update={"temperature": 0.0})
            answers = self._sample(prompts, 1, greedy, engine, on_done)
            metrics["greedy_accuracy"] = mean_pass_at_k([self._count(one) for one in answers], 1)
            failed += sum(self._failed(group) for group in answers)
        metrics |= sample_metrics(groups)
        return Result(name, len(prompts), failed, metrics, time.perf_counter() - began)

    def _sample(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: SamplingSettings,
        engine: Engine,
        on_done: Callable[[int], None],
    ) -> list[ScoredGroup]:
        drawing = Drawing(n, sampling, self._seed, self._environment, self.max_len)
        with self._scorer.step():
            return sample_groups(engine, self._scorer, prompts, drawing, self._tokenizer, on_done)

    def _count(self, group: ScoredGroup) -> tuple[int, int]:
        """(samples that were scored, samples that are right)."""
        scores = self._scores(group)
        scored = scores[~np.isnan(scores)]
        return len(scored), int((scored >= self.settings.correct_at).sum())

    def _failed(self, group: ScoredGroup) -> int:
        return int(np.isnan(self._scores(group)).sum())

    def _scores(self, group: ScoredGroup) -> NDArray[np.float64]:
        """Of the component that says what is right; none where it does not apply to the prompt."""
        component = self.settings.component or next(iter(group.rewards))
        return group.rewards.get(component, np.zeros(0))


def sample_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Mean reward of kept samples, mean response length in tokens, share that hit the limit."""
    totals = np.concatenate([group.total[group.kept] for group in groups])
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [sum(len(turn.token_ids) for turn in one.turns) for one in rollouts]
    truncated = [one.finish_reason == "length" for one in rollouts]
    return {
        **{f"environment/{name}": value for name, value in mean_counts(rollouts).items()},
        "reward": float(totals.mean()) if len(totals) else math.nan,
        "response_length": float(np.mean(lengths)),
        "truncated_fraction": float(np.mean(truncated)),
    }
