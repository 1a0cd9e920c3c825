"""What a recipe says about sampling."""

from typing import Literal

from pydantic import Field

from postgrad.core.settings import Settings


class SamplingSettings(Settings):
    """How the next token is chosen. temperature 0 is greedy; the filters are applied after it."""

    temperature: float = Field(default=1.0, ge=0.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0)  # 0: off
    min_p: float = Field(default=0.0, ge=0.0, lt=1.0)
    stop: tuple[str, ...] = ()
    max_new_tokens: int = Field(default=512, ge=1)


class RolloutSettings(SamplingSettings):
    """The rollout engine and where a step's samples come from.

    `slots`: sequences decoded together; `cache_tokens`: token places in the key-value cache. Both
    are chosen at start where they are left out, and kept as run state.
    """

    type: Literal["local"] = "local"
    source: Literal["live", "replay"] = "live"
    replay_path: str | None = None  # run directory whose samples.jsonl is read
    slots: int | None = Field(default=None, ge=1)
    cache_tokens: int | None = Field(default=None, ge=16)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
