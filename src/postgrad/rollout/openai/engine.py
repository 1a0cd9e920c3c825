"""A rollout engine over a server with OpenAI's interface, for evaluation.

The server has its own tokenizer and weights: its samples have no logprobs that a learner could use,
and their token ids are those of our tokenizer for the server's text. Whatever needs the engine's
weights is refused.
"""

import json
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from postgrad.core.errors import RunError, UsageError
from postgrad.core.media import image_store, plain_file
from postgrad.core.records import PlacedImage
from postgrad.core.seeds import integer
from postgrad.data.images import sent_message
from postgrad.data.templates import begins_texts
from postgrad.rewards.http import Breaker, ServerError, Servers, secret
from postgrad.rollout.engine import Completion, Request
from postgrad.rollout.openai.settings import OpenAISettings
from postgrad.rollout.settings import SamplingSettings
from postgrad.rollout.stats import DividedStats, EngineStats

PATHS = {"chat": "/chat/completions", "completions": "/completions"}
_NO_WEIGHTS = (
    'rollout.type = "openai" has weights of its own that cannot be set or scored with: train with '
    'rollout.type = "local" or "vllm"'
)


@dataclass(frozen=True, slots=True)
class ServerReply:
    """An answer of the server."""

    text: str
    stopped: bool  # by the model or a stop string, not by the token limit


class OpenAIEngine:
    """The part of the Engine protocol that a server can do: it samples single answers."""

    streams = 0

    def __init__(self, settings: OpenAISettings, model: str, tokenizer: Any) -> None:
        """model: its name on the server. Raises UsageError where the key's variable is not set."""
        assert settings.base_url is not None  # a recipe without it is refused
        self._sums = DividedStats(1)
        self.stats: EngineStats = self._sums
        self._settings = settings
        self._model = model
        self._tokenizer = tokenizer
        self._servers = Servers(
            urls=(settings.base_url,),
            key=secret(settings.api_key_env, "rollout.openai.api_key_env", "the server's key"),
            timeout=settings.timeout,
            retries=settings.retries,
            backoff=settings.backoff,
            breaker=Breaker(settings.retries + settings.concurrent, 0.0),
        )
        self._workers = ThreadPoolExecutor(settings.concurrent, "openai")
        self._open: dict[Future[ServerReply], tuple[Request, int]] = {}

    def submit(self, request: Request) -> None:
        """Send a request for each sample, so that each is retried alone. Raises UsageError for one
        that the server's interface has no place for.
        """
        self._require_place(request)
        for sample in request.sample_ids:  # a body is made when it is sent: images are large
            asked = self._workers.submit(self._ask, request, sample)
            self._open[asked] = (request, sample)
        self._sums.begin(0, len(request.sample_ids), len(request.token_ids))

    def completed(self, awaited: Collection[int] | None = None) -> list[Completion]:
        """Wait for at least one answer. Raises RunError with the cause of the last try where a
        sample got none: an unanswered question must not count as a wrong answer.
        """
        if not self._open:
            return []
        ended, _ = wait(self._open, return_when=FIRST_COMPLETED)
        return [self._completion(*self._open.pop(future), future) for future in list(ended)]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Always raises UsageError: a server takes no weights."""
        raise UsageError(_NO_WEIGHTS)

    def logprobs(
        self,
        sequences: Sequence[NDArray[np.int32]],
        temperature: float,
        images: Sequence[tuple[PlacedImage, ...]] = (),
    ) -> list[NDArray[np.float32]]:
        """Always raises UsageError: the server's logprobs are of other tokens."""
        raise UsageError(_NO_WEIGHTS)

    def cut(self) -> list[Request]:
        """Always raises UsageError: a server's text has no tokens to go on from."""
        raise UsageError(_NO_WEIGHTS)

    def sleep(self) -> None:
        """Does nothing: the memory is the server's."""

    def close(self) -> None:
        """Cancel requests that were not sent yet."""
        self._workers.shutdown(wait=False, cancel_futures=True)

    def body(self, request: Request, sample: int) -> dict[str, Any]:
        """The JSON body of one sample's request; keys of `extra_body` override the others."""
        settings = self._settings
        if settings.endpoint == "chat":
            messages = [sent_message(message, _picture) for message in request.messages]
            prompt_fields: dict[str, Any] = {"messages": messages}
        else:
            prompt_fields = {"prompt": self._text(request.token_ids.tolist())}
        counters = (request.ticket, sample, request.turn)
        body = {
            "model": self._model,
            **prompt_fields,
            **_sampling(request.sampling),
            "seed": integer(request.seed, "openai", *counters),
            **settings.extra_body,
        }
        if "max_completion_tokens" in body:  # servers that have the new name refuse the old one
            del body["max_tokens"]
        return body

    def _text(self, ids: list[int]) -> str:
        """The text of a prompt, without the begin of text that the server's tokenizer, which is
        that of the model here, writes before it by itself, unless it is told not to.
        """
        adds = self._settings.extra_body.get("add_special_tokens", True)
        begins = ids[:1] == [self._tokenizer.bos_token_id]
        if adds and begins and begins_texts(self._tokenizer):
            ids = ids[1:]
        return self._tokenizer.decode(ids)

    def _require_place(self, request: Request) -> None:
        """Raises UsageError for what the endpoint does not take: an option, a later turn, which has
        only tokens, or an image beside a text.
        """
        _sampling(request.sampling)
        if self._settings.endpoint == "chat" and not request.messages:
            raise UsageError(
                f"ticket {request.ticket}: an episode of several turns is a text here, not "
                'messages: use rollout.openai.endpoint = "completions"'
            )
        if self._settings.endpoint == "completions" and request.images:
            raise UsageError(
                f"ticket {request.ticket}: its prompt has an image, and a server of completions "
                'takes text alone: use rollout.openai.endpoint = "chat", which sends images too'
            )

    def _ask(self, request: Request, sample: int) -> ServerReply:
        chat = self._settings.endpoint == "chat"
        path, body = PATHS[self._settings.endpoint], self.body(request, sample)
        return self._servers.ask(path, body, _read_chat if chat else _read)

    def _completion(self, request: Request, sample: int, future: Future[ServerReply]) -> Completion:
        try:
            reply = future.result()
        except ServerError as error:
            self.close()
            raise RunError(
                f"{self._settings.base_url} gave no answer for ticket {request.ticket}, sample "
                f"{sample}: {error}"
            ) from error
        ids = self._tokenizer.encode(reply.text, add_special_tokens=False)
        self._sums.end(0, len(ids))
        return Completion(
            ticket=request.ticket,
            sample=sample,
            turn=request.turn,
            token_ids=np.array(ids, np.int32),
            logprobs=np.full(len(ids), np.nan, np.float32),
            finish_reason="stop" if reply.stopped else "length",
            versions=((0, len(ids)),),
            text=reply.text,
        )


def _picture(digest: str) -> bytes:
    """The file of an image that the server's program sees as the model's own reader does here."""
    return plain_file(image_store().read(digest))


def _sampling(sampling: SamplingSettings) -> dict[str, Any]:
    """Sampling settings as OpenAI's parameters. Raises UsageError for those that it lacks."""
    if unknown := [name for name in sampling.filters if name != "top_p"]:
        raise UsageError(
            f"{' and '.join(unknown)}: not part of OpenAI's interface; give it in "
            "rollout.openai.extra_body, if the server knows it"
        )
    options: dict[str, Any] = {
        "temperature": sampling.temperature,
        "max_tokens": sampling.max_new_tokens,
    }
    options |= {"top_p": sampling.top_p} if sampling.top_p < 1.0 else {}
    return options | ({"stop": list(sampling.stop)} if sampling.stop else {})


def _read_chat(reply: bytes) -> ServerReply:
    return _reply(reply, lambda choice: choice["message"]["content"])


def _read(reply: bytes) -> ServerReply:
    return _reply(reply, lambda choice: choice["text"])


def _reply(reply: bytes, text_of: Any) -> ServerReply:
    """The first choice of a reply; its text may be empty. Raises ServerError for another shape."""
    try:
        choice = json.loads(reply)["choices"][0]
        text, ended = text_of(choice), choice.get("finish_reason")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        beginning = reply[:200].decode(errors="replace")
        raise ServerError(f"the reply is no completion: {beginning!r}") from error
    if text is not None and not isinstance(text, str):
        raise ServerError(f"the reply has no text: {str(text)[:200]!r}")
    return ServerReply(text or "", ended != "length")
