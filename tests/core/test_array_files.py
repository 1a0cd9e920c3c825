"""Files of arrays with a hash: the bits that were written, or an error."""

import errno
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import save_file

from postgrad.core import array_files
from postgrad.core.array_files import Arrays, digest_of, disk_error, read_arrays, write_arrays
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
    write_arrays(path, ARRAYS, lambda arrays: arrays["mask"].tobytes().hex())
    with pytest.raises(ValueError, match="another hash"):
        read_arrays(path)
    with pytest.raises(ValueError, match="absent"):
        read_arrays(path, lambda arrays: str(arrays["absent"]))
    assert len(read_arrays(path, lambda arrays: arrays["mask"].tobytes().hex())) == 3


def test_no_file_is_told_from_a_damaged_one(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_arrays(path)


def test_a_disk_without_room_is_an_os_error_and_leaves_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(array_files, "save_file", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_arrays(path, ARRAYS)
    assert is_full(caught.value)
    assert list(path.parent.iterdir()) == []
    quota = disk_error(SafetensorError("I/O error: Disk quota exceeded (os error 122)"))
    assert is_full(quota)
    assert disk_error(SafetensorError("unexpected")).errno == errno.EIO
