"""Grammars over a tokenizer's tokens, apart from any engine."""

import importlib.util
import json
import random
import tomllib
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from postgrad.core.errors import RunError, UsageError
from postgrad.rollout.grammar import KINDS, Grammars, compiled, lark_of
from postgrad.rollout.settings import SamplingSettings

NAMES = ["<pad>", "<eos>", "<end>", "<turn>", *'abcd[]{}",:/\\012Ġ', "ab", "[[", '":', "cd"]
EOS, END, TURN = 1, 2, 3
SPACE = NAMES.index("Ġ")
GRAMMARS = [
    ("regex", "(ab|c){1,3}d?"),
    ("regex", r"a/b\\?|c\/+"),
    ("json_schema", '{"type": "array", "items": {"enum": [1, 20, "ab"]}}'),
    ("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}'),
    ("lark", 'start: "[" start? "]" | B\nB: /[ab]{2}/ // a remark }'),
]


@pytest.fixture(scope="module")
def tokenizer():
    raw = Tokenizer(models.BPE({name: i for i, name in enumerate(NAMES)}, []))
    raw.decoder = decoders.ByteLevel()
    ends = ["<end>", "<turn>"]
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", extra_special_tokens=ends
    )


def allowed_after(matcher):
    """Numbers of the tokens that llguidance lets follow."""
    octets = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    bits = np.unpackbits(octets, bitorder="little")[: len(NAMES)]
    return np.flatnonzero(bits).tolist()


def ids(text):
    return np.array([NAMES.index(letter) for letter in text], np.int32)


@pytest.mark.parametrize("grammar", GRAMMARS, ids=[kind + text[:8] for kind, text in GRAMMARS])
def test_ends_inside_a_grammar_allow_what_several_ends_of_sequence_do(grammar, tokenizer):
    """What vLLM is sent, for a tokenizer with one end, against the same grammar for three."""
    from llguidance import LLMatcher, grammar_from
    from llguidance.hf import from_tokenizer

    several = from_tokenizer(tokenizer, len(NAMES), [EOS, END, TURN])
    single = from_tokenizer(tokenizer, len(NAMES))
    sent = grammar_from("grammar", lark_of(grammar, [END, TURN]))  # as vLLM reads it
    assert LLMatcher.validate_grammar(sent, single) == ""
    ended = 0
    for number in range(20):
        draw = random.Random(number)
        plain = LLMatcher(several, compiled(grammar), log_level=0)
        inside = LLMatcher(single, sent, log_level=0)
        for _ in range(12):
            tokens = allowed_after(plain)
            assert allowed_after(inside) == tokens
            ended += EOS in tokens
            tokens = [token for token in tokens if token > TURN]
            if not tokens:
                break
            token = draw.choice(tokens)
            assert plain.consume_token(token)
            assert inside.consume_token(token)
    assert ended


def test_a_grammar_with_no_other_ends_is_read_as_lark(tokenizer):
    assert lark_of(("lark", 'start: "a"'), []) == 'start: answer\nanswer: %lark {\nstart: "a"\n}\n'


@pytest.mark.parametrize(
    ("regex", "text", "count"),
    [("a+", "aaa", 3), ("abq|cd", "ab<eos>", 2), ("ab", "ab<eos>", 3), ("ab", "a", 1)],
    ids=["all", "dead end", "ended", "open"],
)
def test_tokens_are_followed_up_to_a_dead_end(regex, text, count, tokenizer):
    grammars = Grammars(tokenizer, [EOS, END], len(NAMES))
    tokens = ids(text.removesuffix("<eos>")).tolist() + [EOS] * text.endswith("<eos>")
    assert grammars.followed(("regex", regex), np.array(tokens, np.int32)) == count


def test_a_token_that_is_forbidden_before_any_dead_end_is_an_error(tokenizer):
    grammars = Grammars(tokenizer, [EOS, END], len(NAMES))
    message = rf"token 1 of its turn is {NAMES.index('c')}, which rollout.regex does not allow"
    with pytest.raises(RunError, match=message):
        grammars.followed(("regex", "ab"), ids("ac"))


def test_without_the_package_a_message_names_the_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    message = r"SamplingSettings: regex: needs the package llguidance: pip install 'postgrad\[gra"
    with pytest.raises(UsageError, match=message):
        SamplingSettings(regex="a")
    assert SamplingSettings().filters == ()  # it is asked for where there is a grammar alone


HOSTILE = {
    "too deep": ("regex", "(" * 20_000 + "a" + ")" * 20_000, "invalid regex"),
    "a look-ahead": ("regex", "(?=a)b", "look-around, including look-ahead"),
    "a schema elsewhere": ("json_schema", '{"$ref": "https://example.com/a.json"}', "not fetch"),
    "a schema in a file": ("json_schema", '{"$ref": "file:///etc/passwd"}', "not fetch"),
    "too deep a schema": ("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000, "recursion"),
    "what it cannot do": ("json_schema", '{"not": {"type": "string"}}', "Unimplemented keys"),
    "no rule called start": ("lark", 'begin: "a"', "start"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_in_a_short_message(name):
    kind, text, message = HOSTILE[name]
    with pytest.raises(ValueError, match=message) as refused:
        compiled((kind, text))
    assert len(str(refused.value)) < 400


@pytest.mark.slow
def test_a_grammar_too_costly_for_a_token_ends_the_run_with_its_name(tokenizer):
    """Accepted as a text; the work of its first token is more than llguidance allows."""
    lark = "start: T\nT: " + " & ".join(f"/(.|\\n)*a.{{{n}}}b(.|\\n)*/" for n in range(40, 52))
    grammars = Grammars(tokenizer, [EOS], len(NAMES))
    with pytest.raises(RunError, match="make it simpler"):
        grammars.followed(("lark", lark), ids("abcd" * 40))


def test_json_text_reads_back(tokenizer):
    text = '["ab",20]'
    schema = ("json_schema", GRAMMARS[2][1])
    assert Grammars(tokenizer, [EOS], len(NAMES)).followed(schema, ids(text)) == len(text)
    assert json.loads(text) == ["ab", 20]


@pytest.mark.parametrize("flexible", [True, False])
def test_a_schema_says_whether_json_has_white_space_for_both_engines(flexible, tokenizer):
    schema = {"type": "array", "items": {"type": "integer"}}
    if not flexible:
        schema["x-guidance"] = {"whitespace_flexible": False}
    grammar = ("json_schema", json.dumps(schema))
    for asked in (grammar, ("lark", lark_of(grammar, []))):
        matcher = Grammars(tokenizer, [EOS], len(NAMES)).begin(asked, ids("["))
        assert (SPACE in allowed_after(matcher)) is flexible


def test_the_grammars_of_the_documentation_are_ones():
    page = (Path(__file__).parents[2] / "docs" / "rollout.md").read_text("utf-8")
    blocks = page.partition("## Answers that follow a grammar")[2].split("```toml")[1:4]
    tables = [tomllib.loads(block.partition("```")[0])["rollout"] for block in blocks]
    assert tuple(key for table in tables for key in table) == KINDS
    for kind, table in zip(KINDS, tables, strict=True):
        assert SamplingSettings(**table).filters == (kind,)
