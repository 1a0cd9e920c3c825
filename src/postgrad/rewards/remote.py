"""A reward model behind HTTP as verifier: `postgrad serve-reward`, on one server or several."""

import base64
import json
import math
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self, cast

from pydantic import Field, field_validator, model_validator

from postgrad.core.errors import RunError, UsageError
from postgrad.core.progress import report
from postgrad.rewards.http import AsksServers, Breaker, ServerError, Servers, plain_address, secret
from postgrad.rewards.verifier import PromptView, RolloutView, Score

_PLACE = re.compile(r"\{(question|answer|response)\}")
_ROUND_SECONDS = 1.0  # between two rounds of asking servers that may be starting
_OF_THE_INPUT = frozenset({"model_failed", "not_finite"})  # codes of a server that is well


class Remote(AsksServers):
    """A reward model's score of a sample, from the server at `url` or from those at `urls`.

    The server gets question and response as chat messages, with the images of the question in their
    places, or as raw text where `text` is set.
    """

    url: str | None = None  # such as "http://127.0.0.1:8000"
    urls: tuple[str, ...] = ()  # several servers with the same model
    token_env: str | None = None  # environment variable with the token, which is stored nowhere
    system: str | None = None  # a system message before the others
    text: str | None = None  # raw text with {question}, {answer} and {response}
    normalise: bool = False  # (score - mean) / std, with the scale that is kept with the model
    # Hash of the model that has to answer; None: of the one that answers at the start of the run.
    model: str | None = Field(default=None, min_length=1)
    # How images are sent: their bytes, or their hash to a server with --images.
    images: Literal["bytes", "hash"] = "bytes"
    # Seconds of one score, all tries and waits; at the start also of waiting for a server.
    deadline: float = Field(default=120.0, gt=0.0)

    @field_validator("url", "urls")
    @classmethod
    def _plain_addresses(
        cls, addresses: str | tuple[str, ...] | None
    ) -> str | tuple[str, ...] | None:
        for url in (addresses,) if isinstance(addresses, str) else addresses or ():
            plain_address(url, "http://127.0.0.1:8000", "token_env")
            if url.rstrip("/").endswith("/score"):
                raise ValueError(f"{url!r}: leave out /score, which is asked of that address")
        return addresses

    @model_validator(mode="after")
    def _can_ask(self) -> Self:
        if (self.url is None) == (not self.urls):
            raise ValueError("one server is `url`, several are `urls`: give one of the two")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError("two of `urls` are the same")
        if self.text is not None and "{response}" not in self.text:
            raise ValueError("`text` has no {response}: the sample would not be sent")
        if self.text is not None and self.system is not None:
            raise ValueError("`text` replaces the messages, `system` too: write it into `text`")
        return self

    @property
    def default_wall_seconds(self) -> float:
        """The deadline and 5 seconds for what it does not cover."""
        return self.deadline + 5.0

    def at_start(self) -> dict[str, Any]:
        """{"model": hash of the model that answers now}; {} where the recipe names one.

        Waits up to `deadline` for a server that may still be starting. Raises RunError where none
        answers, UsageError where servers have different models, or `normalise` is set and a model
        has no mean and std.
        """
        if self.model is not None:
            return {}
        began, retries = time.monotonic(), self.retries
        while True:
            models, silent = self._models(retries)
            waited, retries = time.monotonic() - began, 0
            if models:
                break
            if waited >= self.deadline or not any(error.passing for error in silent.values()):
                raise RunError(self._no_model(silent, waited))
            work = f"seconds waited for {' or '.join(silent)} ({next(iter(silent.values()))})"
            report(work, int(waited), int(self.deadline))
            time.sleep(min(_ROUND_SECONDS, self.deadline - waited))
        if len(set(models.values())) > 1:
            listing = ", ".join(f"{url} has {model:.12}" for url, model in models.items())
            raise UsageError(f"rewards: the servers of `urls` have several models: {listing}")
        return {"model": next(iter(models.values()))}

    def _models(self, retries: int) -> tuple[dict[str, str], dict[str, ServerError]]:
        """The hash of the model of each server that answers, by address; why the others do not."""
        models: dict[str, str] = {}
        silent: dict[str, ServerError] = {}
        for url in self._addresses:
            # No breaker: nothing waits behind these requests.
            unlimited = Breaker(sys.maxsize, 0.0)
            server = replace(self._asking(url), retries=retries, deadline=None, breaker=unlimited)
            try:
                models[url] = server.ask("/info", None, self._described)
            except ServerError as error:
                silent[url] = error
        return models, silent

    def _no_model(self, silent: Mapping[str, ServerError], waited: float) -> str:
        causes = "; ".join(f"{url}: {error}" for url, error in silent.items())
        text = f"rewards: no reward server says which model it has: {causes}"
        if waited < self.deadline:
            return text
        return (
            f"{text}; the run waited {waited:.0f} s (rewards.deadline): start the server, or set "
            "another `url`, and start the run again"
        )

    def prepare(self) -> None:
        self._token()

    def check(self, prompt: PromptView) -> str | None:
        if prompt.answer is None and self.text is not None and "{answer}" in self.text:
            return "there is no reference answer for `text`"
        if prompt.images and self.text is not None:
            return "it has images, which are sent with messages, and not with `text`"
        return None

    def score(self, prompt: PromptView, rollout: RolloutView) -> Score:
        body = {"inputs": [self._input(prompt, rollout.text)]}
        return self._asking(*self._addresses).ask("/score", body, self._read)

    @property
    def _addresses(self) -> tuple[str, ...]:
        return self.urls or (cast(str, self.url),)

    def _asking(self, *urls: str) -> Servers:
        return self.servers(
            *urls, key=self._token(), deadline=self.deadline, final_codes=_OF_THE_INPUT
        )

    def _token(self) -> str | None:
        return secret(self.token_env, "token_env", "the reward server's token")

    def _input(self, prompt: PromptView, response: str) -> dict[str, Any]:
        if self.text is not None:
            filled = {
                "question": prompt.question,
                "answer": prompt.answer or "",
                "response": response,
            }
            return {"text": _PLACE.sub(lambda match: filled[match[1]], self.text)}
        messages = [
            {"role": "user", "content": self._content(prompt)},
            {"role": "assistant", "content": response},
        ]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        return {"messages": messages}

    def _content(self, prompt: PromptView) -> str | list[dict[str, str]]:
        """The question; with images its parts in order, where it has `<image SHA-256>` for each."""
        if not prompt.images:
            return prompt.question
        parts: list[dict[str, str]] = []
        rest = prompt.question
        for file in map(Path, prompt.images):
            before, _, rest = rest.partition(f"<image {file.name}>")
            image = {"sha256": file.name}
            if self.images == "bytes":
                image = {"base64": base64.b64encode(file.read_bytes()).decode()}
            parts += [{"type": "text", "text": before}] if before else []
            parts.append({"type": "image", **image})
        return [*parts, {"type": "text", "text": rest}] if rest else parts

    def _described(self, reply: bytes) -> str:
        """The model's hash from a reply of /info.

        Raises ServerError where it names none, UsageError where `normalise` has no scale.
        """
        info = _object(reply)
        model = info.get("model")
        if not isinstance(model, str) or not model:
            raise ServerError(f"the reply names no model: {_start(reply)}")
        if self.normalise:
            try:
                self._scale(info)
            except ServerError as error:
                raise UsageError(f"rewards: {error}") from error
        return model

    def _read(self, reply: bytes) -> Score:
        answer = _object(reply)
        if self.model is not None and answer.get("model") != self.model:
            raise ServerError(
                f"the server has another model: {answer.get('model')!s:.12}, and this run began "
                f"with {self.model:.12}"
            )
        scores = answer.get("scores")
        if not isinstance(scores, list) or len(cast(list[Any], scores)) != 1:
            raise ServerError(f"one score was wanted, the reply is {_start(reply)}")
        value = _number(cast(list[Any], scores)[0], "score", reply)
        if not self.normalise:
            return Score(value)
        mean, deviation = self._scale(answer)
        return Score((value - mean) / deviation, {"raw": value})

    def _scale(self, answer: Mapping[str, Any]) -> tuple[float, float]:
        mean, deviation = answer.get("mean"), answer.get("std")
        if mean is None or deviation is None:
            raise ServerError("normalise = true, and the server's model knows no mean and no std")
        scale = _number(mean, "mean"), _number(deviation, "std")
        if scale[1] <= 0.0:
            raise ServerError(f"normalise = true, and the server's std is {scale[1]:g}")
        return scale


def _object(reply: bytes) -> dict[str, Any]:
    try:
        data = json.loads(reply)
    except (ValueError, RecursionError) as error:
        raise ServerError(f"the reply is no JSON: {_start(reply)}") from error
    if not isinstance(data, dict):
        raise ServerError(f"the reply is no JSON object: {_start(reply)}")
    return cast(dict[str, Any], data)


def _number(value: Any, name: str, reply: bytes = b"") -> float:
    """A finite number of a reply; a JSON integer may be too long for a float."""
    try:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and math.isfinite(number := float(value)):
            return number
    except OverflowError:
        pass
    excerpt = f", in the reply {_start(reply)}" if reply else ""
    raise ServerError(f"the {name} {value!r:.60} is no finite number{excerpt}")


def _start(reply: bytes) -> str:
    return repr(reply[:200].decode(errors="replace"))
