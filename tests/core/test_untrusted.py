"""Files, JSON and TOML of others: what is read, and what is refused in one sentence."""

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from postgrad.core.untrusted import (
    CONTENTS,
    MOST_DEPTH,
    NotAFile,
    decoded,
    is_deep,
    open_file,
    other_content,
    parse_json,
    parse_toml,
    path_problem,
    read_bytes,
    shown,
)

values = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=30,
)


def depth(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


@given(values, st.integers(1, 8))
def test_a_value_is_deep_where_its_lists_and_tables_are(value: Any, most: int) -> None:
    assert is_deep(value, most) == (depth(value) > most)


def test_json_is_read_to_a_depth_and_no_further() -> None:
    for most in (MOST_DEPTH, MOST_DEPTH + 1):
        text = "[" * most + "]" * most
        if most == MOST_DEPTH:
            assert depth(parse_json(text)) == most
        else:
            with pytest.raises(ValueError, match=f"more than {MOST_DEPTH} deep"):
                parse_json(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "deep"),
        ("[" * 100_000 + "]" * 100_000, "deep"),
        ('{"a":' * 100_000, "deep"),
        ("9" * 5000, "thousands of digits"),
        (b"\xff", "not UTF-8"),
        ("{", "not JSON"),
        ("", "not JSON"),
    ],
)
def test_what_is_no_json_to_read_is_a_value_error(text: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_json(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = " + "[" * 1000 + "]" * 1000, "deep"),
        (".".join("a" * 500) + " = 1", "deep"),
        ("[" + ".".join("a" * 500) + "]", "deep"),
        ("x = 1\ny = " + "9" * 5000, r"thousands of digits \(at line 2\)"),
        ("x = 1\ny = \nz = 1", "line 2"),
    ],
)
def test_what_is_no_toml_to_read_is_a_value_error(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_toml(text)


def test_only_ordinary_files_are_opened_and_nothing_is_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for path, kind in (
        (tmp_path, "a directory"),
        (tmp_path / "pipe", "a pipe"),
        (Path("/dev/zero"), "a device"),
    ):
        with pytest.raises(NotAFile, match=f"is {kind}, where a file is expected"):
            open_file(path)
    with pytest.raises(FileNotFoundError):
        open_file(tmp_path / "none")
    with pytest.raises(OSError, match="symbolic links"):
        open_file(tmp_path / "loop")


def test_a_pipe_of_the_shell_is_read_where_it_may_be(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    try:
        os.write(writing, b"steps = 3\n")
        os.close(writing)
        assert read_bytes(Path(f"/dev/fd/{reading}"), pipes=True) == b"steps = 3\n"
    finally:
        os.close(reading)


def test_a_file_is_read_up_to_a_size(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_bytes(path, 5) == b"12345"
    with pytest.raises(NotAFile, match="more than 4 bytes"):
        read_bytes(path, 4)


def test_text_is_utf_8_with_the_line_that_is_not() -> None:
    assert decoded(b"\xef\xbb\xbfa = 1\r\nb = 2\r") == "a = 1\nb = 2\n"
    with pytest.raises(ValueError, match="line 2 is not UTF-8"):
        decoded(b"a\nb\xff\n")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("a" * 256, "longer than a path may be"),
        ("é" * 128, "longer than a path may be"),
        ("a/" * 2048, "longer than a path may be"),
        ("a\0b", "NUL"),
        ("\ud800", "surrogate"),
        ("a" * 255, None),
        ("runs/x", None),
        ("", None),
    ],
)
def test_a_path_that_no_file_can_have_is_told(path: str, message: str | None) -> None:
    problem = path_problem(path)
    assert problem == "" if message is None else message in problem


def test_values_are_shown_short() -> None:
    assert shown("x" * 500) == "'" + "x" * 59 + "..."
    assert shown(10**5000) == "a whole number of more than 77 digits"
    assert shown([[1] * 100] * 100) == "a list of 100"
    assert shown({"a": 1}) == "a table of 1"
    assert (shown(1.5), shown(None), shown(True)) == ("1.5", "None", "True")


def test_a_link_is_opened_only_where_that_is_wanted(tmp_path: Path) -> None:
    path, link = tmp_path / "a.txt", tmp_path / "link"
    path.write_text("a", "utf-8")
    link.symlink_to(path)
    for name in (path, link):
        with open_file(name) as file:
            assert file.read() == b"a"
    with open_file(path, links=False) as file:
        assert file.read() == b"a"
    with pytest.raises(NotAFile, match=r"link is a link, where a file is expected"):
        open_file(link, links=False)
    with pytest.raises(FileNotFoundError):
        open_file(tmp_path / "none", links=False)


@pytest.mark.parametrize("first", [first for first in CONTENTS if len(first) <= 3])
def test_the_length_that_safetensors_begin_with_is_no_kind_of_file(
    first: bytes, tmp_path: Path
) -> None:
    """Writers pad it to a multiple of 8 today; a header of 35 615 bytes begins as gzip does."""
    length = int.from_bytes(first, "little")
    file = tmp_path / "model.safetensors"
    file.write_bytes(length.to_bytes(8, "little") + b'{"__metadata__":{}}'.ljust(length))
    with safe_open(file, "np") as weights:
        assert list(weights.keys()) == []
    assert other_content(file) == ""
    file.write_bytes(first + b" and something else")
    assert other_content(file) == f"it is {CONTENTS[first]}"
