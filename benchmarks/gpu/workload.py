"""Models, tokenizers, rows and lengths of all parts: made here, without a network, from counters.

Models have the shapes of real ones and random weights, drawn on the device. The tokenizer has a
token for each byte, and for every other token of the vocabulary a word of its number: a text of
letters has as many tokens as letters, and every sampled token has a text. Where answers are
sampled, one token of `ENDS` ends an answer, as one in so many of random tokens does: lengths are
then spread as GSM8K's are, up to `new_tokens`.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from benchmarks.gpu.session import Session
from benchmarks.gpu.work import FULL, SMALL, Sizes
from postgrad.core.seeds import bits, permutation
from postgrad.models.fresh import END, PAD, START, TEMPLATE
from postgrad.models.known_shapes import find_shape
from postgrad.models.save import save_model
from postgrad.models.shapes import ModelShape

SEED = 0
IDS = {"0.6B": "Qwen/Qwen3-0.6B", "1.5B": "Qwen/Qwen2.5-1.5B", "8B": "Qwen/Qwen3-8B"}
TINY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "layers": 2, "heads": 4,
    "kv_heads": 2, "head_dim": 16,
}  # fmt: skip
LONGEST = 32_768  # tokens of a sequence
ENDS = 180  # one of so many tokens ends an answer: 146 tokens on average, where 300 are the most
# Tokens that the chat template adds to a question and an answer: names of roles are letters too.
TEMPLATE_TOKENS = len("[user\n") + len("]\n") + len("[assistant\n") + len("]\n")
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def sizes_of(session: Session) -> Sizes:
    """The sizes of a session."""
    return SMALL if session.small else FULL


def shape_of(session: Session, name: str) -> ModelShape:
    """The shape of a model of IDS; in a dry run a tiny one of the same type."""
    shape = find_shape(IDS[name])
    return replace(shape, **TINY) if session.small else shape


def model_of(session: Session, name: str, *, ends: bool = False) -> Path:
    """The directory of a fresh model, made in the first call. ends: one token of ENDS is an end of
    answers; else the tokenizer's alone, one in a vocabulary.
    """
    to = session.scratch / "models" / name
    if not to.exists():
        _make(session, shape_of(session, name), to)
    if not ends:
        return to
    other = to.with_name(f"{name}-ends")
    if not other.exists():
        part = other.with_suffix(".part")
        part.mkdir(parents=True)
        for file in to.iterdir():
            (part / file.name).symlink_to(file)
        _write_ends(part, shape_of(session, name).vocab_size)
        part.rename(other)
    return other


def _make(session: Session, shape: ModelShape, to: Path) -> None:
    tokenizer = make_tokenizer(shape.vocab_size)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = AutoConfig.for_model(
        shape.model_type, vocab_size=shape.vocab_size, hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, tie_word_embeddings=shape.tied, bos_token_id=None,
        max_position_embeddings=LONGEST, **ids,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    )  # fmt: skip
    torch.manual_seed(SEED)
    with torch.device(session.device):
        lm: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    lm.generation_config = GenerationConfig(**ids)
    to.parent.mkdir(parents=True, exist_ok=True)
    save_model(lm, tokenizer, to)


def _write_ends(folder: Path, vocabulary: int) -> None:
    """Replaces the generation config. Token 0 ends nothing: a device that computes nothing samples
    it alone.
    """
    path = folder / "generation_config.json"
    config = json.loads(path.read_text("utf-8"))
    path.unlink()  # a link to the other model's
    config["eos_token_id"] = sorted({config["eos_token_id"], *range(ENDS // 2, vocabulary, ENDS)})
    path.write_text(json.dumps(config, indent=1), "utf-8")


def make_tokenizer(vocabulary: int) -> Any:
    """Byte-level, without merges: the special tokens, the bytes, then `w` and a number for all
    other tokens, which no text has.
    """
    named = [PAD, START, END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words = [*named, *(f"w{number}" for number in range(len(named), vocabulary))]
    inner = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    inner.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    inner.add_special_tokens([PAD, START, END])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=END, pad_token=PAD, chat_template=TEMPLATE,
        additional_special_tokens=[START], model_max_length=LONGEST,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def token_ids(vocabulary: int, count: int, row: int) -> NDArray[np.int64]:
    """[count] tokens of the prompt with that number, none of them special, from counters."""
    first = 3
    drawn = bits(SEED, "gpu tokens", row, np.arange(count))
    return (drawn % np.uint64(vocabulary - first)).astype(np.int64) + first


def text_of(count: int, row: int, part: int) -> str:
    """A text of so many tokens: letters from counters. part: 0 of a question, 1 of its answer."""
    drawn = bits(SEED, "gpu letters", row, part, np.arange(count))
    return "".join(LETTERS[int(number)] for number in drawn % np.uint64(len(LETTERS)))


def pack_lengths(pack: int, tokens: int) -> NDArray[np.int64]:
    """[rows] tokens of the rows of an update of about so many tokens in all: from 64 (of a small
    pack an quarter) to a whole pack, evenly by their logarithms, mixed. Every update has the same.
    """
    shortest = min(64, pack // 4)
    mean = (pack - shortest) / np.log(pack / shortest)
    count = max(2, round(tokens / mean))
    even = np.exp(np.linspace(np.log(shortest), np.log(pack), count))
    return np.round(even).astype(np.int64)[permutation(count, SEED, "gpu rows", pack)]


def question_lengths(session: Session, count: int) -> NDArray[np.int64]:
    """[count] tokens of prompts, template included, evenly between the session's fewest and most,
    mixed.
    """
    fewest, most = sizes_of(session).questions
    even = np.linspace(fewest, most, count).round().astype(np.int64)
    return even[permutation(count, SEED, "gpu questions", count)]


def asked(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """[rows] tokens of the questions in rows of these lengths: a quarter of their letters."""
    return np.maximum(1, (lengths - TEMPLATE_TOKENS) // 4)


def write_conversations(to: Path, lengths: NDArray[np.int64]) -> Path:
    """Rows of so many tokens each, template included."""
    answered = lengths - TEMPLATE_TOKENS - asked(lengths)
    return _write(to, asked(lengths), answered)


def write_questions(to: Path, lengths: NDArray[np.int64]) -> Path:
    """Rows whose prompts have so many tokens each, template included; answers are one letter."""
    return _write(to, lengths - (TEMPLATE_TOKENS - len("]\n")), np.ones_like(lengths))


def _write(to: Path, questions: NDArray[np.int64], answers: NDArray[np.int64]) -> Path:
    to.parent.mkdir(parents=True, exist_ok=True)
    with to.open("w", encoding="utf-8") as file:
        for row, (question, answer) in enumerate(zip(questions, answers, strict=True)):
            texts = {"question": text_of(question, row, 0), "answer": text_of(answer, row, 1)}
            file.write(json.dumps(texts) + "\n")
    return to


def described(session: Session) -> dict[str, Any]:
    """The work in words and numbers, for the file of results."""
    return {
        "models": {name: f"{IDS[name]}, random weights" for name in IDS},
        "training rows": "64 tokens to a whole pack, evenly by logarithm; a quarter is question",
        "prompts": "GSM8K shape: evenly from fewest to most tokens, 100 on average",
        "answers": f"end at one token of {ENDS}, 146 on average, at most new_tokens",
        "sizes": asdict(sizes_of(session)),
    }
