"""What the rows of an evaluation set have of their own: the keys in messages about them, where
readers know only those of [data], and the name under which a row is counted.
"""

import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.data.rows import shown
from postgrad.data.settings import KEY, MixSettings, PairMixSettings
from postgrad.recipe.eval_checks import same_rows
from postgrad.recipe.eval_settings import EvalSettings, PairEvalSettings
from postgrad.recipe.resolve import TAKEN_OVER


@contextmanager
def keys_of(
    evaluation: EvalSettings | PairEvalSettings, place: int, data: MixSettings | PairMixSettings
) -> Generator[None]:
    """While the evaluation set number `place` is read, a UsageError names that set's keys, but
    [data]'s where the set has taken their values over, and those of one of [[data.sets]] where the
    set is the part that its eval_fraction holds out.
    """

    def key_in_recipe(match: re.Match[str]) -> str:
        eval_set, key = evaluation.sets[place], match[1]
        of_set = "subset" if key == "name" else key
        if eval_set.eval_fraction:
            held_out_of = (s for s in data.sources if same_rows(s, eval_set.data))
            return next(held_out_of, data).own_keys(match[0])
        if of_set not in type(eval_set).model_fields:
            return match[0]
        if of_set in TAKEN_OVER and getattr(eval_set, of_set) == getattr(data, key):
            return match[0]
        return f"eval.{of_set}" if eval_set.name is None else f"eval.sets.{place}.{of_set}"

    try:
        yield
    except UsageError as error:
        raise UsageError(KEY.sub(key_in_recipe, str(error))) from error.__cause__


def counted_under(by: str | None, metadata: Mapping[str, Any], row: int, dataset: str) -> str:
    """The name under which a row is counted: its value in the column `by`, else that of its
    dataset. Raises UsageError where the value is no name.
    """
    if by is None:
        return dataset
    value = metadata.get(by)
    if not isinstance(value, str | int | float):
        there = f"has {shown(value)}" if by in metadata else "has nothing"
        raise UsageError(
            f"eval.by = {by!r}: row {row} of {dataset} {there} there, and text or a number is "
            f"needed; beside question and answer it has {', '.join(metadata) or 'no column'}"
        )
    return str(value)
