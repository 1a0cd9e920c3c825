"""The folder that all sides read: a fresh model, its tokenizer, and the work to do.

model/            transformers model (random weights, the same every time) and tokenizer
work.json         prompts as token ids, samples, new tokens, the length of every sample, seed
questions.jsonl   GSM8K rows: question, answer
pairs.jsonl       HH-RLHF rows: chosen, rejected
tokens.json       both as token ids, see tokens.py
"""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

from benchmarks.speed.tokens import write_tokens

SEED, VOCABULARY, QUESTIONS, PAIRS = 0, 4096, 1024, 1024
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{m['role']}}\n{{m['content']}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPES: dict[str, dict[str, Any]] = {
    "6m": {
        "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    },
    "110m": {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
        "num_attention_heads": 12, "num_key_value_heads": 4,
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Work:
    """One kind of work.

    sides: the package that has a module for every side. equal: counts that must not differ between
    sides. extra: for Options.extra.
    """

    sides: str
    equal: tuple[str, ...]
    vocabulary: int = VOCABULARY
    extra: dict[str, Any] = field(default_factory=dict[str, Any])


GRPO = ("samples", "sampled_tokens", "trained_tokens", "groups_without_gradient")
WORKS = {
    "rollout": Work("rollout", ("samples", "sampled_tokens")),
    "grpo": Work("grpo", GRPO),
    "grpo-half": Work("grpo", GRPO, extra={"without_gradient": 0.5}),
    "memory": Work("grpo", GRPO, vocabulary=151_936, extra={"micro_batch": 16}),
    "reward": Work("reward", ("pairs", "trained_tokens")),
    "sft": Work("sft", ("rows", "trained_tokens")),
    "start": Work("start", ("steps",)),
}


def make(folder: Path, data: Path, shape: str, vocabulary: int, *, prompts: int = 16) -> None:
    """Write the folder. data: where gsm8k.jsonl and hh-rlhf-harmless.jsonl.gz are."""
    questions = list(rows(data / "gsm8k.jsonl"))
    pairs = list(rows(data / "hh-rlhf-harmless.jsonl.gz"))
    tokenizer = make_tokenizer(questions, pairs)
    tokenizer.save_pretrained(folder / "model")
    make_model(SHAPES[shape], vocabulary, tokenizer).save_pretrained(folder / "model")
    write_rows(folder / "questions.jsonl", questions[:QUESTIONS])
    write_rows(folder / "pairs.jsonl", pairs[:PAIRS])
    samples, longest = 8, 128
    work = {
        "seed": SEED,
        "samples": samples,
        "new_tokens": longest,
        "prompts": [prompt_ids(tokenizer, row["question"]) for row in questions[:prompts]],
        "lengths": lengths(prompts, samples, longest),
    }
    (folder / "work.json").write_text(json.dumps(work), "utf-8")
    write_tokens(folder)


def rows(path: Path) -> Iterator[dict[str, str]]:
    """The objects of a file of JSON lines, packed or not."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    for line in text.splitlines():
        yield json.loads(line)


def write_rows(path: Path, written: list[dict[str, str]]) -> None:
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in written), "utf-8")


def make_tokenizer(
    questions: list[dict[str, str]], pairs: list[dict[str, str]]
) -> PreTrainedTokenizerFast:
    """A byte-level BPE of VOCABULARY tokens with a chat template; pad and end are two tokens."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    texts = [f"{row['question']}\n{row['answer']}" for row in questions]
    texts += [row["chosen"] for row in pairs]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(shape: dict[str, Any], vocabulary: int, tokenizer: Any) -> Any:
    """A fresh Qwen2 in float32 with tied embeddings."""
    config = Qwen2Config(
        **shape,
        vocab_size=vocabulary,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(SEED)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def prompt_ids(tokenizer: Any, question: str) -> list[int]:
    """A question as the chat template puts it to the model."""
    messages = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def lengths(prompts: int, samples: int, longest: int) -> list[list[int]]:
    """How long each sample gets: evenly from 1 to `longest`, mean under half of it, mixed."""
    count = prompts * samples
    even = np.maximum(1, np.arange(count) * longest // (count - 1))
    mixed = np.random.default_rng(SEED).permutation(even)
    return mixed.reshape(prompts, samples).tolist()
