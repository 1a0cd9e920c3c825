"""The records of samples on their way to the learner: one frozen record per stage.

    Prompt -> Rollout -> ScoredGroup -> RolloutBatch -> Experience -> layouts
    (data)    (rollout)  (rewards)      (columns)       (algorithm)   (learner)

They hold NumPy arrays and plain values only, so that they can be sent to another process. What a
stage does not know yet is not a field of its record: only a ScoredGroup has rewards.

Shapes: S sequences (samples), N tokens of all sequences end to end, n samples of one prompt, R
tokens of one response (all turns after the prompt).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from postgrad.core import seeds
from postgrad.core.ragged import Ragged

T = TypeVar("T")
# "stop": it ended by itself; "length": the token limit cut it; "dead_end": no token may come next
# that its grammar allows
FinishReason = Literal["stop", "length", "dead_end"]
Author = Literal["policy", "environment"]
Logprobs = NDArray[np.float32]  # [tokens]
# What a reply of an environment stands behind: the policy's newest turn and what it read there, the
# turn with a number, from 0 on, and what it read there, or nothing.
Behind = int | Literal["newest", "nothing"]
# [tokens, layers, k] numbers of the experts that each layer with a router sent a token to; -1 where
# nobody knows: the router chooses itself there.
Experts = NDArray[np.int16]
# int32, a row for each token: the ids, rising, of the tokens that the sampler's filters left where
# it was drawn; an empty row where they took nothing away, and of tokens that nobody sampled.
SamplingMask = Ragged


@dataclass(frozen=True, slots=True)
class Hinted:
    """What a grader reads in place of a prompt's tokens: the row's hint (data.hint) too."""

    token_ids: NDArray[np.int32]  # [H] the chat template applied
    # Among them, where a right answer of the prompt's group comes in; None: the hint names none.
    answer_at: int | None = None
    room: int = 0  # tokens that this answer may have


@dataclass(frozen=True, slots=True)
class Prompt:
    """One draw from the data, ready to be sampled from. `question`, `answer` and `metadata` are
    JSON values: verifiers in other processes read them.
    """

    ticket: int  # global number of the draw, from 0 on: 17 is the 18th draw of the run
    token_ids: NDArray[np.int32]  # [prompt tokens], the chat template applied
    question: str  # the last user text, without the words that data.template puts around it
    answer: str | None  # the reference answer ("42"); None where the row has none
    dataset: str  # the source's name, as messages and samples.jsonl call it
    row: int  # number of the row in `dataset`, from 0 on
    # What else a verifier may want, by column name: {"level": 3}.
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    # The conversation that `token_ids` spells: ({"role": "user", "content": "2 + 2?"},).
    messages: Sequence[Mapping[str, str]] = ()
    images: tuple["PlacedImage", ...] = ()  # among `token_ids`, in order
    environment: str | None = None  # the name of the one that plays it; None: none does
    hinted: Hinted | None = None  # None: the row has no hint


@dataclass(frozen=True, slots=True)
class Turn:
    """A run of t tokens by one author."""

    author: Author
    token_ids: NDArray[np.int32]  # [t]
    logprobs: NDArray[np.float32]  # [t] nats, as the sampler drew them; zeros of an environment
    experts: Experts | None = None  # [t, layers, k] where the engine records them
    images: tuple["PlacedImage", ...] = ()  # of an environment's reply, among the t tokens
    # Of an environment: the tokens are another conversation, up to the policy's next turn. Nothing
    # before them is read behind them.
    opens: bool = False
    sampling_mask: SamplingMask | None = None  # [t] where the engine was asked for it


@dataclass(frozen=True, slots=True)
class EpisodeFailure:
    """Why an environment gave no reply to a turn: a fault of the environment, not of the policy."""

    cause: str  # one word: "error", "wall_clock", "crash"
    message: str  # for people


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sample of a prompt, as the engine wrote it. Its response has R tokens.

    Where an episode has several conversations, they stand one behind the other, each with all of
    its tokens: the first one begins with the prompt, every other one with a turn that `opens` it.
    Where the first turn opens one, nobody has read the prompt.
    """

    ticket: int  # of its prompt
    sample: int  # number among the samples of the prompt, 0 .. n - 1
    turns: tuple[Turn, ...]  # in order; none where the environment failed before the first
    finish_reason: FinishReason  # of its last turn
    # Which policy version wrote how many tokens, in order: ((3, 120), (4, 16)).
    versions: tuple[tuple[int, int], ...]
    text: str  # all turns decoded, without special tokens
    # More values per token, [R] each: "turn_rewards" of an environment, not weighted, and
    # "step_rewards", the weighted parts of the total that belong to single steps. Where R is 0,
    # "turn_rewards" is one value, for verifiers and files alone: nobody learns from the sample.
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict[str, NDArray[Any]])
    # What verifiers read after several turns, the text of the last one; None: they read `text`.
    answer: str | None = None
    # What an environment counted: {"turns": 2.0, "calls": 1.0}.
    counts: Mapping[str, float] = field(default_factory=dict[str, float])
    failure: EpisodeFailure | None = None  # of the last turn's reply; then no reward counts
    # [P, layers, k] of the prompt that was read, where turns have experts
    prompt_experts: Experts | None = None

    def read_prompt(self, prompt: Prompt) -> NDArray[np.int32]:
        """[P] what the policy read before the first turn: the prompt, or nothing of it."""
        return prompt.token_ids[:0] if self.opening_tokens else prompt.token_ids

    @property
    def opening_tokens(self) -> int:
        """Tokens of the R that stand in place of the prompt."""
        return len(self.turns[0].token_ids) if self.turns and self.turns[0].opens else 0

    @property
    def response_tokens(self) -> int:
        """R, of all turns."""
        return sum(len(turn.token_ids) for turn in self.turns)

    @property
    def policy_tokens(self) -> int:
        """Of the R tokens, those that the policy wrote."""
        return sum(len(turn.token_ids) for turn in self.turns if turn.author == "policy")

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """[R] of all turns."""
        return Ragged.of((turn.token_ids for turn in self.turns), np.int32).values

    @property
    def logprobs(self) -> NDArray[np.float32]:
        """[R] nats, as sampled; zeros at environment tokens."""
        return Ragged.of((turn.logprobs for turn in self.turns), np.float32).values

    @property
    def experts(self) -> Experts | None:
        """[P + R, layers, k] of the prompt and all turns; None where they were not recorded."""
        parts = [self.prompt_experts, *(turn.experts for turn in self.turns)]
        recorded = [part for part in parts if part is not None]
        return np.concatenate(recorded) if len(recorded) == len(parts) else None

    def images_behind(self, prompt: Prompt) -> tuple["PlacedImage", ...]:
        """Those of the prompt that was read and of the environment's replies, among the tokens of
        both.
        """
        start = len(self.read_prompt(prompt))
        images = list(prompt.images) if start else []
        for turn in self.turns:
            images += [image.moved(start) for image in turn.images]
            start += len(turn.token_ids)
        return tuple(images)

    @property
    def sampling_mask(self) -> SamplingMask | None:
        """[R] of all turns; None where a turn of the policy was sampled without it."""
        turns = self.turns
        if any(turn.author == "policy" and turn.sampling_mask is None for turn in turns):
            return None
        rows = [turn.sampling_mask or Ragged.empty(len(turn.token_ids), np.int32) for turn in turns]
        return Ragged.joined(rows, np.int32)

    @property
    def openings(self) -> tuple[int, ...]:
        """Where, among the R tokens, the second conversation of its episode begins, the third and
        so on.
        """
        ends = accumulate(len(turn.token_ids) for turn in self.turns)
        return tuple(begin for begin, turn in zip(ends, self.turns[1:], strict=False) if turn.opens)

    def conversations(
        self, prompt: Prompt
    ) -> list[tuple[int, NDArray[np.int32], tuple["PlacedImage", ...]]]:
        """Of each conversation: where it begins among the tokens of the prompt that was read and
        the response, its tokens, and its images among them.
        """
        read = self.read_prompt(prompt)
        tokens = np.concatenate([read, self.token_ids])
        images, before = self.images_behind(prompt), len(read)
        begins = [0, *(before + at for at in self.openings), len(tokens)]
        return [
            (begin, tokens[begin:end], images_between(images, begin, end))
            for begin, end in pairwise(begins)
        ]


@dataclass(frozen=True, slots=True)
class Failure:
    """A verifier that gave no score for a sample, or an environment that gave no reply."""

    sample: int  # number among the samples of the prompt
    component: str  # the reward's name in the recipe, as in ScoredGroup.rewards
    cause: str  # one word: "error", "cpu_time", "wall_clock", "crash"
    message: str  # for people: what the verifier raised, or which limit it broke


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """The n rollouts of one prompt with their rewards."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]  # n
    # What each component's verifier gave, [n], before its weight: {"math": [1.0, nan]}, NaN where
    # it failed. A component that does not apply to the prompt is absent.
    rewards: Mapping[str, NDArray[np.float64]]
    total: NDArray[np.float64]  # [n] the components mixed (rewards/mixing.py); NaN where not kept
    kept: NDArray[np.bool_]  # [n] False for samples that the failure policy dropped
    failures: tuple[Failure, ...] = ()
    # What verifiers want recorded beside their score: n JSON values by component.
    details: Mapping[str, tuple[Any, ...]] = field(default_factory=dict[str, tuple[Any, ...]])
    turn_weight: float = 0.0  # weight of the column "turn_rewards" in `total`; 0: not part of it


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image in a sequence of tokens: it stands at placeholders, whose embeddings it gives."""

    digest: str  # SHA-256 of its file (core/media.py)
    at: NDArray[np.int64]  # [tokens] the placeholders among the tokens of the sequence, rising
    # (rows, columns) of its tokens, for rotary positions of three components; None: of one.
    grid: tuple[int, int] | None = None
    mutual: bool = False  # True: its tokens, which are one run, see each other, later ones too

    def moved(self, tokens: int) -> "PlacedImage":
        """The image in a sequence that has so many tokens more before it."""
        return replace(self, at=self.at + tokens)

    @property
    def runs(self) -> list[list[int]]:
        """Its tokens as runs without gaps: [[first token, tokens], ...]."""
        runs = np.split(self.at, np.flatnonzero(np.diff(self.at) > 1) + 1)
        return [[int(run[0]), len(run)] for run in runs]


@dataclass(frozen=True, slots=True)
class Sequences:
    """What a learner can train on: S sequences of prompt and response."""

    tokens: Ragged  # int32 [N] token ids
    # bool [N]: True where the token is trained on. Never the first token of a sequence, which
    # nothing predicts.
    loss_mask: Ragged
    # [S] sequences of one group lie next to each other, and what they begin with alike is computed
    # once: [0, 0, 1, 1] for two prompts with two samples each.
    group: NDArray[np.int64]
    # int16 [N, layers, k]: the experts that a policy's learner has to use again, see Experts.
    experts: Ragged | None = None
    images: tuple[tuple[PlacedImage, ...], ...] = ()  # of each sequence, in order; (): no images
    # Of each sequence, the tokens at which a conversation of its own begins, rising: behind them
    # nothing before them is read (Rollout). The first one begins at 0, which is not said. (): none.
    openings: tuple[tuple[int, ...], ...] = ()
    # float32 [N]: what each loss token counts in the loss of SFT, 0 elsewhere; None: 1 each.
    loss_weights: Ragged | None = None
    # [N] rows: what the policy's distributions are renormalised over, and those of models that are
    # compared with it (rollout.keep_sampling_mask). None: over the vocabulary.
    sampling_mask: SamplingMask | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def images_of(self, row: int) -> tuple[PlacedImage, ...]:
        """The images of a sequence, in order."""
        return self.images[row] if self.images else ()

    def conversations(self, row: int) -> list[tuple[int, int]]:
        """Begin and end of each part of a sequence that is read by itself: mostly all of it."""
        opened = self.openings[row] if self.openings else ()
        return list(pairwise([0, *opened, len(self.tokens.row(row))]))

    def last_conversation(self, row: int) -> tuple[NDArray[np.int32], tuple[PlacedImage, ...]]:
        """The tokens of a sequence's last conversation, and its images among them."""
        begin, end = self.conversations(row)[-1]
        return self.tokens.row(row)[begin:end], images_between(self.images_of(row), begin, end)

    def _with_images(self) -> Ragged:
        """The tokens, with those of images replaced by parts of their hashes, below 0."""
        if not self.images:
            return self.tokens
        rows = [
            with_images(row, images) for row, images in zip(self.tokens, self.images, strict=True)
        ]
        return self.tokens.like(np.concatenate(rows))

    @property
    def unmasked(self) -> "Sequences":
        """These without sampling masks, for models that give no distribution over tokens."""
        return replace(self, sampling_mask=None)

    def take(self, rows: NDArray[np.int64]) -> "Sequences":
        """Sequences `rows`, in this order."""
        experts = None if self.experts is None else self.experts.take(rows)
        taken: list[int] = rows.tolist()
        images = tuple(self.images[row] for row in taken) if self.images else ()
        openings = tuple(self.openings[row] for row in taken) if self.openings else ()
        weights = None if self.loss_weights is None else self.loss_weights.take(rows)
        tokens, loss_mask = self.tokens.take(rows), self.loss_mask.take(rows)
        sampling_mask = self.sampling_mask
        if sampling_mask is not None:
            flat = self.tokens.like(np.arange(len(self.tokens.values)))
            sampling_mask = sampling_mask.take_many(flat.take(rows).values)
        return Sequences(
            tokens, loss_mask, self.group[rows], experts, images, openings, weights, sampling_mask
        )

    @property
    def shared_by(self) -> Ragged:
        """int32 [N] numbers that are equal where tokens are, the images that they stand for, and
        the experts that they were sent to: what begins alike in all can be computed once.
        """
        compared = self._with_images()
        if self.experts is None:
            return compared
        chosen = self.experts.values.reshape(len(compared.values), -1)
        keys = seeds.bits(0, "experts", compared.values, *chosen.T)
        return compared.like(np.unique(keys, return_inverse=True)[1].astype(np.int32))

    def at_last(self) -> "Sequences":
        """The same sequences with loss at their last tokens alone, where a reward model scores."""
        mask = np.zeros(len(self.tokens.values), np.bool_)
        mask[self.tokens.offsets[1:] - 1] = True
        return replace(self, loss_mask=self.tokens.like(mask))


def images_between(images: Iterable[PlacedImage], begin: int, end: int) -> tuple[PlacedImage, ...]:
    """The images that begin in tokens[begin:end] of a sequence, among these tokens."""
    return tuple(image.moved(-begin) for image in images if begin <= image.at[0] < end)


def require_sampling_mask(mask: SamplingMask, token_ids: NDArray[np.int32]) -> None:
    """Raises ValueError unless a mask that was read from a file is one of these tokens."""
    if len(mask) != len(token_ids):
        raise ValueError(f"a sampling mask of {len(mask)} tokens for {len(token_ids)}")
    rows = mask.rows
    rising = np.diff(mask.values) > 0
    if (mask.values < 0).any() or not (rising | (np.diff(rows) > 0)).all():
        raise ValueError("the ids of a sampling mask rise from token to token of the vocabulary")
    drawn = np.bincount(rows[mask.values == token_ids[rows]], minlength=len(mask)) > 0
    if not (drawn | (mask.lengths == 0)).all():
        raise ValueError("a sampling mask takes away the token that was drawn")


def with_images(tokens: NDArray[np.int32], images: Iterable[PlacedImage]) -> NDArray[np.int32]:
    """The tokens of a sequence, with those of its images replaced by parts of their hashes, which
    are below 0: what is equal to it begins with the same text and shows the same images.
    """
    marked = tokens.copy()
    for image in images:
        parts = np.frombuffer(bytes.fromhex(image.digest), ">u4") | np.uint32(2**31)
        marked[image.at] = np.resize(parts.astype(np.uint32).view(np.int32), len(image.at))
    return marked


def column_of(rows: Iterable[tuple[T, ...]]) -> tuple[tuple[T, ...], ...]:
    """Sequences.images or openings of sequences with these; () where none has any."""
    column = tuple(rows)
    return column if any(column) else ()


@dataclass(frozen=True, slots=True)
class Experience:
    """S sequences with the columns that an algorithm's losses read."""

    sequences: Sequences
    # float32 [N] each, over sequences.tokens. Only what the algorithm needs: "sampled_logprobs",
    # "old_logprobs", "undropped_logprobs", "ref_logprobs" (nats), "values", "advantages", "returns"
    # (units of reward).
    columns: Mapping[str, Ragged]
    # [S] False for sequences that cannot move any weight: they are not computed, and are counted in
    # every denominator all the same.
    has_gradient: NDArray[np.bool_]
    # float32 [N]: what a token of an environment's reply counts, whose cross-entropy is a part of
    # the policy's loss; 0 elsewhere. None: no such part.
    replies: Ragged | None = None

    def __len__(self) -> int:
        return len(self.sequences)
