"""Files that are whole or not there."""

from pathlib import Path

import pytest

from postgrad.core import files


def test_a_file_is_replaced_at_once(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    files.write_json(path, {"a": [1, "ß"]})
    assert path.read_text("utf-8") == '{\n  "a": [\n    1,\n    "ß"\n  ]\n}\n'
    files.write_text(path, "b\n")
    assert path.read_text("utf-8") == "b\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    files.write_text(path, "old")

    def fail(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        files.write_text(path, "new")
    assert path.read_text("utf-8") == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.write_json(tmp_path / "a.json", {"a": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_numbers_that_are_not_finite_are_null_wherever_they_stand() -> None:
    value = {"a": [float("nan"), 1.5, ("x", float("inf"))], "b": {"c": -float("inf"), "d": None}}
    assert files.finite(value) == {"a": [None, 1.5, ["x", None]], "b": {"c": None, "d": None}}
