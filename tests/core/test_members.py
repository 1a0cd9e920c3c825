"""Lines in gzip members: readable anywhere by their unpacked position, and by gunzip."""

import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.core.errors import RunError
from postgrad.core.members import has_lines, member, open_lines

STEPS = [b"one\n" * 5, b"two\n", b"three\n" * 1000]
NAME = "samples.jsonl"


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    path = tmp_path / f"{NAME}.gz"
    path.write_bytes(b"".join(map(member, STEPS)))
    return path


def test_lines_are_those_of_the_plain_file_and_of_gunzip(packed: Path) -> None:
    uncompressed = b"".join(STEPS)
    assert gzip.decompress(packed.read_bytes()) == uncompressed
    assert has_lines(packed.with_name(NAME))
    with open_lines(packed.with_name(NAME)) as file:
        assert list(file) == uncompressed.splitlines(keepends=True)
    packed.with_name(NAME).write_bytes(b"plain\n")  # it goes before the compressed one
    with open_lines(packed.with_name(NAME)) as file:
        assert file.read() == b"plain\n"


@given(
    contents=st.lists(st.binary(min_size=1, max_size=50), max_size=6),
    start=st.integers(0, 200),
    length=st.integers(0, 200),
)
def test_any_piece_is_read_by_its_place(
    contents: list[bytes], start: int, length: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("members") / NAME
    path.with_name(f"{NAME}.gz").write_bytes(b"".join(map(member, contents)))
    with open_lines(path) as file:
        file.seek(start)
        assert file.read(length) == b"".join(contents)[start : start + length]


def test_equal_contents_have_equal_bytes() -> None:
    assert member(STEPS[2]) == member(STEPS[2])


@pytest.mark.parametrize("cut", [1, 20, 45])
def test_a_member_that_is_still_being_written_is_left_for_later(packed: Path, cut: int) -> None:
    with packed.open("ab") as file:
        file.write(member(b"four\n")[:cut])
    with open_lines(packed.with_name(NAME)) as file:
        assert file.read() == b"".join(STEPS)


@pytest.mark.parametrize("place", [0, 12, 60, -1])
def test_a_damaged_member_is_named_with_its_place(packed: Path, place: int) -> None:
    content = bytearray(packed.read_bytes())
    content[place] ^= 0xFF
    packed.write_bytes(content)
    with pytest.raises(RunError, match=r"samples.jsonl.gz: what begins at byte \d+ is"):  # noqa: SIM117
        with open_lines(packed.with_name(NAME)) as file:
            file.read()


def test_a_file_of_another_program_says_how_to_read_it(packed: Path) -> None:
    packed.write_bytes(gzip.compress(b"one\n"))
    with pytest.raises(RunError, match=r"unpack it with gunzip as samples.jsonl"):
        open_lines(packed.with_name(NAME))
