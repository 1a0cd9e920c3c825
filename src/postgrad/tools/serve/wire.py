"""The bodies of POST /score: checked, and turned into token ids. Pure.

    {"inputs": [{"messages": [{"role": "user", "content": "..."}, ...]},
                {"text": "..."}, {"token_ids": [1, 2, 3]}]}

The content of a message is a text, or a list of parts, some of which are images:

    [{"type": "image", "base64": "iVBORw0..."}, {"type": "image", "sha256": "9f2c..."},
     {"type": "text", "text": "..."}]

Messages are written by the model's chat template up to the token that ends the last answer's turn,
as the model was trained on. Text and token ids are scored as they stand: nothing is added. A
process reward model scores each step of the last answer: it takes messages alone, since the others
do not say where the answer begins.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

from postgrad.core.errors import UsageError
from postgrad.core.media import MARK
from postgrad.core.records import PlacedImage
from postgrad.data.answer_spans import Unmarkable
from postgrad.data.images import images_in, with_image_texts
from postgrad.data.step_ends import step_ends
from postgrad.data.templates import (
    Unencodable,
    encode,
    render_conversations,
    single_text,
    turn_ends,
)

if TYPE_CHECKING:
    from postgrad.models.image_reader import ImageReader

_QUEUED_BATCHES = 64

_STRICT = ConfigDict(extra="forbid", strict=True, frozen=True)


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What one server takes on. More than one limit may refuse a request; each refusal names its
    own.
    """

    request_bytes: int = 4 << 20
    request_seconds: float = 60.0  # from the first byte of a request to the answer
    requests: int = 512  # open at a time
    inputs: int = 256  # of one request
    input_tokens: int = 16384  # of one input
    batch_tokens: int = 16384  # of one call of the model
    queue_tokens: int = 1 << 20  # that wait for the model
    images: int = 64  # of one request
    image_pixels: int = 1 << 26  # of all images of one request, as they are sent
    image_bytes: int = 1 << 30  # of the processed images of all open requests

    def to_json(self) -> dict[str, Any]:
        """For the page /info: each limit by its name."""
        return asdict(self)


def limits_of(
    batch_tokens: int | None, request_bytes: int | None, request_seconds: float | None
) -> ServerLimits:
    """The limits with those that the command line gives. UsageError where one is not positive."""
    usual = ServerLimits()
    for name, value in (
        ("--max-batch-tokens", batch_tokens),
        ("--max-request-bytes", request_bytes),
        ("--request-seconds", request_seconds),
    ):
        if value is not None and not 0 < value < 2**40:
            raise UsageError(f"{name} {value:g}: a positive number is expected")
    batch_tokens = batch_tokens or usual.batch_tokens
    return ServerLimits(
        request_bytes=request_bytes or usual.request_bytes,
        request_seconds=request_seconds or usual.request_seconds,
        input_tokens=batch_tokens,
        batch_tokens=batch_tokens,
        queue_tokens=max(usual.queue_tokens, _QUEUED_BATCHES * batch_tokens),
    )


class Refusal(Exception):
    """A request that gets no scores: HTTP status, a code for programs, a message for people."""

    def __init__(
        self, status: int, code: str, message: str, *, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message
        self.retry_after = retry_after  # seconds

    @property
    def body(self) -> dict[str, Any]:
        """The one shape of every error."""
        return {"error": {"code": self.code, "message": self.message}}


class TextPart(BaseModel):
    """A text among the parts of a message."""

    model_config = _STRICT

    type: Literal["text"]
    text: str


class ImagePart(BaseModel):
    """An image: the bytes of its file in base64, or the SHA-256 of one that the server has."""

    model_config = _STRICT

    type: Literal["image"]
    base64: Annotated[str, Field(min_length=1)] | None = None
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.base64 is None) == (self.sha256 is None):
            raise ValueError("give one of base64 and sha256")
        return self


class ChatMessage(BaseModel):
    """One turn of a conversation."""

    model_config = _STRICT

    role: str
    content: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[
            list[Annotated[TextPart | ImagePart, Field(discriminator="type")]],
            Field(min_length=1),
            Tag("parts"),
        ],
        Discriminator(lambda content: "parts" if isinstance(content, list) else "text"),
    ]


class Input(BaseModel):
    """What gets one score, given in exactly one of three forms."""

    model_config = _STRICT

    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    text: Annotated[str, Field(min_length=1)] | None = None
    token_ids: Annotated[list[int], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one_of_three(self) -> Self:
        if (self.messages, self.text, self.token_ids).count(None) != 2:
            raise ValueError("give one of messages, text and token_ids")
        return self


class ScoreRequest(BaseModel):
    """The body of POST /score."""

    model_config = _STRICT

    inputs: Annotated[list[Input], Field(min_length=1)]


def parse(body: bytes, limits: ServerLimits) -> ScoreRequest:
    """The request in a body. Raises Refusal: 400 where the body is no JSON, 422 where a value is
    wrong. The message names the place of the value and never its content, which may be private.
    """
    try:
        request = ScoreRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        if first["type"] == "json_invalid":
            raise Refusal(400, "malformed_json", f"the body is no JSON: {first['msg']}") from None
        where = ".".join(str(part) for part in first["loc"]) or "the body"
        message = first["msg"].removeprefix("Value error, ")
        raise Refusal(422, "invalid_request", f"{where}: {message}") from None
    if len(request.inputs) > limits.inputs:
        message = f"{len(request.inputs)} inputs, at most {limits.inputs} in one request"
        raise Refusal(422, "too_many_inputs", message)
    json.loads(body, object_pairs_hook=_require_unique)
    return request


def _require_unique(pairs: list[tuple[str, Any]]) -> None:
    """Refuses an object with a key twice, of which pydantic takes the last."""
    names = [name for name, _ in pairs]  # of the schema alone, since others are refused
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise Refusal(422, "invalid_request", f"an object has the key {twice!r} twice")


class ShowsImages(Protocol):
    """Holds the images of one request."""

    def add(self, part: ImagePart, where: str) -> str:
        """The hash of an image, which is held now. where: its place, for messages. Raises Refusal
        for one that cannot be read or is one too many.
        """
        ...


class Encoder:
    """Inputs to token ids, for one tokenizer. Not for several threads at a time. separator: of the
    steps of a process reward model; None of one that scores whole answers. reader: of a model that
    reads images.
    """

    def __init__(
        self,
        tokenizer: Any,
        max_tokens: int,
        separator: str | None = None,
        reader: "ImageReader | None" = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._reader = reader
        self._separator = separator
        self._ends: re.Pattern[str] = turn_ends(tokenizer)
        self._size = len(tokenizer)
        self._max_tokens = max_tokens

    def encode(
        self, inputs: Sequence[Input], shown: ShowsImages
    ) -> tuple[list[NDArray[np.int32]], list[tuple[PlacedImage, ...]]]:
        """[tokens] token ids of each input, and its images, which `shown` holds; with steps
        [tokens, 2], where the second column is 1 at the last token of a step. Raises Refusal (422)
        for the first that cannot be scored, naming its place.
        """
        images: list[tuple[PlacedImage, ...]] = []
        sequences: list[NDArray[np.int32]] = []
        for place, each in enumerate(inputs):
            where = f"inputs.{place}"
            turns = [
                self._turn(message, shown, f"{where}.messages.{number}")
                for number, message in enumerate(each.messages or ())
            ]
            ids = self._encoded(each, turns, where)
            sequences.append(ids)
            images.append(self._placed(ids if ids.ndim == 1 else ids[:, 0], turns, where))
        return sequences, images

    def _turn(self, message: ChatMessage, shown: ShowsImages, where: str) -> dict[str, Any]:
        """A message as templates take it: a text with a MARK for each image."""
        if isinstance(message.content, str):
            return {"role": message.role, "content": message.content}
        texts: list[str] = []
        digests: list[str] = []
        for number, part in enumerate(message.content):
            if isinstance(part, ImagePart):
                digests.append(shown.add(part, f"{where}.content.{number}"))
                texts.append(MARK)
            elif MARK in part.text:
                text = f"{where}.content.{number}: U+FFFC stands for an image here: leave it out"
                raise Refusal(422, "cannot_encode", text)
            else:
                texts.append(part.text)
        turn = {"role": message.role, "content": "".join(texts)}
        return {**turn, "images": digests} if digests else turn

    def _placed(
        self, ids: NDArray[np.int32], turns: Sequence[dict[str, Any]], where: str
    ) -> tuple[PlacedImage, ...]:
        """The images among token ids. Raises Refusal where a placeholder is no image's."""
        if self._reader is None:
            return ()
        images = self._reader.placed(ids, images_in(turns))
        if images is None:
            text = f"{where}: a token that stands for an image, and no image: send messages"
            raise Refusal(422, "cannot_encode", text)
        return images

    def _encoded(
        self, scored: Input, turns: Sequence[dict[str, Any]], where: str
    ) -> NDArray[np.int32]:
        if self._separator is not None and scored.messages is None:
            message = f"{where}: this model scores steps of an answer: send messages"
            raise Refusal(422, "needs_messages", message)
        try:
            if scored.token_ids is not None:
                ids = self._checked(scored.token_ids, where)
            elif scored.text is not None:
                ids = self._ids(scored.text, None)
            else:
                ids = self._conversation(turns)
        except (Unmarkable, Unencodable) as error:
            message = f"{where}: {error}"
            raise Refusal(422, "cannot_encode", message) from error
        if len(ids) > self._max_tokens:
            message = f"{where}: {len(ids)} tokens, at most {self._max_tokens} in one input"
            raise Refusal(422, "too_many_tokens", message)
        if not len(ids):
            raise Refusal(422, "no_tokens", f"{where}: no token is left of it to score")
        return ids

    def _checked(self, ids: Sequence[int], where: str) -> NDArray[np.int32]:
        wrong = next((token for token in ids if not 0 <= token < self._size), None)
        if wrong is not None:  # on a GPU an index that is out of range ends the whole process
            message = f"{where}: a token id that is not from 0 to {self._size - 1}"
            raise Refusal(422, "unknown_token", message)
        return np.array(ids, np.int32)

    def _conversation(self, turns: Sequence[dict[str, Any]]) -> NDArray[np.int32]:
        if turns[-1]["role"] != "assistant":
            raise Unmarkable("the last message is not the assistant's: there is nothing to score")
        reads = self._reader is not None
        (texts,) = render_conversations(
            self._tokenizer, [(turns, 0)], ends=self._ends, turns="last", variables={}, parts=reads
        )
        rendered = single_text(texts)
        if self._reader is not None:
            (rendered,) = with_image_texts([rendered], turns, self._reader)
        ids = self._ids(rendered.text, rendered.spans[-1][1])
        if self._separator is None:
            return ids
        begin = len(self._ids(rendered.text, rendered.spans[-1][0]))
        marked = np.stack([ids, np.zeros_like(ids)], 1)
        marked[begin + step_ends(self._tokenizer, ids[begin:], self._separator), 1] = 1
        return marked

    def _ids(self, text: str, end: int | None) -> NDArray[np.int32]:
        """The token ids of a text; with `end`, of the tokens that begin before that character."""
        encoded = encode(self._tokenizer, [text], return_offsets_mapping=end is not None)
        ids = np.array(encoded["input_ids"][0], np.int32)
        if end is None:
            return ids
        offsets = np.array(encoded["offset_mapping"][0], np.int64).reshape(-1, 2)
        return ids[offsets[:, 0] < end]
