"""How long a dataset's rows are, where it is at hand: a sample of them, counted in a second.

No chat template is rendered, which would need transformers: messages stand as in ChatML.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from postgrad.core.errors import UsageError
from postgrad.core.hub import split_revision
from postgrad.data.answers import labelled_of, pair_of
from postgrad.data.functions import prepared_rows
from postgrad.data.messages import Message, conversation_of, prompt_of
from postgrad.data.pair_settings import PairSettings
from postgrad.data.rows import Row, parse_split
from postgrad.data.settings import DataSettings, RowSettings, Share
from postgrad.models.files import require_regular
from postgrad.models.settings import ModelSettings
from postgrad.plan.lengths import Lengths
from postgrad.recipe.recipe import Recipe

SAMPLE = 1000  # rows of each set
LARGE = 100_000_000  # bytes; of larger data only the first rows are read
# Tokens around a message in ChatML, beside its role: <|im_start|>, new line; <|im_end|>, new line.
OPENING, CLOSING = 2, 2
# Words, single digits, punctuation and white space: what byte-level tokenizers begin with. Those
# with a hundred thousand tokens have nearly every word.
PIECES = re.compile(r" ?[^\W\d_]{1,12}|\d| ?(?:[^\s\w]|_)+|\s")

Count = Callable[[str], int]


def row_lengths(recipe: Recipe, model: ModelSettings | None = None) -> Lengths | None:
    """Lengths of the recipe's training data; None where it is not on this machine, or no sampled
    row fits. model: whose tokenizer counts, where it is not the recipe's own.

    Tokens are those of the model's tokenizer where that is at hand, else guessed from words, within
    a tenth for English and wide vocabularies. Sampled answers are as long as they may become.
    Raises UsageError as the reading of the data does.
    """
    count, how = _counter(model or recipe.model)
    parts: list[tuple[float, np.ndarray[Any, Any]]] = []
    whole, sampled = True, 0
    for settings in recipe.data.sources:
        size = _bytes(settings)
        if size is None:
            return None
        rows = prepared_rows(_first_rows(settings) if size > LARGE else settings)
        whole &= size <= LARGE
        chosen = rows[:: -(-len(rows) // SAMPLE)]
        pairs = [pair for row in chosen for pair in _counted(row, settings, recipe, count)]
        draws = settings.draws(len(rows)) if isinstance(settings, Share) else len(rows)
        sampled += len(chosen)
        parts.append((draws / len(chosen), np.array(pairs, np.float64)))
    weights = np.concatenate([np.full(len(found), weight) for weight, found in parts])
    prompt, answer, kept = _fitting(np.concatenate([found for _, found in parts]), recipe)
    if not kept.any():
        return None
    weights = np.where(kept, weights, 0.0)
    mean = partial(np.average, weights=weights)
    return Lengths(
        prompt=float(mean(prompt)),
        answer=float(mean(answer)),
        spread=float(mean((prompt + answer) ** 2) / mean(prompt + answer) ** 2),
        rows=round(float(weights.sum())) if whole else None,
        source=f"{sampled} rows of the data, {how}",
    )


def _fitting(pairs: np.ndarray[Any, Any], recipe: Recipe) -> Any:
    """Tokens of prompt and answer as data.on_too_long leaves them, and which rows are kept."""
    prompt, answer, limit = pairs[:, 0], pairs[:, 1], recipe.data.max_len
    if recipe.sampled_tokens is not None:
        answer = np.full(len(prompt), recipe.sampled_tokens)
    kept = prompt + answer <= limit
    if recipe.data.on_too_long == "truncate":
        prompt = np.minimum(prompt, limit - (answer if recipe.trains_on_rollouts else 1))
        answer, kept = np.minimum(answer, limit - prompt), np.full(len(prompt), True)
    return prompt, answer, kept


def _counted(
    row: Row, settings: RowSettings, recipe: Recipe, count: Count
) -> Iterator[tuple[float, float]]:
    """Tokens of prompt and answer of each sample of a row; of a pair's answers, their mean."""

    def tokens(messages: list[Message]) -> int:
        around = sum(OPENING + count(message["role"]) + CLOSING for message in messages)
        return around + sum(count(message["content"]) for message in messages)

    opening = OPENING + count("assistant")  # of the answer: the policy reads it
    if isinstance(settings, PairSettings):
        paired = recipe.row_kind == "pair"
        found = pair_of(row, settings) if paired else labelled_of(row, settings)
        replies = [one[found.first :] for one in found.conversations]
        answers = [tokens(one) - opening - 1 for one in replies]  # up to the end of the turn
        prompt = tokens(found.conversations[0][: found.first]) + opening
        yield from [(prompt, sum(answers) / 2)] if paired else [(prompt, one) for one in answers]
    elif isinstance(settings, DataSettings):
        if recipe.row_kind == "prompt":
            yield tokens(prompt_of(row, settings)) + opening, 0
            return
        said = conversation_of(row, settings)
        first = next((i for i, one in enumerate(said) if one["role"] == "assistant"), len(said))
        yield tokens(said[:first]) + opening, tokens(said[first:]) - opening


def _counter(model: ModelSettings) -> tuple[Count, str]:
    """How many tokens a text has, and how that is known."""
    if model.source is not None:
        file = _tokenizer_file(model.source)
        if file is not None:
            from tokenizers import Tokenizer  # only here

            require_regular(file)
            try:
                tokenizer = Tokenizer.from_file(str(file))
            except Exception as error:  # the library raises no other
                raise UsageError(
                    f"{file} cannot be read: {error}; take the tokenizer.json of the model"
                ) from error
            return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids), (
                "counted with the model's tokenizer"
            )
    elif model.init is not None and model.init.tokenizer.kind == "characters":
        return len, "counted in characters"
    return lambda text: len(PIECES.findall(text)), "tokens guessed from words"


def _tokenizer_file(path: str) -> Path | None:
    """tokenizer.json of a directory, or of a hub id that was fetched before."""
    if Path(path).is_dir():
        file = Path(path) / "tokenizer.json"
        return file if file.is_file() else None
    from huggingface_hub import try_to_load_from_cache

    name, revision = split_revision(path)
    try:
        found = try_to_load_from_cache(name, "tokenizer.json", revision=revision)
    except ValueError:  # no hub id
        return None
    return Path(found) if isinstance(found, str) else None


def _bytes(settings: RowSettings) -> int | None:
    """Size of the files of a dataset; None where they are not on this machine."""
    path = Path(settings.path).expanduser()
    if path.is_file():
        return path.stat().st_size
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return None


def _first_rows(settings: RowSettings) -> RowSettings:
    split = parse_split(settings.split)[0]
    return settings.model_copy(update={"limit": SAMPLE, "split": split})
