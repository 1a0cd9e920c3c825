"""Verifiers on answers of which we know what they are worth: the reference answer, and nothing.

A verifier that gives a reference answer nothing, or an empty answer as much, is found here and not
in a reward that never rises.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from postgrad.core.records import Prompt, Rollout, ScoredGroup, Turn
from postgrad.jobs import environments
from postgrad.jobs.dry_run.report import FAILURE, Check, Report
from postgrad.jobs.dry_run.rows import shortened
from postgrad.jobs.learned import learned_reward
from postgrad.jobs.setup.common import check_answers
from postgrad.observe.console import Console
from postgrad.recipe.recipe import Answering
from postgrad.rewards.learned import REWARD_MODEL
from postgrad.rewards.registry import component_names, controller_verifier, for_rollout
from postgrad.rewards.scorer import Scorer
from postgrad.rewards.settings import RewardSettings
from postgrad.rewards.verifier import PromptView

TRIED, ASKED = 64, 4  # rows of which answers are scored; where a server is asked
RIGHT = 1.0 - 1e-6
EXAMPLES = 3  # answers that are shown for each component
WIDTH = 200  # characters of one
COMPARING = ("judge", "remote")  # verifiers beside those of users that ought to tell answers apart


@dataclass(frozen=True, slots=True)
class Tried:
    """What a component said. given: (prompt, answer, its score, that of an empty answer); NaN where
    it failed. sure: the answers are right by what the verifier itself says of the rows.
    """

    name: str
    sure: bool
    given: Sequence[tuple[Prompt, str, float, float]]

    @property
    def right(self) -> int:
        """Answers with full score."""
        return sum(score >= RIGHT for _, _, score, _ in self.given)

    def row(self) -> tuple[str, str, str, str]:
        """For a table: its name, right ones, mean scores of answers and of empty ones."""
        right = f"{self.right} of {len(self.given)}"
        scores = [score for _, _, score, _ in self.given]
        empty = [score for _, _, _, score in self.given]
        return self.name, right, _mean(scores), _mean(empty)


def _mean(scores: Sequence[float]) -> str:
    return f"{sum(scores) / len(scores):.3f}" if scores else ""


def try_answers(
    report: Report, recipe: Answering, prompts: Sequence[Prompt], tokenizer: Any
) -> None:
    """Every row's reference answer can be read, and is worth what it should be."""
    with report.check("reference answers") as check, _scorer(recipe, tokenizer) as scorer:
        check_answers(scorer, prompts)
        check.detail = f"{len(prompts)} rows can be read"
    worked = {
        name: reward
        for name, reward in _components(recipe)
        if reward.type != REWARD_MODEL  # the step asks it
    }
    if not worked or not check.ok:
        return
    with report.check("verifiers") as check:
        with Scorer(list(worked.values()), recipe.scoring, environment=0.0) as scorer:
            groups = _scored(recipe, worked, prompts, scorer, tokenizer)
        tried = [_of(name, reward, groups) for name, reward in worked.items()]
        _show(tried, report.console)
        check.detail = ", ".join(
            f"{one.name} {one.right} of {len(one.given)}" for one in tried if one.given
        )
        for one in tried:
            judge(report, check, one, worked[one.name])
        for failure in _failures(groups):
            report.problem(check, failure, FAILURE)


def _scorer(recipe: Answering, tokenizer: Any) -> Scorer:
    return environments.scorer(recipe, learned_reward(recipe, tokenizer))


def _components(recipe: Answering) -> list[tuple[str, RewardSettings]]:
    if not recipe.rewards:
        return []
    rewards = for_rollout(recipe.rewards, recipe.rollout.max_new_tokens)
    return list(zip(component_names(rewards), rewards, strict=True))


def _scored(
    recipe: Answering,
    worked: Mapping[str, RewardSettings],
    prompts: Sequence[Prompt],
    scorer: Scorer,
    tokenizer: Any,
) -> list[ScoredGroup]:
    """Groups of an empty answer and every answer that is right for some component."""
    asks = any(controller_verifier(reward).waits or reward.waits for reward in worked.values())
    step = -(-len(prompts) // (ASKED if asks else TRIED))
    pairs: list[tuple[Prompt, list[Rollout]]] = []
    for number, prompt in enumerate(prompts[:: max(1, step)]):
        one = replace(prompt, ticket=number)
        answers = [_answer(reward, one) for reward in worked.values()]
        texts = dict.fromkeys(["", *(text for text in answers if text is not None)])
        rollouts = [_rollout(one, n, text, tokenizer) for n, text in enumerate(texts)]
        pairs.append((one, rollouts))
    with scorer.step():
        return scorer.score(pairs)


def _answer(reward: RewardSettings, prompt: Prompt) -> str | None:
    """What is right for a component; the reference answer itself where it does not say."""
    if not reward.applies(prompt.dataset, prompt.metadata):
        return None
    right = controller_verifier(reward).right_answer(_view(prompt))
    return prompt.answer if right is None else right


def _view(prompt: Prompt) -> PromptView:
    return PromptView(prompt.question, prompt.answer, prompt.metadata, prompt.dataset, prompt.row)


def _rollout(prompt: Prompt, sample: int, text: str, tokenizer: Any) -> Rollout:
    ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
    turn = Turn("policy", ids, np.zeros(len(ids), np.float32))
    return Rollout(prompt.ticket, sample, (turn,), "stop", ((0, len(ids)),), text)


def _of(name: str, reward: RewardSettings, groups: Sequence[ScoredGroup]) -> Tried:
    given: list[tuple[Prompt, str, float, float]] = []
    sure = False
    for group in groups:
        answer = _answer(reward, group.prompt)
        if answer is None or name not in group.rewards:
            continue
        sure = controller_verifier(reward).right_answer(_view(group.prompt)) is not None
        place = next(n for n, one in enumerate(group.rollouts) if one.text == answer)
        scores = group.rewards[name]
        given.append((group.prompt, answer, float(scores[place]), float(scores[0])))
    return Tried(name, sure, given)


def _show(tried: Sequence[Tried], console: Console) -> None:
    columns = ("reward", "reference answers right", "their mean score", "an empty answer's")
    console.table("verifiers on reference answers", columns, [one.row() for one in tried])
    rows = [
        (one.name, f"{prompt.row} of {prompt.dataset}", f"{score:.3f}", shortened(text, WIDTH))
        for one in tried
        for prompt, text, score, _ in _wrong(one)[:EXAMPLES]
    ]
    if rows:
        console.table("answers without full score", ("reward", "row", "score", "answer"), rows)


def _wrong(one: Tried) -> list[tuple[Prompt, str, float, float]]:
    return [given for given in one.given if not given[2] >= RIGHT]


def judge(report: Report, check: Check, one: Tried, reward: RewardSettings) -> None:
    """Says what a score that cannot be right means."""
    if not one.given:
        return
    count, empty = len(one.given), [given[3] for given in one.given]
    if one.sure and one.right <= count / 2:
        prompt, text, score, _ = _wrong(one)[0]
        report.problem(
            check,
            f"{one.name} gives {count - one.right} of {count} reference answers no full score, so "
            f"that right samples would be called wrong; the first is row {prompt.row} of "
            f"{prompt.dataset} ({score:g} for {shortened(text, WIDTH)!r}); mend the rows, or "
            "choose another [[rewards]] type or setting",
        )
    elif one.sure and one.right < count:
        report.warn(
            check,
            f"{one.name}: {count - one.right} of {count} reference answers have no full score",
        )
    if one.sure and any(score >= RIGHT for score in empty):
        report.problem(check, f"{one.name} gives an empty answer full score")
    judges = ":" in reward.type or reward.type in COMPARING
    if judges and all(score <= nothing for _, _, score, nothing in one.given):
        report.warn(
            check,
            f"{one.name} gives no reference answer more than an empty one: look whether it reads "
            "what it should",
        )


def _failures(groups: Sequence[ScoredGroup]) -> Iterator[str]:
    """The first failure of each component, with how many there were."""
    found = [(group.prompt, one) for group in groups for one in group.failures]
    for name in dict.fromkeys(one.component for _, one in found):
        own = [(prompt, one) for prompt, one in found if one.component == name]
        prompt, first = own[0]
        yield (
            f"{name} failed on {len(own)} answers; the first is row {prompt.row} of "
            f"{prompt.dataset}: {first.cause}: {first.message}"
        )
