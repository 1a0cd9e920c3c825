"""Evaluation by answers: held-out prompts, answers sampled with another seed than training's,
scored; and what answering needs in training too: the environment, the scorer, checks of rows.

The same prompts and the same random numbers every time, so that two evaluations of a run differ by
the weights alone.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from postgrad.core.errors import UsageError
from postgrad.core.records import Prompt, Rollout, ScoredGroup
from postgrad.core.seeds import integer
from postgrad.data.overlap import Selection
from postgrad.data.prompts import PromptSet, Unreadable, every_answer_is_read, load_prompts
from postgrad.data.rows import dataset_name
from postgrad.data.settings import DataSettings
from postgrad.evaluation.keys import counted_under, keys_of
from postgrad.evaluation.results import (
    CorrectCount,
    EvaluatedProblem,
    Result,
    by_dataset,
    left_out,
    note_of_answer,
    rates,
    wrong_answers,
)
from postgrad.evaluation.votes import nothing_to_vote_on
from postgrad.models.image_reader import ImageReader
from postgrad.observe.samples import thinned
from postgrad.observe.settings import KeptSamples
from postgrad.recipe.eval_settings import EvalSet, EvalSettings, SetSampling
from postgrad.recipe.recipe import Answering
from postgrad.recipe.scored import rates_mean_nothing
from postgrad.rewards.scorer import Scorer
from postgrad.rollout.engine import Engine
from postgrad.rollout.environment import SamplingSpec
from postgrad.rollout.environments.sets import as_played, dialogues
from postgrad.rollout.records_json import Json, group_to_json
from postgrad.rollout.sampling import sample_groups
from postgrad.rollout.settings import EnvironmentSets, SamplingSettings, TokenFilters


def read_set(
    recipe: Answering,
    place: int,
    tokenizer: Any,
    reader: ImageReader | None = None,
    unreadable: Unreadable = every_answer_is_read,
) -> PromptSet:
    """Evaluation set `place`. reader: of a model that reads images. unreadable: as of load_prompts.
    Raises UsageError for data that cannot be read, see data.prompts, and for a row without the
    column that `by` names.
    """
    eval_set = recipe.eval.sets[place]
    sampling = recipe.eval.sampling_of(eval_set)
    new = sampling.max_new_tokens or recipe.rollout.max_new_tokens
    with keys_of(recipe.eval, place, recipe.data):
        prompts = load_prompts(
            as_played(recipe.environment, eval_set.data),
            tokenizer,
            max_prompt_tokens=eval_set.max_len - new,
            selection=Selection(part="evaluation"),
            reader=reader,
            unreadable=unreadable,
        )
    for prompt in prompts.all():
        counted_under(eval_set.by, prompt.metadata, prompt.row, prompt.dataset)
    return prompts


class Evaluator:
    """The evaluation sets of a recipe, read once."""

    def __init__(
        self,
        recipe: Answering,
        tokenizer: Any,
        scorer: Scorer,
        reader: ImageReader | None = None,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        """reader: of a model that reads images. warn: is told where an environment cannot close.
        Raises UsageError as read_set does.
        """
        self.settings: EvalSettings = recipe.eval
        self._seed = integer(recipe.seed, "evaluation")
        self._rated = not rates_mean_nothing(recipe.eval, recipe.rewards)
        self._tokenizer = tokenizer
        self._scorer = scorer
        self._kept: KeptSamples = recipe.observe.eval_samples
        self._rollout: SamplingSettings = recipe.rollout  # what ends an answer
        self._played_in = recipe.environment
        self._environments = dialogues(
            recipe.environment,
            recipe.data,
            tokenizer,
            reader=reader,
            warn=warn,
            max_len=self.max_len,
        )
        self._sets: list[tuple[str | None, PromptSet]] = [
            (eval_set.name, read_set(recipe, place, tokenizer, reader, unreadable_by(scorer)))
            for place, eval_set in enumerate(self.settings.sets)
        ]

    @property
    def sets(self) -> Sequence[tuple[str | None, PromptSet]]:
        """Name and prompts of each set."""
        return self._sets

    def probe(self, count: int) -> list[Prompt]:
        """The first `count` prompts of all sets, fewer where there are fewer."""
        every = (prompt for _, prompts in self._sets for prompt in prompts.all())
        return list(islice(every, count))

    @property
    def sequences(self) -> int:
        """Sequences that the largest set samples: the engine is sized for them."""
        return max(rows * sampling.n_samples for rows, sampling in self._sizes)

    @property
    def max_len(self) -> int:
        """Tokens of the longest prompt and answer that any set allows."""
        return max(eval_set.max_len for eval_set in self.settings.sets)

    @property
    def total(self) -> int:
        """Samples that one evaluation draws."""
        greedy = int(self.settings.greedy)
        return sum(rows * (sampling.n_samples + greedy) for rows, sampling in self._sizes)

    @property
    def _sizes(self) -> list[tuple[int, SetSampling]]:
        """Rows of each set, and how they are answered."""
        rows = [len(prompts) for _, prompts in self._sets]
        return list(zip(rows, self.settings.samplings, strict=True))

    def _drawn_by(self, sampling: SetSampling) -> SamplingSettings:
        """How tokens of a set's answers are chosen: what ends them is the run's."""
        rollout = self._rollout
        return SamplingSettings(
            temperature=sampling.temperature,
            **{name: getattr(sampling, name) for name in TokenFilters.model_fields},
            max_new_tokens=sampling.max_new_tokens or rollout.max_new_tokens,
            stop=rollout.stop,
            regex=rollout.regex,
            json_schema=rollout.json_schema,
            lark=rollout.lark,
        )

    def __call__(self, engine: Engine, on_done: Callable[[int], None]) -> list[Result]:
        """The results of every set, in the recipe's order, with the engine's newest weights.

        on_done is called with the number of samples that have just ended. Raises RunError where too
        many verifiers failed.
        """
        return [
            self._evaluate_set(eval_set, sampling, prompts.all(), engine, on_done)
            for eval_set, sampling, (_, prompts) in zip(
                self.settings.sets, self.settings.samplings, self._sets, strict=True
            )
        ]

    def _evaluate_set(
        self,
        eval_set: EvalSet,
        sampling: SetSampling,
        prompts: Sequence[Prompt],
        engine: Engine,
        on_done: Callable[[int], None],
    ) -> Result:
        began, name = time.perf_counter(), eval_set.name
        each, played, drawn = sampling.n_samples, self._environments, self._drawn_by(sampling)
        spec = SamplingSpec(each, drawn, self._seed, played, eval_set.max_len)
        groups = self._sample(prompts, spec, engine, on_done)
        greedy: Sequence[ScoredGroup | None] = [None] * len(groups)
        if self.settings.greedy:
            coldest = drawn.model_copy(update={"temperature": 0.0})
            spec = replace(spec, samples=1, sampling=coldest)
            greedy = self._sample(prompts, spec, engine, on_done)
        problems = [self._problem(*pair, eval_set.by) for pair in zip(groups, greedy, strict=True)]
        pass_at, maj_at = sampling.pass_at, sampling.maj_at
        if maj_at:
            self._require_answers(groups)
        overall = rates(problems, pass_at, maj_at)
        parts = by_dataset(problems, pass_at, maj_at)
        metrics = {metric: rate for metric, (rate, _) in overall.items()}
        metrics |= left_out(problems, (*pass_at, *maj_at))
        metrics |= sample_metrics(groups, self._played_in)
        if each == 1:  # nothing is compared: a constant is no measurement
            for component in self._scorer.comparing:
                metrics.pop(f"reward/{component}", None)
        return Result(
            name=name,
            rows=len(prompts),
            failed=sum(self._failed(group) for group in (*groups, *greedy) if group is not None),
            metrics=metrics | {metric: rate for metric, (rate, _) in parts.items()},
            seconds=time.perf_counter() - began,
            intervals={metric: ends for metric, (_, ends) in (overall | parts).items() if ends},
            problems=problems,
            samples=list(self._lines(name, groups, greedy)),
            rated=self._rated,
            judge=self.settings.component,
        )

    def _lines(
        self,
        name: str | None,
        groups: Sequence[ScoredGroup],
        greedy: Sequence[ScoredGroup | None],
    ) -> Iterator[Json]:
        """Lines of eval_samples.jsonl. A greedy answer is the last of its prompt's samples."""
        coldest = {group.prompt.ticket: group for group in greedy if group is not None}
        for group in thinned(groups, self._kept):
            yield from self._group_lines(name, group, {})
            if (cold := coldest.get(group.prompt.ticket)) is not None:
                number = len(group.rollouts)
                yield from self._group_lines(name, cold, {"sample": number, "greedy": True})

    def _group_lines(
        self, name: str | None, group: ScoredGroup, more: Mapping[str, Any]
    ) -> Iterator[Json]:
        scores = self._scores(group).tolist() or [math.nan] * len(group.rollouts)
        lines = group_to_json(group, step=0, decode=self._tokenizer.decode)
        for line, score in zip(lines, scores, strict=True):
            for key in ("metadata", "policy_version"):
                del line[key]
            for turn in line["turns"]:
                del turn["logprobs"]
            right = None if math.isnan(score) else score >= self.settings.correct_at
            yield {**line, **more, "set": name, "correct": right}

    def _sample(
        self,
        prompts: Sequence[Prompt],
        spec: SamplingSpec,
        engine: Engine,
        on_done: Callable[[int], None],
    ) -> list[ScoredGroup]:
        return sample_groups(engine, self._scorer, prompts, spec, self._tokenizer, on_done)

    def _problem(
        self, group: ScoredGroup, greedy: ScoredGroup | None, by: str | None
    ) -> EvaluatedProblem:
        return EvaluatedProblem(
            dataset=counted_under(
                by, group.prompt.metadata, group.prompt.row, group.prompt.dataset
            ),
            row=group.prompt.row,
            question=group.prompt.question,
            samples=self._count(group),
            greedy=self._count(greedy) if greedy else None,
            text=(greedy or group).rollouts[0].text,
            wrong=self._wrong(group) if self.settings.maj_at else None,
        )

    def _count(self, group: ScoredGroup) -> CorrectCount:
        scores = self._scores(group)
        scored = scores[~np.isnan(scores)]
        return len(scored), int((scored >= self.settings.correct_at).sum())

    def _wrong(self, group: ScoredGroup) -> tuple[int, ...]:
        details = group.details.get(self._judging(group))
        scores = self._scores(group).tolist()
        return wrong_answers(scores, details or [None] * len(scores), self.settings.correct_at)

    def _require_answers(self, groups: Sequence[ScoredGroup]) -> None:
        """Raises UsageError where samples were scored, and no verifier says which answer it read:
        it is of the user's own, which the checks of a recipe do not know.
        """
        judging = {self._judging(group) for group in groups if self._count(group)[0]}
        details = [d for group in groups for d in group.details.get(self._judging(group), ())]
        if judging and not any(note_of_answer(detail) for detail in details):
            raise UsageError(nothing_to_vote_on(sorted(judging), "sample"))

    def _failed(self, group: ScoredGroup) -> int:
        """Samples that a verifier failed on, whether or not its score decides what is correct."""
        unjudged = np.flatnonzero(np.isnan(self._scores(group))).tolist()
        return len({*unjudged, *(failure.sample for failure in group.failures)})

    def _scores(self, group: ScoredGroup) -> NDArray[np.float64]:
        """[samples] scores of the component that judges correctness (eval.component); [0] where it
        does not apply to the prompt.
        """
        return group.rewards.get(self._judging(group), np.zeros(0))

    def _judging(self, group: ScoredGroup) -> str:
        return self.settings.component or next(iter(group.rewards))


def sample_metrics(
    groups: Sequence[ScoredGroup], environment: EnvironmentSets | None
) -> dict[str, float]:
    """Mean reward of kept samples, mean response length in tokens, the share of truncated samples,
    that of samples at a dead end of their grammar, where there are any, the mean score of each
    component over the samples that it scored (NaN where it scored none), and what environments
    counted.
    """
    totals = np.concatenate([group.total[group.kept] for group in groups])
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [rollout.response_tokens - rollout.opening_tokens for rollout in rollouts]
    truncated = [rollout.finish_reason != "stop" for rollout in rollouts]
    dead_ends = [rollout.finish_reason == "dead_end" for rollout in rollouts]
    metrics = {
        **environment_metrics(groups, environment),
        "reward": float(totals.mean()) if len(totals) else math.nan,
        "response_length": float(np.mean(lengths)),
        "truncated_fraction": float(np.mean(truncated)),
        **({"dead_end_fraction": float(np.mean(dead_ends))} if any(dead_ends) else {}),
    }
    for name in dict.fromkeys(name for group in groups for name in group.rewards):
        scores = np.concatenate([group.rewards[name] for group in groups if name in group.rewards])
        scored = scores[~np.isnan(scores)]
        metrics[f"reward/{name}"] = float(scored.mean()) if len(scored) else math.nan
    return metrics


def environment_metrics(
    groups: Sequence[ScoredGroup], environment: EnvironmentSets | None
) -> dict[str, float]:
    """What an environment counted, as means over the samples that it played; 0 where a sample lacks
    a count. Where the recipe has several environments, their names are parts of the metrics'.
    """
    by_prefix: dict[str, list[Rollout]] = {}
    several = environment is not None and len(environment.sets) > 1
    for group in groups:
        prefix = f"environment/{group.prompt.environment}" if several else "environment"
        played = [rollout for rollout in group.rollouts if rollout.counts]
        by_prefix.setdefault(prefix, []).extend(played)
    return {
        f"{prefix}/{name}": float(np.mean([rollout.counts.get(name, 0.0) for rollout in rollouts]))
        for prefix, rollouts in sorted(by_prefix.items())
        for name in sorted({name for rollout in rollouts for name in rollout.counts})
    }


def unreadable_by(scorer: Scorer | None) -> Unreadable:
    """Asks the scorer's verifiers, if there are any."""
    if scorer is None:
        return every_answer_is_read
    return lambda prompts: {prompt.ticket for prompt, _ in scorer.check(prompts)}


def check_answers(
    scorer: Scorer, rows: Sequence[Prompt], sources: Sequence[DataSettings] = ()
) -> None:
    """Raises UsageError where a verifier cannot read a row's reference answer, or no reward applies
    to a row: it would score every sample of that row wrong, in silence. sources: the settings of
    datasets; where on_unreadable is "drop", `unreadable_by` was asked of the rows.
    """
    by_choice = {
        choice: {dataset_name(source) for source in sources if source.on_unreadable == choice}
        for choice in ("drop", "error")
    }
    asked = by_choice["drop"] - by_choice["error"]  # parts of one file share its name
    unreadable = scorer.check(row for row in rows if row.dataset not in asked)
    if unreadable:
        prompt, reason = unreadable[0]
        raise UsageError(
            f"{len(unreadable)} of {len(rows)} rows have a reference answer that a verifier "
            f"cannot read; the first is row {prompt.row} of {prompt.dataset}: {reason}; fix the "
            'rows, leave them out with data.on_unreadable = "drop", or choose another [[rewards]] '
            "type"
        )
