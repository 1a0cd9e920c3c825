"""All rows of a recipe, read as its run reads them, and what can be said of them all at once."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from postgrad.core.records import Prompt
from postgrad.data.account import LOST, MEANING, RowAccount
from postgrad.data.conversations import Conversation, load_conversations
from postgrad.data.draws import DrawnSet, Draws
from postgrad.data.pairs import Labelled, Pair, load_labelled, load_pairs
from postgrad.data.prompts import load_prompts
from postgrad.data.rows import read_rows
from postgrad.data.settings import RowSettings
from postgrad.jobs import environments
from postgrad.jobs.dry_run import rows as showing
from postgrad.jobs.dry_run.report import Check, Report
from postgrad.jobs.setup import common
from postgrad.jobs.setup import rows as reading
from postgrad.recipe.recipe import Answering, Recipe, RLRecipe

NO_LIMIT = 2**30  # tokens
MANY = 0.1  # of the rows lost: less than data.max_lost_fraction allows, more than a person expects
Key = tuple[int, int | None]
CUT_LOOKED_AT = 2000  # rows that are read again to show what was cut off


@dataclass(slots=True)
class Sets:
    """What could be read. training: None where it could not; evaluation: by place in eval.sets."""

    training: Draws[Any] | None = None
    evaluation: dict[int, DrawnSet[Any]] = field(default_factory=dict[int, DrawnSet[Any]])

    @property
    def tokens(self) -> int:
        """The longest sample of the training data, a pair together."""
        return int(self._lengths.max())

    @property
    def mean_tokens(self) -> float:
        """Of a sample of the training data."""
        return float(self._lengths.mean())

    @property
    def _lengths(self) -> NDArray[np.int64]:
        assert self.training is not None
        return np.array([sum(map(len, token_ids(one))) for one in self.training.all()], np.int64)

    @property
    def largest_id(self) -> int:
        """Of all tokens."""
        sets: list[Draws[Any]] = [*self.evaluation.values()]
        sets += [] if self.training is None else [self.training]
        found = [int(ids.max()) for one in sets for row in one.all() for ids in token_ids(row)]
        return max(found, default=0)

    def prompts(self) -> list[Prompt]:
        """Every question that is asked, of training and evaluation."""
        sets = [*([] if self.training is None else [self.training]), *self.evaluation.values()]
        return [row for one in sets for row in one.all() if isinstance(row, Prompt)]


def token_ids(one: Any) -> list[NDArray[np.int32]]:
    """Of a record, the two of a pair one after the other."""
    if isinstance(one, Pair):
        return [one.chosen, one.rejected]
    return [one.token_ids]


def read(report: Report, recipe: Recipe, tokenizer: Any) -> Sets:
    """Every row of every set; a set that cannot be read is a problem, and the others are read."""
    found = Sets()
    for place, one in enumerate(recipe.eval.sets):
        with report.check(f"rows of eval {one.name or ''}".rstrip()) as check:
            found.evaluation[place] = reading.evaluated(recipe, place, tokenizer)
            _tell(report, check, [found.evaluation[place].account])
    readable = recipe
    if len(found.evaluation) < len(recipe.eval.sets):  # what is held out is no reason here
        whole = recipe.eval.model_copy(update={"sets": ()})
        readable = recipe.model_copy(update={"eval": whole})
    with report.check("rows") as check:
        found.training = reading.training(readable, tokenizer)
        _tell(report, check, found.training.accounts)
        if isinstance(recipe, RLRecipe):
            environments.check_rows(recipe, found.training)
    return found


def _tell(report: Report, check: Check, accounts: Sequence[RowAccount]) -> None:
    common.print_rows(report.console, accounts, check.name)
    rows, kept = sum(one.rows for one in accounts), sum(one.kept for one in accounts)
    check.detail = f"{kept} of {rows} rows are used"
    for one in accounts:
        lost = [(one.fates[fate], MEANING[fate]) for fate in LOST if fate in one.fates]
        if sum(count for count, _ in lost) > MANY * one.rows:
            told = ", ".join(f"{count} {meaning}" for count, meaning in lost)
            report.warn(check, f"{one.name}: of {one.rows} rows {told}; raise data.max_len?")


def show(report: Report, recipe: Recipe, sets: Sets, tokenizer: Any) -> None:
    """Ten rows of the training data with their masks."""
    if sets.training is None:
        return
    with report.check("rows shown") as check:
        parts = sets.training.parts
        each = -(-showing.SHOWN // len(parts))
        count = 0
        for settings, part in zip(recipe.data.sources, parts, strict=True):
            whole = _uncut(recipe, settings, part, tokenizer)
            first = [place for place, one in enumerate(part.all()) if key_of(one) in whole][:2]
            for one in showing.spread(part, min(each, showing.SHOWN - count), first):
                shown = showing.shown_row(tokenizer, part.account.name, one, whole.get(key_of(one)))
                showing.show(shown, report.console)
                count += 1
        check.detail = f"{count} of them, what is learned from is marked"


def _uncut(recipe: Recipe, settings: Any, part: DrawnSet[Any], tokenizer: Any) -> dict[Key, Any]:
    """The first rows that were cut, as they were before."""
    if not part.account.fates.get("truncated"):
        return {}
    some = settings.model_copy(
        update={"max_len": NO_LIMIT, "limit": min(settings.limit or NO_LIMIT, CUT_LOOKED_AT)}
    )
    whole = {key_of(one): one for one in _load(recipe, some, part, tokenizer).all()}
    return {
        key: whole[key]
        for one in part.all()
        if (key := key_of(one)) in whole
        and sum(map(len, token_ids(whole[key]))) > sum(map(len, token_ids(one)))
    }


def key_of(one: Any) -> Key:
    """What names a record in its dataset: a row with a pair gives two labelled answers, one that is
    unrolled several texts.
    """
    if isinstance(one, Conversation):
        return one.row, one.text
    return one.row, one.desirable if isinstance(one, Labelled) else None


def _load(recipe: Recipe, settings: Any, part: DrawnSet[Any], tokenizer: Any) -> DrawnSet[Any]:
    """Other settings of the dataset that `part` was read from."""
    first = part.all()[0]
    if isinstance(recipe, Answering):
        settings = environments.through(recipe, settings)
    if isinstance(first, Prompt):
        return load_prompts(settings, tokenizer, max_prompt_tokens=NO_LIMIT)
    if isinstance(first, Conversation):
        return load_conversations(settings, tokenizer)
    if isinstance(first, Labelled):
        return load_labelled(settings, tokenizer)
    return load_pairs(settings, tokenizer)


def limit_for(settings: RowSettings, part: DrawnSet[Any], count: int) -> int:
    """How many rows of a dataset have to be read for `count` of its records."""
    entries = part.all()
    last = entries[min(count, len(entries)) - 1].row
    first = read_rows(settings.model_copy(update={"limit": 1}))[0].index
    return last - first + 1
