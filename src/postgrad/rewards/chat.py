"""One question to a server that speaks OpenAI's chat completions. Light imports."""

import json
from collections.abc import Mapping
from typing import Any

from postgrad.rewards.http import ServerError, Servers


def complete(server: Servers, body: Mapping[str, Any]) -> str:
    """The text of the reply to the request `body`.

    Raises ServerError with the cause of the last try where no try gave a text.
    """
    return server.ask("/chat/completions", body, _content)


def _content(reply: bytes) -> str:
    try:
        content = json.loads(reply)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        excerpt = reply[:200].decode(errors="replace")
        raise ServerError(f"the reply is no chat completion: {excerpt!r}") from error
    if not isinstance(content, str) or not content.strip():
        raise ServerError(f"the reply has no text: {content!r}", counts=False)
    return content
