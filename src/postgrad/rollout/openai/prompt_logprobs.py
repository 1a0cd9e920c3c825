"""A teacher behind a server: the logprobs that it gives the tokens of samples.

The server is asked for the logprobs of a prompt's own tokens (`prompt_logprobs` of vLLM's
/completions), so it has to read the student's token ids: what the student writes is sent as ids,
and nothing is tokenised again. Its logprobs are at a temperature of 1.
"""

import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from postgrad.core.errors import RunError, UsageError
from postgrad.core.process import Handle
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.rewards.http import Breaker, ServerError, Servers, secret
from postgrad.rollout.openai.settings import TeacherServerSettings

NO_IMAGES = (
    "A server grades a prompt's own tokens in /completions, which takes no image beside them; its "
    "/chat/completions takes images, but makes tokens of texts itself, and they need not be those "
    "that the student wrote. Load the teacher here (model.path), or leave out rows with images "
    "(data.filter)"
)


class ServedTeacher:
    """The logprobs of loss tokens, by a server. Its model is looked up at once."""

    temperature = 1.0

    def __init__(self, settings: TeacherServerSettings, key: str) -> None:
        """key: of the recipe, for messages: "teacher.server". Raises UsageError where the key's
        variable is not set, or the server has no such model; RunError where it does not answer.
        """
        assert settings.base_url is not None  # a recipe without it names no server
        self._url, self._key = settings.base_url, key
        self._servers = Servers(
            urls=(settings.base_url,),
            key=secret(settings.api_key_env, f"{key}.api_key_env", "the server's key"),
            timeout=settings.timeout,
            retries=settings.retries,
            backoff=settings.backoff,
            breaker=Breaker(settings.retries + settings.concurrent, 0.0),
        )
        self._model, self.identity = self._look_up(settings.model)
        self._requests = ThreadPoolExecutor(settings.concurrent, "teacher")
        self._batches = ThreadPoolExecutor(1, "teacher batches")

    def close(self) -> None:
        """Cancels requests that were not sent yet."""
        self._requests.shutdown(wait=False, cancel_futures=True)
        self._batches.shutdown(wait=False, cancel_futures=True)

    def logprobs(self, sequences: Sequences, temperature: float | None = None) -> Handle[Ragged]:
        """LogprobRole.logprobs. The handle raises RunError with the cause of the last try where a
        sequence got no answer: a token without a grade must not count as one that was graded 0; and
        for a sequence with an image, which nothing here can be sent with.
        """
        assert temperature in (None, 1.0)  # a recipe with another is refused
        return self._batches.submit(self._graded, sequences)

    def require_same_tokens(self, tokenizer: Any, texts: Sequence[str], remedy: str) -> None:
        """Raises UsageError where the server reads one of these texts as other tokens."""
        for text in texts:
            wanted = tokenizer.encode(text, add_special_tokens=False)
            body = {**self._body(text), "add_special_tokens": False}
            read = self._ask(body, lambda reply: [[*entry] for entry in _entries(reply)])
            same = len(read) == len(wanted) and all(
                str(token) in ids for token, ids in zip(wanted[1:], read[1:], strict=True)
            )
            if not same:
                raise UsageError(
                    f"{self._key}: {self._model} at {self._url} has another tokenizer than the "
                    f"policy: it reads {text[:60]!r} as {len(read)} tokens "
                    f"({', '.join('/'.join(ids) for ids in read[1:6])} ...), the policy as "
                    f"{len(wanted)} ({', '.join(map(str, wanted[1:6]))} ...); {remedy}"
                )

    def _graded(self, sequences: Sequences) -> Ragged:
        if any(sequences.images):
            raise RunError(f"{self._key}: a sample has an image. {NO_IMAGES}")
        places = [
            slice(start + begin, start + end)
            for row, start in enumerate(sequences.tokens.offsets[:-1].tolist())
            for begin, end in sequences.conversations(row)
        ]
        tokens, mask = sequences.tokens.values, sequences.loss_mask.values
        places = [place for place in places if mask[place].any()]
        asked = [self._requests.submit(self._grade, tokens[place]) for place in places]
        grades = np.zeros(len(tokens), np.float32)
        for place, answer in zip(places, asked, strict=True):
            grades[place] = np.where(mask[place], answer.result(), np.float32(0.0))
        return sequences.tokens.like(grades)

    def _grade(self, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """[T] the logprob of each token; 0 of the first one, which nothing predicts."""
        tokens = ids.tolist()
        return self._ask(self._body(tokens), lambda reply: _logprobs(_entries(reply), tokens))

    def _body(self, prompt: str | list[int]) -> dict[str, Any]:
        # 0: of each place the prompt's own token alone
        asked = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        return {"model": self._model, "prompt": prompt, **asked}

    def _ask(self, body: Mapping[str, Any] | None, read: Any, path: str = "/completions") -> Any:
        try:
            return self._servers.ask(path, body, read)
        except ServerError as error:
            raise RunError(f"{self._key}: {self._url} gave no grades: {error}") from error

    def _look_up(self, wanted: str | None) -> tuple[str, str]:
        """The model's name on the server, and what names it in checkpoints."""
        models: list[dict[str, Any]] = self._ask(None, _models, "/models")
        names = [str(model.get("id")) for model in models]
        if wanted is not None and wanted not in names:
            raise UsageError(
                f"{self._key}.model = {wanted!r}: {self._url} has {', '.join(names) or 'no model'}"
            )
        model = models[names.index(wanted) if wanted is not None else 0]
        root = model.get("root")
        return str(model["id"]), f"server:{model['id']}" + (f" ({root})" if root else "")


def _models(reply: bytes) -> list[dict[str, Any]]:
    try:
        models = json.loads(reply)["data"]
        if models and all(isinstance(model["id"], str) for model in models):
            return models
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise ServerError(f"the reply lists no models: {_start(reply)}")


def _entries(reply: bytes) -> list[dict[str, Any]]:
    """Of each token of the prompt, what is said of the tokens that might stand there, by token id;
    of the first one nothing.
    """
    try:
        choice = json.loads(reply)["choices"][0]
        entries = cast(list[Any], choice["prompt_logprobs"])
        if entries[0] is None and all(isinstance(entry, dict) for entry in entries[1:]):
            return [{}, *entries[1:]]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        pass
    raise ServerError(
        f"the reply has no prompt_logprobs, which vLLM's server gives: {_start(reply)}"
    )


def _logprobs(entries: Sequence[Mapping[str, Any]], tokens: list[int]) -> NDArray[np.float32]:
    if len(entries) != len(tokens):
        raise ServerError(f"{len(tokens)} tokens were sent, and {len(entries)} were graded")
    values = np.zeros(len(tokens), np.float32)
    for place in range(1, len(tokens)):
        entry: Any = entries[place].get(str(tokens[place]))
        value: Any = cast(dict[str, Any], entry).get("logprob") if isinstance(entry, dict) else None
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value > 0.0:
            raise ServerError(
                f"token {tokens[place]} at place {place} has the logprob {value!r}, which is none"
            )
        values[place] = value
    return values


def _start(reply: bytes) -> str:
    return repr(reply[:200].decode(errors="replace"))
