"""What a sample has read and written so far: turns, one behind the other, in conversations.

Most episodes are one conversation: each turn stands behind all before it. An environment may also
go on behind an earlier turn, or begin anew: an agent that shortens its history, or asks the policy
in another role. Then the policy reads another conversation, whose tokens are recorded whole, as a
turn that `opens` it; so is the first one, where the environment begins with other words than the
prompt. So each conversation is a run of the sample's tokens, and only what the policy
writes bears loss, once. Layouts compute what conversations begin with alike once (layout/tree.py).
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from postgrad.core.records import (
    Behind,
    Experts,
    PlacedImage,
    Prompt,
    Turn,
    images_between,
    with_images,
)
from postgrad.layout.tree import common_prefix, grow
from postgrad.rollout.engine import Completion, recorded_first


@dataclass(frozen=True, slots=True)
class NextRead:
    """What the policy reads next, from the begin of its conversation on."""

    token_ids: NDArray[np.int32]
    images: tuple[PlacedImage, ...]  # among token_ids
    new: int  # tokens of these that the environment adds
    behind: Behind
    experts: Experts | None = None  # of the first tokens, where another conversation has them


@dataclass(slots=True)
class _ConversationTurns:
    first: int  # number of its first turn among all
    images: tuple[PlacedImage, ...] = ()  # among its tokens
    # [tokens, layers, k] of its tokens up to the policy's newest; None: not recorded
    experts: Experts | None = None


class Transcript:
    """The turns of a sample, and what the policy reads behind them."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt.token_ids
        self.turns: list[Turn] = []
        self._conversations = [_ConversationTurns(0, prompt.images)]
        self._length = len(prompt.token_ids)  # tokens of the newest conversation
        # Of each turn of the policy its conversation, and how many tokens this has behind the turn.
        self._written: list[tuple[int, int]] = []

    def _tokens(self, number: int) -> NDArray[np.int32]:
        """Those of a conversation."""
        ends = [each.first for each in self._conversations[1:]] + [len(self.turns)]
        turns = self.turns[self._conversations[number].first : ends[number]]
        before = [] if number else [self._prompt]
        return np.concatenate([*before, *(turn.token_ids for turn in turns)]).astype(np.int32)

    def _keys(self, number: int) -> NDArray[np.int32]:
        """Of each token of a conversation a number that tokens of another one have where they, and
        all before them, are the same to a model. Experts of the last token are not known; they
        may be in another conversation.
        """
        conversation = self._conversations[number]
        keys = with_images(self._tokens(number), conversation.images)
        if conversation.experts is not None:
            keys[-1] = -1 - number
        return keys

    def write(self, completion: Completion) -> Completion:
        """Adds a turn of the policy. Returns it with the experts alone that are news."""
        mask = completion.sampling_mask
        turn = Turn("policy", completion.token_ids, completion.logprobs, sampling_mask=mask)
        self.turns.append(turn)
        self._length = tokens = self._length + len(completion.token_ids)
        self._written.append((len(self._conversations) - 1, tokens))
        newest = self._conversations[-1]
        if completion.experts is None:
            return completion
        more = tokens if newest.experts is None else tokens - len(newest.experts)
        news = self.news(completion.experts, tokens)
        assert news is not None
        newest.experts = recorded_first(newest.experts, more, news)
        return replace(completion, experts=news)

    def news(self, experts: Experts | None, tokens: int) -> Experts | None:
        """The experts of the newest of a conversation's `tokens`, from the one on that had none
        before.
        """
        recorded = self._conversations[-1].experts
        if experts is None or recorded is None:
            return experts
        return experts[-(tokens - len(recorded) + 1) :]

    def behind(
        self, behind: Behind, token_ids: NDArray[np.int32], images: tuple[PlacedImage, ...]
    ) -> NextRead:
        """What the policy reads where an environment adds these tokens. images: among them. Raises
        ValueError where there is no such turn.
        """
        new = len(token_ids)
        if behind == "nothing":
            return NextRead(token_ids, images, new, behind, self._recorded(token_ids, images))
        turns = len(self._written)
        turn = turns - 1 if behind == "newest" else behind
        if not 0 <= turn < turns:
            raise ValueError(f"it stands behind turn {turn} of the policy, which has had {turns}")
        number, length = self._written[turn]
        before = self._conversations[number].images
        tokens = np.concatenate([self._tokens(number)[:length], token_ids])
        shown = tuple(image for image in before if image.at[-1] < length)
        shown += tuple(image.moved(length) for image in images)
        if turn == turns - 1:
            return NextRead(tokens, shown, new, "newest")
        return NextRead(tokens, shown, new, turn, self._recorded(tokens, shown))

    def _recorded(
        self, tokens: NDArray[np.int32], images: tuple[PlacedImage, ...]
    ) -> Experts | None:
        """The experts of what another conversation begins with as those before do: an engine may
        have it in its cache and not compute it again, and learners share it where its experts are
        the same. None where engines record none.
        """
        keys = with_images(tokens, images)
        parts: list[Experts] = []
        for number, conversation in enumerate(self._conversations):
            if conversation.experts is None:
                return None
            parts.append(conversation.experts[: common_prefix(keys, self._keys(number))])
        recorded = np.full((max(map(len, parts)), *parts[0].shape[1:]), -1, np.int16)
        for part in parts:  # the first that has a token's experts computed it first
            begin = recorded[: len(part)]
            np.copyto(begin, part, where=begin < 0)
        return recorded

    def read(self, read: NextRead) -> None:
        """Adds what the environment says."""
        opens = read.behind != "newest"
        old = 0 if opens else len(read.token_ids) - read.new
        images = images_between(read.images, old, len(read.token_ids))
        silent = np.zeros(len(read.token_ids) - old, np.float32)
        if opens:
            if not self.turns:  # nobody reads the prompt
                self._prompt = self._prompt[:0]
                self._conversations.clear()
            conversation = _ConversationTurns(len(self.turns), read.images, read.experts)
            self._conversations.append(conversation)
        self._conversations[-1].images = read.images
        self._length = len(read.token_ids)
        turn = Turn("environment", read.token_ids[old:], silent, images=images, opens=opens)
        self.turns.append(turn)

    def tokens_with(self, read: NextRead, min_shared: int) -> int:
        """Tokens of all conversations of the sample, with what the policy reads next. Beginnings of
        `min_shared` tokens and more that they share count once, as the learner computes them.
        """
        count = len(self._conversations) - (read.behind == "newest")
        if not count or not self.turns:
            return len(read.token_ids)
        ended = [self._keys(number) for number in range(count)]
        return grow([*ended, with_images(read.token_ids, read.images)], min_shared).n_tokens

    def with_experts(self) -> tuple[Experts | None, tuple[Turn, ...]]:
        """The prompt's experts, and the turns with theirs, where the engine recorded them."""
        parts = [each.experts for each in self._conversations]
        recorded = [part for part in parts if part is not None]
        if len(recorded) < len(parts):
            return None, tuple(self.turns)
        lengths = [len(turn.token_ids) for turn in self.turns]
        prompt, *experts = np.split(
            np.concatenate(recorded), len(self._prompt) + np.cumsum([0, *lengths[:-1]])
        )
        pairs = zip(self.turns, experts, strict=True)
        return prompt, tuple(replace(turn, experts=part) for turn, part in pairs)
