"""How long the rows of the data are: read from it where it is at hand, else assumed longest."""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from postgrad.core.errors import UsageError
from postgrad.core.hub import local_file
from postgrad.core.media import MARK, MeasuredImages, images_in
from postgrad.data.answers import labelled_of, pair_of
from postgrad.data.chat_format import Message, texts_of
from postgrad.data.functions import prepared_rows
from postgrad.data.messages import conversation_of, prompt_of
from postgrad.data.rows import Row, parse_split
from postgrad.data.settings import DataSettings, PairSettings, RowSettings, Share
from postgrad.data.steps import steps_of
from postgrad.models.files import require_readable
from postgrad.models.image_sizes import ImageSizes, image_sizes
from postgrad.models.known_shapes import shape_of_model
from postgrad.models.settings import ModelSettings
from postgrad.models.towers import ImageCost
from postgrad.plan.turns import Column, Turns, most_turns
from postgrad.recipe.recipe import Recipe, RLRecipe

GYM = "reasoning-gym:"  # data.gym.PREFIX, whose module a plan does not import

SAMPLE = 1000  # rows that are counted of each set
LARGE = 100_000_000  # bytes; of larger data only the first rows are read
# Tokens around a message in ChatML, beside its role: <|im_start|>, new line; <|im_end|>, new line.
OPENING, CLOSING = 2, 2
# Words, single digits, punctuation and white space: what byte-level tokenizers begin with. Those
# with a hundred thousand tokens have nearly every word.
PIECES = re.compile(r" ?[^\W\d_]{1,12}|\d| ?(?:[^\s\w]|_)+|\s")

CountTokens = Callable[[str], int]
_Fitting = tuple[Column, Column, Column, Column, NDArray[np.bool_]]


@dataclass(frozen=True, slots=True)
class RowLengths:
    """Mean lengths, in tokens, of the rows that data.max_len keeps."""

    prompt: float  # mean tokens that are only read
    answer: float  # mean tokens behind it: of the answer, or of all turns and replies
    spread: float  # mean squared length over squared mean length; 1.0 where all are equally long
    source: str  # where the figures are from, for people: "1000 rows of the data, counted with ..."
    # Samples of an epoch, without the fraction that data.eval_fraction holds out; duplicates and
    # rows that other evaluations hold out are included. None: unknown.
    rows: int | None = None
    shared: bool = True  # a prompt is computed once for its answers (ModelShape.min_shared)
    images: ImageCost | None = None  # of a mean row, whose answers share them; None: it has none
    replies: float = 0.0  # those of `answer` that an environment says
    turns: float = 1.0  # of the policy

    @property
    def written(self) -> float:
        """Tokens of an answer that the policy writes."""
        return self.answer - self.replies

    def computed(self, answers: int) -> float:
        """Tokens that are computed for a prompt with several answers."""
        return self.prompt * (1 if self.shared else answers) + answers * self.answer

    def squares(self, answers: int) -> float:
        """Squared tokens, to which the cost of attention is proportional: twice the sum of all
        tokens' positions.
        """
        sequence = (self.prompt + self.answer) ** 2 * self.spread
        once = self.prompt**2 if self.shared else 0.0
        return once + answers * (sequence - once)


def longest(recipe: Recipe) -> RowLengths:
    """Rows as long as data.max_len allows. Half of a row is the answer, in RL as many tokens as
    rollout.max_new_tokens, with an environment as many as all turns and replies may have.
    """
    row = recipe.data.max_len
    source, rows = "every row as long as data.max_len allows", _generated_rows(recipe)
    if not isinstance(recipe, RLRecipe):
        return RowLengths(row - row // 2, row // 2, 1.0, source, rows=rows)
    count, _ = _counter(recipe.model)
    samples: list[list[Any]] = []
    for dataset in recipe.data.sources:
        turns = Turns.of(recipe, dataset, partial(_answered, count=count))
        prompt = np.array([turns.prompt(row)])
        samples.append([prompt, *turns.played(prompt, row)])
    prompt, written, replies, turned = np.mean(samples, axis=0)[:, 0].tolist()
    answer = written + replies
    return RowLengths(prompt, answer, 1.0, source, rows, replies=replies, turns=turned)


def of_one_turn(lengths: RowLengths, recipe: Recipe, *, read: bool) -> RowLengths:
    """The lengths of samples that end after their first turn, however many an environment allows:
    the geometry of memory, which plan.passes compares with that of filled rows. read: whether the
    rows were.
    """
    if most_turns(recipe) == 1:
        return lengths
    answer = recipe.sampled_tokens or 0
    prompt = lengths.prompt if read else recipe.data.max_len - answer
    return replace(lengths, prompt=prompt, answer=answer, replies=0.0, turns=1.0)


def _generated_rows(recipe: Recipe) -> int | None:
    """Rows of an epoch where all of them are generated; None where any are read from a dataset."""
    counts = [
        settings.draws(count) if isinstance(settings, Share) else count
        for settings in recipe.data.sources
        if (count := _problems(settings)) is not None
    ]
    return sum(counts) if len(counts) == len(recipe.data.sources) else None


def is_generated(recipe: Recipe) -> bool:
    """Whether reasoning-gym makes all rows, which are text alone then."""
    return all(settings.path.startswith(GYM) for settings in recipe.data.sources)


def _problems(settings: RowSettings) -> int | None:
    """How many problems reasoning-gym generates for these settings; None: unknown, or no gym."""
    if not settings.path.startswith(GYM) or "[" in settings.split or settings.filter:
        return None
    return min(settings.size, settings.limit or settings.size)


def row_lengths(recipe: Recipe, model: ModelSettings | None = None) -> RowLengths | None:
    """Lengths of the recipe's training data; None where it is not on this machine, none of the
    counted rows fits, or some have images that the model does not read. model: the model whose
    tokenizer counts, where it is not the recipe's.

    Where that tokenizer is not on this machine, tokens are guessed from words; for English and
    large vocabularies that is within a tenth. Answers that RL samples count with the most tokens
    that they may have. Images count with the tokens that the model's image processor gives them.
    Raises the UsageErrors of reading the data, and for images those of finding the model's shape.
    """
    store = MeasuredImages()
    with images_in(store):
        return _measured(recipe, model or recipe.model, store)


def _measured(recipe: Recipe, model: ModelSettings, store: MeasuredImages) -> RowLengths | None:
    count, how = _counter(model)
    images = RowImages(model, store, count("\n\n"))
    parts: list[tuple[float, np.ndarray[Any, Any], _Fitting]] = []
    all_read, counted, reads = True, 0, partial(_answered, count=count)
    for settings in recipe.data.sources:
        size = _bytes(settings)
        if size is None:
            return None
        rows = list(prepared_rows(_first_rows(settings) if size > LARGE else settings))
        all_read &= size <= LARGE
        chosen = rows[:: -(-len(rows) // SAMPLE)]
        samples = [s for row in chosen for s in _samples(row, settings, recipe, count, images)]
        trained = max(1, round(len(rows) * (1 - settings.eval_fraction)))
        counted += len(chosen)
        if any(math.isnan(sum(sample)) for sample in samples):
            return None
        table = np.array(samples, np.float64)
        of_set = Turns.of(recipe, settings, reads) if isinstance(recipe, RLRecipe) else None
        fitting = _fitting(table, settings, recipe, of_set)
        drawn = trained / len(chosen)  # times that each sample stands for one of an epoch
        if isinstance(settings, Share) and (kept := int(fitting[-1].sum())):
            drawn = settings.draws(max(1, round(kept * drawn))) / kept  # of what is kept, as a run
        parts.append((drawn, table, fitting))
    weights = np.concatenate([np.full(len(samples), weight) for weight, samples, _ in parts])
    table = np.concatenate([samples for _, samples, _ in parts])
    prompt, answer, replies, turns, kept = map(
        np.concatenate, zip(*(fitting for *_, fitting in parts), strict=True)
    )
    if not kept.any():
        return None
    weights = np.where(kept, weights, 0.0)
    mean = partial(np.average, weights=weights)
    cost = ImageCost(*(float(mean(column)) for column in table[:, 2:].T))
    if cost.images:
        each = cost.tokens / cost.images
        how = f"{how}; {cost.images:.3g} images in each, of {each:.0f} tokens on average"
    return RowLengths(
        prompt=float(mean(prompt)),
        answer=float(mean(answer)),
        spread=float(mean((prompt + answer) ** 2) / mean(prompt + answer) ** 2),
        rows=round(float(weights.sum())) if all_read else None,
        source=f"{counted} rows of the data, {how}{_left_out_later(recipe)}",
        images=cost if cost.images else None,
        replies=float(mean(replies)),
        turns=float(mean(turns)),
    )


def _left_out_later(recipe: Recipe) -> str:
    """Says that rows are counted which the run leaves out once it has read and checked them all."""
    data = recipe.data
    keys = {
        "data.dedup": data.dedup != "none",
        "data.decontaminate_ngram": data.decontaminate_ngram > 0,
        "data.on_unreadable": any(
            isinstance(source, DataSettings) and source.on_unreadable == "drop"
            for source in data.sources
        ),
    }
    named = " and ".join(key for key, leaves_out in keys.items() if leaves_out)
    return f"; rows that {named} will leave out are among them" if named else ""


class RowImages:
    """Counts the images of one row after the other. An image that a row has several times, as in
    both conversations of a pair, is encoded once.
    """

    def __init__(self, model: ModelSettings, store: MeasuredImages, new_line: int) -> None:
        """store: of the rows as they are read. new_line: tokens of "\\n\\n"."""
        self._model, self._store, self._new_line = model, store, new_line
        self._sizes: ImageSizes | None = None
        self._asked = False
        self._seen: set[str] = set()

    def begin(self) -> None:
        """Starts the next row: no image of it was seen yet."""
        self._seen.clear()

    def tokens(self, message: Mapping[str, Any]) -> float:
        """Tokens of the images of a message, with those around them; nan where the model reads
        none. Raises UsageError where its shape cannot be found.
        """
        digests: list[str] = message.get("images", [])
        if not digests:
            return 0.0
        sizes = self._sizes_of_model()
        if sizes is None:
            return math.nan
        self._seen.update(digests)
        pixels = [self._store.sizes[digest] for digest in digests]
        return sum(
            sizes.cost(*each).tokens + sizes.around(*each, self._new_line) for each in pixels
        )

    def cost(self) -> ImageCost:
        """What the tower computes of the row's images."""
        total = ImageCost()
        for digest in sorted(self._seen):
            assert self._sizes is not None  # tokens were counted
            total += self._sizes.cost(*self._store.sizes[digest])
        return total

    def _sizes_of_model(self) -> ImageSizes | None:
        if not self._asked:  # the first image asks: a shape may take seconds
            self._asked = True
            tower = shape_of_model(self._model).tower
            self._sizes = None if tower is None else image_sizes(tower, self._model.source)
        return self._sizes


def _fitting(
    pairs: NDArray[np.float64], settings: RowSettings, recipe: Recipe, turns: Turns | None
) -> _Fitting:
    """Arrays over rows of a dataset: tokens of the prompt, of what stands behind it and of the
    replies there, as its on_too_long leaves them, turns, and whether the row is kept. pairs: [rows,
    3 or more], tokens of prompt and answer, and images. turns: of samples; None: rows have answers.
    """
    prompt, answer, limit = pairs[:, 0], pairs[:, 1], settings.max_len
    if recipe.sampled_tokens is not None:
        answer = np.full(len(prompt), recipe.sampled_tokens)
    kept = prompt + answer <= limit
    if settings.on_too_long == "truncate":
        uncut = prompt
        prompt = np.minimum(prompt, limit - (answer if recipe.trains_on_rollouts else 1))
        answer = np.minimum(answer, limit - prompt)
        kept = (pairs[:, 2] == 0) | (prompt == uncut)  # images stand in prompts, and are not cut
    if turns is None:
        return prompt, answer, np.zeros(len(prompt)), np.ones(len(prompt)), kept
    written, replies, turned = turns.played(prompt, recipe.data.max_len)
    return prompt, written + replies, replies, turned, kept


def _samples(
    row: Row, settings: RowSettings, recipe: Recipe, count: CountTokens, images: RowImages
) -> list[tuple[float, ...]]:
    """(tokens of the prompt, tokens of the answer, the fields of ImageCost) of each sample."""
    images.begin()
    pairs = list(_counted(row, settings, recipe, count, images))
    cost = astuple(images.cost())
    return [(*pair, *cost) for pair in pairs]


def _counted(
    row: Row, settings: RowSettings, recipe: Recipe, count: CountTokens, images: RowImages
) -> Iterator[tuple[float, float]]:
    """(tokens of the prompt, tokens of the answer) of each sample of a row. A pair is one sample:
    its answer has the mean of the two answers.
    """

    def tokens(messages: list[Message]) -> float:
        around = sum(OPENING + count(message["role"]) + CLOSING for message in messages)
        texts = (text.replace(MARK, "") for message in messages for text in texts_of(message))
        return around + sum(map(count, texts)) + sum(map(images.tokens, messages))

    opening = OPENING + count("assistant")  # the answer's first tokens, which are not learned
    if recipe.row_kind == "steps" and isinstance(settings, PairSettings):
        answers = steps_of(row, settings)
        for path in answers.paths:
            *prompt, answer = answers.messages(path, settings.separator)
            yield tokens(prompt) + opening, tokens([answer]) - opening - 1
    elif isinstance(settings, PairSettings):
        paired = recipe.row_kind == "pair"
        sample = pair_of(row, settings) if paired else labelled_of(row, settings)
        replies = [messages[sample.first :] for messages in sample.conversations]
        answers = [tokens(reply) - opening - 1 for reply in replies]  # up to the end of the turn
        prompt = tokens(sample.conversations[0][: sample.first]) + opening
        if paired:
            answers = [sum(answers) / 2]
        yield from [(prompt, answer) for answer in answers]
    elif isinstance(settings, DataSettings):
        if recipe.row_kind == "prompt":
            yield tokens(prompt_of(row, settings)) + opening, 0
            return
        messages = conversation_of(row, settings)
        if settings.text:
            yield from _pieces(count(messages[0]["content"]) + 1, settings)
            return
        replies = (i for i, message in enumerate(messages) if message["role"] == "assistant")
        first = next(replies, len(messages))
        yield tokens(messages[:first]) + opening, tokens(messages[first:]) - opening


def _answered(message: Message, count: CountTokens) -> float:
    """Tokens of a message of text, and of the opening of the turn that answers it."""
    around = OPENING + count(message["role"]) + CLOSING + OPENING + count("assistant")
    return around + sum(map(count, texts_of(message)))


def _pieces(tokens: int, settings: DataSettings) -> Iterator[tuple[float, float]]:
    """(1, tokens behind the first) of a plain text, or of each piece that it is split into."""
    step = settings.max_len - 1 if settings.on_too_long == "split" else tokens
    for start in range(0, max(1, tokens - 1), max(1, step)):
        yield 1, min(step, tokens - 1 - start)


def _counter(model: ModelSettings) -> tuple[CountTokens, str]:
    """A function that counts the tokens of a text, and in words how it does."""
    if model.source is not None:
        file = local_file(model.source, "tokenizer.json")
        if file is not None:
            from tokenizers import Tokenizer  # only here

            require_readable(file)
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
        return _characters(model.init.tokenizer.phrases), "counted in characters"
    return lambda text: len(PIECES.findall(text)), "tokens guessed from words"


def _characters(phrases: Collection[str]) -> CountTokens:
    """Counts the tokens of a fresh tokenizer of characters, in which each phrase is one."""
    longest_first = sorted(phrases, key=len, reverse=True)
    pattern = re.compile("|".join([*map(re.escape, longest_first), r"[\s\S]"]))
    return lambda text: len(pattern.findall(text))


def _bytes(settings: RowSettings) -> int | None:
    """Bytes of the files of a dataset; None where they are not on this machine."""
    path = Path(settings.path).expanduser()
    if path.is_file():
        return path.stat().st_size
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return None


def _first_rows(settings: RowSettings) -> RowSettings:
    split = parse_split(settings.split)[0]
    return settings.model_copy(update={"limit": SAMPLE, "split": split})
