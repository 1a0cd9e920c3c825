"""The book-keeping of rows."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from postgrad.core import seeds
from postgrad.rollout.engine import Request
from postgrad.rollout.local.budget import ALIGN, rows_computed
from postgrad.rollout.local.rows import DrawnTokens, Rows
from postgrad.rollout.local.sampler import uniform
from postgrad.rollout.settings import SamplingSettings


def request(ticket, samples=1, length=3, turn=0, seed=0, **sampling):
    ids = np.arange(length, dtype=np.int32)
    return Request(ticket, tuple(range(samples)), ids, SamplingSettings(**sampling), turn, seed)


def append(rows, tokens, logprobs=(0.0, 0.0, 0.0)):
    logprobs = np.array(logprobs[: len(tokens)], np.float32)
    rows.append(DrawnTokens(np.arange(len(tokens)), np.array(tokens, np.int32), logprobs))


def test_a_rows_newest_token_lies_after_its_prompt():
    rows = Rows(4, 8)
    rows.add(request(5, samples=2, length=3), (0, 1), np.zeros(2, np.int64))
    rows.add(request(6, length=7), (0,), np.zeros(1, np.int64))
    append(rows, [10, 11, 12], [-1.0, -2.0, -3.0])
    append(rows, [20, 21, 22])
    assert rows.newest(3).tolist() == [20, 21, 22]
    assert rows.tokens[1, :2].tolist() == [11, 21]
    assert rows.logprobs[:3, 0].tolist() == [-1.0, -2.0, -3.0]


@given(st.integers(1, 100), st.data())
def test_few_numbers_of_rows_are_computed_none_of_them_over_the_capacity(capacity, data):
    count = data.draw(st.integers(1, capacity))
    computed = rows_computed(count, capacity, "cpu")
    assert count <= computed <= min(2 * count, count + ALIGN, capacity)
    assert computed in (1, 2, 4, 8, capacity) or computed % ALIGN == 0
    assert count <= rows_computed(count, capacity, "cuda") <= max(min(capacity, ALIGN), 1.5 * count)


def test_up_to_512_rows_are_eleven_numbers_of_rows_on_cuda():
    numbers = {rows_computed(count, 512, "cuda") for count in range(1, 513)}
    assert sorted(numbers) == [16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512]


def test_a_draw_is_named_by_seed_ticket_sample_turn_and_position_alone():
    rows = Rows(4, 8)
    rows.add(request(5, samples=2, seed=1), (0, 1), np.zeros(2, np.int64))
    rows.add(request(9, turn=2, seed=4), (0,), np.zeros(1, np.int64))
    append(rows, [0, 0, 0])
    expected = [
        seeds.uniform(1, "sample", 5, 0, 0, 1),
        seeds.uniform(1, "sample", 5, 1, 0, 1),
        seeds.uniform(4, "sample", 9, 0, 2, 1),
    ]
    key, written = torch.from_numpy(rows.key[:3].view(np.int64)), torch.from_numpy(rows.written[:3])
    assert uniform(key, written).tolist() == [float(u) for u in expected]


@given(st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
def test_closing_gaps_keeps_every_other_row_and_moves_the_fewest(case):
    n, gone = case
    rows = Rows(n, 2)
    for ticket in range(n):
        rows.add(request(ticket), (0,), np.zeros(1, np.int64))
    to, source = rows.remove(np.array(sorted(gone), np.int64))
    left = n - len(gone)
    assert rows.count == left
    assert sorted(rows.ticket[:left].tolist()) == sorted(set(range(n)) - gone)
    assert [r.ticket for r in rows.requests[:left]] == rows.ticket[:left].tolist()
    assert len(to) == len(source) == sum(row < left for row in gone)


def test_version_spans_add_up_to_the_tokens_written():
    rows = Rows(2, 8)
    rows.add(request(0), (0,), np.zeros(1, np.int64))
    append(rows, [0])
    rows.end_version(3)
    assert rows.versions(0, 4) == ((3, 1),)
    for _ in range(2):
        append(rows, [0])
    assert rows.versions(0, 4) == ((3, 1), (4, 2))
