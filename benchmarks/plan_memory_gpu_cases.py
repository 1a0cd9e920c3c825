"""The configurations of benchmarks.plan_memory_gpu: real shapes, rows of one length."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from postgrad.core.records import Prompt, Rollout

# Hub ids of known shapes; of mixtures of experts the config, Qwen3-30B-A3B and OLMoE-1B-7B, and a
# hybrid of Qwen3.5's type.
MODELS: dict[str, str | dict[str, Any]] = {
    "0.6B": "Qwen/Qwen3-0.6B",
    "1.7B": "Qwen/Qwen3-1.7B",
    "8B": "Qwen/Qwen3-8B",
    "30B-A3B": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False,
        "norm_topk_prob": True, "max_position_embeddings": 40960,
    },
    "7B-A1B": {
        "model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024,
        "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 50304,
        "tie_word_embeddings": False, "max_position_embeddings": 4096,
    },
    "2B-hybrid": {
        "model_type": "qwen3_5_text", "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
        "vocab_size": 248320, "tie_word_embeddings": True, "max_position_embeddings": 40960,
    },
}  # fmt: skip
ROW = 1024  # tokens of a row, or of a prompt with all of its answers
NEW, ANSWERS = 32, 8
RANKS = 8  # of a sharded case; one of them is run
JOBS = {"grpo": "rl", "ppo": "rl"}


@dataclass(frozen=True, slots=True)
class Case:
    """A job on a model, and what is special about it."""

    job: str
    size: str
    words: tuple[str, ...] = ()
    tokens: int = 8192  # of a micro-batch; an update has two

    @property
    def name(self) -> str:
        """In words."""
        return " ".join((self.job, self.size, *self.words, str(self.tokens)))

    @property
    def sampled(self) -> bool:
        """Whether an engine samples the answers."""
        return self.job in JOBS

    @property
    def row(self) -> int:
        """Tokens of a row of the data: in RL a prompt, which its answers fill up to ROW."""
        return ROW - ANSWERS * NEW if self.sampled else ROW

    def recipe(self, model: Path, rows: Path) -> dict[str, Any]:
        """The recipe without its run directory."""
        words = dict.fromkeys(self.words, True)
        sharing = {key: 2 for key in ("tensor", "context") if key in words}
        replicas = RANKS // 2 ** len(sharing) if "zero3" in words else 1
        count = 2 * self.tokens // ROW * replicas
        settings: dict[str, Any] = {"path": str(model)}
        if "adapter" in words:
            settings["lora"] = {"rank": 64, "alpha": 64}
        if "compiled" in words:
            settings["compile"] = "auto" if isinstance(MODELS[self.size], str) else True
        if "checkpointing" in words:
            settings["gradient_checkpointing"] = True
        if "offload" in words:
            settings["gradient_checkpointing"] = "offload"
        recipe: dict[str, Any] = {
            "job": JOBS.get(self.job, self.job),
            "steps": 2,
            "model": settings,
            "learner": {"threads": 1},
            "batch": {"train_batch_size": count, "micro_train_tokens": self.tokens},
            "data": {"path": str(rows), "prompt": "question", "cache": False, "max_len": ROW},
        }
        if "resting" in words:
            recipe["learner"] |= {"offload": "sampling"}
        if "zero3" in words:
            recipe["learner"] |= {"ranks": RANKS, "sharding": "zero3"}
            recipe["learner"] |= {f"{key}_parallel": size for key, size in sharing.items()}
            recipe["cluster"] = {"type": "ray"}
        if self.job == "preference":
            recipe["data"] |= {"prompt": "question", "chosen": "answer", "rejected": "other"}
            recipe["batch"]["train_batch_size"] = count // 2
        if not self.sampled:
            if self.job == "sft":
                recipe["data"] |= {"answer": "answer"}
            return recipe
        recipe["batch"] = {
            "rollout_batch_size": count,
            "n_samples_per_prompt": ANSWERS,
            "micro_train_tokens": self.tokens,
        }
        recipe["algorithm"] = {"type": self.job, "kl_coef": 0.05 * ("reference" in words)}
        recipe["rewards"] = [{"type": f"{__name__}:by_sample"}]
        recipe["rollout"] = {
            "max_new_tokens": NEW,
            "slots": 128,
            "cache_tokens": 128 * (ROW + 16),
        }
        if self.job == "ppo":
            recipe["critic"] = {"model": {"gradient_checkpointing": "checkpointing" in words}}
        return recipe


def by_sample(prompt: Prompt, rollout: Rollout) -> float:
    """A reward that no text decides, so that every group has something to learn: 1 for every second
    sample of a prompt.
    """
    return float(rollout.sample % 2)


def cases() -> Iterator[Case]:
    """All of them: updates of two full micro-batches."""
    for words in ((), ("checkpointing",), ("adapter",), ("adapter", "checkpointing")):
        yield Case("sft", "0.6B", words)
    yield Case("sft", "0.6B", (), 16384)
    yield Case("sft", "0.6B", ("checkpointing",), 16384)
    yield Case("sft", "1.7B")
    yield Case("sft", "1.7B", ("checkpointing",), 16384)
    yield Case("sft", "1.7B", ("adapter",))
    yield Case("sft", "1.7B", ("zero3",))
    yield Case("sft", "8B", ("adapter", "checkpointing"))
    yield Case("sft", "8B", ("zero3", "checkpointing"))
    yield Case("sft", "8B", ("zero3", "checkpointing"), 16384)
    yield Case("grpo", "0.6B")
    yield Case("grpo", "0.6B", ("reference", "checkpointing"))
    yield Case("grpo", "1.7B", ("checkpointing",))
    yield Case("grpo", "1.7B", ("adapter", "reference"))
    yield Case("grpo", "8B", ("adapter", "checkpointing"))
    yield Case("grpo", "8B", ("zero3", "checkpointing"))
    yield Case("grpo", "0.6B", ("resting",))
    yield Case("ppo", "0.6B")
    yield Case("ppo", "1.7B", ("checkpointing",))
    yield Case("preference", "0.6B", ("checkpointing",))
    yield from compiled_cases()
    yield from offloaded_cases()
    yield from shared_cases()
    yield from mixture_cases()


def mixture_cases() -> Iterator[Case]:
    """Those of mixtures of experts, whose routers and experts run between compiled parts, and of a
    hybrid without kernels.
    """
    for words in (("adapter",), ("adapter", "checkpointing"), ("zero3", "checkpointing")):
        for compiled in ((), ("compiled",)):
            yield Case("sft", "7B-A1B", (*compiled, *words))
    yield Case("sft", "30B-A3B", ("zero3", "checkpointing"))
    yield Case("sft", "30B-A3B", ("compiled", "zero3", "checkpointing"))
    yield Case("sft", "2B-hybrid", ("checkpointing",))
    yield Case("sft", "2B-hybrid", ("adapter",))


def offloaded_cases() -> Iterator[Case]:
    """Those whose layers are computed again from inputs in the host's memory."""
    yield Case("sft", "0.6B", ("offload",))
    yield Case("sft", "0.6B", ("compiled", "offload"))
    yield Case("sft", "8B", ("adapter", "offload"))
    yield Case("sft", "8B", ("adapter", "offload"), 16384)
    yield Case("sft", "8B", ("zero3", "offload"), 16384)


def shared_cases() -> Iterator[Case]:
    """Those of which two ranks share the matrices of layers, or the rows."""
    for words in (("tensor",), ("context",), ("tensor", "checkpointing")):
        yield Case("sft", "8B", ("zero3", *words))
    for words in (("tensor",), ("tensor", "checkpointing")):
        yield Case("sft", "8B", ("compiled", "zero3", *words))


def compiled_cases() -> Iterator[Case]:
    """Those whose layers torch compiles."""
    for words in ((), ("checkpointing",), ("adapter",), ("adapter", "checkpointing")):
        yield Case("sft", "0.6B", ("compiled", *words))
    yield Case("sft", "1.7B", ("compiled", "checkpointing"), 16384)
    yield Case("sft", "8B", ("compiled", "adapter", "checkpointing"))
    yield Case("sft", "8B", ("compiled", "zero3", "checkpointing"))
    yield Case("grpo", "0.6B", ("compiled",))
    yield Case("grpo", "1.7B", ("compiled", "adapter", "reference"))
    yield Case("ppo", "0.6B", ("compiled",))
    yield Case("preference", "0.6B", ("compiled", "checkpointing"))
