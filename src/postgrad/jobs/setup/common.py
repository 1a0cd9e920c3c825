"""What several jobs need before they start."""

from collections.abc import Sequence

from postgrad.checkpoint.store import Checkpoint
from postgrad.core.errors import UsageError
from postgrad.core.records import Prompt
from postgrad.data import account, overlap
from postgrad.data.account import RowAccount
from postgrad.jobs import environments
from postgrad.jobs.evaluation import Evaluator
from postgrad.jobs.run import Run
from postgrad.learner.protocols import Learns
from postgrad.observe.console import Console
from postgrad.recipe.recipe import Answering, Recipe
from postgrad.rewards.scorer import Scorer


def held_out(recipe: Recipe) -> overlap.HeldOut:
    """The questions of all evaluation sets: none of them may be trained on."""
    sets = [one.data for one in recipe.eval.sets]
    return overlap.held_out(sets, recipe.data.decontaminate_ngram)


def check_answers(scorer: Scorer, rows: Sequence[Prompt]) -> None:
    """Raises UsageError where a verifier cannot read a row's reference answer, or no reward applies
    to a row: it would score every sample of that row wrong, in silence.
    """
    unreadable = scorer.check(rows)
    if unreadable:
        prompt, reason = unreadable[0]
        raise UsageError(
            f"{len(unreadable)} of {len(rows)} rows have a reference answer that a verifier "
            f"cannot read; the first is row {prompt.row} of {prompt.dataset}: {reason}; mend the "
            "rows, or choose another [[rewards]] type"
        )


def evaluator(run: Run, recipe: Answering, tokenizer: object, scorer: Scorer) -> Evaluator:
    """Of a policy that answers; its rows are shown and checked."""
    found = Evaluator(recipe, tokenizer, scorer)
    show_rows(run, [prompts.account for _, prompts in found.sets], "evaluation")
    for _, prompts in found.sets:
        environments.check_rows(recipe, prompts)
        check_answers(scorer, prompts.all())
    return found


def restore(learner: Learns, checkpoint: Checkpoint | None) -> None:
    """Goes on from a checkpoint where there is one."""
    if checkpoint is not None:
        learner.load(checkpoint.tensors)


def show_rows(run: Run, accounts: Sequence[RowAccount], what: str = "training") -> None:
    """One table that accounts for every row, and an event for each dataset."""
    title = f"rows of the {what} data"
    print_rows(run.console, accounts, title)
    for one in accounts:
        run.logs.event("data", title, **one.to_json())


def print_rows(console: Console, accounts: Sequence[RowAccount], title: str) -> None:
    """The table, and below it where to look and what else to know."""
    console.table(title, *account.table(accounts))
    for one in accounts:
        if remarks := one.remarks():
            console.note("\n".join([one.name, *remarks]))
