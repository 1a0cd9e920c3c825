"""Verifiers on answers whose score is known beforehand: the reference answer, and an empty one.

A verifier that scores a reference answer zero, or an empty answer as high, is found here and not
by a reward that never rises.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from postgrad.core.records import Prompt, Rollout, ScoredGroup, Turn
from postgrad.data.settings import DataSettings
from postgrad.evaluation.answers import check_answers
from postgrad.fleet.learned import learned_reward, scorer_of
from postgrad.observe.console import Console
from postgrad.recipe.recipe import Answering
from postgrad.rewards.learned import REWARD_MODELS
from postgrad.rewards.registry import component_names, controller_verifier, for_rollout
from postgrad.rewards.scorer import Scorer
from postgrad.rewards.settings import EnvironmentRewards, RewardSettings
from postgrad.tools.dry_run.outcome import FAILURE, Check, Report
from postgrad.tools.dry_run.rows import shortened

TRIED, ASKED = 64, 4  # rows of which answers are scored; where a server is asked
RIGHT = 1.0 - 1e-6
EXAMPLES = 3  # answers that are shown for each component
WIDTH = 200  # characters of one
COMPARING = ("judge", "remote")  # verifiers beside those of users that ought to tell answers apart
# (prompt, answer, its score, the score of an empty answer); NaN where the verifier failed
ScoredAnswer = tuple[Prompt, str, float, float]


@dataclass(frozen=True, slots=True)
class Tried:
    """The scores that one component of the reward gave to reference and empty answers."""

    name: str  # of the component, such as "math"
    sure: bool  # the verifier itself derives the right answer from the row, so 1.0 is expected
    scored: Sequence[ScoredAnswer]
    compares: bool = False  # scores say how a sample compares with the others of its group

    @property
    def right(self) -> int:
        """How many reference answers have full score."""
        return sum(score >= RIGHT for _, _, score, _ in self.scored)

    def row(self) -> tuple[str, str, str, str]:
        """For a table: name, count of right answers, mean scores of reference and empty answers."""
        right = f"{self.right} of {len(self.scored)}"
        scores = [score for _, _, score, _ in self.scored]
        empty = [score for _, _, _, score in self.scored]
        return self.name, right, _mean(scores), _mean(empty)


def _mean(scores: Sequence[float]) -> str:
    return f"{sum(scores) / len(scores):.3f}" if scores else ""


def try_answers(
    report: Report,
    recipe: Answering,
    by_source: Sequence[tuple[DataSettings, Sequence[Prompt]]],
    tokenizer: Any,
) -> None:
    """Checks that every row's reference answer can be read, unless its dataset leaves out such
    rows, and that the verifiers score it as right.
    """
    prompts = [prompt for _, rows in by_source for prompt in rows]
    with report.check("reference answers") as check, _scorer(recipe, tokenizer) as scorer:
        leaving_out = [rows for source, rows in by_source if source.on_unreadable == "drop"]
        left_out = scorer.check([prompt for rows in leaving_out for prompt in rows])
        dropped = {id(prompt) for prompt, _ in left_out}
        prompts = [prompt for prompt in prompts if id(prompt) not in dropped]
        check_answers(scorer, prompts)
        check.detail = f"{len(prompts)} rows can be read"
    verifiers = {
        name: reward
        for name, reward in _components(recipe)
        if reward.type not in REWARD_MODELS  # it scores in the small run's step
    }
    if not verifiers or not check.ok:
        return
    with report.check("verifiers") as check:
        tried, groups = _tried(verifiers, prompts, recipe, tokenizer)
        _show(tried, report.console)
        check.detail = ", ".join(
            f"{component.name} {component.right} of {len(component.scored)}"
            for component in tried
            if component.scored
        )
        for component in tried:
            report_doubts(report, check, component, verifiers[component.name])
        for failure in _failures(groups):
            report.problem(check, failure, FAILURE)


def _scorer(recipe: Answering, tokenizer: Any) -> Scorer:
    return scorer_of(recipe, tokenizer, learned_reward(recipe, tokenizer))


def _components(recipe: Answering) -> list[tuple[str, RewardSettings]]:
    if not recipe.rewards:
        return []
    rewards = for_rollout(recipe.rewards, recipe.rollout.max_new_tokens)
    return list(zip(component_names(rewards), rewards, strict=True))


def _tried(
    verifiers: Mapping[str, RewardSettings],
    prompts: Sequence[Prompt],
    recipe: Answering,
    tokenizer: Any,
) -> tuple[list[Tried], list[ScoredGroup]]:
    """The scores of each component, and the groups that they are of."""
    settings, asked = list(verifiers.values()), _asked(verifiers, prompts)
    every = {prompt.environment: EnvironmentRewards(0.0) for prompt in prompts}
    with Scorer(settings, recipe.scoring, every, decode=tokenizer.decode) as scorer:
        right = scorer.right_answers(asked)
        answers = [_answers(verifiers, *of_row) for of_row in zip(asked, right, strict=True)]
        groups, of_groups = _scored(asked, answers, scorer, tokenizer), scorer.of_groups()
    by_group = list(zip(groups, answers, strict=True))
    tried = [
        Tried(
            name,
            any(name in of_row for of_row in right),
            [_compared(group, name, texts[name]) for group, texts in by_group if name in texts],
            name in of_groups,
        )
        for name in verifiers
    ]
    return tried, groups


def _asked(verifiers: Mapping[str, RewardSettings], prompts: Sequence[Prompt]) -> list[Prompt]:
    """The rows of which answers are scored, with tickets of their own."""
    asks = any(controller_verifier(reward).waits or reward.waits for reward in verifiers.values())
    step = -(-len(prompts) // (ASKED if asks else TRIED))
    return [replace(prompt, ticket=n) for n, prompt in enumerate(prompts[:: max(1, step)])]


def _answers(
    verifiers: Mapping[str, RewardSettings], prompt: Prompt, right: Mapping[str, str]
) -> dict[str, str]:
    """By component the answer that is right for it: the verifier's own, else the reference answer,
    if there is one. Components that do not apply to the prompt are left out.
    """
    answers = {
        name: (reward.after or "", right.get(name, prompt.answer))
        for name, reward in verifiers.items()
        if reward.applies(prompt.dataset, prompt.metadata)
    }
    return {name: before + text for name, (before, text) in answers.items() if text is not None}


def _scored(
    prompts: Sequence[Prompt],
    answers: Sequence[Mapping[str, str]],
    scorer: Scorer,
    tokenizer: Any,
) -> list[ScoredGroup]:
    """Scored groups; each has an empty answer first, then the right answers of all components."""
    pairs: list[tuple[Prompt, list[Rollout]]] = []
    for prompt, right in zip(prompts, answers, strict=True):
        texts = dict.fromkeys(["", *right.values()])
        pairs.append((prompt, [_rollout(prompt, n, t, tokenizer) for n, t in enumerate(texts)]))
    groups = scorer.score(pairs)
    scorer.require_scored(groups)
    return groups


def _rollout(prompt: Prompt, sample: int, text: str, tokenizer: Any) -> Rollout:
    tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids = np.array([*tokens, *end], np.int32)
    turn = Turn("policy", ids, np.zeros(len(ids), np.float32))
    return Rollout(prompt.ticket, sample, (turn,), "stop", ((0, len(ids)),), text)


def _compared(group: ScoredGroup, name: str, answer: str) -> ScoredAnswer:
    """The score that component `name` gave to the answer, beside that of the empty one."""
    place = next(n for n, rollout in enumerate(group.rollouts) if rollout.text == answer)
    scores = group.rewards[name]
    return group.prompt, answer, float(scores[place]), float(scores[0])


def _show(tried: Sequence[Tried], console: Console) -> None:
    columns = ("reward", "reference answers right", "their mean score", "an empty answer's")
    console.table(
        "verifiers on reference answers", columns, [component.row() for component in tried]
    )
    rows = [
        (
            component.name,
            f"{prompt.row} of {prompt.dataset}",
            f"{score:.3f}",
            shortened(text, WIDTH),
        )
        for component in tried
        for prompt, text, score, _ in _wrong(component)[:EXAMPLES]
    ]
    if rows:
        console.table("answers without full score", ("reward", "row", "score", "answer"), rows)


def _wrong(component: Tried) -> list[ScoredAnswer]:
    return [scored for scored in component.scored if not scored[2] >= RIGHT]


def report_doubts(report: Report, check: Check, component: Tried, reward: RewardSettings) -> None:
    """Reports scores that cannot be right: reference answers without full score, empty answers
    with it, and judges that tell the two apart nowhere.
    """
    if not component.scored:
        return
    count, empty = len(component.scored), [scored[3] for scored in component.scored]
    if component.sure and component.right <= count / 2:
        prompt, text, score, _ = _wrong(component)[0]
        report.problem(
            check,
            f"{component.name} gives {count - component.right} of {count} reference answers no "
            "full score, so that right samples would be called wrong; the first is row "
            f"{prompt.row} of {prompt.dataset} ({score:g} for {shortened(text, WIDTH)!r}); fix "
            "the rows, or choose another [[rewards]] type or setting",
        )
    elif component.sure and component.right < count:
        report.warn(
            check,
            f"{component.name}: {count - component.right} of {count} reference answers have no "
            "full score",
        )
    if component.sure and any(score >= RIGHT for score in empty):
        report.problem(check, f"{component.name} gives an empty answer full score")
    judges = (":" in reward.type or reward.type in COMPARING) and not component.compares
    if judges and all(score <= nothing for _, _, score, nothing in component.scored):
        report.warn(
            check,
            f"{component.name} gives no reference answer more than an empty one: look whether it "
            "reads what it should",
        )


def _failures(groups: Sequence[ScoredGroup]) -> Iterator[str]:
    """A message for each component that failed: how often, and its first failure."""
    failures = [(group.prompt, failure) for group in groups for failure in group.failures]
    for name in dict.fromkeys(failure.component for _, failure in failures):
        of_component = [
            (prompt, failure) for prompt, failure in failures if failure.component == name
        ]
        prompt, first = of_component[0]
        yield (
            f"{name} failed on {len(of_component)} answers; the first is row {prompt.row} of "
            f"{prompt.dataset}: {first.cause}: {first.message}"
        )
