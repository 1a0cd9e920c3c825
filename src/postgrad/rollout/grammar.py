"""Answers that follow a grammar: which tokens may come next in a sample.

The library is llguidance, which vLLM has too: it reads regular expressions, JSON schemas and Lark
grammars, and compares them with the bytes of tokens, so that a token may cross what a grammar
divides. Where only one text can follow, the tokenizer's own division of it is allowed and no other.
What a sample may go on with depends on the tokens that it has alone. llguidance limits the memory
and the work of a grammar, and of each token: a recipe's grammar cannot hold up a run.
"""

import importlib.util
import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from postgrad.core.errors import RunError, UsageError

Grammar = tuple[str, str]  # kind, one of KINDS, and text
KINDS = ("regex", "json_schema", "lark")
ALL = -1  # 32 tokens, all of them allowed
DEAD_END = "NoExtension"  # how llguidance's message begins where no token continues a sample
LONGEST_MESSAGE = 300  # characters of a message, which may repeat the grammar


def compiled(grammar: Grammar) -> str:
    """A grammar as llguidance's matchers take it. Raises ValueError, which says where in the
    grammar and what is wrong, or that llguidance is missing.
    """
    if importlib.util.find_spec("llguidance") is None:
        raise ValueError("needs the package llguidance: pip install 'postgrad[grammar]'")
    from llguidance import LLMatcher

    read = {
        "regex": LLMatcher.grammar_from_regex,
        "json_schema": LLMatcher.grammar_from_json_schema,
        "lark": LLMatcher.grammar_from_lark,
    }
    kind, text = grammar
    compiled_text = read[kind](text)
    if message := LLMatcher.validate_grammar(compiled_text):
        raise ValueError(f"no grammar: {' '.join(message.split())[:LONGEST_MESSAGE]}")
    return compiled_text


def lark_of(grammar: Grammar, ends: Iterable[int]) -> str:
    """A grammar of any kind as a Lark grammar, behind which one of the tokens `ends` may come: for
    a library's user who knows a single end of an answer. `start:` is its first line, by which
    llguidance recognises Lark.
    """
    kind, text = grammar
    if kind == "json_schema":
        answer = f"%json {text}"
    else:
        if kind == "regex":  # in the words of Lark, as llguidance quotes them
            text = json.loads(compiled(grammar))["grammars"][0]["lark_grammar"]
        answer = f"%lark {{\n{text}\n}}"
    numbers = ",".join(map(str, ends))
    return f"start: answer{f' <[{numbers}]>?' if numbers else ''}\nanswer: {answer}\n"


class Grammars:
    """Grammars over a model's tokens. Nothing is compiled before the first request with one."""

    def __init__(self, tokenizer: Any, eos: Sequence[int], vocabulary: int) -> None:
        """eos: the tokens that end an answer; all are allowed where the grammar may end.
        vocabulary: how many tokens have logits.
        """
        self._tokenizer = tokenizer
        self._eos = list(eos)
        self._vocabulary = vocabulary
        self._executor: Any = None
        self._tokens: Any = None  # the tokenizer as llguidance reads it
        self._starts: dict[Grammar, Any] = {}  # matchers that have read nothing

    @property
    def _size(self) -> int:
        return max(self._vocabulary, len(self._tokenizer))

    @property
    def words(self) -> int:
        """W: integers of 32 bits that have a bit for every token."""
        return -(-self._size // 32)

    def begin(self, grammar: Grammar, written: NDArray[np.int32] | None) -> Any:
        """The matcher of a sample that has the tokens `written`; None: none. Raises UsageError
        where the tokenizer cannot be read, or writes no answer of the grammar.
        """
        if grammar not in self._starts:
            self._starts[grammar] = self._start(grammar)
        matcher = self._starts[grammar].deep_copy()
        if written is not None:
            _read(matcher, written.tolist())
        return matcher

    def _start(self, grammar: Grammar) -> Any:
        import torch
        from llguidance import LLExecutor, LLMatcher
        from llguidance.hf import from_tokenizer

        kind, text = grammar
        if self._tokens is None:
            try:
                self._tokens = from_tokenizer(self._tokenizer, self._size, self._eos)
            except ValueError as error:
                raise UsageError(
                    f"rollout.{kind} needs a fast tokenizer whose tokens are bytes of text (with "
                    f"the decoder ByteLevel or ByteFallback): {error}"
                ) from error
            self._executor = LLExecutor(torch.get_num_threads())
        matcher = LLMatcher(self._tokens, compiled(grammar), log_level=0)
        if not self.allow([matcher], [0], np.zeros((1, self.words), np.int32))[0]:
            raise UsageError(
                f"rollout.{kind}: no token of this tokenizer begins what it allows: "
                f"{text[:LONGEST_MESSAGE]!r}"
            )
        return matcher

    def followed(self, grammar: Grammar, tokens: NDArray[np.int32]) -> int:
        """How many of a turn's `tokens` its grammar allows: all, or those before a dead end, at
        which another engine went on. Raises RunError for a token that it forbids elsewhere.
        """
        matcher = self.begin(grammar, None)
        ended = len(tokens) > 0 and int(tokens[-1]) in self._eos
        count = int(matcher.try_consume_tokens(tokens[: len(tokens) - ended].tolist()))
        if count == len(tokens) - ended and (not ended or matcher.is_accepting()):
            return len(tokens)
        matcher = self.begin(grammar, tokens[:count])
        if self.allow([matcher], [0], np.zeros((1, self.words), np.int32))[0]:
            raise RunError(
                f"a sample does not follow its grammar: token {count} of its turn is "
                f"{int(tokens[count])}, which rollout.{grammar[0]} does not allow there"
            )
        return count

    def follow(
        self,
        matchers: Sequence[Any],
        tokens: Sequence[int],
        rows: Sequence[int],
        allowed: NDArray[np.int32],
    ) -> list[bool]:
        """The next token of each sample, then as `allow`. Raises RunError for a token that the
        grammar does not allow.
        """
        for matcher, token in zip(matchers, tokens, strict=True):
            _read(matcher, [token])
        return self.allow(matchers, rows, allowed)

    def allow(
        self, matchers: Sequence[Any], rows: Sequence[int], allowed: NDArray[np.int32]
    ) -> list[bool]:
        """Write which tokens may come next in a sample into its row of `allowed` [N, W], a bit
        each, the lowest first. Returns whether any may, the end of the answer included. Raises
        RunError where llguidance gave up.
        """
        pairs = list(zip(matchers, rows, strict=True))
        if pairs:
            self._executor.unsafe_compute_mask_ptr(
                pairs, allowed.ctypes.data, allowed.strides[0], len(allowed)
            )
        return [not matcher.is_error() or _goes_on(matcher.get_error()) for matcher in matchers]


def _read(matcher: Any, tokens: list[int]) -> None:
    if not matcher.consume_tokens(tokens):
        message = matcher.get_error().partition("\n")[0]
        raise RunError(f"a sample does not follow its grammar: {message}")


def _goes_on(message: str) -> bool:
    """False: no token may come next. Raises RunError for any other message of llguidance."""
    if message.startswith(DEAD_END):
        return False
    first = message.partition("\n")[0]
    raise RunError(f"llguidance cannot go on with a sample's grammar, make it simpler: {first}")
