"""A model is named by what is in its files."""

import hashlib
from pathlib import Path

from postgrad.models.hashes import directory_hash


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
