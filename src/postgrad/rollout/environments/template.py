"""Messages of a reply as a chat template writes them, and as tokens.

The policy's own tokens stay as they were sampled: only the messages after them are rendered, as the
template writes them after an assistant's turn, and tokenised once.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from postgrad.core.errors import RunError, UsageError
from postgrad.core.media import MARK, image_store
from postgrad.core.records import PlacedImage
from postgrad.data.answer_spans import Rendered, Unmarkable
from postgrad.data.chat_format import THINK, Message, parts_of
from postgrad.data.images import content_of, images_in, with_image_texts
from postgrad.data.templates import (
    Unencodable,
    encode,
    prompts,
    render_conversations,
    single_text,
    turn_ends,
)

if TYPE_CHECKING:
    from postgrad.models.image_reader import ImageReader  # imports torch

_QUESTION: Message = {"role": "user", "content": "?"}
_ALONE = "as a conversation"
_AFTER = "after an assistant's turn"  # where messages of a reply mostly stand
_SINGLE = "this type of model makes other tokens of an image where a conversation has more"
_TURN = "@turn@"  # stands for what the policy wrote
KEPT_CHARACTERS = 4096  # of a reply whose tokens are kept for the next like it
LONG_TOKEN = 16  # characters: text of so many for each token that is wanted has more than enough
KNOWN_IMAGES = 256  # of replies, whose texts are kept: a run may see any number
IMAGE_LIMITS = 2**23, 2**24  # bytes and pixels of an image in a reply, which comes from anywhere
KNOWN_TOOLS = 64  # lists of tools whose templates are kept


class Template:
    """Renders messages as a chat template writes them after an assistant's turn."""

    def __init__(
        self,
        tokenizer: Any,
        variables: Mapping[str, Any],
        reader: "ImageReader | None" = None,
        most: int | None = None,
    ) -> None:
        """reader: of a policy that reads images. most: tokens for which a conversation has room; of
        text that has over twice as many the end is not tokenised. None: any number.
        """
        self._tokenizer = tokenizer
        self._most = most
        self._variables = variables
        self.reader = reader
        self._shown: dict[str, None] = {}  # hashes of images of replies, the oldest first
        self._ends = turn_ends(tokenizer)
        added: Mapping[int, Any] = tokenizer.added_tokens_decoder
        special = {token_id for token_id, added_token in added.items() if added_token.special}
        self._special = special | set(tokenizer.all_special_ids)
        # Games have few replies.
        self._after = lru_cache(maxsize=4096)(self._tokens_after)
        self._shows = lru_cache(maxsize=KNOWN_TOOLS)(self._showing)

    def showing(self, tools: Sequence[Mapping[str, Any]]) -> "Template":
        """The same template where a conversation has other tools: schemas in the chat format."""
        return self._shows(json.dumps(list(tools)))

    def _showing(self, tools: str) -> "Template":
        variables = {**self._variables, "tools": json.loads(tools) or None}
        return Template(self._tokenizer, variables, self.reader, self._most)

    @cached_property
    def opens_thoughts(self) -> bool:
        """Whether the template opens the policy's thoughts, so that its turns begin within them."""
        return self._text([_QUESTION]).rstrip().endswith(THINK)

    def closed(self, token_ids: NDArray[np.int32]) -> bool:
        """Whether the policy's turn ends with a special token; after a stop string it does not."""
        return len(token_ids) > 0 and int(token_ids[-1]) in self._special

    def text(self, token_ids: NDArray[np.int32]) -> str:
        """The text of a turn, special tokens included, but without the one that ends it."""
        ids = token_ids[:-1] if self.closed(token_ids) else token_ids
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    def after(self, messages: Sequence[Message], *, closed: bool) -> NDArray[np.int32]:
        """[O] int32: the tokens between the policy's turn and its next one.

        closed: whether the turn has its end token already. Raises UsageError where the template
        refuses the messages or drops their text.
        """
        text = json.dumps(messages)
        if len(text) > KEPT_CHARACTERS:
            return self._tokens_after(text, closed)
        return self._after(text, closed)

    def seen(
        self, messages: Sequence[Message], *, closed: bool, before: int
    ) -> tuple[NDArray[np.int32], tuple[PlacedImage, ...]]:
        """As `after`, with the images of the messages among the tokens. before: images that the
        conversation has already.
        """
        digests = images_in(messages)
        if not digests:
            return self.after(messages, closed=closed), ()
        assert self.reader is not None  # it has read them
        if self.reader.single and before + len(digests) > 1:
            raise _refused(messages, _SINGLE)
        tokens = self._tokens_after(json.dumps(messages), closed, before)
        return tokens, self._placed(messages, tokens, digests, _AFTER)

    def opening(
        self, messages: Sequence[Message]
    ) -> tuple[NDArray[np.int32], tuple[PlacedImage, ...]]:
        """The tokens of a conversation from its begin to the policy's turn, as of a prompt, and the
        images among them. Raises UsageError where the template refuses the messages.
        """
        digests = images_in(messages)
        if len(digests) > 1 and self.reader is not None and self.reader.single:
            raise _refused(messages, _SINGLE, _ALONE)
        try:
            text = self._text(messages)
            self._require_written(text, messages)
            if self.reader is not None:
                text = with_image_texts([Rendered(text, (), "")], messages, self.reader)[0].text
            tokens = self._ids(text) if digests else self._enough_ids(text)
        except (Unmarkable, Unencodable) as error:
            raise _refused(messages, str(error), _ALONE) from error
        if not digests:
            return tokens, ()
        return tokens, self._placed(messages, tokens, digests, _ALONE)

    def _placed(
        self,
        messages: Sequence[Message],
        tokens: NDArray[np.int32],
        digests: Sequence[str],
        where: str,
    ) -> tuple[PlacedImage, ...]:
        """The images of the messages among their tokens."""
        assert self.reader is not None  # it has read them
        images = self.reader.placed(tokens, digests)
        if images is None:
            raise _refused(messages, "its tokens are not those of its images", where)
        self._shown |= dict.fromkeys(digests)
        for oldest in list(self._shown)[:-KNOWN_IMAGES]:
            del self._shown[oldest]
            self.reader.forget(oldest)
        return images

    def _require_written(self, text: str, messages: Sequence[Message]) -> None:
        """Raises Unmarkable where a template leaves out a message, as some do with instructions. It
        may take flags out of one (/no_think), and thoughts out of answers.
        """
        for number, message in enumerate(messages):
            if message["role"] == "assistant" or not (dropped := _missing(text, message)):
                continue
            marked = {key: value for key, value in message.items() if key != "images"}
            marked["content"] = _TURN
            if _TURN not in self._text([*messages[:number], marked, *messages[number + 1 :]]):
                raise Unmarkable(f"it drops the text {dropped[0][:60]!r} of {message['role']!r}")

    def _tokens_after(self, messages: str, closed: bool, before: int = 0) -> NDArray[np.int32]:
        """messages: as JSON, which can be a key where it is kept."""
        replies: list[Message] = json.loads(messages)
        try:
            rest = self._rest(replies, before)
        except Unmarkable as error:
            raise _refused(replies, str(error)) from error
        end = self._ends.match(rest)
        mark = end[0] if end else ""
        try:
            ids = self._ids(rest) if images_in(replies) else self._enough_ids(rest)
            if not closed or not mark:
                return ids
            # Tokenised behind the end mark: some tokenizers encode the begin of a text differently.
            return ids[len(self._ids(mark)) :]
        except Unencodable as error:
            raise _refused(replies, f"the tokenizer cannot write it: {error}") from error

    def _rest(self, replies: Sequence[Message], before: int) -> str:
        """What the template writes behind the policy's words. before: images in the question, since
        some templates number them. Raises Unmarkable.
        """
        question = _QUESTION
        if before:
            question = {"role": "user", "content": MARK * before, "images": [""] * before}
        rest = self._behind_turn(question, replies)
        if dropped := [piece for reply in replies for piece in _missing(rest, reply)]:
            raise Unmarkable(f"it drops the text {dropped[0][:60]!r}")
        if self.reader is None:
            return rest
        return with_image_texts([Rendered(rest, (), "")], replies, self.reader)[0].text

    def _behind_turn(self, question: Message, replies: Sequence[Message]) -> str:
        """What the template writes from the end token of the policy's turn on.

        The turn is plain text, whatever the policy wrote. Some templates refuse a tool's result
        behind it, since they write the function's name before the result, as gpt-oss's: these see a
        turn with the calls that the results name. Raises Unmarkable.
        """
        try:
            text = self._text([question, {"role": "assistant", "content": _TURN}, *replies])
        except Unmarkable:
            calls = [_call_of(reply) for reply in replies if "tool_call_id" in reply]
            if not calls:
                raise
        else:
            _, separator, rest = text.partition(_TURN)
            if not separator:
                raise Unmarkable(f"it drops the text {_TURN!r}")
            return rest
        asked = [question, {"role": "assistant", "content": "", "tool_calls": calls}]
        (texts,) = render_conversations(
            self._tokenizer, [(asked, 0)], ends=self._ends, turns="last",
            variables=self._variables, parts=self.reader is not None,
        )  # fmt: skip
        alone = single_text(texts)
        written = alone.text[: alone.spans[-1][1]]
        ends = [match for match in self._ends.finditer(written) if match.end() == len(written)]
        turn = written[: ends[-1].start()] if ends else written
        text = self._text([*asked, *replies])
        if not text.startswith(turn):
            raise Unmarkable("it writes a call otherwise where a result follows")
        return text[len(turn) :]

    def _text(self, messages: Sequence[Message]) -> str:
        (text,) = prompts(
            self._tokenizer, [messages], variables=self._variables, parts=self.reader is not None
        )
        if isinstance(text, Unmarkable):
            raise text
        return text

    def _enough_ids(self, text: str) -> NDArray[np.int32]:
        """The tokens of a text; of one that ends its episode, since it has over twice `most`, those
        of its begin: 50 MB would take minutes.
        """
        if self._most is not None and len(text) > LONG_TOKEN * self._most:
            begin = self._ids(text[: LONG_TOKEN * self._most])
            if len(begin) > 2 * self._most:
                return begin
        return self._ids(text)

    def _ids(self, text: str) -> NDArray[np.int32]:
        return np.array(encode(self._tokenizer, [text])["input_ids"][0], np.int32)


def _missing(text: str, message: Message) -> list[str]:
    """What a message says and a text that was made of it does not."""
    pieces = [piece.strip() for piece in message["content"].split(MARK)]
    escaped = [json.dumps(piece, ensure_ascii=False)[1:-1] for piece in pieces]  # as Llama 3 does
    pairs = zip(pieces, escaped, strict=True)
    return [piece for piece, other in pairs if piece not in text and other not in text]


def _call_of(result: Message) -> dict[str, Any]:
    """The call that a tool's result answers, as far as the result says."""
    named = {"name": result.get("name", result["role"]), "arguments": {}}
    return {"type": "function", "id": result["tool_call_id"], "function": named}


def _refused(messages: Sequence[Message], why: str, where: str = _AFTER) -> UsageError:
    roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
    return UsageError(
        f"environment: the chat template cannot write a message of role {roles!r} {where}: {why}; "
        "give data.chat_template one that can"
    )


def with_images(
    messages: Sequence[Message], reader: "ImageReader | None", room: int
) -> list[Message]:
    """Messages of a reply with texts as contents, their images checked, kept, and named by hash.
    They come from anywhere: a file that is large or broken, one that the model cannot read, more
    than `room` of them, and a text that has the model's mark of an image are a ValueError.
    """
    read: list[Message] = []
    for number, message in enumerate(messages):
        content, sources = message["content"], list[Any]()
        if not isinstance(content, str):
            content, sources = parts_of(content, number)
        if reader is not None:
            for mark in {reader.placeholder, reader.token}:
                if mark in content:
                    raise ValueError(f"message {number} has {mark!r}, which stands for an image")
        elif sources:
            raise ValueError(f"message {number} has an image, and the policy reads text alone")
        room -= len(sources)
        if room < 0:
            raise ValueError("its episode has more images than environment.max_images")
        read.append({**message, "content": content})
        if reader is not None and sources:
            read[-1]["images"] = tuple(_kept(source, reader) for source in sources)
    return read


def _kept(source: Any, reader: "ImageReader") -> str:
    """The hash of an image, which is in the run's store from now on."""
    digest = image_store().add(content_of(source, None), IMAGE_LIMITS)
    try:
        reader.text(digest)
    except RunError:
        raise
    except Exception as error:  # of any type: a picture that the image processor does not expect
        raise ValueError(str(error)) from error
    return digest
