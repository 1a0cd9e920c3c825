"""The lists of what is measured, in order of worth: names, shapes and the seconds each may take.

Free of torch, so that tables and pages are made anywhere.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much the parts do.

    packs: tokens of a forward and backward pass of training, and of the longest row. update_tokens:
    of an optimizer step, about. rows, contexts: of decoding. decoded: tokens of each row whose time
    is taken. questions: (fewest, most) tokens of a prompt, evenly between. new_tokens: most of an
    answer. prompts: of the smaller and the larger GRPO step. samples: of each.
    """

    packs: dict[str, int]
    update_tokens: int
    rows: tuple[int, ...]
    contexts: dict[str, int]
    decoded: int
    questions: tuple[int, int]
    new_tokens: int
    prompts: tuple[int, int]
    samples: int


FULL = Sizes({"4k": 4096, "16k": 16_384}, 65_536, (64, 256, 512),
             {"1k": 1024, "4k": 4096, "8k": 8192}, 96, (44, 156), 300, (16, 64), 8)  # fmt: skip
SMALL = Sizes({"4k": 128, "16k": 256}, 512, (8, 16, 32),
              {"1k": 64, "4k": 128, "8k": 160}, 8, (24, 40), 12, (2, 4), 4)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Job:
    """A run of SFT with compiled layers, where a GPU is. words: "checkpointing", "LoRA", "eager":
    without compiling, and "free": without deterministic mode. seconds: see session.Case.
    """

    model: str
    pack: str
    seconds: float
    words: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """ "1.5B 4k checkpointing"."""
        return " ".join((self.model, self.pack, *self.words))

    @property
    def lora(self) -> bool:
        """Whether an adapter is trained."""
        return "LoRA" in self.words

    @property
    def model_keys(self) -> dict[str, Any]:
        """Keys of [model]."""
        keys: dict[str, Any] = {
            "compile": False if "eager" in self.words else "auto",
            "gradient_checkpointing": "checkpointing" in self.words,
        }
        return keys | ({"lora": {"rank": 64, "alpha": 64}} if self.lora else {})

    @property
    def learner_keys(self) -> dict[str, Any]:
        """Keys of [learner]."""
        return {"deterministic": "free" not in self.words}


JOBS = (
    Job("1.5B", "4k", 75),
    Job("1.5B", "4k", 25, ("eager",)),
    Job("0.6B", "4k", 30),
    Job("1.5B", "4k", 25, ("free",)),
    Job("1.5B", "16k", 25),
    Job("1.5B", "4k", 25, ("checkpointing",)),
    Job("8B", "4k", 75, ("LoRA", "checkpointing")),
    Job("0.6B", "16k", 20),
    Job("0.6B", "4k", 20, ("checkpointing",)),
    Job("1.5B", "16k", 25, ("checkpointing",)),
    Job("0.6B", "16k", 20, ("checkpointing",)),
)


@dataclass(frozen=True, slots=True)
class Load:
    """Rows decoded together. rows: its place in Sizes.rows. shared: samples of a prompt."""

    rows: int
    context: str
    shared: int
    seconds: float

    def name(self, sizes: Sizes) -> str:
        """ "256 rows 1k own prompts"."""
        alone = "own prompts" if self.shared == 1 else f"{self.shared} a prompt"
        return f"{sizes.rows[self.rows]} rows {self.context} {alone}"


LOADS = (  # the first has the goal: nothing is shared, so that every byte counts
    Load(1, "1k", 1, 40),
    Load(1, "1k", 8, 15),
    Load(0, "1k", 8, 12),
    Load(2, "1k", 8, 15),
    Load(1, "4k", 8, 20),
    Load(0, "8k", 8, 20),
    Load(1, "8k", 8, 30),
)


WAYS = ("memory", "ipc", "nccl", "gloo")  # of weights to an engine's process


def sent_bytes(small: bool) -> int:
    """Bytes of weights that are sent."""
    return 1 << 20 if small else 1 << 31


def way_name(way: str) -> str:
    """Of its case."""
    return f"weights by {way}"


def step_name(prompts: int, samples: int) -> str:
    """ "16 x 8"."""
    return f"{prompts} x {samples}"
