"""Whether a verifier of a user's own says which answers it read, so that there is something to vote
on: the checks of a recipe import no code of others.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from postgrad.core.errors import UsageError
from postgrad.core.records import Prompt, Rollout, Turn
from postgrad.evaluation.results import note_of_answer
from postgrad.recipe.recipe import Answering
from postgrad.recipe.scored import judges
from postgrad.rewards.registry import VERIFIERS, component_names
from postgrad.rewards.scorer import Scorer
from postgrad.rewards.settings import EnvironmentRewards, RewardSettings

# Where verifiers look for the answer of a sample.
FORMS = ("{}", "#### {}", r"\boxed{{{}}}", "<answer>{}</answer>")


def nothing_to_vote_on(names: Sequence[str], asked: str) -> str:
    """The message about verifiers that say of no sample which answer they read. asked: of what."""
    return (
        f"eval.maj_at: {', '.join(map(repr, names))} did not say of any {asked} which answer it "
        'read, so there is nothing to vote on: return Score(value, {"answer": text}) from your '
        "verifier, with None for a sample that has none, or name another eval.component"
    )


def require_votes(recipe: Answering, prompts: Iterable[Prompt], tokenizer: Any) -> None:
    """Raises UsageError where majorities are asked for, and a verifier of the user's own judges
    that says of none of a few answers to its first row which answer it read.

    It is run on the row's right answer in several forms, and on an empty one. Where it fails on all
    of them, or tells none from another, nothing is known: it may read another form.
    """
    if not recipe.eval.maj_at:
        return
    rows = list(prompts)
    for place in judges(recipe.eval, recipe.rewards):
        reward = recipe.rewards[place]
        name = component_names([reward])[0]
        row = next((row for row in rows if reward.applies(row.dataset, row.metadata)), None)
        if reward.type in VERIFIERS or row is None:
            continue
        scores, details = _tried(recipe, name, reward, row, tokenizer)
        told_apart = len(np.unique(scores[~np.isnan(scores)])) > 1
        if told_apart and not any(map(note_of_answer, details)):
            asked = f"answer to row {row.row} of {row.dataset}"
            raise UsageError(nothing_to_vote_on([name], asked))


def _tried(
    recipe: Answering, name: str, reward: RewardSettings, row: Prompt, tokenizer: Any
) -> tuple[Any, Sequence[Any]]:
    """The scores and details of one component for answers to a row. Its failures are no run's."""
    alone = [reward.model_copy(update={"on_failure": "drop_sample"})]
    scoring = recipe.scoring.model_copy(update={"workers": 1, "waiting_workers": 1})
    environment = {row.environment: EnvironmentRewards(0.0)}  # a row may have no other reward
    with Scorer(alone, scoring, environment, decode=tokenizer.decode) as scorer:
        right = scorer.right_answers([row])[0].get(name)
        texts = {"": None} if right is None else {"": None, right: None}
        texts |= {form.format(row.answer): None for form in FORMS if row.answer is not None}
        before = reward.after or ""
        answers = [_answer(row, n, before + text, tokenizer) for n, text in enumerate(texts)]
        (group,) = scorer.score([(row, answers)])
    return group.rewards[name], group.details.get(name, ())


def _answer(row: Prompt, sample: int, text: str, tokenizer: Any) -> Rollout:
    """A sample of one turn with this text."""
    ids = np.array(tokenizer(text or "\n", add_special_tokens=False)["input_ids"], np.int32)
    turn = Turn("policy", ids, np.zeros(len(ids), np.float32))
    return Rollout(row.ticket, sample, (turn,), "stop", ((0, len(ids)),), text)
