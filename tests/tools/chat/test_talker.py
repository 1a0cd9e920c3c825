"""An answer is what the model says, token by token, and the conversation is remembered."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.made_run import TOKENIZER
from postgrad.core.errors import UsageError
from postgrad.rollout.settings import SamplingSettings
from postgrad.tools.chat.loaded import load
from postgrad.tools.chat.talker import HALF, Talker, TextStream

GREEDY = SamplingSettings(temperature=0.0, max_new_tokens=8)


@pytest.fixture
def talker(models: Callable[[int], str]) -> Talker:
    chat_model = load(models(0), None, "float32", 4096)
    return Talker(chat_model.engine, chat_model.tokenizer, variables={}, system=None)


def say(talker: Talker, text: str, sampling: SamplingSettings = GREEDY, seed: int = 0) -> str:
    return "".join(talker.answer(text, talker.request(text, sampling, seed)))


def by_transformers(path: str, messages: list[dict[str, str]], most: int) -> str:
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    lm: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    prompt = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    mask = torch.ones_like(prompt)
    out = lm.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=most)
    return tokenizer.decode(out[0, prompt.shape[1] :], skip_special_tokens=True)


def test_two_turns_are_what_plain_transformers_answers(
    talker: Talker, models: Callable[[int], str]
) -> None:
    short = GREEDY.model_copy(update={"max_new_tokens": 4})
    first = say(talker, "a", short)
    messages = [{"role": "user", "content": "a"}]
    assert first == by_transformers(models(0), messages, 4)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "b"}]
    second = say(talker, "b", short)
    assert second == by_transformers(models(0), messages, 4)
    assert talker.messages == [*messages, {"role": "assistant", "content": second}]


def test_a_later_answer_computes_what_is_new_alone(talker: Talker) -> None:
    """And is that of a conversation whose tokens are all computed."""
    question, short = "how many?", GREEDY.model_copy(update={"max_new_tokens": 4})
    say(talker, question, short)
    computed, later = talker._engine.stats.prompt_tokens, talker.request("b", short, 0)
    answer = "".join(talker.answer("b", later))
    assert talker._engine.stats.prompt_tokens - computed < len(later.token_ids) / 2
    talker._engine.sleep()
    assert "".join(talker.answer("b", later)) == answer


def test_the_seed_decides_what_is_drawn(talker: Talker) -> None:
    hot = GREEDY.model_copy(update={"temperature": 1.0})
    answers: list[str] = []
    for seed in (0, 1, 0):
        talker.reset()
        answers.append(say(talker, "hi", hot, seed))
    assert answers[0] == answers[2] != answers[1]


def test_every_token_has_its_piece(talker: Talker) -> None:
    pieces = list(talker.answer("hi", talker.request("hi", GREEDY, 0)))
    assert len(pieces) == GREEDY.max_new_tokens + 1  # and the rest
    assert max(map(len, pieces)) == 1  # a tokenizer of characters
    assert not talker.has_ended


def test_what_is_cut_ends_with_its_next_token_and_is_remembered_so(talker: Talker) -> None:
    pieces = talker.answer("hi", talker.request("hi", GREEDY, 0))
    begun = next(pieces) + next(pieces)
    talker.cut()
    answer = begun + "".join(pieces)
    assert talker.messages[-1] == {"role": "assistant", "content": answer}
    assert len(answer) == 3
    assert not talker.has_ended
    talker.reset()
    assert say(talker, "hi").startswith(answer)


def test_a_conversation_without_room_is_refused_and_stays_as_it_was(talker: Talker) -> None:
    with pytest.raises(UsageError, match=r"has 69 tokens, the limit is 64"):
        talker.request("x" * 50, GREEDY, 0)
    assert talker.messages == []
    assert say(talker, "hi")


def test_an_answer_takes_the_room_that_is_left(talker: Talker) -> None:
    request = talker.request("x" * 40, SamplingSettings(max_new_tokens=512), 0)
    assert len(request.token_ids) + request.sampling.max_new_tokens == 64


def test_what_the_tokenizer_cannot_write_is_refused(talker: Talker) -> None:
    with pytest.raises(UsageError, match="the model cannot read this"):
        talker.request("é", GREEDY, 0)


@given(st.text())
def test_pieces_are_whole_characters_and_together_the_text(text: str) -> None:
    """The tokenizer has a token for each byte: most characters come in several."""
    ids = TOKENIZER.encode(text).ids
    stream = TextStream(lambda tokens: TOKENIZER.decode(tokens, skip_special_tokens=True))
    pieces = [stream.add(ids[: place + 1]) for place in range(len(ids))]
    if HALF not in text:
        assert not any(HALF in piece for piece in pieces)
        assert "".join(pieces) == text
    assert "".join(pieces) + stream.end(text) == text


def byte_fallback() -> Tokenizer:
    """As of Llama 2: a token for each byte, and a decoder that joins them where they are UTF-8."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for text in ("▁", "▁a", "▁the", "b", "é", "日"):
        vocabulary[text] = len(vocabulary)
    tokenizer: Any = Tokenizer(BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return tokenizer


FALLBACK = byte_fallback()


@given(st.lists(st.integers(0, FALLBACK.get_vocab_size() - 1), max_size=20))
def test_bytes_that_are_no_text_end_no_conversation(ids: list[int]) -> None:
    """tokenizers' DecodeStream raises there."""
    stream = TextStream(lambda tokens: FALLBACK.decode(tokens, skip_special_tokens=True))
    pieces = [stream.add(ids[: place + 1]) for place in range(len(ids))]
    full_text = FALLBACK.decode(ids, skip_special_tokens=True)
    shown = "".join(pieces)
    assert shown + stream.end(full_text) == (full_text if full_text.startswith(shown) else shown)


def test_bytes_that_never_become_a_character_are_shown_at_the_end() -> None:
    ids = TOKENIZER.encode("aé").ids[:-1]
    decode = lambda tokens: TOKENIZER.decode(tokens)  # noqa: E731
    stream = TextStream(decode)
    assert [stream.add(ids[:1]), stream.add(ids), stream.end(decode(ids))] == ["a", "", HALF]
