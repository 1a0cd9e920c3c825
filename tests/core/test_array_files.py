"""Files of arrays with a hash: the bits that were written, or an error."""

import errno
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from postgrad.core import array_files
from postgrad.core.array_files import (
    Arrays,
    digest_of,
    disk_error,
    open_arrays,
    pieces_of,
    read_arrays,
    write_arrays,
)
from postgrad.core.files import is_full

ARRAYS = {
    "lengths": np.array([2, 0, 1], np.int64),
    "mask": np.array([True, False, True]),
    "values": np.array([0.1, np.nan, -0.0], np.float32),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "entry.safetensors"


def test_what_is_read_has_the_bits_that_were_written(path: Path) -> None:
    write_arrays(path, ARRAYS)
    arrays = read_arrays(path)
    assert {name: (a.dtype, a.tobytes()) for name, a in arrays.items()} == {
        name: (a.dtype, a.tobytes()) for name, a in ARRAYS.items()
    }
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_the_hash_covers_names_dtypes_shapes_and_values() -> None:
    values = np.arange(4, dtype=np.int32)
    others: list[Arrays] = [
        {"b": values},
        {"a": values.view(np.float32)},
        {"a": values.reshape(2, 2)},
        {"a": values + 1},
        {"a": values, "b": values[:0]},
    ]
    digests = {digest_of(arrays) for arrays in [{"a": values}, *others]}
    assert len(digests) == 6
    assert digest_of({"a": values, "b": values}) == digest_of({"b": values, "a": values})
    strided = np.arange(8, dtype=np.int32)[::2]
    assert digest_of({"a": strided}) == digest_of({"a": strided.copy()})


def test_a_damaged_file_is_a_value_error(path: Path) -> None:
    write_arrays(path, ARRAYS)
    written = path.read_bytes()
    flipped = bytearray(written)
    flipped[-1] ^= 1
    for damaged in (bytes(flipped), written[: len(written) // 2], b"", b"not this file"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError):
            read_arrays(path)


def test_a_file_without_a_hash_or_of_another_digest_is_a_value_error(path: Path) -> None:
    path.parent.mkdir()
    save_file(ARRAYS, path)
    with pytest.raises(ValueError, match="another hash"):
        read_arrays(path)
    write_arrays(path, ARRAYS, of_the_mask)
    with pytest.raises(ValueError, match="another hash"):
        read_arrays(path)
    with pytest.raises(ValueError, match="absent"):
        read_arrays(path, lambda arrays: str(arrays["absent"]))
    assert len(read_arrays(path, of_the_mask)) == 3


def of_the_mask(arrays: Arrays) -> str:
    return b"".join(pieces_of(arrays["mask"])).hex()


def test_no_file_is_told_from_a_damaged_one(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_arrays(path)


def test_safetensors_reads_what_is_written_and_the_other_way_round(path: Path) -> None:
    write_arrays(path, ARRAYS)
    read = load_file(path)
    assert {name: (a.dtype, a.tobytes()) for name, a in read.items()} == {
        name: (a.dtype, a.tobytes()) for name, a in ARRAYS.items()
    }
    theirs = path.with_name("theirs.safetensors")
    save_file(ARRAYS, theirs, {"sha256": digest_of(ARRAYS)})
    assert theirs.read_bytes() == path.read_bytes()
    assert read_arrays(theirs)["values"].tobytes() == ARRAYS["values"].tobytes()


def test_an_array_is_read_in_pieces(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(array_files, "PIECE", 3)
    write_arrays(path, ARRAYS)
    lengths = open_arrays(path)["lengths"]
    assert [len(piece) for piece in lengths.pieces()] == [3] * 8
    assert lengths.array().tolist() == [2, 0, 1]
    copied = path.with_name("copied.safetensors")
    write_arrays(copied, open_arrays(path))
    assert copied.read_bytes() == path.read_bytes()


def test_a_disk_without_room_is_an_os_error_and_leaves_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        dtype, shape = np.dtype(np.int32), (2,)

        def pieces(self) -> Iterator[bytes]:
            yield b"1234"
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left") as caught:
        write_arrays(path, {"values": Full()}, lambda _: "")
    assert is_full(caught.value)
    assert list(path.parent.iterdir()) == []


def test_the_error_of_safetensors_is_that_of_the_system() -> None:
    quota = disk_error(SafetensorError("I/O error: Disk quota exceeded (os error 122)"))
    assert is_full(quota)
    assert disk_error(SafetensorError("unexpected")).errno == errno.EIO
