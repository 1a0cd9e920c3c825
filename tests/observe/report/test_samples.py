"""A sample as a page needs it."""

import base64
import hashlib
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.made_run import TOKENIZER, sample
from postgrad.observe.report.page import packed
from postgrad.observe.report.samples import (
    IMAGE_BYTES,
    Pieces,
    body,
    group_row,
    pictures,
    vocabulary,
)

PIECES = Pieces(TOKENIZER)


def test_a_group_says_once_what_its_samples_share() -> None:
    lines = [(5, sample(3, 7, 1, "one")), (6, sample(3, 7, 2, "zwei", filtered="equal"))]
    row = group_row(lines)
    assert (row["step"], row["ticket"], row["row"]) == (3, 7, 7)
    assert row["question"] == "What is 7 twice?"
    assert [group_sample["id"] for group_sample in row["samples"]] == [5, 6]
    assert [group_sample["tokens"] for group_sample in row["samples"]] == [3, 4]
    assert row["samples"][0]["total"] == pytest.approx(4 / 3)
    assert row["samples"][0]["advantage"] == pytest.approx(-1 / 6, rel=1e-4)
    assert "failures" not in row["samples"][0]


def test_the_mean_advantage_is_of_tokens_in_the_loss() -> None:
    line = sample(1, 0, 3, "abcd", advantages=[1.0, 0.0, 0.0, 0.5], mask=[1, 0, 0, 1])
    assert group_row([(0, line)])["samples"][0]["advantage"] == 0.75


def test_a_body_has_the_values_of_each_token() -> None:
    line = sample(1, 0, 3, "ab€", columns={"turn_rewards": [0.0]})
    line["turns"][0]["logprobs"][0] = -1.23456
    line["advantages"] = [0.123456789, 1.0, 1.0, 1.0, 1.0]
    sample_body = body(line, PIECES)
    turn = sample_body["turns"][0]
    assert turn["logprobs"] == [-1235, -250, -250, -250, -250]  # thousandths of a nat
    assert turn["differences"] == [98556, 100, 100, 100, 100]  # hundred-thousandths
    assert sample_body["advantages"] == [0.12346, 1.0, 1.0, 1.0, 1.0]
    assert sample_body["mask"] == 1  # all of them
    assert turn["texts"] == {2: "", 3: "", 4: "€"}
    assert sample_body["columns"] == {"turn_rewards": [0.0]}
    words = vocabulary([sample_body], PIECES)
    assert words[TOKENIZER.encode("b").ids[0]] == "b"
    assert set(turn["ids"]) <= set(words)


def test_a_turn_says_that_it_is_another_conversation() -> None:
    line = sample(1, 0, 3, "abc")
    reply = {"author": "environment", "token_ids": [5, 6], "logprobs": [0.0, 0.0], "text": "ab"}
    line["turns"] += [{**reply, "opens": True}, {**line["turns"][0]}, reply]
    turns = body(line, PIECES)["turns"]
    assert [turn.get("opens", False) for turn in turns] == [False, True, False, False]


def test_what_was_not_computed_is_not_there() -> None:
    line = sample(1, 0, 0, "ab")
    for key in ("advantages", "mask"):
        del line[key]
    del line["turns"][0]["learner_logprobs"]
    sample_body = body(line, None)
    assert sample_body["advantages"] == sample_body["mask"] == []
    assert "differences" not in sample_body["turns"][0]
    assert sample_body["turns"][0]["text"] == "ab"  # no tokenizer: the text as a whole
    assert vocabulary([sample_body], None) == {}
    row = group_row([(0, line)])["samples"][0]
    assert row["trained"] is False
    assert "advantage" not in row


values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
odd = st.recursive(values, lambda inner: st.lists(inner, max_size=3), max_leaves=4)
KEYS = ("turns", "advantages", "mask", "prompt_token_ids", "rewards", "text", "total", "failures")


@given(
    st.dictionaries(st.sampled_from(KEYS), odd),
    st.dictionaries(st.sampled_from(("token_ids", "logprobs", "learner_logprobs")), odd),
)
def test_lines_of_another_hand_break_nothing(changed: dict[str, Any], turn: dict[str, Any]) -> None:
    line = {**sample(1, 0, 0, "ab"), "turns": [turn], **changed}
    packed(group_row([(0, line)]))
    sample_body = body(line, PIECES)
    packed([sample_body, vocabulary([sample_body], PIECES)])
    numbers = [value for turn in sample_body["turns"] for value in turn["logprobs"]]
    assert all(value is None or math.isfinite(value) for value in numbers)


def kept(folder: Path, content: bytes) -> str:
    digest = hashlib.sha256(content).hexdigest()
    (folder / digest).write_bytes(content)
    return digest


def test_images_are_data_urls_of_raster_formats_and_nothing_else(tmp_path: Path) -> None:
    png = kept(tmp_path, b"\x89PNG\r\n\x1a\n and pixels")
    webp = kept(tmp_path, b"RIFF\x00\n\x00\x01WEBPVP8 ")
    drawing = kept(tmp_path, b"<svg onload='alert(1)'></svg>")
    large = kept(tmp_path, b"BM" + bytes(IMAGE_BYTES))
    damaged = kept(tmp_path, b"GIF89a")
    (tmp_path / damaged).write_bytes(b"GIF89a, another")
    missing = "ab" * 32
    line = sample(1, 0, 0, "ab")
    line["images"] = [
        {"sha256": digest, "runs": [[0, 1]], "grid": None, "mutual": False}
        for digest in (png, webp, png, drawing, large, damaged, missing)
    ]
    shown = body(line, PIECES)
    assert shown["images"] == [png, webp, png, drawing, large, damaged, missing]
    images = pictures([shown], tmp_path, 2**24)
    head, _, data = images[png]["src"].partition(",")
    assert head == "data:image/png;base64"
    assert base64.b64decode(data) == b"\x89PNG\r\n\x1a\n and pixels"
    assert images[webp]["src"].startswith("data:image/webp;base64,")
    assert images[drawing] == {"why": "its file is no image"}
    assert "at most 1048576" in images[large]["why"]
    assert images[damaged] == {"why": "its file is damaged"}
    assert images[missing]["why"].startswith("its file cannot be read")
    assert pictures([shown], tmp_path, 30)[webp] == {"why": "the page has no room for more images"}


def test_images_of_replies_are_shown_with_their_turn(tmp_path: Path) -> None:
    png = kept(tmp_path, b"\x89PNG\r\n\x1a\n and pixels")
    line = sample(1, 0, 0, "ab")
    line["turns"][0]["images"] = [{"sha256": png, "runs": [[0, 1]], "grid": None, "mutual": False}]
    shown = body(line, PIECES)
    assert "images" not in shown
    assert shown["turns"][0]["images"] == [png]
    assert pictures([shown], tmp_path, 2**24)[png]["src"].startswith("data:image/png;base64,")


@pytest.mark.parametrize(
    "named", [{"sha256": "../../etc/passwd"}, {"sha256": 3}, {}, "x", {"sha256": "AB" * 32}]
)
def test_what_is_no_hash_names_no_file(named: Any, tmp_path: Path) -> None:
    shown = body(sample(1, 0, 0, "ab") | {"images": [named]}, PIECES)
    assert "images" not in shown
    assert pictures([shown], tmp_path, 2**24) == {}
