"""The messages between the controller and a vLLM process, one JSON object a line.

    controller -> process                                     process -> controller
    Start, once                                               {"ready": {...}} or {"failed": text}
    {"do": "sample", "keys", "seeds", "prompt", "sampling"}   SampledTokens, one for each key
    {"do": action, "call": number, ...}                       {"done": number, "value": ...}

A message with prompts that have images names them too: "images", of each prompt a list of
{"digest": SHA-256, "runs": [[first token, tokens], ...]}, and "pixels", the safetensors file with
their arrays as "DIGEST/ARGUMENT". The file belongs to the message: who reads it removes it.

Both sides import this file, and vLLM's environment lacks postgrad's dependencies: it imports the
standard library only.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # for which vLLM 0.32 has room and kernels


def lora_room(rank: int) -> int:
    """The rank of the room that vLLM makes for adapters of `rank`."""
    return next((room for room in LORA_RANKS if room >= rank), rank)


@dataclass(frozen=True, slots=True)
class Start:
    """The first message to a process: what its engine is made with."""

    model: str  # path or hub id
    dtype: str  # "bfloat16", "float32"
    max_len: int  # tokens of the longest sequence, prompt and response
    slots: int  # sequences decoded together
    cache_bytes: int | None  # of keys and values on one rank; None: what memory_fraction leaves
    tensor_parallel: int  # devices
    memory_fraction: float  # of a GPU, for weights, keys and values
    eager: bool  # without compiled graphs
    sleep: bool  # whether memory can be given back between samplings
    # No prompt is computed in chunks: vLLM 0.32 cannot do that on a CPU for samples with a seed,
    # whose generator it would have to wind back.
    whole_prompts: bool
    seeded: bool = True  # each sample draws from a generator of its own
    folder: str = ""  # of this process alone, for files that must not outlive it
    revision: str | None = None  # of a hub id
    lora_rank: int = 0  # of the adapter that it samples with; 0: there is none
    lora_targets: tuple[str, ...] = ()  # layers that the adapter is on: "q_proj", "down_proj"
    images: bool = False  # whether the model reads images
    experts: bool = False  # whether samples come with the experts of their tokens
    states: bool = False  # whether layers carry a state along the sequence, as delta rules do
    config: dict[str, Any] = field(default_factory=dict[str, Any])  # in place of the model's own
    more: dict[str, Any] = field(default_factory=dict[str, Any])  # further arguments of the engine


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One sample as vLLM wrote it, of R tokens."""

    key: int  # of the sample, from the message that asked for it
    tokens: list[int]  # [R] token ids
    logprobs: list[float]  # [R] in nats, under the distribution that each was drawn from
    stopped: bool  # by an end token or a stop string, not by the token limit
    versions: list[list[int]]  # [[policy version, tokens], ...] in order
    # Base64 of uint16 [P + R - 1, layers, k]: the experts of each token that was computed, behind a
    # prompt of P tokens, in each layer of the model. "": they are not recorded, or R is 0.
    experts: str = ""


def line(message: Mapping[str, Any]) -> bytes:
    """A message as a line of JSON. Numbers that are not finite are written as NaN and Infinity."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"
