"""What grades the tokens of a run's rollouts: teachers, one for all datasets or one for each, which
the fleet loads or servers have; or the policy or the reference. All of them read the rows' hints.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from postgrad.algorithms.base import Grades
from postgrad.core.errors import RunError, UsageError
from postgrad.core.process import Handle
from postgrad.core.ragged import Ragged
from postgrad.core.records import Hinted, PlacedImage, Prompt, Sequences, column_of
from postgrad.core.rollout_batch import RolloutBatch
from postgrad.data.draws import Draws
from postgrad.data.rows import dataset_name
from postgrad.data.text_segments import Reread, TextReader
from postgrad.fleet.fleet import Fleet, RunContext, teacher_name
from postgrad.learner.protocols import LogprobRole
from postgrad.models.tokenizer import require_same_tokens
from postgrad.recipe.recipe import Answering, RLRecipe
from postgrad.rollout.openai.prompt_logprobs import NO_IMAGES, ServedTeacher

OTHER_TOKENS = (
    'a teacher that is loaded grades segments of text with align = "text" beside model.path; or '
    "take one of the student's family, or let it write answers (postgrad generate) and train on "
    "their text with SFT"
)
OTHER_DISTRIBUTIONS = (
    "distillation compares whole distributions over one vocabulary: take a teacher of the "
    'student\'s family; job = "rl" with "on_policy_distillation" and teacher.align = "text", which '
    "grades segments of text; or let it write answers (postgrad generate) and train on their text"
)
NOBODY = -1  # grades a sample
PROBED = 64  # tokens that servers have to read as the policy does, beside prompts of the data


class Teachers:
    """Grades samples: a sample's teacher is that of its prompt's dataset."""

    def __init__(
        self,
        roles: Sequence[LogprobRole],
        of_dataset: dict[str, int],
        correct_at: float = 1.0,
        special: Sequence[int] = (),
        readers: Mapping[int, TextReader] | None = None,
    ) -> None:
        """of_dataset: by name of a dataset, which of `roles`; one for each dataset of the data.
        correct_at: the reward of answers that hints may show. special: tokens that are no text.
        readers: of those of `roles` that read samples in tokens of their own.
        """
        self.roles = roles
        self._of_dataset, self._correct_at, self._special = of_dataset, correct_at, special
        self._readers = readers or {}

    def grade(self, batch: RolloutBatch, prompts: Sequence[Prompt]) -> "Graded":
        """The teachers' logprobs of every loss token, behind the hints of prompts that have some. A
        sample whose hint has no right answer to show is not graded.

        prompts: by group of the batch. Raises UsageError for a sample of a dataset that is not in
        [data] (a replay of another run).
        """
        sequences = batch.sequences
        for prompt in prompts:
            if prompt.dataset not in self._of_dataset:
                raise UsageError(
                    f"teacher: ticket {prompt.ticket} is of {prompt.dataset}, which [data] does "
                    f"not have ({', '.join(self._of_dataset)}): no teacher is for it"
                )
        shown = shown_answers(batch, prompts, self._correct_at, self._special)
        read = behind_hints(sequences, prompts, shown)
        asks = np.array([_place(prompt) is not None for prompt in prompts], np.bool_)
        graded = ~asks[sequences.group]
        graded[[*shown]] = True
        chosen = np.array([self._of_dataset[prompt.dataset] for prompt in prompts], np.int64)
        teacher_of = np.where(graded, chosen[sequences.group], NOBODY)
        parts: list[GradedPart] = []
        numbers: list[int] = np.unique(teacher_of[graded]).tolist()
        for number in numbers:  # all are asked before any is waited for
            rows, role = np.flatnonzero(teacher_of == number), self.roles[number]
            part = read if len(rows) == len(sequences) else read.take(rows)
            if number not in self._readers:
                parts.append(GradedPart(rows, role.logprobs(part)))
                continue
            reread = self._readers[number].read(part, prompts, ~batch.truncated[rows])
            handle = role.logprobs(reread.sequences) if len(reread.rows) else None
            parts.append(GradedPart(rows, handle, reread))
        return Graded(sequences, graded, parts)


@dataclass(frozen=True, slots=True)
class GradedPart:
    """Samples of one teacher."""

    rows: NDArray[np.int64]  # which
    logprobs: Handle[Ragged] | None  # None: none of them has text that the teacher reads
    reread: Reread | None = None  # as a teacher of other tokens reads them


class Graded:
    """The logprobs of several teachers as one column, once it is asked for."""

    def __init__(
        self, sequences: Sequences, graded: NDArray[np.bool_], parts: Sequence[GradedPart]
    ) -> None:
        """graded: [S] who is. parts: of `sequences`, with what their teacher says of them."""
        self._sequences, self._graded, self._parts = sequences, graded, parts

    def result(self) -> Grades:
        """Waits for all of them."""
        tokens = self._sequences.tokens
        logprobs = tokens.like(np.zeros(len(tokens.values)))
        segments = tokens.like(np.arange(len(tokens.values)))  # each token is one
        for part in self._parts:
            of_part = part.logprobs and part.logprobs.result()
            if part.reread is not None:
                each = zip(part.rows.tolist(), part.reread.graded(of_part), strict=True)
                for row, (grades, numbers) in each:
                    logprobs.row(row)[:], segments.row(row)[:] = grades, numbers
                continue
            for row, grades in zip(part.rows.tolist(), of_part or (), strict=True):
                # a hint stands before the answer: what both end with is the same
                of_row = logprobs.row(row)
                shared = min(len(of_row), len(grades))
                of_row[-shared:] = grades[-shared:]
        rereads = any(part.reread is not None for part in self._parts)
        return Grades(logprobs, self._graded, segments if rereads else None)


def shown_answers(
    batch: RolloutBatch, prompts: Sequence[Prompt], correct_at: float, special: Sequence[int]
) -> dict[int, NDArray[np.int32]]:
    """By row of the batch the right answer that its hint shows: the first other sample of its group
    that ended, has a reward of `correct_at` or more, and finds room (Hübotter et al. 2026,
    arXiv:2601.20802). Without `special` tokens, as a user would write it. Rows whose hint has a
    place for an answer, and whose group none, are absent.
    """
    groups: list[int] = batch.sequences.group.tolist()
    right: dict[int, list[tuple[int, NDArray[np.int32]]]] = {}  # by group: rows, their answers
    for row in np.flatnonzero((batch.rewards >= correct_at) & ~batch.truncated).tolist():
        prompt = prompts[groups[row]]
        if (hinted := _place(prompt)) is None:
            continue
        answer = batch.sequences.tokens.row(row)[len(prompt.token_ids) :]
        answer = answer[~np.isin(answer, special)]
        if 0 < len(answer) <= hinted.room:
            right.setdefault(groups[row], []).append((row, answer))
    shown: dict[int, NDArray[np.int32]] = {}
    for row, group in enumerate(groups):
        for other, answer in right.get(group, ()):
            if other != row:
                shown[row] = answer
                break
    return shown


def _place(prompt: Prompt) -> Hinted | None:
    """The prompt's hint, where a right answer of the group comes in."""
    hinted = prompt.hinted
    return None if hinted is None or hinted.answer_at is None else hinted


def behind_hints(
    sequences: Sequences, prompts: Sequence[Prompt], shown: Mapping[int, NDArray[np.int32]]
) -> Sequences:
    """The sequences as graders read them: with the prompt's hint in place of its tokens. prompts:
    by group; shown: by row the right answer that comes into the hint.

    A hint stands before the first conversation alone: others do not begin with the prompt. Recorded
    experts are of the prompts that the policy read, so that a grader chooses its own. Raises
    RunError where an environment began with something else than the prompt.
    """
    if all(prompt.hinted is None for prompt in prompts):
        return sequences
    tokens: list[Any] = []
    masks: list[Any] = []
    images: list[tuple[PlacedImage, ...]] = []
    openings: list[tuple[int, ...]] = []
    sampled: list[Ragged] = []  # sampling masks
    groups: list[int] = sequences.group.tolist()
    rows = zip(groups, sequences.tokens, sequences.loss_mask, strict=True)
    for row, (group, ids, mask) in enumerate(rows):
        prompt = prompts[group]
        end = 0 if prompt.hinted is None else len(prompt.token_ids)
        ahead = _hint(prompt.hinted, shown.get(row))
        if end and not np.array_equal(ids[:end], prompt.token_ids):
            raise RunError(
                f"ticket {prompt.ticket}: its hint stands in place of the prompt, which the policy "
                f"has not read: the environment {prompt.environment!r} began with other messages; "
                "let it begin with the row's, or train without hints"
            )
        tokens.append(np.concatenate([ahead, ids[end:]]))
        masks.append(np.concatenate([np.zeros(len(ahead), np.bool_), mask[end:]]))
        # a prompt with a hint has no images: these are of an environment's replies
        placed = sequences.images_of(row)
        images.append(tuple(image.moved(len(ahead) - end) for image in placed))
        later = sequences.openings[row] if sequences.openings else ()
        openings.append(tuple(at + len(ahead) - end for at in later))
        if sequences.sampling_mask is not None:
            begin = int(sequences.tokens.offsets[row])
            behind = sequences.sampling_mask.take_many(np.arange(begin + end, begin + len(ids)))
            sampled += [Ragged.empty(len(ahead), np.int32), behind]
    return Sequences(
        Ragged.of(tokens, np.int32),
        Ragged.of(masks, np.bool_),
        sequences.group,
        images=column_of(images),
        openings=column_of(openings),
        sampling_mask=Ragged.joined(sampled, np.int32) if sampled else None,
    )


def _hint(hinted: Hinted | None, answer: NDArray[np.int32] | None) -> NDArray[np.int32]:
    """What a grader reads in place of a prompt: the prompt with its hint, and with this right
    answer; [] where it has none.
    """
    if hinted is None:
        return np.zeros(0, np.int32)
    ids, at = hinted.token_ids, hinted.answer_at
    return ids if answer is None else np.concatenate([ids[:at], answer, ids[at:]])


def check_teachers(recipe: Answering, tokenizer: object) -> None:
    """Raises UsageError where a teacher that reads the student's tokens, and is loaded here, has
    others.
    """
    remedy = OTHER_TOKENS if recipe.trains_on_rollouts else OTHER_DISTRIBUTIONS
    for place, teacher in recipe.teacher.places:
        model = recipe.loaded_models.get((*place, "model"))
        if model is not None and teacher.align == "tokens":
            key = ".".join(map(str, (*place, "model.path")))
            assert model.source is not None  # of no path there is no table
            require_same_tokens(model.source, key, tokenizer, remedy=remedy)


def text_readers(
    recipe: RLRecipe, tokenizer: object, prompts: Draws[Prompt]
) -> dict[int, TextReader]:
    """By the number of a teacher (`teacher_numbers`), what those of align = "text" read samples
    with. recipe: of an algorithm that needs teachers. Raises UsageError as TextReader does.
    """
    readers: dict[int, TextReader] = {}
    of_dataset = teacher_numbers(recipe)
    for number, (place, teacher) in enumerate(recipe.teacher.places):
        if teacher.align == "tokens" or number not in of_dataset.values():
            continue
        asked = [
            (source, part.all())
            for source, part in zip(recipe.data.sources, prompts.parts, strict=True)
            if of_dataset[dataset_name(source)] == number
        ]
        key, path = ".".join(map(str, place)), teacher.model.source
        assert path is not None  # a recipe without it is refused
        readers[number] = TextReader(key, path, tokenizer, asked, recipe.data.max_len)
    return readers


def load_teachers(
    fleet: Fleet,
    context: RunContext,
    recipe: RLRecipe,
    tokenizer: Any,
    first: Sequence[Prompt],
    stack: ExitStack,
    self_grader: LogprobRole | None,
    readers: Mapping[int, TextReader],
) -> Teachers | None:
    """The teachers of a recipe; None where its algorithm has none. first: prompts, whose
    texts servers have to read as the policy does. stack: ends what talks to servers. self_grader:
    of the run's roles the one that grades all samples in place of teachers. readers: text_readers.

    Raises UsageError for a dataset without a teacher, or a server with other tokens, RunError for a
    server with another model than the run was started with.
    """
    needs = recipe.algorithm.needs()
    shows = needs.correct_at, tokenizer.all_special_ids
    if self_grader is not None:
        of_self = {dataset_name(source): 0 for source in recipe.data.sources}
        return Teachers([self_grader], of_self, *shows)
    if not needs.teacher:
        return None
    of_dataset = teacher_numbers(recipe)
    roles: dict[int, LogprobRole] = {}
    texts = [*(tokenizer.decode(prompt.token_ids) for prompt in first), spread_tokens(tokenizer)]
    for place, (table, teacher) in enumerate(recipe.teacher.places):
        if place not in of_dataset.values():
            continue
        number = place - 1 if place else None
        if teacher.server.base_url is None:
            assert teacher.model.source is not None  # a set without a teacher is refused
            roles[place] = fleet.teacher(teacher.model.source, number)
            continue
        served = ServedTeacher(teacher.server, ".".join(map(str, (*table, "server"))))
        stack.callback(served.close)
        _require_same_served_model(context, teacher_name(number), served.identity)
        served.require_same_tokens(tokenizer, texts, OTHER_TOKENS)
        roles[place] = served
    places = sorted(roles)
    return Teachers(
        [roles[place] for place in places],
        {name: places.index(place) for name, place in of_dataset.items()},
        *shows,
        {places.index(place): reader for place, reader in readers.items() if place in places},
    )


def require_served_text(recipe: RLRecipe, prompts: Iterable[Prompt]) -> None:
    """Raises UsageError where the teacher of a prompt with an image is behind a server, before
    anything is loaded. prompts: of a policy that reads images.
    """
    needs = recipe.algorithm.needs()
    if needs.self_graded or not needs.teacher:
        return
    of_dataset, places = teacher_numbers(recipe), recipe.teacher.places
    for prompt in prompts:
        table, teacher = places[of_dataset[prompt.dataset]]
        if prompt.images and teacher.server.base_url is not None:
            key = ".".join(map(str, (*table, "server")))
            raise UsageError(
                f"{key}: row {prompt.row} of {prompt.dataset} has an image. {NO_IMAGES}"
            )


def spread_tokens(tokenizer: Any) -> str:
    """A text of tokens from the whole of a vocabulary, in which each is a text of its own."""
    vocabulary = sorted(tokenizer.get_vocab().values())
    texts = [tokenizer.decode([token]) for token in vocabulary[:: len(vocabulary) // PROBED + 1]]
    return "".join(text for text in texts if text and "\ufffd" not in text)


def teacher_numbers(recipe: RLRecipe) -> dict[str, int]:
    """By dataset of the training data: 0 for [teacher], n + 1 for [[teacher.sets]] at n. Raises
    UsageError for a dataset without a teacher, and for a name that no dataset has.
    """
    settings = recipe.teacher
    by_name = {name: n + 1 for n, other in enumerate(settings.sets) for name in other.datasets}
    names = [dataset_name(source) for source in recipe.data.sources]
    for name in by_name:
        if name not in names:
            raise UsageError(
                f"teacher.sets: no dataset of [data] is called {name!r}; there are "
                f"{', '.join(names)}"
            )
    without = [name for name in names if name not in by_name]
    if without and not settings.named:
        raise UsageError(
            f"teacher: {without[0]} has no teacher: name it in the datasets of one of "
            "[[teacher.sets]], or give teacher.model.path for all that no set names"
        )
    return {name: by_name.get(name, 0) for name in names}


def _require_same_served_model(context: RunContext, name: str, identity: str) -> None:
    """A run goes on with the model of the same name on the server: its weights are not seen."""
    before = context.choices.frozen.get(name, identity)
    if before != identity:
        raise RunError(
            f"the {name}'s server has {identity}, and this run was started with {before}: serve "
            "that again, or start a new run"
        )
    context.choices = replace(context.choices, frozen={**context.choices.frozen, name: identity})
