"""What the controller and a process with vLLM say to each other, a JSON object a line.

    controller -> process                                     process -> controller
    Start, once                                               {"ready": {...}} or {"failed": text}
    {"do": "sample", "keys", "seeds", "prompt", "sampling"}   SampledTokens, one for each key
    {"do": what, "call": number, ...}                         {"done": number, "value": ...}

Both sides import this file: it must not need more than the standard library, since vLLM lives in
an environment of its own.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Start:
    """What an engine is made with.

    max_len: tokens of the longest sequence. slots: sequences decoded together. cache_bytes: of keys
    and values on one rank; None: what is left of memory_fraction of a device. eager: without
    compiled graphs. whole_prompts: none is computed in pieces; vLLM 0.32 cannot do that on a CPU
    for samples with a seed, whose generator it wants to wind back. folder: of one process
    alone, for what must not outlive it. revision: of a hub id.
    """

    model: str
    dtype: str
    max_len: int
    slots: int
    cache_bytes: int | None
    tensor_parallel: int
    memory_fraction: float
    eager: bool
    sleep: bool
    whole_prompts: bool
    folder: str = ""
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One sample as vLLM wrote it. versions: [[policy version, tokens], ...] in order."""

    key: int
    tokens: list[int]
    logprobs: list[float]
    stopped: bool
    versions: list[list[int]]


def line(message: Mapping[str, Any]) -> bytes:
    """A message on its way. Numbers that are not finite go as NaN and Infinity."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"
