"""Images of rows: every way to name one, where they stand in the messages, what is refused."""

import base64
import hashlib
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from helpers.image_directories import bomb
from postgrad.core.errors import UsageError
from postgrad.data.account import Bookkeeper
from postgrad.data.answers import pair_of
from postgrad.data.chat_format import MARK
from postgrad.data.conversations import load_conversations
from postgrad.data.functions import prepared_rows
from postgrad.data.messages import answer_of, asked_in, conversation_of, prompt_of
from postgrad.data.rows import Row, read_rows
from postgrad.data.settings import DataSettings, PairSettings


def png(shade: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4, 4), (shade, 0, 0)).save(file, "PNG")
    return file.getvalue()


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


RED, DARK = png(250), png(9)
BOMB_URL = f"data:image/png;base64,{base64.b64encode(bomb(20_000, 5_000)).decode()}"
_RED_TEXT = base64.b64encode(RED).decode()
RED_URL = f"data:image/png;base64,{_RED_TEXT}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "red.png").write_bytes(RED)
    (tmp_path / "dark.png").write_bytes(DARK)
    return tmp_path


def read(folder: Path, row: dict[str, Any], **settings: Any) -> tuple[Row, DataSettings]:
    file = folder / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    asked = DataSettings(path=str(file), **settings)
    return next(read_rows(asked)), asked


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "pictures/red.png"},
        {"type": "image", "path": "pictures/red.png"},
        {"type": "image", "url": "pictures/red.png"},
        {"type": "image", "image": RED_URL},
        {"type": "image", "base64": base64.b64encode(RED).decode()},
        {"type": "image_url", "image_url": {"url": RED_URL, "detail": "low"}},
        {"type": "input_image", "image_url": RED_URL},
        {"type": "image", "image": {"bytes": RED_URL, "path": None}},
    ],
)
def test_a_part_names_its_image_in_many_ways(folder: Path, part: dict[str, Any]) -> None:
    content = [{"type": "text", "text": "Is "}, part, {"type": "text", "text": " red?"}]
    row, settings = read(folder, {"messages": [{"role": "user", "content": content}]})
    (message,) = prompt_of(row, settings)
    assert message["content"] == f"Is {MARK} red?"
    assert message["images"] == [digest(RED)]


def test_absolute_names_and_file_urls_are_files(folder: Path) -> None:
    path = folder / "dark.png"
    for source in (str(path), f"file://{path}"):
        row, settings = read(folder, {"question": "a", "answer": "b", "images": [source]})
        assert conversation_of(row, settings)[0]["images"] == [digest(DARK)]


def test_parts_without_a_source_take_the_column_in_order(folder: Path) -> None:
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "1"}]},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": [{"type": "text", "text": "3"}, {"type": "image"}]},
    ]
    images = ["pictures/red.png", "dark.png"]
    row, settings = read(folder, {"messages": messages, "images": images})
    first, _, last = prompt_of(row, settings)
    assert (first["content"], first["images"]) == (f"{MARK}1", [digest(RED)])
    assert (last["content"], last["images"]) == (f"3{MARK}", [digest(DARK)])


def test_images_of_a_question_stand_before_it_and_are_no_metadata(folder: Path) -> None:
    images = ["dark.png", "pictures/red.png"]
    row, settings = read(folder, {"question": "Same?", "answer": "no", "images": images})
    (message,) = prompt_of(row, settings)
    assert message["content"] == f"{MARK}{MARK}Same?"
    assert message["images"] == [digest(DARK), digest(RED)]
    assert answer_of(row, settings) == "no"
    # a verifier, and the comparison of questions, get them by their hashes
    asked = f"<image {digest(DARK)}><image {digest(RED)}>Same?"
    assert asked_in(row, [message], settings) == [asked]


def test_one_image_of_a_column_of_another_name(folder: Path) -> None:
    row, settings = read(folder, {"question": "a", "answer": "b", "picture": "dark.png"},
                         images="picture")  # fmt: skip
    assert prompt_of(row, settings)[0]["images"] == [digest(DARK)]
    row, settings = read(folder, {"question": "a", "answer": "b", "images": "no.png"}, images="")
    assert "images" not in prompt_of(row, settings)[0]


def test_bytes_of_the_hubs_image_feature(folder: Path) -> None:
    images = [{"bytes": RED, "path": "x.png"}, {"bytes": None, "path": "dark.png"}]
    rows = [{"question": "a", "answer": "b", "images": images}]
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    settings = DataSettings(path=str(folder / "rows.parquet"))
    (row,) = list(read_rows(settings))
    assert prompt_of(row, settings)[0]["images"] == [digest(RED), digest(DARK)]


def test_the_hubs_image_feature_is_read_without_decoding(folder: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"question": datasets.Value("string"), "images": datasets.List(datasets.Image())}
    )
    rows = {"question": ["a"], "images": [[{"bytes": RED, "path": None}]]}
    table = datasets.Dataset.from_dict(rows, features=features)
    from postgrad.data.hub import _undecoded

    (values,) = _undecoded(table)
    assert values["images"] == [{"bytes": RED, "path": None}]


def test_both_answers_of_a_pair_have_the_images_of_the_question(folder: Path) -> None:
    file = folder / "pairs.jsonl"
    pair = {"prompt": "Red?", "chosen": "yes", "rejected": "no", "images": ["pictures/red.png"]}
    file.write_text(json.dumps(pair) + "\n")
    settings = PairSettings(path=str(file))
    chosen, rejected = pair_of(next(read_rows(settings)), settings).conversations
    assert chosen[0] == rejected[0]
    assert chosen[0]["images"] == [digest(RED)]


@pytest.mark.parametrize(
    ("images", "why"),
    [
        (["http://example.org/a.png"], "it is elsewhere, and nothing is fetched"),
        ([{"url": "https://example.org/a.png"}], "it is elsewhere, and nothing is fetched"),
        (["s3://bucket/a.png"], "it is elsewhere, and nothing is fetched"),
        (["missing.png"], "there is no file "),
        (["."], "there is no file "),
        (["a\u0000b"], "cannot be read: "),
        (["rows.jsonl"], "it is no image in PNG, JPEG"),
        (["data:image/png,abc"], "its data URL is not in base64"),
        (["data:image/png;base64,$$$$"], "its base64 is broken: character 0 is '$'"),
        ([_RED_TEXT[:50] + "*" + _RED_TEXT[51:]], "its base64 is broken: character 50 is '*'"),
        ([_RED_TEXT[:76] + "\n" + _RED_TEXT[76:]], "its base64 is broken: character 76 is '\\n'"),
        ([_RED_TEXT[:45]], "its base64 is broken: Invalid base64-encoded string"),
        ([_RED_TEXT[:60]], "its file is broken"),
        (["ä" * 300], "its base64 is broken: character 0 is 'ä'"),
        ([BOMB_URL], "it has 20000 x 5000 pixels, and at most"),
        ([7], "an image is a file name, base64, a data URL, or bytes with their path"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_names_row_and_image(folder: Path, images: Any, why: str) -> None:
    row, settings = read(folder, {"question": "a", "answer": "b", "images": images})
    with pytest.raises(UsageError) as raised:
        prompt_of(row, settings)
    assert str(raised.value).startswith(f"{folder}/rows.jsonl:1: an image of row 0 (")
    assert why in str(raised.value)


@pytest.mark.parametrize(
    ("places", "images", "why"),
    [
        (1, ["dark.png", "dark.png"], "has 2 images in column 'images' (data.images), and its "
         "messages have places for 1"),
        (2, ["dark.png"], "a message has a place for it, and the row has no further image"),
    ],
)  # fmt: skip
def test_images_and_places_have_to_be_equally_many(
    folder: Path, places: int, images: list[str], why: str
) -> None:
    content = [{"type": "image"}] * places
    row, settings = read(folder, {"messages": [{"role": "user", "content": content}],
                                  "images": images})  # fmt: skip
    with pytest.raises(UsageError) as raised:
        prompt_of(row, settings)
    assert why in str(raised.value)


def test_a_model_that_reads_text_alone_refuses_a_row_with_an_image(
    folder: Path, tokenizer: Any
) -> None:
    row = {"question": "a", "answer": "b", "images": ["dark.png"]}
    _, settings = read(folder, row)
    with pytest.raises(UsageError, match="has an image, and this model reads text alone"):
        load_conversations(settings, tokenizer)


@pytest.mark.parametrize(
    ("column", "noted"), [("pictrues", True), ("pictures", False), ("images", False), ("", False)]
)
def test_a_column_of_images_that_no_row_has_is_noted(
    folder: Path, column: str, noted: bool
) -> None:
    _, settings = read(folder, {"question": "a", "answer": "b", "pictures": []}, images=column)
    book = Bookkeeper("rows")
    list(prepared_rows(settings, book))
    note = f"no row has the column {column!r} (data.images), so none has an image of it"
    assert (note in book.notes) == noted
