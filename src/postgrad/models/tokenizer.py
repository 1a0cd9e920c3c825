"""Tokenizers of models, whether two models have the same one, and what their tokens spell."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer

from postgrad.core.errors import UsageError
from postgrad.core.hub import pretrained
from postgrad.models import files
from postgrad.models.config import reading, require_directory

NO_TEXT = b"\xff"  # what a token that is no text spells: a byte that UTF-8 never has
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
# The printable bytes are themselves in tokens of byte-level BPE, the others characters from 256 on.
_SHOWN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = [byte for byte in range(256) if byte not in _SHOWN]
BYTE_OF = {chr(b): b for b in _SHOWN} | {chr(256 + n): b for n, b in enumerate(_HIDDEN)}


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a model, checked: an end-of-sequence token, offsets. Of an adapter its own,
    or where its directory has none its base's.
    """
    require_directory(path, "tokenizer")
    if files.is_adapter(path) and not files.has_tokenizer(Path(path)):
        path = files.weights_source(path)
    wanted = "name a directory with tokenizer.json, or a hub id"
    with reading(f"no tokenizer at {path}", wanted):
        if Path(path).is_dir():
            files.require_tokenizer_files(Path(path))
        name, at = pretrained(path)
        tokenizer: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **at)
        size = len(tokenizer)
    # It would warn once of a text over model_max_length, "indexing errors" to come: rows over
    # data.max_len are counted in their account, and the limit of positions is told at the start.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    if not tokenizer.is_fast or not size:
        raise UsageError(
            f"the tokenizer at {path} gives no offsets, which loss masks need: convert it "
            "to tokenizer.json"
        )
    if tokenizer.eos_token_id is None:
        raise UsageError(
            f"the tokenizer at {path} has no end-of-sequence token: no answer could ever end; set "
            "eos_token in tokenizer_config.json"
        )
    return tokenizer


def require_same_tokens(
    path: str,
    key: str,
    policy_tokenizer: Any,
    *,
    remedy: str = "take a model of the same family",
) -> None:
    """Raises UsageError where the model at `path`, which will read the policy's token ids, has
    another vocabulary. key: the recipe's key that names the model.
    """
    tokenizer = load_tokenizer(path)
    if tokenizer.get_vocab() != policy_tokenizer.get_vocab():
        raise UsageError(
            f"{key}: {path} has another tokenizer than the policy ({len(tokenizer)} and "
            f"{len(policy_tokenizer)} tokens): the policy's token ids mean other text to it; "
            f"{remedy}"
        )


@dataclass(frozen=True, slots=True)
class SpelledText:
    """The bytes of a text, and where among them each of its tokens ends."""

    text: bytes
    ends: NDArray[np.int64]  # [tokens] never falling

    def without_first(self) -> "SpelledText":
        """The text without its first byte."""
        return SpelledText(self.text[1:], (self.ends - 1).clip(0))


@dataclass(frozen=True, slots=True)
class Spelling:
    """The bytes that each token of a tokenizer stands for. Bytes and not characters: a token of
    byte-level BPE, or of a byte alone, may be a part of a character.
    """

    tokens: tuple[bytes, ...]  # by id; NO_TEXT of special tokens
    drops_space: bool  # its decoder drops the space before a text's first word, as SentencePiece's

    @classmethod
    def of(cls, tokenizer: Any) -> "Spelling":
        """Raises UsageError where the decoder does not join tokens byte by byte."""
        steps = list(_steps(json.loads(tokenizer.backend_tokenizer.to_str())["decoder"]))
        kinds = {step["type"] for step in steps}
        odd = kinds - {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip"}
        if odd or not kinds:
            raise UsageError(
                f"the tokenizer at {tokenizer.name_or_path} joins tokens to text by "
                f"{', '.join(sorted(odd)) or 'nothing'}, so that a token has no bytes of its own: "
                "byte-level BPE and SentencePiece have them"
            )
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        tokens = [NO_TEXT] * (max(vocabulary.values()) + 1)
        for token, number in vocabulary.items():
            tokens[number] = _spelled(token, steps)
        for number, added in tokenizer.added_tokens_decoder.items():
            tokens[number] = NO_TEXT if added.special else added.content.encode()
        for number in tokenizer.all_special_ids:
            tokens[number] = NO_TEXT
        return cls(tuple(tokens), any(map(_drops_space, steps)))

    def spelled(self, ids: NDArray[np.int32]) -> SpelledText:
        """What ids spell, with the space that a decoder would drop."""
        listed: list[int] = ids.tolist()
        parts = [self.tokens[n] if n < len(self.tokens) else NO_TEXT for n in listed]
        ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        return SpelledText(b"".join(parts), ends)

    def decoded(self, ids: NDArray[np.int32]) -> SpelledText:
        """What ids spell, as the decoder gives it."""
        spelled = self.spelled(ids)
        dropped = self.drops_space and spelled.text.startswith(b" ")
        return spelled.without_first() if dropped else spelled


def _steps(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """The decoders of a sequence, in order."""
    if decoder is not None and decoder["type"] == "Sequence":
        for each in decoder["decoders"]:
            yield from _steps(each)
    elif decoder is not None:
        yield decoder


def _spelled(token: str, steps: list[dict[str, Any]]) -> bytes:
    for step in steps:
        if step["type"] == "ByteLevel" and all(char in BYTE_OF for char in token):
            return bytes(BYTE_OF[char] for char in token)
        if step["type"] == "ByteFallback" and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        if step["type"] == "Metaspace":
            token = token.replace(step["replacement"], " ")
        if step["type"] == "Replace" and "String" in step["pattern"]:
            token = token.replace(step["pattern"]["String"], step["content"])
    return token.encode()


def _drops_space(step: dict[str, Any]) -> bool:
    stripped = step["type"] == "Strip" and step["content"] == " " and step["start"] > 0
    return stripped or (step["type"] == "Metaspace" and step["prepend_scheme"] != "never")
