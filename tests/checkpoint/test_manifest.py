"""A manifest is untrusted: it names plain files of its own folder, or it is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from postgrad.checkpoint.manifest import Damaged, manifest_of, read_manifest, verify


def written(folder: Path, **changes: Any) -> Path:
    (folder / "a.bin").write_bytes(b"abc")
    data = manifest_of(folder, 5, ["a.bin"]).to_json()
    (folder / "manifest.json").write_text(json.dumps({**data, **changes}), "utf-8")
    return folder


def test_it_holds_sizes_hashes_and_versions(tmp_path: Path) -> None:
    manifest = read_manifest(written(tmp_path))
    verify(tmp_path, manifest)
    assert manifest.step == 5
    entry = manifest.files["a.bin"]
    assert entry.size == 3
    assert entry.sha256 == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert {"postgrad", "python", "torch", "transformers"} <= set(manifest.versions)


@pytest.mark.parametrize(
    "name", ["../a.bin", "/etc/passwd", "sub/a.bin", "..", ".", "", "a\\b", "a\0b", "manifest.json"]
)
def test_a_name_that_could_lead_out_is_refused(name: str, tmp_path: Path) -> None:
    written(tmp_path, files={name: {"size": 3, "sha256": "0"}})
    with pytest.raises(Damaged, match="outside the checkpoint"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"written_by": "somebody"},
        {"format": 2},
        {"files": {"a.bin": {"size": "3", "sha256": "0"}}},
        {"files": {"a.bin": {"size": 3}}},
        {"files": ["a.bin"]},
        {"files": {"a.bin": "3"}},
        {"files": {"a.bin": {"size": 3, "sha256": None}}},
        {"files": None},
        {"step": "five"},
        {"step": None},
        {"versions": 7},
    ],
)
def test_a_manifest_of_another_shape_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    written(tmp_path, **changes)
    with pytest.raises(Damaged, match=r"manifest\.json"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("key", ['"format": 1', '"a.bin": {"size": 3, "sha256": "0"}', '"size": 3'])
def test_a_key_that_stands_there_twice_is_refused(key: str, tmp_path: Path) -> None:
    """At every depth: of two entries of one file only one would be checked."""
    name, value = key.split(": ", 1)
    entry = {"size": 3, "sha256": "0"}
    written(tmp_path, files={"a.bin": entry})
    path = tmp_path / "manifest.json"
    text = path.read_text("utf-8")
    assert text.count(f"{name}: {value}") == 1
    path.write_text(text.replace(f"{name}: {value}", f"{name}: {value}, {name}: {value}"), "utf-8")
    with pytest.raises(Damaged, match="twice"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "[[1, 2]]", "\x00", "[" * 100_000])
def test_what_is_no_object_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(text, "utf-8")
    with pytest.raises(Damaged, match=r"manifest\.json"):
        read_manifest(tmp_path)


def test_a_manifest_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(Damaged, match="cannot be read"):
        read_manifest(tmp_path)


def test_a_manifest_that_is_missing_says_that_nothing_was_finished(tmp_path: Path) -> None:
    with pytest.raises(Damaged, match="is missing: the checkpoint was never finished"):
        read_manifest(tmp_path)


def test_other_contents_of_the_same_size_are_found(tmp_path: Path) -> None:
    written(tmp_path)
    manifest = read_manifest(tmp_path)
    (tmp_path / "a.bin").write_bytes(b"abd")
    with pytest.raises(Damaged, match=r"a\.bin has changed since it was written"):
        verify(tmp_path, manifest)


def test_a_declared_size_that_is_another_is_refused(tmp_path: Path) -> None:
    written(tmp_path, files={"a.bin": {"size": 10**15, "sha256": "0" * 64}})
    with pytest.raises(Damaged, match=f"has 3 bytes, its manifest says {10**15}"):
        verify(tmp_path, read_manifest(tmp_path))


def test_a_link_out_of_the_folder_is_no_file_of_ours(tmp_path: Path) -> None:
    folder = tmp_path / "step"
    folder.mkdir()
    written(folder)
    outside = tmp_path / "outside.bin"
    (folder / "a.bin").rename(outside)
    (folder / "a.bin").symlink_to(outside)
    with pytest.raises(Damaged, match=r"a\.bin is missing"):
        verify(folder, read_manifest(folder))
