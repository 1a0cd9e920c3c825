"""Makes small models and tokenizers from nothing but a recipe, as a Hugging Face directory."""

import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

from postgrad.core.errors import UsageError
from postgrad.models.save import save_model
from postgrad.models.settings import ModelInit, TokenizerInit

LONGEST_WORD = 1000  # letters
_LONG_WORD = re.compile(rf"\S{{{LONGEST_WORD + 1},}}")
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PRINTABLE = "\n" + "".join(c for c in map(chr, range(32, 127)))
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_fresh(init: ModelInit, texts: Iterable[str], seed: int, to: Path) -> None:
    """Writes config, weights, tokenizer, chat template and generation config to `to`.

    The same arguments give the same bytes. Weights are float32, drawn from `seed`. The end of a
    turn `<|im_end|>` is the end-of-sequence token, and padding has another token: with one token
    for both, score heads that look for the last real token would find the wrong one. `to` is
    complete or absent. Raises UsageError where a text holds a character that a "characters"
    tokenizer lacks, or the model's type would lose some, RunError where the disk fails.
    """
    tokenizer = _wrapped(_tokenizer(init.tokenizer, texts), init.max_position_embeddings)
    config = _config(init, tokenizer)
    _require_whole_texts(init, config, tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        lm: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    lm.generation_config = GenerationConfig(**ids)
    save_model(lm, tokenizer, to)


def _require_whole_texts(init: ModelInit, config: Any, tokenizer: Any) -> None:
    """Raises UsageError where transformers reads the tokenizer back as one that loses characters:
    of some types it takes a class of their own, whatever the files say, and Qwen2Tokenizer drops
    the blanks of a tokenizer of characters.
    """
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        read: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    text = "".join([*PRINTABLE, *init.tokenizer.phrases])
    if read.decode(read(text, add_special_tokens=False).input_ids) != text:
        raise UsageError(
            f'model.init.tokenizer.kind = "{init.tokenizer.kind}": transformers reads tokenizers '
            f'of type "{init.type}" as {type(read).__name__}, which loses characters of this one: '
            'take kind = "bpe", or model.init.type = "qwen3"'
        )


def _config(init: ModelInit, tokenizer: Any) -> Any:
    more: dict[str, Any] = {}
    if init.type == "gemma3":
        more["layer_types"] = ["full_attention"] * init.num_hidden_layers
    return AutoConfig.for_model(
        "gemma3_text" if init.type == "gemma3" else init.type,
        vocab_size=len(tokenizer),
        hidden_size=init.hidden_size,
        intermediate_size=init.intermediate_size,
        num_hidden_layers=init.num_hidden_layers,
        num_attention_heads=init.num_attention_heads,
        num_key_value_heads=init.num_key_value_heads,
        head_dim=init.hidden_size // init.num_attention_heads,
        max_position_embeddings=init.max_position_embeddings,
        tie_word_embeddings=init.tie_word_embeddings,
        rope_parameters=_rope(init),
        initializer_range=init.initializer_range,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **more,
    )


def _rope(init: ModelInit) -> dict[str, Any]:
    """rope_parameters; Gemma 3 has a table for each kind of layer."""
    plain = {"rope_type": "default", "rope_theta": init.rope_theta}
    return {"full_attention": plain, "sliding_attention": plain} if init.type == "gemma3" else plain


def _tokenizer(init: TokenizerInit, texts: Iterable[str]) -> Tokenizer:
    tokenizer = _characters(init, texts) if init.kind == "characters" else _bpe(init, texts)
    tokenizer.add_special_tokens([PAD, START, END])
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in init.phrases])
    return tokenizer


def _characters(init: TokenizerInit, texts: Iterable[str]) -> Tokenizer:
    """Printable ASCII and newline, one token each; phrases are added as whole tokens."""
    printable = set(PRINTABLE)
    for number, text in enumerate(texts):
        foreign = sorted(set(text) - printable)
        if foreign:
            raise UsageError(
                f"text {number} of the training data holds {foreign[0]!r}, which a tokenizer of "
                "characters lacks (printable ASCII and newline): take "
                'model.init.tokenizer.kind = "bpe"'
            )
    vocabulary = {PAD: 0, START: 1, END: 2}
    vocabulary |= {c: i for i, c in enumerate(PRINTABLE, len(vocabulary))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unknown|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    return tokenizer


def _bpe(init: TokenizerInit, texts: Iterable[str]) -> Tokenizer:
    """Byte-level BPE; digits stand alone, so that numbers are read digit by digit."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=init.vocab_size - len(init.phrases),
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_with_roles(texts), trainer)
    return tokenizer


def _with_roles(texts: Iterable[str]) -> Iterator[str]:
    """The training texts, with the roles that the template writes before every message added often
    enough to become few tokens. Long words are cut: the trainer's time grows with their square.
    """
    yield from ("system\n", "user\n", "assistant\n") * 100
    for text in texts:
        start = 0
        for word in _LONG_WORD.finditer(text):
            for end in range(word.start() + LONGEST_WORD, word.end(), LONGEST_WORD):
                yield text[start:end]
                start = end
        yield text[start:]


def _wrapped(tokenizer: Tokenizer, max_len: int) -> Any:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        chat_template=TEMPLATE,
        model_max_length=max_len,
        clean_up_tokenization_spaces=False,
    )
