"""A model is named by what is in its files."""

import hashlib
from pathlib import Path

from postgrad.models.save import directory_hash


def test_it_is_the_hash_of_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"{}")
    (tmp_path / "README.md").write_bytes(b"not part of the model")
    line = f"{hashlib.sha256(b'{}').hexdigest()}  config.json\n"
    assert directory_hash(tmp_path) == hashlib.sha256(line.encode()).hexdigest()


def test_a_renamed_and_a_changed_file_make_another_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"{}")
    before = directory_hash(tmp_path)
    (tmp_path / "config.json").rename(tmp_path / "other.json")
    renamed = directory_hash(tmp_path)
    (tmp_path / "other.json").write_bytes(b"[]")
    assert len({before, renamed, directory_hash(tmp_path)}) == 3


def test_it_does_not_depend_on_the_folder_or_the_order_of_writing(tmp_path: Path) -> None:
    names = ["b.safetensors", "a.json", "c.jinja"]
    for folder, order in (("one", names), ("two", names[::-1])):
        (tmp_path / folder).mkdir()
        for name in order:
            (tmp_path / folder / name).write_bytes(name.encode())
    (tmp_path / "two" / "original.json").mkdir()  # a folder is no file of the model
    assert directory_hash(tmp_path / "one") == directory_hash(tmp_path / "two")


def test_contents_that_change_places_make_another_model(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"1")
    (tmp_path / "b.json").write_bytes(b"2")
    before = directory_hash(tmp_path)
    (tmp_path / "a.json").write_bytes(b"2")
    (tmp_path / "b.json").write_bytes(b"1")
    assert directory_hash(tmp_path) != before
