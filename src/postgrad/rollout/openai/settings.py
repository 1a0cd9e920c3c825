"""Settings of servers with OpenAI's interface: one that samples, and one that is a teacher."""

from typing import Any, Literal

from pydantic import Field, field_validator

from postgrad.core.settings import Settings
from postgrad.rewards.http import plain_address


class OpenAISettings(Settings):
    """A server with OpenAI's interface, for type = "openai", which evaluates and does not train.

    `model`: what the server calls it; left out, the path that is evaluated. `endpoint`: "chat"
    sends a row's messages, "completions" the text of its rendered prompt. `api_key_env` names the
    environment variable that holds the key, which is stored nowhere. `concurrent` requests are
    under way at once; `extra_body` goes into every one.
    """

    base_url: str | None = None
    model: str | None = None
    endpoint: Literal["chat", "completions"] = "chat"
    api_key_env: str | None = None
    timeout: float = Field(default=120.0, gt=0.0)  # seconds of one try
    retries: int = Field(default=3, ge=0, le=20)
    backoff: float = Field(default=1.0, ge=0.0)  # seconds before the second try, then twice that
    concurrent: int = Field(default=16, ge=1, le=1024)
    extra_body: dict[str, Any] = {}

    @field_validator("base_url")
    @classmethod
    def _plain_address(cls, url: str | None) -> str | None:
        return url and plain_address(url, "https://host/v1", "rollout.openai.api_key_env")


class TeacherServerSettings(Settings):
    """A server that gives logprobs of a prompt's tokens (vLLM's `prompt_logprobs`), for a teacher.

    `model`: what the server calls it; left out, the first of its list. `api_key_env` names the
    environment variable that holds the key, which is stored nowhere. `concurrent` requests are
    under way at once.
    """

    base_url: str | None = None
    model: str | None = None
    api_key_env: str | None = None
    timeout: float = Field(default=300.0, gt=0.0)  # seconds of one try
    retries: int = Field(default=5, ge=0, le=20)
    backoff: float = Field(default=1.0, ge=0.0)  # seconds before the second try, then twice that
    concurrent: int = Field(default=16, ge=1, le=1024)

    @field_validator("base_url")
    @classmethod
    def _plain_address(cls, url: str | None) -> str | None:
        return url and plain_address(url, "https://host/v1", "teacher.server.api_key_env")
