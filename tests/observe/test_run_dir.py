"""A run directory holds one run, and nothing of anybody else's is touched."""

import json
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from postgrad.core.errors import RunError, UsageError
from postgrad.observe.run_dir import RunDirectory

RECIPE = {"job": "sft", "seed": 0}


def test_a_new_one_has_its_recipe_and_versions(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "a" / "run", RECIPE, overwrite=False)
    written = json.loads((directory.path / "recipe.json").read_text("utf-8"))
    assert written["recipe"] == RECIPE
    assert {"postgrad", "python", "torch", "transformers"} <= set(written["versions"])
    assert RunDirectory.open(directory.path).recipe() == RECIPE
    directory.write_summary({"steps": 3})
    assert json.loads((directory.path / "summary.json").read_text("utf-8")) == {"steps": 3}


def test_another_run_is_left_alone_unless_it_may_be_replaced(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run", RECIPE, overwrite=False)
    (directory.path / "metrics.jsonl").write_text("{}\n", "utf-8")
    directory.checkpoints.mkdir()
    (directory.path / "notes.txt").write_text("mine", "utf-8")
    with pytest.raises(UsageError, match=r"already holds a run.*--overwrite true"):
        RunDirectory.create(directory.path, RECIPE, overwrite=False)
    assert (directory.path / "metrics.jsonl").exists()
    RunDirectory.create(directory.path, {"job": "rl"}, overwrite=True)
    assert sorted(path.name for path in directory.path.iterdir()) == ["notes.txt", "recipe.json"]
    assert directory.recipe() == {"job": "rl"}


def test_a_folder_of_other_files_is_refused_even_with_overwrite(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years", "utf-8")
    (tmp_path / "model").mkdir()
    with pytest.raises(UsageError, match=r"holds other files \(thesis\.tex\)"):
        RunDirectory.create(tmp_path, RECIPE, overwrite=True)
    assert (tmp_path / "model").exists()


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("", "utf-8")
    with pytest.raises(UsageError, match="is a file"):
        RunDirectory.create(tmp_path / "run", RECIPE, overwrite=True)


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1))
    with pytest.raises(RunError, match="the disk is full; make room"):
        RunDirectory.create(tmp_path / "run", RECIPE, overwrite=False)


def test_a_place_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(RunError, match=r"cannot be written: .*Permission denied"):
        RunDirectory.create(tmp_path / "run", RECIPE, overwrite=False)


def test_what_is_no_run_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no recipe\.json: it is not a run directory"):
        RunDirectory.open(tmp_path)
    with pytest.raises(UsageError, match="is no directory"):
        RunDirectory.open(tmp_path / "nowhere")
    (tmp_path / "recipe.json").write_text("[]", "utf-8")
    with pytest.raises(UsageError, match="is not a recipe that a run wrote"):
        RunDirectory.open(tmp_path).recipe()
