"""Samples of the built-in engine that follow a grammar."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from postgrad.core.errors import UsageError
from postgrad.rollout.engine import Request, generate
from postgrad.rollout.local import step as step_module
from postgrad.rollout.local.engine import LocalEngine
from postgrad.rollout.local.rows import Rows
from postgrad.rollout.local.sampler import Kind, Knobs, sample
from postgrad.rollout.local.step import StepShape
from postgrad.rollout.settings import SamplingSettings

REGEX = "(ab|cd)+[x-z]?|hello( world){1,3}"
JSON_SCHEMA = '{"type": "array", "items": {"enum": [1, 20]}, "minItems": 1}'


def pieces_of(texts, decoder="ByteLevel"):
    """Two special tokens and 30 others, as the model of these tests has them."""
    names = ["<pad>", "<eos>", *texts]
    names += [f"~{number}" for number in range(32 - len(names))]
    raw = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    if decoder == "ByteLevel":
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = getattr(decoders, decoder)()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>")


@pytest.fixture(scope="module")
def bytelevel():
    """Pieces of one to five bytes; Ġ is the space."""
    return pieces_of([*"abcdxyzhelowrĠ[],012", "Ġworld", "llo", "bab", "ĠĠ"])


def engine_of(model, tokenizer, slots=5, ahead=0, cache_tokens=None):
    engine = LocalEngine(model("qwen3"), tokenizer, slots=slots, cache_tokens=cache_tokens or 640)
    engine._ahead = ahead
    return engine


def requests(prompt, count=6, **sampling):
    sampling = {"max_new_tokens": 24} | sampling
    return [
        Request(ticket, (0, 1, 2), prompt(ticket, 4 + ticket), SamplingSettings(**sampling))
        for ticket in range(count)
    ]


def text_of(completion):
    return completion.text.removesuffix("<eos>")


def bits(done):
    return [(c.token_ids.tobytes(), c.logprobs.tobytes(), c.finish_reason) for c in done]


def test_a_masked_distribution_is_renormalised_over_what_is_allowed():
    """0.1, 0.2, 0.3, 0.4 without the second token: 1/8, 3/8, 4/8; top_k counts what is left."""
    p = torch.tensor([[0.1, 0.2, 0.3, 0.4] + 32 * [0.0]])
    p = torch.cat([p, torch.full((1, 4), 0.25)], 1)  # behind bit 32: forbidden
    allowed = torch.tensor([[0b1101, 0]], dtype=torch.int32)
    n, shares = 800, {0: [1 / 8, 0, 3 / 8, 4 / 8], 2: [0, 0, 3 / 7, 4 / 7]}
    numbers = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    for top_k, share in shares.items():
        column = torch.full((n,), float(1), dtype=torch.float64)
        knobs = Knobs(column, column.long() * top_k, column, column * 0, allowed.expand(n, 2))
        kind = Kind(False, False, bool(top_k), masked=True)
        tokens, logprobs = sample(p.log().repeat(n, 1), knobs, numbers, kind)
        counted = np.bincount(tokens.numpy(), minlength=4) / n
        np.testing.assert_allclose(counted, share, atol=2 / n)
        reference = np.log(np.array(share)[tokens.numpy()])
        np.testing.assert_allclose(logprobs.numpy(), reference, atol=1e-6)


def test_greedy_sampling_takes_the_best_token_that_is_allowed():
    unit = torch.ones(1, dtype=torch.float64)
    allowed = torch.tensor([[-(2**31) | 0b11]], dtype=torch.int32)  # the last bit is the sign
    knobs = Knobs(unit * 0, unit.long() * 0, unit, unit * 0, allowed)
    logits = torch.arange(32.0)[None]
    logits[0, 31] = 0.5
    tokens, logprobs = sample(logits, knobs, unit * 0.3, Kind(False, True, False, masked=True))
    assert tokens.tolist() == [1]
    weights = np.exp([0.0, 1.0, 0.5])
    assert logprobs[0] == pytest.approx(np.log(weights[1] / weights.sum()), abs=1e-6)


def test_every_sample_that_ends_matches_the_regex(model, prompt, bytelevel):
    done = generate(engine_of(model, bytelevel), requests(prompt, count=10, regex=REGEX))
    ended = [c for c in done if c.finish_reason == "stop"]
    assert len(ended) > 10
    assert all(c.token_ids[-1] == bytelevel.eos_token_id for c in ended)
    assert all(re.fullmatch(REGEX, text_of(c)) for c in ended)
    assert {c.finish_reason for c in done} <= {"stop", "length"}
    assert len({text_of(c) for c in ended}) > 5  # it is no single text


def test_every_sample_that_ends_follows_the_schema_or_the_lark_grammar(model, prompt, bytelevel):
    asked = requests(prompt, json_schema=JSON_SCHEMA)
    asked += [
        replace(request, ticket=request.ticket + 10)
        for request in requests(prompt, lark='start: "[" start? "]"')
    ]
    done = generate(engine_of(model, bytelevel), asked)
    texts = [(c.ticket, text_of(c)) for c in done if c.finish_reason == "stop"]
    listed = [json.loads(text) for ticket, text in texts if ticket < 10]
    nested = [text for ticket, text in texts if ticket >= 10]
    assert listed
    assert all(items and set(items) <= {1, 20} for items in listed)
    assert nested
    assert all(text == "[" * (len(text) // 2) + "]" * (len(text) // 2) for text in nested)


def test_logprobs_are_those_of_the_masked_distribution(model, prompt, bytelevel):
    """Against float64 NumPy over what the regex lets follow, worked out by hand for each prefix."""
    sampling = SamplingSettings(regex="a(b|c)d", max_new_tokens=8)
    follows = {"": "a", "a": "bc", "ab": "d", "ac": "d", "abd": [], "acd": []}
    lm = model("qwen3", "eager")
    engine = LocalEngine(model("qwen3"), bytelevel, slots=4, cache_tokens=256)
    for done in generate(engine, [Request(0, tuple(range(6)), prompt(3, 5), sampling)]):
        ids = torch.tensor([[*prompt(3, 5).tolist(), *done.token_ids.tolist()]])
        with torch.no_grad():
            logits = lm(ids).logits[0, 4:-1].double().numpy()
        text, reference = "", []
        for row, token in zip(logits, done.token_ids, strict=True):
            names = [*follows[text]] or ["<eos>"]
            allowed = bytelevel.convert_tokens_to_ids(names)
            assert token in allowed
            reference.append(row[token] - np.log(np.exp(row[allowed]).sum()))
            text += bytelevel.convert_ids_to_tokens(int(token))
        np.testing.assert_allclose(done.logprobs, reference, atol=2e-5)
        assert done.finish_reason == "stop"


@pytest.mark.slow
def test_samples_do_not_depend_on_slots_late_reading_or_what_is_beside_them(
    model, prompt, bytelevel
):
    asked = requests(prompt, count=3, regex=REGEX, max_new_tokens=12)
    plain = [replace(r, ticket=r.ticket + 10) for r in requests(prompt, count=3, max_new_tokens=12)]
    alone = generate(engine_of(model, bytelevel, slots=5), asked)
    for slots, ahead in ((1, 0), (9, 0), (5, 1)):
        done = generate(engine_of(model, bytelevel, slots=slots, ahead=ahead), asked + plain)
        followed = [c for c in done if c.ticket < 10]
        assert [b[0] for b in bits(followed)] == [b[0] for b in bits(alone)]
        for completion, other in zip(followed, alone, strict=True):
            np.testing.assert_allclose(completion.logprobs, other.logprobs, atol=1e-5)
        free = generate(engine_of(model, bytelevel, slots=slots, ahead=ahead), plain)
        assert [b[0] for b in bits(done) if b not in bits(followed)] == [b[0] for b in bits(free)]


@pytest.mark.slow
def test_a_step_with_a_grammar_is_traced_in_one_graph_with_the_same_bits(
    model, prompt, bytelevel, monkeypatch
):
    """So that CUDA captures it."""
    asked = requests(prompt, count=1, regex=REGEX, max_new_tokens=2)
    eager = generate(engine_of(model, bytelevel, slots=6), asked)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    traced, kinds = torch.compile(step_module.step, backend="eager", fullgraph=True), []

    def compiled(*arguments):
        kinds.extend(each.kind for each in arguments if isinstance(each, StepShape))
        traced(*arguments)

    monkeypatch.setattr(step_module, "step", compiled)
    done = generate(engine_of(model, bytelevel, slots=6), asked)
    assert torch._dynamo.utils.counters["graph_break"] == {}
    assert len(kinds) > 1
    assert all(kind.masked for kind in kinds)
    assert bits(done) == bits(eager)


@pytest.mark.parametrize("steps", [1, 3, 7])
def test_a_sample_that_was_cut_goes_on_where_its_grammar_was(steps, model, prompt, bytelevel):
    asked = requests(prompt, regex=REGEX)
    uninterrupted = generate(engine_of(model, bytelevel), asked)
    first = engine_of(model, bytelevel)
    for request in asked:
        first.submit(request)
    done = [completion for _ in range(steps) for completion in first.advance()]
    again = first.cut()
    assert any(request.position for request in again)
    done += generate(engine_of(model, bytelevel, slots=3), again)
    done.sort(key=lambda c: (c.ticket, c.sample))
    assert [c.token_ids.tolist() for c in done] == [c.token_ids.tolist() for c in uninterrupted]


def test_a_sample_that_no_token_continues_ends_with_a_reason_of_its_own(model, prompt):
    """No token has the q that must follow "ab"; "cd" may end."""
    tokenizer = pieces_of("abcd")
    done = generate(engine_of(model, tokenizer), requests(prompt, regex="abq|cd"))
    ends = {text_of(c): c.finish_reason for c in done}
    assert ends == {"ab": "dead_end", "cd": "stop"}


def test_a_grammar_that_no_token_begins_is_refused(model, prompt, bytelevel):
    engine = engine_of(model, bytelevel)
    with pytest.raises(UsageError, match=r"rollout.regex: no token of this tokenizer begins"):
        generate(engine, requests(prompt, regex="Q+"))


def test_a_tokenizer_without_bytes_is_refused(model, prompt, tokenizer):
    with pytest.raises(UsageError, match=r"rollout.regex needs a fast tokenizer whose tokens are"):
        generate(engine_of(model, tokenizer), requests(prompt, regex="a"))


def test_bytes_of_a_character_are_tokens_of_their_own(model, prompt):
    """A tokenizer with a byte fallback: é is <0xC3><0xA9>, and so is half of è."""
    raw = ["<0xC3>", "<0xA9>", "<0xA8>", "▁", "a", "é"]
    tokenizer = pieces_of(raw, "ByteFallback")
    regex = "[éèa]{1,4}"
    done = generate(engine_of(model, tokenizer), requests(prompt, count=8, regex=regex))
    ids = dict(zip(raw, tokenizer.convert_tokens_to_ids(raw), strict=True))
    spelled = {ids["<0xC3>"]: b"\xc3", ids["<0xA9>"]: b"\xa9", ids["<0xA8>"]: b"\xa8"}
    spelled |= {ids["a"]: b"a", ids["é"]: "é".encode()}
    ended = [c.token_ids[:-1].tolist() for c in done if c.finish_reason == "stop"]
    texts = [b"".join(spelled[token] for token in tokens).decode() for tokens in ended]
    assert texts
    assert all(re.fullmatch(regex, text) for text in texts)
    assert any(ids["<0xC3>"] in tokens for tokens in ended)


def test_rows_without_a_grammar_have_no_bits(prompt):
    rows = Rows(4, 8)
    rows.add(requests(prompt)[0], (0, 1), np.zeros(2, np.int64))
    assert not rows.masked
    assert not rows.kind().masked
    assert rows.allowed.size == 0
