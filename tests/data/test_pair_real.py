"""1 800 real human comparisons of hh-rlhf: every row accounted for."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from postgrad.data.answers import pair_of
from postgrad.data.mixture import dataset_texts
from postgrad.data.overlap import held_out
from postgrad.data.pairs import PairSet, load_pairs
from postgrad.data.rows import read_rows
from postgrad.data.settings import PairSettings
from postgrad.models.fresh import make_fresh
from postgrad.models.settings import ModelInit, TokenizerInit
from postgrad.models.tokenizer import load_tokenizer

DATA = os.environ.get("POSTGRAD_TEST_DATA")
pytestmark = pytest.mark.skipif(DATA is None, reason="POSTGRAD_TEST_DATA names no folder")
ROWS = 1800
PARTED_INSIDE = "331 pairs differ within a turn: the loss covers all of that turn"


@pytest.fixture(scope="module")
def path() -> str:
    return str(Path(DATA or "") / "hh-rlhf-harmless.jsonl.gz")


@pytest.fixture(scope="module")
def bpe(path: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer made from the first 300 pairs."""
    init = ModelInit(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        tokenizer=TokenizerInit(vocab_size=2000),
    )
    to = tmp_path_factory.mktemp("hh") / "model"
    make_fresh(init, dataset_texts(PairSettings(path=path, limit=300)), 0, to)
    return load_tokenizer(str(to))


@pytest.fixture(scope="module")
def all_pairs(path: str, bpe: Any) -> PairSet:
    return load_pairs(PairSettings(path=path, max_len=8192), bpe)


@pytest.mark.slow
def test_every_comparison_is_kept_but_four_with_an_empty_answer(all_pairs: PairSet) -> None:
    account = all_pairs.account
    assert account.rows == ROWS
    assert account.fates == {"kept": ROWS - 4, "empty": 4}
    assert account.examples["empty"].endswith(":87")
    assert account.notes == (
        "1,800 rows: pairs of transcripts (Human:, Assistant:)",
        PARTED_INSIDE,
    )


@pytest.mark.slow
def test_rows_over_the_limit_are_lost_by_name_or_cut(path: str, bpe: Any) -> None:
    for how in ("drop", "truncate"):
        settings = PairSettings.model_validate(
            {"path": path, "max_len": 256, "on_too_long": how, "limit": 300}
        )
        loaded = load_pairs(settings, bpe)
        assert loaded.account.rows == sum(loaded.account.fates.values()) == 300
        assert loaded.account.kept == len(loaded)
        for pair in loaded.all():
            assert max(len(pair.chosen), len(pair.rejected)) <= 256
            assert pair.chosen.tolist() != pair.rejected.tolist()
            assert pair.chosen_mask.any()
            assert pair.rejected_mask.any()


@pytest.mark.slow
def test_the_marked_tokens_are_the_answers_as_the_file_has_them(
    all_pairs: PairSet, path: str, bpe: Any
) -> None:
    """Read anew: the last "\\n\\nAssistant:" of each text begins its last answer."""
    with gzip.open(path, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    inside = 0
    for pair in all_pairs.all():
        start = int(np.argmax(pair.chosen_mask))
        assert pair.chosen[:start].tolist() == pair.rejected[:start].tolist()
        assert not pair.rejected_mask[:start].any()
        inside += bool(pair.chosen[start] == pair.rejected[start])
        if pair.row % 10:
            continue
        for key in ("chosen", "rejected"):
            ids, mask = getattr(pair, key), getattr(pair, f"{key}_mask")
            answer = rows[pair.row][key].rpartition("\n\nAssistant:")[2].strip()
            assert bpe.decode(ids[mask].tolist()).endswith(f"{answer}<|im_end|>")
            assert mask[-1]
    assert 100 < inside <= 331  # a common letter is no common token


def test_no_real_pair_asks_what_a_held_out_pair_asks(path: str) -> None:
    """24 end with the same words, "yes" or "go on.", after other conversations (docs/data.md)."""
    held = held_out([PairSettings(path=path, split="train[1500:]")])
    settings = PairSettings(path=path, split="train[:1500]")
    rows = list(read_rows(settings))
    assert sum(held.has(pair_of(row, settings).question, row) for row in rows) == 0
