"""When samples end."""

from types import SimpleNamespace

import numpy as np
import pytest

from postgrad.core.errors import UsageError
from postgrad.rollout.engine import Request
from postgrad.rollout.local.rows import DrawnTokens, Rows, Stopper, eos_token_ids
from postgrad.rollout.settings import SamplingSettings


def write(rows, text, letter_ids):
    rows.add(
        Request(0, (0,), np.ones(1, np.int32), SamplingSettings(stop=("cab", "bb"))),
        (0,),
        np.zeros(1, np.int64),
    )
    row = rows.count - 1
    ids = [letter_ids[letter] for letter in text]
    rows.tokens[row, : len(ids)] = ids
    rows.written[row] = len(ids)


def test_a_stop_string_is_found_at_the_token_that_completes_it(tokenizer):
    letter_ids = {letter: tokenizer.convert_tokens_to_ids(letter) for letter in "abcx"}
    rows = Rows(5, 16)
    for text in ("xxxxxxxxxxcab", "xxxxca", "bb", "b", "bxb"):
        write(rows, text, letter_ids)
    assert Stopper((1,), tokenizer).stopped(rows).tolist() == [True, False, True, False, False]


def test_any_end_of_sequence_token_ends_a_row(tokenizer):
    rows = Rows(3, 4)
    rows.add(
        Request(0, (0, 1, 2), np.ones(1, np.int32), SamplingSettings()),
        (0, 1, 2),
        np.zeros(3, np.int64),
    )
    drawn = DrawnTokens(np.arange(3), np.array([1, 7, 8], np.int32), np.zeros(3, np.float32))
    rows.append(drawn)
    assert Stopper((1, 8), tokenizer).stopped(rows).tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("stated", "end_token", "expected"),
    [(5, 7, (5, 7)), ([5, 6], 5, (5, 6)), (None, 7, (7,)), ([9, 3], None, (3, 9))],
)
def test_end_tokens_come_from_generation_config_and_tokenizer(stated, end_token, expected):
    lm = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=stated))
    assert eos_token_ids(lm, SimpleNamespace(eos_token_id=end_token)) == expected


def test_a_model_without_end_token_is_refused():
    with pytest.raises(UsageError, match="end-of-sequence"):
        eos_token_ids(SimpleNamespace(), SimpleNamespace(eos_token_id=None))
