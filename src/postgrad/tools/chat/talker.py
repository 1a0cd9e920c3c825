"""One model in a conversation: its messages so far, and its next answer, token by token."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from postgrad.core.errors import UsageError
from postgrad.core.media import MARK
from postgrad.data.answer_spans import Rendered, Unmarkable
from postgrad.data.chat_format import Message
from postgrad.data.images import images_in, with_image_texts
from postgrad.data.templates import Unencodable, encode, render
from postgrad.models.image_reader import ImageReader
from postgrad.models.images import ImageTower
from postgrad.rollout.engine import Completion, Request
from postgrad.rollout.local.engine import LocalEngine
from postgrad.rollout.settings import SamplingSettings

HALF = "\ufffd"  # what bytes that are no character yet decode to


class TalkingEngine(LocalEngine):
    """The built-in engine with one sequence, whose tokens can be read while it is written.

    max_len: tokens of the longest conversation, prompt and answer.
    """

    def __init__(
        self,
        lm: nn.Module,
        tokenizer: Any,
        *,
        cache_tokens: int,
        max_len: int,
        tower: ImageTower | None = None,
    ) -> None:
        super().__init__(lm, tokenizer, slots=1, cache_tokens=cache_tokens, tower=tower)
        self.max_len = max_len
        self.dtype = str(next(lm.parameters()).dtype).removeprefix("torch.")

    @property
    def written(self) -> NDArray[np.int32]:
        """[R] token ids of the answer under way, as far as it is written."""
        rows = self._rows
        return rows.tokens[0, : rows.written[0]] if rows.count else np.zeros(0, np.int32)

    def interrupt(self) -> None:
        """Makes the answer under way end with its next token."""
        self._rows.limit[: self._rows.count] = 0


class TextStream:
    """Decodes token ids as they come; a character of several tokens waits for its last one.

    A token is decoded behind those of the piece before it, since what it stands for may depend on
    them: a space in front, half a character. DecodeStream of tokenizers does the same and gives the
    same pieces, but raises where bytes are no UTF-8 and the decoder falls back to bytes (Llama 2,
    Mistral, Gemma): with tokenizers 0.23 on 202 of 2000 sequences of random tokens. What a hot
    model samples must not end a conversation.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._before = 0  # tokens from here to `_shown` are the piece before
        self._shown = 0
        self.text = ""

    def add(self, tokens: Sequence[int]) -> str:
        """The text that the newest tokens add. tokens: all so far."""
        shown = self._decode(list(tokens[self._before : self._shown]))
        text = self._decode(list(tokens[self._before :]))
        if len(text) <= len(shown) or text.endswith(HALF):
            return ""
        self._before, self._shown = self._shown, len(tokens)
        return self._append(text[len(shown) :])

    def end(self, text: str) -> str:
        """What is still missing of `text`, the whole answer; "" where other text was shown."""
        return self._append(text[len(self.text) :] if text.startswith(self.text) else "")

    def _append(self, piece: str) -> str:
        self.text += piece
        return piece


class Talker:
    """A model that answers and remembers the conversation.

    variables: what its chat template is called with. stop: texts that end an answer. reader: of a
    model that reads images.
    """

    def __init__(
        self,
        engine: TalkingEngine,
        tokenizer: Any,
        *,
        variables: Mapping[str, Any],
        system: str | None,
        stop: tuple[str, ...] = (),
        reader: ImageReader | None = None,
    ) -> None:
        self._reader = reader
        self._engine = engine
        self._tokenizer = tokenizer
        self._variables = variables
        self._stop = stop
        self._opening: list[Message] = (
            [{"role": "system", "content": system}] if system is not None else []
        )
        self.messages = list(self._opening)
        self.has_ended = True  # the last answer, by itself

    def reset(self) -> None:
        """Forgets every message but the system prompt."""
        self.messages = list(self._opening)

    def tokens_of(self, digest: str) -> int:
        """The tokens that an image takes; digest: of the image in `image_store`. Raises UsageError
        where the model reads none, its image processor refuses it, or it leaves no room for a word.
        """
        if self._reader is None:
            raise UsageError("it reads text alone: docs/models.md names the types that read images")
        tokens = self._reader.text(digest).tokens
        if tokens >= self._engine.max_len:
            raise UsageError(
                f"it makes {tokens} tokens of it, and a conversation has at most "
                f"{self._engine.max_len}: scale the image down, or raise --max-len as far as the "
                "model's positions go"
            )
        return tokens

    def request(
        self, text: str, sampling: SamplingSettings, seed: int, images: Sequence[str] = ()
    ) -> Request:
        """The request for an answer to `text`, after all messages so far. images: the hashes of
        those that the message shows, before its text.

        Raises UsageError where the template, the tokenizer or the image processor refuses it, or it
        has no room.
        """
        messages = [*self.messages, _question(text, images)]
        try:
            prompt = self._rendered(messages)
            encoded: list[int] = encode(self._tokenizer, [prompt])["input_ids"][0]
        except (Unmarkable, Unencodable) as error:
            raise UsageError(f"the model cannot read this: {error}") from error
        ids, shown = np.array(encoded, np.int32), images_in(messages)
        room = self._engine.max_len - len(ids)
        if room < 1:
            of_images = ", those of its images included" if shown else ""
            raise UsageError(
                f"the conversation has {len(ids)} tokens{of_images}, the limit is "
                f"{self._engine.max_len}: start over with /reset, or raise --max-len as far as the "
                "model's positions go"
            )
        placed = () if self._reader is None else self._reader.placed(ids, shown)
        if placed is None:
            raise UsageError(
                "the model cannot read this: its tokens are not those of its images: tokenizer, "
                "image processor and config have to be of one model"
            )
        limits = {"stop": self._stop, "max_new_tokens": min(room, sampling.max_new_tokens)}
        limited = sampling.model_copy(update=limits)
        turn = len(messages) // 2
        place = 0, (0,), ids, limited, turn, seed
        return Request(*place, images=placed, may_go_on=True)

    def _rendered(self, messages: Sequence[Message]) -> str:
        """The prompt as the model reads it. Raises Unmarkable."""
        reads = self._reader is not None
        prompt = render(
            self._tokenizer, messages, generation=True, variables=self._variables, parts=reads
        )
        if self._reader is None:
            return prompt
        return with_image_texts([Rendered(prompt, (), "")], messages, self._reader)[0].text

    def answer(self, text: str, request: Request, images: Sequence[str] = ()) -> Iterator[str]:
        """The answer to `text`, piece by piece with each token. At its end question and answer
        become messages. images: as of `request`.
        """
        self._engine.submit(request)
        stream = TextStream(lambda ids: self._tokenizer.decode(ids, skip_special_tokens=True))
        done: list[Completion] = []
        while not done:
            done = self._engine.advance()
            yield stream.add(self._engine.written.tolist()) if not done else ""
        yield stream.end(done[0].text)
        self.has_ended = done[0].finish_reason == "stop"
        self.messages += [
            _question(text, images),
            {"role": "assistant", "content": done[0].text},
        ]

    def cut(self) -> None:
        """Makes the answer under way end with its next token."""
        self._engine.interrupt()


def _question(text: str, images: Sequence[str]) -> Message:
    """A message of the user. Raises UsageError for a text that an image could not be told from."""
    if not images:
        return {"role": "user", "content": text}
    if MARK in text:
        raise UsageError("the message has U+FFFC, which stands for an image here: remove it")
    return {"role": "user", "content": MARK * len(images) + text, "images": [*images]}
