"""The configurations of benchmarks.plan_memory."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# hidden, intermediate, layers, heads, key heads, vocabulary, and the type
SIZES: dict[str, tuple[int, int, int, int, int, int, str]] = {
    "0.4M": (64, 192, 2, 4, 2, 4096, "qwen2"),
    "6M": (256, 768, 6, 4, 2, 4096, "qwen2"),
    "22M": (384, 1152, 12, 6, 2, 4096, "qwen2"),
    "44M-150k": (256, 768, 6, 4, 2, 151_936, "qwen3"),
    "99M": (768, 2304, 14, 12, 4, 4096, "qwen2"),
    "105M-150k": (512, 1536, 8, 8, 2, 151_936, "qwen2"),
    "105M-wide": (1024, 3072, 8, 16, 8, 4096, "qwen3"),  # layers as wide as those of 0.6B
    "357M-wide": (1024, 3072, 28, 16, 8, 4096, "qwen3"),  # and as many
    "210M-wide": (2048, 6144, 4, 16, 8, 4096, "qwen3"),  # and of 1.7B
    "590M-wide": (4096, 12288, 3, 32, 8, 4096, "qwen3"),  # and of 8B
}
GSM8K = {"prompt": "question", "answer": "answer", "limit": 200}
HH = {"chosen": "chosen", "rejected": "rejected", "limit": 100}
PAIRS = ("reward", "preference")
IMAGES = "images"  # the size of the model that reads some


@dataclass(frozen=True, slots=True)
class Case:
    """A job on a model, and what is special about it. settings: sections of the recipe."""

    job: str
    size: str
    data: Path
    words: tuple[str, ...] = ()
    samples: int = 16
    settings: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])

    @property
    def name(self) -> str:
        """In words."""
        return " ".join((self.job, self.size, *self.words))

    def recipe(self, model: Path) -> dict[str, Any]:
        """The recipe without its run directory."""
        table: dict[str, Any] = {
            "job": {"grpo": "rl", "ppo": "rl"}.get(self.job, self.job),
            "steps": 2,
            "model": {"path": str(model), "dtype": "float32"},
            "learner": {"threads": 1},
            "batch": {"train_batch_size": self.samples},
        }
        if self.job in PAIRS:
            path = str(self.data / "hh-rlhf-harmless.jsonl.gz")
            table["data"] = {"path": path, "max_len": 512, "max_lost_fraction": 1.0, **HH}
        else:
            table["data"] = {"path": str(self.data / "gsm8k.jsonl"), "max_len": 512, **GSM8K}
        if self.size == IMAGES:
            path = str(model.with_name(f"{IMAGES}-{self.job}.jsonl"))
            table["data"] = {"path": path, "max_len": 512}
        table["data"]["cache"] = False
        if table["job"] == "rl":
            table["batch"] = {"rollout_batch_size": self.samples, "n_samples_per_prompt": 4}
            table["rewards"] = [{"type": "regex", "pattern": "[a-m]$"}]  # half of random answers
            kl_coef = 0.05 if "reference" in self.words else 0.0
            table["algorithm"] = {"type": self.job, "kl_coef": kl_coef}
            table["rollout"] = {"max_new_tokens": 96}
        if self.job == "ppo":
            table["critic"] = {"model": {"dtype": "float32"}}
        words = dict.fromkeys(self.words, True)
        model_settings = table["model"]
        if words.get("adapter"):
            model_settings["lora"] = {"rank": 16, "alpha": 16}
        if words.get("4bit"):
            model_settings["quantize"] = "4bit"
        if words.get("checkpointing"):
            model_settings["gradient_checkpointing"] = True
        if words.get("frozen"):
            model_settings["freeze"] = ["vision", "projector"]
        if words.get("bfloat16"):
            model_settings["dtype"] = "bfloat16"
        if words.get("muon"):
            table["learner"]["optimizer"] = "muon"
        if words.get("saves"):
            table["checkpoint"] = {"save_steps": 1}
        if words.get("exports"):
            table["checkpoint"] = {"save_hf": True}
        for word in self.words:
            if word.isdigit():
                table["batch"]["micro_train_tokens"] = int(word)
        return table


def cases(data: Path) -> Iterator[Case]:
    """All of them: updates have at least two full micro-batches."""
    for job in ("sft", "reward", "preference", "grpo", "ppo"):
        yield Case(job, "6M", data, samples=32 if job == "sft" else 16)
    yield Case("sft", "6M", data, ("8192",), 96)
    yield Case("sft", "6M", data, ("adapter",), 32)
    yield Case("sft", "6M", data, ("checkpointing",), 32)
    yield Case("sft", "6M", data, ("bfloat16",), 32)
    yield Case("grpo", "6M", data, ("adapter", "reference"), 16)
    for job, samples in (("sft", 24), ("preference", 10), ("grpo", 10)):
        yield Case(job, "44M-150k", data, (), samples)
    for words in ((), ("checkpointing",), ("bfloat16",), ("muon",), ("saves",), ("adapter",)):
        yield Case("sft", "99M", data, (*words, "512"), 6)
    for words in ((), ("checkpointing",), ("bfloat16",), ("adapter", "checkpointing")):
        yield Case("sft", "105M-150k", data, (*words, "512"), 6)
    yield Case("reward", "99M", data, ("1024",), 6)
    yield Case("preference", "99M", data, ("checkpointing", "1024"), 6)
    yield Case("sft", "6M", data, ("adapter", "checkpointing"), 32)
    yield Case("sft", "99M", data, ("1024",), 12)
    yield Case("sft", "99M", data, (), 24)
    yield Case("sft", "99M", data, ("checkpointing",), 24)
    yield Case("sft", "99M", data, ("adapter",), 24)
    yield Case("sft", "99M", data, ("adapter", "checkpointing", "1024"), 12)
    yield Case("sft", "99M", data, ("bfloat16", "1024"), 12)
    yield Case("sft", "99M", data, ("muon", "1024"), 12)
    yield Case("sft", "99M", data, ("saves", "1024"), 12)
    yield Case("sft", "99M", data, ("exports", "1024"), 12)
    yield Case("reward", "99M", data, ("checkpointing", "1024"), 4)
    yield Case("preference", "99M", data, ("adapter", "1024"), 4)
    yield Case("grpo", "99M", data, ("reference", "1024"), 4)
    yield Case("ppo", "99M", data, ("checkpointing", "1024"), 4)
    yield Case("sft", "105M-150k", data, ("1024",), 12)
    yield Case("sft", "105M-150k", data, ("adapter", "checkpointing", "1024"), 12)
    yield Case("reward", "105M-150k", data, ("1024",), 4)
    yield Case("grpo", "105M-150k", data, ("1024",), 4)
    for size in ("105M-wide", "210M-wide"):
        for words in ((), ("checkpointing",), ("adapter",), ("adapter", "checkpointing")):
            yield Case("sft", size, data, (*words, "2048"), 24)
    for words in (("adapter",), ("adapter", "checkpointing")):
        yield Case("sft", "590M-wide", data, (*words, "2048"), 24)
    yield Case("sft", "357M-wide", data, ("adapter", "checkpointing", "2048"), 24)
    for words in ((), ("checkpointing",), ("frozen",), ("adapter",), ("adapter", "4bit")):
        yield Case("sft", IMAGES, data, words, 32)
    yield Case("preference", IMAGES, data, (), 33)
    yield Case("preference", IMAGES, data, ("checkpointing",), 33)
