"""The text of each token."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.made_run import TOKENIZER
from postgrad.observe.report.samples import Pieces, pieces_of

PIECES = Pieces(TOKENIZER)


def joined(ids: list[int]) -> str:
    changed = PIECES.exceptions(ids)
    return "".join(changed.get(place, PIECES.text(token)) for place, token in enumerate(ids))


@given(st.text(st.characters(codec="utf-8"), max_size=30))
def test_the_texts_of_tokens_are_the_text(text: str) -> None:
    assert joined(TOKENIZER.encode(text).ids) == text


def test_the_last_token_of_a_cut_character_gets_it() -> None:
    ids = TOKENIZER.encode("a€").ids
    assert len(ids) == 4
    changed = PIECES.exceptions(ids)
    assert [changed.get(place, PIECES.text(token)) for place, token in enumerate(ids)] == [
        "a",
        "",
        "",
        "€",
    ]


def test_a_token_of_another_vocabulary_is_no_text() -> None:
    assert PIECES.text(10**6) == ""


@pytest.mark.parametrize("where", ["init", "model"])
def test_the_tokenizer_of_a_run_is_found(tmp_path: Path, where: str) -> None:
    assert pieces_of(tmp_path, {"path": None}) is None
    (tmp_path / where).mkdir()
    TOKENIZER.save(str(tmp_path / where / "tokenizer.json"))
    pieces = pieces_of(tmp_path, None)
    assert pieces is not None
    assert pieces.text(TOKENIZER.encode("x").ids[0]) == "x"


def test_the_tokenizer_of_the_starting_model_does_too(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{torn")
    start = tmp_path / "start"
    start.mkdir()
    TOKENIZER.save(str(start / "tokenizer.json"))
    assert pieces_of(tmp_path, {"path": str(start)}) is not None
    assert pieces_of(tmp_path, {"path": str(tmp_path / "gone")}) is None
