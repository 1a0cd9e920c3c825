"""A file of lines, read while another process writes it."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postgrad.core.errors import RunError
from postgrad.observe.follow import Followed, parse, read_lines, read_object


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "lines.jsonl"


def texts(followed: Followed) -> list[bytes]:
    return [line for _, line in followed.lines()]


def test_only_new_whole_lines_come(file: Path) -> None:
    followed = Followed(file)
    assert texts(followed) == []  # there is no file yet
    file.write_bytes(b"one\ntwo\nthr")
    assert list(followed.lines()) == [(0, b"one\n"), (4, b"two\n")]
    assert texts(followed) == []
    with file.open("ab") as writer:
        writer.write(b"ee\n")
    assert list(followed.lines()) == [(8, b"three\n")]
    assert not followed.rewritten()


@pytest.mark.parametrize("now", [b"one\n", b"one\nTWO\n", b"one\nTWO\nthree\nfour\n", b"", None])
def test_a_file_that_was_cut_back_or_begun_anew_is_noticed(file: Path, now: bytes | None) -> None:
    file.write_bytes(b"one\ntwo\nthree\n")
    followed = Followed(file)
    assert len(texts(followed)) == 3
    file.unlink()
    if now is not None:
        file.write_bytes(now)
    assert followed.rewritten()


def test_a_file_with_the_same_bytes_again_is_not_another(file: Path) -> None:
    file.write_bytes(b"one\ntwo\n")
    followed = Followed(file)
    assert len(texts(followed)) == 2
    file.write_bytes(b"one\ntwo\nthree\n")  # a resume repeats its steps bit by bit
    assert not followed.rewritten()
    assert texts(followed) == [b"three\n"]


@given(st.lists(st.binary(max_size=40)), st.lists(st.integers(0, 200), max_size=8))
@settings(max_examples=50)
def test_however_a_file_grows_its_lines_come_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], cuts: list[int]
) -> None:
    content = b"".join(line.replace(b"\n", b"") + b"\n" for line in lines)
    file = tmp_path_factory.mktemp("grows") / "lines"
    followed, content_read = Followed(file), b""
    for end in [*sorted(min(cut, len(content)) for cut in cuts), len(content)]:
        file.write_bytes(content[:end])
        assert not followed.rewritten()
        content_read += b"".join(texts(followed))
    assert content_read == content


@pytest.mark.parametrize("line", [b"{", b"[1]", b"\xff", b"[" * 100_000, b'"a"', b"{}x"])
def test_what_is_no_object_is_none(line: bytes, file: Path) -> None:
    assert parse(line) is None
    file.write_bytes(line)
    assert read_object(file) is None


def test_a_file_that_is_not_there_is_none(file: Path) -> None:
    assert read_object(file) is None
    file.write_text('{"a": 1}')
    assert read_object(file) == {"a": 1}


def test_a_log_is_read_up_to_its_last_whole_line(file: Path) -> None:
    assert list(read_lines(file)) == []
    file.write_bytes(b'{"step": 1}\n{"step": 2}\n{"ste')
    assert list(read_lines(file)) == [{"step": 1}, {"step": 2}]
    file.write_bytes(b'{"step": 1}\n[2]\n')
    with pytest.raises(RunError, match=r"lines\.jsonl: the line at byte 12 is no JSON object"):
        list(read_lines(file))
