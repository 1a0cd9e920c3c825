"""All 7 473 real questions of GSM8K: every row accounted for, from a file and from hub layout."""

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from postgrad.data.conversations import load_conversations
from postgrad.data.overlap import held_out
from postgrad.data.prompts import load_prompts
from postgrad.data.rows import read_rows
from postgrad.data.settings import DataSettings
from postgrad.models.fresh import make_fresh
from postgrad.models.settings import ModelInit, TokenizerInit
from postgrad.models.tokenizer import load_tokenizer

DATA = os.environ.get("POSTGRAD_TEST_DATA")
pytestmark = pytest.mark.skipif(DATA is None, reason="POSTGRAD_TEST_DATA names no folder")
ROWS = 7473


@pytest.fixture(scope="module")
def gsm8k() -> Path:
    return Path(DATA or "") / "gsm8k.jsonl"


@pytest.fixture(scope="module")
def bpe(gsm8k: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer made from 500 of the questions."""
    rows = [json.loads(line) for line in gsm8k.read_text("utf-8").splitlines()[:500]]
    init = ModelInit(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        tokenizer=TokenizerInit(vocab_size=2000),
    )
    to = tmp_path_factory.mktemp("real") / "model"
    make_fresh(init, [row["question"] + row["answer"] for row in rows], 0, to)
    return load_tokenizer(str(to))


@pytest.mark.slow
def test_every_question_and_answer_is_kept_cut_or_dropped(gsm8k: Path, bpe: Any) -> None:
    conversations = load_conversations(DataSettings(path=str(gsm8k), max_len=256), bpe)
    assert conversations.account.rows == ROWS
    assert sum(conversations.account.fates.values()) == ROWS
    assert conversations.account.kept == len(conversations)
    lengths = [len(conversation.token_ids) for conversation in conversations.all()]
    assert max(lengths) <= 256
    assert conversations.account.fates["too_long"] == ROWS - len(conversations)
    assert len(conversations) > 0.5 * ROWS
    for conversation in conversations.all()[::500]:
        answer = bpe.decode(conversation.token_ids[conversation.loss_mask].tolist())
        assert answer.endswith("<|im_end|>")
        assert "####" in answer


@pytest.mark.slow
def test_the_hubs_layout_gives_the_same_prompts(
    gsm8k: Path, bpe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """openai/gsm8k as a folder: the path of the shipped recipes, found where one stands."""
    rows = [json.loads(line) for line in gsm8k.read_text("utf-8").splitlines()]
    assert len(rows) == ROWS
    folder = tmp_path / "openai" / "gsm8k" / "main"
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "train-00000-of-00001.parquet")
    monkeypatch.chdir(tmp_path)

    def load(settings: DataSettings) -> Any:
        return load_prompts(settings, bpe, max_prompt_tokens=300)

    hub = load(DataSettings(path="openai/gsm8k", name="main", split="train[-300:]"))
    file = load(DataSettings(path=str(gsm8k), split="train[-300:]"))
    assert hub.account.rows == file.account.rows == 300
    for hub_prompt, file_prompt in zip(hub.all(), file.all(), strict=True):
        assert hub_prompt.token_ids.tolist() == file_prompt.token_ids.tolist()
        assert (hub_prompt.row, hub_prompt.answer) == (file_prompt.row, file_prompt.answer)


@pytest.mark.parametrize(("words", "rows"), [(13, 5), (8, 37)])
def test_how_many_questions_share_words_with_held_out_ones(
    words: int, rows: int, gsm8k: Path
) -> None:
    """The figures of docs/data.md; all 5 were read: the same story with other numbers."""
    held = held_out([DataSettings(path=str(gsm8k), split="train[-500:]")], words)
    raw_rows = read_rows(DataSettings(path=str(gsm8k), split="train[:-500]"))
    assert sum(held.shares_words([row.values["question"]]) for row in raw_rows) == rows
