"""What every rollout engine must do. An engine joins by one line in conftest.py."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from contracts.conftest import empty, small_model
from postgrad.core.errors import RunError, UsageError
from postgrad.rollout.engine import Request, Written, generate
from postgrad.rollout.settings import SamplingSettings

LETTERS = "abcdefghijklmnop"


def prompt(seed, length):
    return np.random.default_rng(seed).integers(2, 18, length).astype(np.int32)


def requests(n=6, samples=4, seed=0, **sampling):
    settings = SamplingSettings(**({"max_new_tokens": 12} | sampling))
    return [
        Request(t, tuple(range(samples)), prompt(t, 2 + 3 * (t % 4)), settings, 0, seed)
        for t in range(n)
    ]


def tokens(completions):
    return {(c.ticket, c.sample, c.turn): c.token_ids.tolist() for c in completions}


def with_pads(completion):
    """Its letters, with a dot for each pad, which `text` leaves out as it does the end token."""
    return "".join(
        "." if i == 0 else LETTERS[i - 2] for i in completion.token_ids.tolist() if i != 1
    )


def test_every_sample_of_every_request_comes_back_once(make_engine):
    done = generate(make_engine(5, 5 * 32), requests())
    assert [(c.ticket, c.sample) for c in done] == [(t, s) for t in range(6) for s in range(4)]


def test_an_idle_engine_has_nothing_to_give(make_engine):
    engine = make_engine(2, 64)
    assert engine.completed() == []
    generate(engine, requests(1))
    assert engine.completed() == []


def test_what_is_drawn_does_not_depend_on_what_shares_the_batch(make_engine):
    wide = tokens(generate(make_engine(24, 24 * 32), requests()))
    narrow = tokens(generate(make_engine(3, 3 * 32), requests()))
    one_by_one = make_engine(4, 4 * 32)
    alone = [c for request in reversed(requests()) for c in generate(one_by_one, [request])]
    assert wide == narrow == tokens(alone)
    assert len({tuple(ids) for ids in wide.values()}) > 12


def test_the_past_of_an_engine_leaves_no_trace_in_its_bits(make_engine):
    engine = make_engine(5, 5 * 32)
    first = generate(engine, requests())
    generate(engine, requests(9, samples=1, seed=5, max_new_tokens=16))
    for before, after in zip(first, generate(engine, requests()), strict=True):
        assert before.token_ids.tolist() == after.token_ids.tolist()
        assert before.logprobs.tobytes() == after.logprobs.tobytes()


def test_seed_and_turn_name_other_numbers(make_engine):
    engine = make_engine(8, 8 * 32)
    settings = SamplingSettings(max_new_tokens=12)
    drawn = [
        generate(engine, [Request(0, (0,), prompt(0, 4), settings, turn, seed)])[0]
        for turn, seed in [(0, 0), (1, 0), (0, 1), (0, 0)]
    ]
    texts = [c.text for c in drawn]
    assert len(set(texts)) == 3
    assert texts[0] == texts[3]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_as_sampled_are_those_of_a_whole_forward(make_engine, temperature):
    engine = make_engine(6, 6 * 32)
    done = generate(engine, requests(temperature=temperature))
    full_sequences = [np.concatenate([requests()[c.ticket].token_ids, c.token_ids]) for c in done]
    for completion, ids, rescored in zip(
        done, full_sequences, engine.logprobs(full_sequences, temperature), strict=True
    ):
        assert len(rescored) == len(ids)
        assert rescored[0] == 0.0
        start = len(ids) - len(completion.token_ids)
        np.testing.assert_allclose(completion.logprobs, rescored[start:], atol=1e-4)


def test_filtered_logprobs_are_renormalised_over_what_is_left(make_engine):
    engine = make_engine(6, 6 * 32)
    done = generate(engine, requests(top_k=1))
    greedy = generate(engine, requests(temperature=0.0))
    assert tokens(done) == tokens(greedy)
    assert all(np.all(c.logprobs == 0.0) for c in done)
    assert all(np.all(c.logprobs < 0.0) for c in greedy)


GRAMMARS = [  # over the letters a to p, with texts of theirs
    ({"regex": "a(b|c)*d|nope"}, re.compile("a(b|c)*d|nope").fullmatch),
    (
        {"lark": 'start: "a" start? "b"'},
        lambda text: text == "a" * len(text[1::2]) + "b" * len(text[1::2]),
    ),
]


@pytest.mark.parametrize(("grammar", "follows"), GRAMMARS)
def test_answers_follow_a_grammar_with_logprobs_over_what_it_allows(make_engine, grammar, follows):
    done = generate(make_engine(5, 1024), requests(max_new_tokens=16, **grammar))
    ended = [completion for completion in done if completion.finish_reason == "stop"]
    assert len(ended) > 12
    assert all(completion.token_ids[-1] == 1 for completion in ended)
    assert all(follows(completion.text) for completion in ended)
    assert len({completion.text for completion in ended}) > 1
    for completion in ended:  # behind the last letter nothing but the end is allowed
        assert completion.logprobs[-1] == pytest.approx(0.0, abs=1e-6)
        assert (completion.logprobs <= 1e-6).all()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_under_a_grammar_are_those_of_the_constrained_distribution(
    make_engine, temperature
):
    """Against float64 NumPy: log softmax(l / T) over what the regex lets follow each prefix."""
    follows = {"": "an", "a": "bc", "ab": "d", "ac": "d", "abd": "", "acd": "", "n": "o", "no": ""}
    asked = requests(temperature=temperature, regex="a(b|c)d|no")
    lm, texts = small_model(), set()
    lm.set_attn_implementation("eager")
    for completion in generate(make_engine(6, 6 * 32), asked):
        before = asked[completion.ticket].token_ids
        ids = torch.tensor([[*before.tolist(), *completion.token_ids.tolist()]])
        with torch.no_grad():
            logits = lm(ids).logits[0, len(before) - 1 : -1].double().numpy() / temperature
        text, reference = "", []
        for row, token in zip(logits, completion.token_ids.tolist(), strict=True):
            allowed = [2 + LETTERS.index(letter) for letter in follows[text]] or [1]
            assert token in allowed
            reference.append(row[token] - np.log(np.exp(row[allowed]).sum()))
            text += LETTERS[token - 2] if token > 1 else ""
        np.testing.assert_allclose(completion.logprobs, reference, atol=2e-5)
        assert completion.finish_reason == "stop"
        texts.add(text)
    assert texts == {"abd", "acd", "no"}


def test_a_sample_that_no_token_continues_is_a_dead_end(make_engine):
    """No token has the q that must follow "ab"; what is written before it is kept."""
    done = generate(make_engine(6, 6 * 32), requests(regex="abq|cd"))
    ends = {(c.text, len(c.token_ids), len(c.logprobs)): c.finish_reason for c in done}
    assert ends == {("ab", 2, 2): "dead_end", ("cd", 3, 3): "stop"}


def test_a_grammar_holds_for_its_own_requests_alone(make_engine):
    free = tokens(generate(make_engine(6, 6 * 32), requests(3)))
    bound = [replace(r, ticket=r.ticket + 10) for r in requests(3, regex="a(b|c)d|no")]
    done = generate(make_engine(6, 6 * 32), [*requests(3), *bound])
    assert {key: ids for key, ids in tokens(done).items() if key[0] < 10} == free
    assert {c.text for c in done if c.ticket >= 10} <= {"abd", "acd", "no"}


def test_answers_end_with_the_end_token_or_at_the_limit(make_engine):
    done = generate(make_engine(8, 8 * 32), requests(12, max_new_tokens=9))
    assert {c.finish_reason for c in done} == {"stop", "length"}
    for c in done:
        ids = c.token_ids.tolist()
        assert 1 not in ids[:-1]
        assert c.finish_reason == ("stop" if ids[-1] == 1 else "length")
        assert len(ids) == 9 or c.finish_reason == "stop"
        assert c.text == "".join(LETTERS[i - 2] for i in ids if i > 1)


def test_a_stop_string_ends_an_answer_at_the_token_that_completes_it(make_engine):
    """A special token between two letters is no part of an answer's text, but keeps them apart."""
    engine = make_engine(8, 8 * 32)
    free = generate(engine, requests(12))
    stop = next(c.text[2:4] for c in free if with_pads(c)[:4] == c.text[:4] and len(c.text) > 5)
    stopped = generate(engine, requests(12, stop=(stop, "never")))
    assert any(stop in with_pads(c) for c in free)
    for before, after in zip(free, stopped, strict=True):
        stop_index = with_pads(before).find(stop)
        if stop_index < 0:
            assert with_pads(after) == with_pads(before)
        else:
            assert with_pads(after) == with_pads(before)[: stop_index + len(stop)]
            assert after.finish_reason == "stop"


def test_a_special_token_ends_an_answer_where_a_stop_string_names_it(make_engine):
    engine = make_engine(8, 8 * 32)
    free = generate(engine, requests(12))
    stopped = generate(engine, requests(12, stop=("<pad>",)))
    ends = [c.token_ids.tolist().index(0) for c in free if 0 in c.token_ids[:-1]]
    assert ends
    for before, after in zip(free, stopped, strict=True):
        ids = before.token_ids.tolist()
        assert after.token_ids.tolist() == (ids[: ids.index(0) + 1] if 0 in ids else ids)
        assert "<pad>" not in after.text
        assert after.finish_reason == ("stop" if 0 in ids else before.finish_reason)


def test_a_continued_request_goes_on_from_the_tokens_it_names(make_engine):
    engine = make_engine(4, 4 * 64)
    settings = SamplingSettings(temperature=0.0, max_new_tokens=6)
    (first,) = generate(engine, [Request(0, (0,), prompt(5, 8), settings)])
    assert len(first.token_ids) == 6
    prefix = np.concatenate([prompt(5, 8), first.token_ids[:3]])
    (second,) = generate(engine, [Request(0, (0,), prefix, settings, turn=1)])
    assert second.token_ids[:3].tolist() == first.token_ids[3:].tolist()
    assert second.turn == 1


def test_requests_may_come_while_others_are_decoded(make_engine):
    engine = make_engine(3, 3 * 64)
    early, late = requests(4), requests(7)[4:]
    for request in early:
        engine.submit(request)
    done = engine.completed()
    done += generate(engine, late)
    assert tokens(done) == tokens(generate(make_engine(3, 3 * 64), requests(7)))


def test_a_longer_request_waits_until_the_cache_is_laid_out_anew(make_engine):
    engine = make_engine(4, 80)
    engine.submit(requests(1)[0])
    done = engine.completed()
    long = Request(50, (0, 1), prompt(9, 40), SamplingSettings(max_new_tokens=20))
    done += generate(engine, [long])
    assert sorted((c.ticket, c.sample) for c in done) == [(0, s) for s in range(4)] + [
        (50, 0),
        (50, 1),
    ]


def test_a_request_that_can_never_fit_is_refused_at_once(make_engine):
    engine = make_engine(2, 64)
    with pytest.raises(
        UsageError, match=r"ticket 3: a prompt of 60 tokens and 12 new ones need 80"
    ):
        engine.submit(
            Request(3, (0,), prompt(0, 60), SamplingSettings(max_new_tokens=12)),
        )


def test_loaded_weights_are_used_and_named(make_engine, other_weights):
    engine = make_engine(8, 8 * 32)
    (before,) = engine.logprobs([prompt(0, 10)], 1.0)
    assert all(c.versions == ((0, len(c.token_ids)),) for c in generate(engine, requests()))
    engine.load_weights(other_weights, 7)
    (after,) = engine.logprobs([prompt(0, 10)], 1.0)
    assert np.abs(before - after)[1:].min() > 1e-4
    done = generate(engine, requests())
    assert all(c.versions == ((7, len(c.token_ids)),) for c in done)
    full_sequences = [np.concatenate([requests()[c.ticket].token_ids, c.token_ids]) for c in done]
    for c, rescored in zip(done, engine.logprobs(full_sequences, 1.0), strict=True):
        np.testing.assert_allclose(c.logprobs, rescored[-len(c.token_ids) :], atol=1e-4)


def test_weights_that_come_while_samples_are_decoded_are_named_span_by_span(
    make_engine, other_weights
):
    engine = make_engine(4, 4 * 32)
    for request in requests():
        engine.submit(request)
    done = engine.completed()
    engine.load_weights(other_weights, 1)
    late = generate(engine, [])
    assert all(c.versions == ((0, len(c.token_ids)),) for c in done)
    assert {v for c in late for v, _ in c.versions} == {0, 1}
    assert len(done) + len(late) == 24
    for c in late:
        assert sum(n for _, n in c.versions) == len(c.token_ids)
        assert [v for v, _ in c.versions] in ([0, 1], [1])


def test_half_of_the_weights_are_refused(make_engine, other_weights):
    with pytest.raises(RunError, match="are missing"):
        make_engine(2, 64).load_weights(other_weights[1:], 1)


def test_diverged_weights_are_an_error_and_no_sample(make_engine, other_weights):
    engine = make_engine(2, 64)
    engine.load_weights([(n, torch.full_like(w, float("nan"))) for n, w in other_weights], 1)
    with pytest.raises(RunError, match="not finite"):
        generate(engine, requests(1))


def test_sound_weights_sample_as_if_there_had_been_no_diverged_ones(make_engine, other_weights):
    engine = make_engine(8, 8 * 32)
    before = tokens(generate(engine, requests(24)))
    sound = engine.logprobs([prompt(0, 10)], 1.0)
    engine.load_weights([(n, torch.full_like(w, float("nan"))) for n, w in other_weights], 1)
    with pytest.raises(RunError, match="not finite"):
        generate(engine, requests())
    empty(engine)
    assert engine.completed() == engine.cut() == []
    engine.load_weights(small_model().named_parameters(), 2)
    assert tokens(generate(engine, requests(24))) == before
    np.testing.assert_allclose(engine.logprobs([prompt(0, 10)], 1.0), sound, atol=1e-5)


def test_stats_count_prompts_once_and_every_sampled_token(make_engine):
    engine = make_engine(8, 8 * 32)
    done = generate(engine, requests())
    assert engine.stats.prompt_tokens == sum(len(r.token_ids) for r in requests())
    assert engine.stats.response_tokens == sum(len(c.token_ids) for c in done)
    assert engine.stats.response_tokens <= engine.stats.decode_slots
    assert engine.stats.response_tokens_per_second > 0


def cut_after(engine, asked, completions):
    """Samples until `completions` have ended, then cuts: (completions so far, what is left)."""
    for request in asked:
        engine.submit(request)
    done = []
    while len(done) < completions:
        done += engine.completed()
    left = engine.cut()
    while more := engine.completed():
        done += more
    return done, left


def test_a_cut_stops_all_samples_and_returns_requests_that_continue_them(make_engine):
    engine = make_engine(5, 5 * 32)
    going_on = []
    for _ in range(
        20
    ):  # vLLM is another process: its cut may find every sample ended, or none begun
        done, left = cut_after(engine, requests(), 3)
        assert engine.completed() == []
        names = [(r.ticket, s) for r in left for s in r.sample_ids]
        assert sorted(names + [(c.ticket, c.sample) for c in done]) == [
            (t, s) for t in range(6) for s in range(4)
        ]
        assert names == sorted(names)
        going_on = [r for r in left if r.written is not None]
        if going_on:
            break
    assert going_on
    for request in going_on:
        assert request.token_ids.tolist() == requests()[request.ticket].token_ids.tolist()
        assert len(request.written.logprobs) == request.position
        assert sum(n for _, n in request.written.versions) == request.position
    assert engine.cut() == []


def test_an_engine_that_is_halted_returns_what_there_is_and_goes_on_as_if_it_had_not(make_engine):
    uninterrupted = generate(make_engine(5, 5 * 32), requests())
    engine = make_engine(5, 5 * 32)
    for request in requests():
        engine.submit(request)
    early = engine.completed(halt=lambda: True)  # [], except where samples end in a process
    late = generate(engine, [])
    assert len(early) + len(late) == len(uninterrupted)
    assert tokens([*early, *late]) == tokens(uninterrupted)


def test_a_halted_engine_decodes_nothing(make_engine):
    engine = make_engine(5, 5 * 32)
    engine.submit(requests(1)[0])
    assert engine.completed(halt=lambda: True) == []
    assert engine.stats.response_tokens == 0


def test_a_sample_that_was_cut_goes_on_to_a_whole_completion(make_engine):
    engine = make_engine(5, 5 * 32)
    done, left = cut_after(engine, requests(), 3)
    written = {(r.ticket, r.sample_ids[0]): r.written for r in left if r.written is not None}
    late = generate(engine, left)
    assert len(done) + len(late) == 24
    for c in late:
        assert len(c.token_ids) <= 12
        assert (c.token_ids[-1] == 1) == (c.finish_reason == "stop")
        assert sum(n for _, n in c.versions) == len(c.token_ids) == len(c.logprobs)
        if before := written.get((c.ticket, c.sample)):
            assert c.token_ids[: len(before.token_ids)].tolist() == before.token_ids.tolist()
            assert c.logprobs[: len(before.logprobs)].tobytes() == before.logprobs.tobytes()
    full_sequences = [np.concatenate([requests()[c.ticket].token_ids, c.token_ids]) for c in late]
    for c, rescored in zip(late, engine.logprobs(full_sequences, 1.0), strict=True):
        np.testing.assert_allclose(c.logprobs, rescored[-len(c.token_ids) :], atol=1e-4)


def test_a_sample_that_was_cut_draws_the_numbers_of_its_own_positions(make_engine):
    """A continuation as a longer prompt would draw those of position 0 again."""
    uncut = tokens(generate(make_engine(5, 5 * 32), requests()))
    engine = make_engine(5, 5 * 32)
    done, left = cut_after(engine, requests(), 3)
    while left:  # cut again and again, at every completion
        more, left = cut_after(engine, left, 1)
        done += more
    assert tokens(done) == uncut


def test_a_sample_that_was_cut_does_not_draw_the_numbers_of_its_start_again(make_engine):
    """All tokens are equally likely: what is drawn follows from the numbers alone."""
    engine = make_engine(8, 8 * 32)
    flat = [(name, torch.zeros_like(w)) for name, w in small_model().named_parameters()]
    engine.load_weights(flat, 1)
    asked = requests()
    long = [c for c in generate(engine, asked) if len(c.token_ids) == 12]
    assert len({tuple(c.token_ids) for c in long}) == len(long) > 5
    left = [
        asked[c.ticket].cut_after(c.sample, Written(c.token_ids[:6], c.logprobs[:6], ((1, 6),)))
        for c in long
    ]
    for c in generate(engine, left):
        assert c.token_ids[6:9].tolist() != c.token_ids[:3].tolist()


def test_a_stop_string_ends_an_answer_also_where_a_cut_divides_it(make_engine):
    """Of greedy answers: their continuation is the same whatever numbers an engine draws."""
    engine = make_engine(8, 8 * 32)
    free = generate(engine, requests(temperature=0.0))
    answer = next(c for c in free if len(set(c.text[:4])) == 4)
    stop = answer.text[1:4]
    for cut_at in (1, 2, 3):
        before = Written(answer.token_ids[:cut_at], answer.logprobs[:cut_at], ((0, cut_at),))
        (asked,) = requests(1, samples=1, temperature=0.0, stop=(stop, "never"))
        token_ids = requests()[answer.ticket].token_ids
        (ended,) = generate(engine, [replace(asked, token_ids=token_ids, written=before)])
        assert ended.text == answer.text[:4]
        assert ended.finish_reason == "stop"


def test_weights_that_come_at_a_cut_name_their_span(make_engine, other_weights):
    engine = make_engine(4, 4 * 32)
    _, left = cut_after(engine, requests(), 3)
    engine.load_weights(other_weights, 1)
    written = {(r.ticket, r.sample_ids[0]): r.position for r in left if r.written is not None}
    for c in generate(engine, left):
        before = written.get((c.ticket, c.sample), 0)
        after = (1, len(c.token_ids) - before)
        assert c.versions == (((0, before), after) if before else (after,))


def all_of(engine, done=()):
    """`done` and all that is still to come, each sample of 20 requests once."""
    ended = [*done, *generate(engine, [])]
    names = sorted((c.ticket, c.sample) for c in ended)
    assert names == [(ticket, sample) for ticket in range(20) for sample in range(4)]
    for c in ended:
        assert sum(n for _, n in c.versions) == len(c.token_ids) == len(c.logprobs) <= 12
    return ended


def test_a_cut_before_anything_was_waited_for_loses_no_sample(make_engine):
    engine = make_engine(8, 8 * 32)
    for _ in range(20):  # vLLM is another process: its cut may find every sample ended
        for request in requests(20):
            engine.submit(request)
        done, left = cut_after(engine, [], 0)
        for request in left:
            engine.submit(request)
        all_of(engine, done)
        if left:
            break
    assert left


def test_tokens_are_scored_while_samples_are_in_flight_and_neither_disturbs_the_other(make_engine):
    engine = make_engine(8, 8 * 32)
    asked = requests(20)
    sequences = [r.token_ids for r in asked]
    idle = engine.logprobs(sequences, 0.6)
    for request in asked:
        engine.submit(request)
    done = engine.completed()
    for busy, before in zip(engine.logprobs(sequences, 0.6), idle, strict=True):
        np.testing.assert_allclose(busy, before, atol=1e-4)
    ended = all_of(engine, done)
    full_sequences = [np.concatenate([asked[c.ticket].token_ids, c.token_ids]) for c in ended]
    for c, scored in zip(ended, engine.logprobs(full_sequences, 1.0), strict=True):
        np.testing.assert_allclose(c.logprobs, scored[-len(c.token_ids) :], atol=1e-4)


def test_weights_that_come_while_samples_are_in_flight_name_their_spans(make_engine, other_weights):
    asked = requests(20)
    new = []
    for _ in range(20):  # vLLM is another process: every sample may have ended before they come
        engine = make_engine(8, 8 * 32)
        for request in asked:
            engine.submit(request)
        done = engine.completed()
        engine.load_weights(other_weights, 1)
        ended = all_of(engine, done)
        assert {tuple(v for v, _ in c.versions) for c in ended} <= {(0,), (0, 1), (1,)}
        assert {c.versions for c in done} == {((0, len(c.token_ids)),) for c in done}
        new = [c for c in ended if c.versions[0][0] == 1]
        if new:
            break
    assert new
    full_sequences = [np.concatenate([asked[c.ticket].token_ids, c.token_ids]) for c in new]
    for c, scored in zip(new, engine.logprobs(full_sequences, 1.0), strict=True):
        np.testing.assert_allclose(c.logprobs, scored[-len(c.token_ids) :], atol=1e-4)


def test_a_cut_after_weights_came_keeps_the_spans_of_both(make_engine, other_weights):
    engine = make_engine(8, 8 * 32)
    for request in requests(20):
        engine.submit(request)
    done = engine.completed()
    engine.load_weights(other_weights, 1)
    more, left = cut_after(engine, [], 1)
    written = [r.written for r in left if r.written is not None]
    assert all(sum(n for _, n in w.versions) == len(w.token_ids) for w in written)
    for request in left:
        engine.submit(request)
    for c in all_of(engine, done + more):
        assert [v for v, _ in c.versions] in ([0], [0, 1], [1])


def test_a_turn_that_goes_on_is_of_a_single_sample_and_not_at_its_limit(make_engine):
    engine = make_engine(2, 64)
    settings = SamplingSettings(max_new_tokens=2)
    for samples, count in (((0, 1), 1), ((0,), 2)):
        before = Written(np.full(count, 3, np.int32), np.zeros(count, np.float32), ((0, count),))
        with pytest.raises(ValueError, match="a continued turn"):
            engine.submit(Request(0, samples, prompt(0, 4), settings, written=before))
