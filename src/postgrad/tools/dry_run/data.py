"""The data checks of a dry run: all rows of a recipe, read as its run reads them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
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
from postgrad.data.settings import DataSettings, RowSettings
from postgrad.data.step_tokens import Stepwise, load_steps
from postgrad.fleet.loading import least_shared
from postgrad.models.image_reader import ImageReader
from postgrad.recipe.recipe import Answering, Recipe, RLRecipe
from postgrad.rollout.environments.sets import as_played, check_rows
from postgrad.rollout.local.prompts import without_images
from postgrad.tools.dry_run.outcome import Check, Report
from postgrad.tools.dry_run.rows import SHOWN, show, shown_row, spread
from postgrad.training.rows import evaluated, print_rows, training

NO_LIMIT = 2**30  # tokens
MANY = 0.1  # of the rows lost: less than data.max_lost_fraction allows, more than a person expects
Key = tuple[int, int | None]
CUT_LOOKED_AT = 2000  # rows that are read again to show what was cut off


@dataclass(slots=True)
class Sets:
    """The data sets of a recipe that could be read."""

    training: Draws[Any] | None = None  # None where it could not be read
    # by index in eval.sets; what could not be read is missing
    evaluation: dict[int, DrawnSet[Any]] = field(default_factory=dict[int, DrawnSet[Any]])

    @property
    def tokens(self) -> int:
        """Tokens of the longest training sample; a pair counts both answers."""
        return int(self._lengths.max())

    @property
    def mean_tokens(self) -> float:
        """Mean tokens of a training sample; a pair counts both answers."""
        return float(self._lengths.mean())

    @property
    def _lengths(self) -> NDArray[np.int64]:
        assert self.training is not None
        return np.array(
            [sum(map(len, token_ids(record))) for record in self.training.all()], np.int64
        )

    @property
    def largest_id(self) -> int:
        """The largest token id of all sets, 0 where there is none."""
        sets: list[Draws[Any]] = [*self.evaluation.values()]
        sets += [] if self.training is None else [self.training]
        largest_ids = [
            int(ids.max(initial=0))
            for drawn_set in sets
            for row in drawn_set.all()
            for ids in embedded_ids(row)
        ]
        return max(largest_ids, default=0)

    def prompts_by_source(self, recipe: Answering) -> list[tuple[DataSettings, list[Prompt]]]:
        """The prompts of each dataset of training and evaluation that could be read, with what the
        recipe says of it; other records are left out.
        """
        read: list[tuple[DataSettings, DrawnSet[Any]]] = []
        if self.training is not None:
            read += zip(recipe.data.sources, self.training.parts, strict=True)
        read += [(recipe.eval.sets[place], drawn) for place, drawn in self.evaluation.items()]
        return [
            (source, [row for row in drawn.all() if isinstance(row, Prompt)])
            for source, drawn in read
        ]


def token_ids(record: Any) -> list[NDArray[np.int32]]:
    """The token ids of a record's sequences: chosen and rejected of a pair, else one sequence."""
    if isinstance(record, Pair):
        return [record.chosen, record.rejected]
    return [record.token_ids]


def embedded_ids(record: Any) -> list[NDArray[np.int32]]:
    """As token_ids, without those of images, which need no embedding."""
    pair = isinstance(record, Pair)
    images = [record.chosen_images, record.rejected_images] if pair else [record.images]
    return [without_images(*each) for each in zip(token_ids(record), images, strict=True)]


def read_sets(
    report: Report, recipe: Recipe, tokenizer: Any, reader: ImageReader | None = None
) -> Sets:
    """Reads every row of every set. A set that cannot be read is reported, the others are read.
    reader: of a model that reads images.
    """
    sets = Sets()
    for place, eval_set in enumerate(recipe.eval.sets):
        with report.check(f"rows of eval {eval_set.name or ''}".rstrip()) as check:
            sets.evaluation[place] = evaluated(recipe, place, tokenizer, reader)
            _report_rows(report, check, [sets.evaluation[place].account])
    readable = recipe
    if len(sets.evaluation) < len(recipe.eval.sets):  # reported above: not once more by training
        without_eval_sets = recipe.eval.model_copy(update={"sets": ()})
        readable = recipe.model_copy(update={"eval": without_eval_sets})
    with report.check("rows") as check:
        sets.training = training(readable, tokenizer, reader)
        _report_rows(report, check, sets.training.accounts)
        if isinstance(recipe, RLRecipe):
            check_rows(recipe.environment, sets.training)
    return sets


def _report_rows(report: Report, check: Check, accounts: Sequence[RowAccount]) -> None:
    """Shows where the rows went; warns where more than MANY of a dataset were lost."""
    print_rows(report.console, accounts, check.name)
    rows, kept = (
        sum(account.rows for account in accounts),
        sum(account.kept for account in accounts),
    )
    check.detail = f"{kept} of {rows} rows are used"
    for account in accounts:
        lost = [(account.fates[fate], MEANING[fate]) for fate in LOST if fate in account.fates]
        if sum(count for count, _ in lost) > MANY * account.rows:
            fates = ", ".join(f"{count} {meaning}" for count, meaning in lost)
            report.warn(
                check, f"{account.name}: of {account.rows} rows {fates}; raise data.max_len?"
            )


def show_rows(
    report: Report,
    recipe: Recipe,
    sets: Sets,
    tokenizer: Any,
    reader: ImageReader | None = None,
) -> None:
    """Shows up to `SHOWN` training rows with their loss masks, cut rows among them. reader: as of
    read_sets.
    """
    if sets.training is None:
        return
    with report.check("rows shown") as check:
        parts = sets.training.parts
        each = -(-SHOWN // len(parts))
        count = 0
        for settings, part in zip(recipe.data.sources, parts, strict=True):
            uncut = _uncut(recipe, settings, part, tokenizer, reader)
            first = [place for place, record in enumerate(part.all()) if key_of(record) in uncut][
                :2
            ]
            for record in spread(part, min(each, SHOWN - count), first):
                shown = shown_row(tokenizer, part.account.name, record, uncut.get(key_of(record)))
                show(shown, report.console)
                count += 1
        check.detail = f"{count} of them, what is learned from is marked"


def _uncut(
    recipe: Recipe,
    settings: Any,
    part: DrawnSet[Any],
    tokenizer: Any,
    reader: ImageReader | None,
) -> dict[Key, Any]:
    """Rows that were cut to data.max_len, as they were before, by `key_of`. Reads the first
    CUT_LOOKED_AT rows again.
    """
    if not part.account.fates.get("truncated"):
        return {}
    some = settings.model_copy(
        update={"max_len": NO_LIMIT, "limit": min(settings.limit or NO_LIMIT, CUT_LOOKED_AT)}
    )
    again = _load(recipe, some, part, tokenizer, reader)
    uncut = {key_of(record): record for record in again.all()}
    return {
        key: uncut[key]
        for record in part.all()
        if (key := key_of(record)) in uncut
        and sum(map(len, token_ids(uncut[key]))) > sum(map(len, token_ids(record)))
    }


def key_of(record: Any) -> Key:
    """Identifies a record within its dataset. The row number alone does not: a pair gives two
    labelled answers, and an unrolled conversation several texts.
    """
    if isinstance(record, Conversation):
        return record.row, record.text
    if isinstance(record, Stepwise):
        return record.row, record.path
    return record.row, record.desirable if isinstance(record, Labelled) else None


def _load(
    recipe: Recipe,
    settings: Any,
    part: DrawnSet[Any],
    tokenizer: Any,
    reader: ImageReader | None,
) -> DrawnSet[Any]:
    """Reads the dataset of `part` again, with other settings."""
    first = part.all()[0]
    if isinstance(recipe, Answering):
        settings = as_played(recipe.environment, settings)
    if isinstance(first, Prompt):
        return load_prompts(settings, tokenizer, max_prompt_tokens=NO_LIMIT, reader=reader)
    if isinstance(first, Conversation):
        return load_conversations(settings, tokenizer, reader=reader)
    if isinstance(first, Labelled):
        return load_labelled(settings, tokenizer, reader=reader)
    if isinstance(first, Stepwise):
        return load_steps(settings, tokenizer, reader=reader)
    shared = partial(least_shared, recipe, recipe.model.source)
    scored = recipe.job == "reward"
    return load_pairs(settings, tokenizer, reader=reader, scored=scored, shared=shared)


def limit_for(settings: RowSettings, part: DrawnSet[Any], count: int) -> int:
    """How many rows of a dataset have to be read to get `count` records: some rows give none."""
    entries = part.all()
    last = entries[min(count, len(entries)) - 1].row
    first = next(read_rows(settings.model_copy(update={"limit": 1}))).index
    return last - first + 1
