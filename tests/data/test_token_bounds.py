"""The fewest tokens of a text: never more than a tokenizer makes, and enough to drop a giant."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from postgrad.core.errors import UsageError
from postgrad.data import templates, token_bounds
from postgrad.data.conversations import load_conversations
from postgrad.data.pairs import load_labelled, load_pairs
from postgrad.data.prompts import load_prompts
from postgrad.data.settings import DataSettings, PairSettings
from postgrad.data.step_tokens import load_steps
from postgrad.data.token_bounds import LONG, characters_of_a_token
from postgrad.models.fresh import _bpe, _wrapped
from postgrad.models.settings import TokenizerInit

WriteRows = Callable[..., str]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ("abab", "a", "\u00e9", "e\u0301", "\u1f82", "\u03b1\u0313\u0300\u0345", " ", "\n" * 9)
MARKS = ("<|im_end|>", "<end>", "\u2581", "\U0001f600", "\u0120")
GIANT = "ab" * LONG


def of_words(model: Any, normalizer: Any = None, split: Any = None) -> Any:
    bare = Tokenizer(model)
    if normalizer is not None:
        bare.normalizer = normalizer
    if split is not None:
        bare.pre_tokenizer = split
    return PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<end>")


def of_bytes(*, normalizer: Any = None, split: Any = None, **how: Any) -> Any:
    """As Gemma's: characters, a merged word, and bytes for all other characters."""
    tokens = [*BYTES, "a", "b", "ab", "abab", "\u2581", "\u2581ab", "\u00e9"]
    merges = [("a", "b"), ("ab", "ab"), ("\u2581", "ab")]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    model = models.BPE(vocabulary, merges, **{"byte_fallback": True, **how})
    return of_words(model, normalizer, split)


def of_byte_levels(*, normalizer: Any = None, strip: bool = False) -> Any:
    """As Qwen's, trained on little. strip: a special token takes in the white space around it."""
    trained = _bpe(TokenizerInit(kind="bpe", vocab_size=300), ["abab abab \u00e9\u1f82"] * 50)
    if normalizer is not None:
        trained.normalizer = normalizer
    if strip:
        trained.add_special_tokens([AddedToken("<end>", lstrip=True, rstrip=True)])
    return _wrapped(trained, 2048)


SPACES = normalizers.Replace(" ", "\u2581")
BOUNDED = {
    "bytes": of_bytes(),
    "bytes, spaces": of_bytes(normalizer=SPACES, split=pre_tokenizers.Split(" ", "isolated")),
    "bytes, composed": of_bytes(normalizer=normalizers.Sequence([normalizers.NFC(), SPACES])),
    "byte levels": of_byte_levels(),
    "byte levels, white space in tokens": of_byte_levels(strip=True),
    "byte levels, composed": of_byte_levels(normalizer=normalizers.NFC()),
}
UNBOUNDED = {
    "words": of_words(
        models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"), split=pre_tokenizers.Whitespace()
    ),
    "pieces of words": of_words(models.WordPiece({"a": 0, "<unk>": 1}, unk_token="<unk>")),
    "no bytes": of_words(models.BPE({"a": 0, "b": 1}, [])),
    "characters that are left out": of_bytes(normalizer=normalizers.Strip()),
    "a text that is left out": of_bytes(normalizer=normalizers.Replace("ab", "")),
    "a pattern": of_bytes(normalizer=normalizers.Replace(Regex("ab+"), "ab")),
    "pieces that are left out": of_bytes(split=pre_tokenizers.Split("ab", "removed")),
}


@pytest.mark.parametrize("name", BOUNDED)
@given(
    st.lists(st.sampled_from((*PIECES, *MARKS)) | st.text(max_size=5), max_size=40)
    | st.lists(st.sampled_from(("abab", "a", " ", "<end>", "\n")), max_size=40)
)
def test_no_text_has_more_characters_than_its_tokens_can_stand_for(
    name: str, pieces: list[str]
) -> None:
    tokenizer = BOUNDED[name]
    bounds = characters_of_a_token(tokenizer)
    assert bounds is not None
    text = "".join(pieces)
    longest = bounds[0] if text.isascii() else bounds[1]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert token_bounds._visible(text) <= longest * len(ids)


def test_a_text_that_is_composed_is_counted_as_its_longest_form_unless_it_is_ascii() -> None:
    plain, composed = BOUNDED["byte levels"], BOUNDED["byte levels, composed"]
    bounds = characters_of_a_token(plain)
    assert bounds is not None
    assert bounds[0] == bounds[1]
    assert characters_of_a_token(composed) == (bounds[0], 4 * bounds[1])


@pytest.mark.parametrize("name", UNBOUNDED)
def test_nothing_is_known_where_a_token_may_stand_for_any_text(name: str) -> None:
    assert characters_of_a_token(UNBOUNDED[name]) is None


@pytest.fixture
def longest_encoded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The lengths of all texts that were tokenised."""
    lengths: list[int] = [0]

    def encode(tokenizer: Any, texts: Any, **options: Any) -> Any:
        lengths.extend(map(len, texts))
        return plain(tokenizer, texts, **options)

    plain = templates.encode
    monkeypatch.setattr(templates, "encode", encode)
    return lengths


def chat(question: str, *answers: str) -> list[dict[str, str]]:
    turns = [{"role": "user", "content": question}]
    for answer in answers:
        turns += [{"role": "assistant", "content": answer}, {"role": "user", "content": "more"}]
    return turns[:-1]


def load(kind: str, path: str, **more: Any) -> Any:
    tokenizer = BOUNDED["byte levels"]
    if kind == "prompts":
        settings = DataSettings(path=path, **more)
        return load_prompts(settings, tokenizer, max_prompt_tokens=settings.max_len)
    if kind in ("conversations", "texts"):
        return load_conversations(DataSettings(path=path, **more), tokenizer)
    reading = {"pairs": load_pairs, "labels": load_labelled, "steps": load_steps}[kind]
    return reading(PairSettings(path=path, **more), tokenizer)


FINE = {
    "prompts": {"question": "a", "answer": "b"},
    "conversations": {"question": "a", "answer": "b"},
    "texts": {"text": "ab"},
    "pairs": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "labels": {"prompt": "a", "completion": "b", "label": True},
    "steps": {"prompt": "a", "completions": ["b", "c"], "labels": [True, False]},
}
LARGE = {
    "prompts": [{"question": GIANT, "answer": "b"}],
    "conversations": [{"question": "a", "answer": GIANT}, {"question": GIANT, "answer": "b"}],
    "texts": [{"text": GIANT}],
    "pairs": [
        {"prompt": "a", "chosen": "b", "rejected": GIANT},
        {"prompt": "a", "chosen": GIANT, "rejected": "b"},
    ],
    "labels": [{"prompt": "a", "completion": GIANT, "label": False}],
    "steps": [{"prompt": "a", "completions": ["b", GIANT], "labels": [True, False]}],
}


@pytest.mark.parametrize("kind", FINE)
def test_a_giant_row_is_dropped_without_being_tokenised(
    kind: str, write_rows: WriteRows, longest_encoded: list[int]
) -> None:
    path = write_rows([FINE[kind], *LARGE[kind], FINE[kind]])
    more = {"text": "text"} if kind == "texts" else {}
    loaded = load(kind, path, max_lost_fraction=1.0, **more)
    assert loaded.account.fates == {"kept": 2, "too_long": len(LARGE[kind])}
    assert loaded.account.examples["too_long"] == f"{path}:2"
    assert [record.row for record in loaded.all()] == [0, 1 + len(LARGE[kind])]
    assert max(longest_encoded) < 1000
    with pytest.raises(UsageError, match=rf"{path}:2: .*row 1 has at least \d+ tokens"):
        load(kind, path, on_too_long="error", **more)


def test_a_giant_row_that_is_used_in_part_is_tokenised(
    write_rows: WriteRows, longest_encoded: list[int]
) -> None:
    path = write_rows([FINE["conversations"], LARGE["conversations"][0]])
    cut = load("conversations", path, max_len=64, on_too_long="truncate")
    assert cut.account.fates == {"kept": 1, "truncated": 1}
    pieces = write_rows([LARGE["texts"][0]])
    split = load("texts", pieces, text="text", on_too_long="split", max_len=4096)
    assert split.account.fates == {"kept": 1}
    assert max(longest_encoded) >= len(GIANT)


def test_a_giant_answer_behind_a_short_one_leaves_the_text_of_the_short_one(
    write_rows: WriteRows, longest_encoded: list[int]
) -> None:
    """Where the template writes an answer differently once more follow, each has a text."""
    thinking = chat("a", "<think>b</think>c", GIANT)
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content if loop.last or m.role == "
        "'user' else m.content.split('</think>')[-1] }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    path = write_rows([{"messages": thinking}])
    loaded = load("conversations", path, chat_template=template, max_lost_fraction=1.0)
    assert loaded.account.fates == {"truncated": 1}
    (kept,) = loaded.all()
    assert (
        BOUNDED["byte levels"]
        .decode(kept.token_ids[kept.loss_mask].tolist())
        .startswith("<think>b</think>c")
    )
    assert max(longest_encoded) > len(GIANT)


def test_the_first_row_of_a_fate_is_the_example_whatever_order_they_are_counted_in(
    write_rows: WriteRows,
) -> None:
    long = {"question": "a", "answer": "ab " * 2000}
    path = write_rows([FINE["conversations"], long, LARGE["conversations"][0]])
    loaded = load("conversations", path, max_lost_fraction=1.0)
    assert loaded.account.fates == {"kept": 1, "too_long": 2}
    assert loaded.account.examples == {"kept": f"{path}:1", "too_long": f"{path}:2"}
    assert json.loads(json.dumps(loaded.account.to_json()))["too_long"] == 2
