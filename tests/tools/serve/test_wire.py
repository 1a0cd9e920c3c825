"""What goes over the wire: token ids as in training, or a refusal, whatever arrives."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.chat import HERMES, LLAMA, LLAMA_SPECIAL, chat_tokenizer
from postgrad.data.loss_masks import tokenise
from postgrad.data.templates import render_conversation, turn_ends
from postgrad.tools.serve.images import RequestImages
from postgrad.tools.serve.wire import Encoder, Refusal, ServerLimits, parse

TOKENIZER = chat_tokenizer()
LIMITS = ServerLimits(inputs=3, input_tokens=40)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "So."},
    {"role": "user", "content": "Why so?"},
    {"role": "assistant", "content": "It is so."},
]
FAMILIES = {
    "chatml": TOKENIZER,
    "hermes": chat_tokenizer(HERMES),
    "llama": chat_tokenizer(LLAMA, LLAMA_SPECIAL),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_ends_with_the_token_that_ends_its_last_answer(family):
    """As in training, where tokens after the last loss-bearing one are cut."""
    tokenizer = FAMILIES[family]
    request = parse(json.dumps({"inputs": [{"messages": CHAT}]}).encode(), LIMITS)
    (ids,), _ = Encoder(tokenizer, 1000).encode(request.inputs, RequestImages(None))
    rendered = render_conversation(
        tokenizer, CHAT, ends=turn_ends(tokenizer), turns="last", variables={}
    )
    (text_tokens,) = tokenise(tokenizer, [rendered])
    full_ids, mask = text_tokens.ids, text_tokens.mask
    assert ids.tolist() == full_ids[: np.flatnonzero(mask)[-1] + 1].tolist()
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids[:-1]).endswith("It is so.")
    assert ids.dtype == np.int32


WORDS = st.sampled_from(["a", "user", "assistant", "日", "<|im_end|>", "", " "])
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "?"]), "content": WORDS}
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
INPUT = st.one_of(
    st.fixed_dictionaries({"text": WORDS | st.text(max_size=60)}),
    st.fixed_dictionaries({"token_ids": st.lists(st.integers(-2, 110), max_size=50)}),
    st.fixed_dictionaries({"messages": st.lists(MESSAGES, max_size=4)}),
    JSON,
)
BODY = st.fixed_dictionaries({"inputs": st.lists(INPUT, max_size=4)}) | JSON
ENCODER = Encoder(TOKENIZER, LIMITS.input_tokens)


@given(BODY.map(lambda body: json.dumps(body).encode()) | st.binary(max_size=60))
def test_whatever_arrives_becomes_tokens_within_the_limits_or_is_refused(body):
    refusal, token_lists = None, []
    try:
        request = parse(body, LIMITS)
        token_lists, _ = ENCODER.encode(request.inputs, RequestImages(None))
    except Refusal as error:
        refusal = error
    if refusal is not None:
        assert refusal.status in (400, 422)
        assert set(refusal.body["error"]) == {"code", "message"}
        return
    assert len(token_lists) == len(request.inputs) <= 3
    for ids in token_lists:
        assert 0 < len(ids) <= 40
        assert ids.min() >= 0
        assert ids.max() < len(TOKENIZER)
