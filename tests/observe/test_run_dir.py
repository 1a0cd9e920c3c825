"""A run directory holds one run, and nothing of anybody else's is touched."""

import errno
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


def test_logs_of_every_engine_of_a_run_go_with_it(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run", RECIPE, overwrite=False)
    for name in ("vllm-0.log", "vllm-10.log", "rollout-0/vllm-0.log", "rollout-1/vllm-1.log"):
        log = directory.path / name
        log.parent.mkdir(exist_ok=True)
        log.write_text("of the old run", "utf-8")
    for name in ("vllm-0.log.old", "my-vllm-0.log", "rollout-first"):
        (directory.path / name).write_text("mine", "utf-8")
    RunDirectory.create(directory.path, RECIPE, overwrite=True)
    assert {path.name for path in directory.path.iterdir()} == {
        "recipe.json",
        "vllm-0.log.old",
        "my-vllm-0.log",
        "rollout-first",
    }


def test_what_the_finder_of_macos_writes_is_no_file_of_anybodys(tmp_path: Path) -> None:
    (tmp_path / ".DS_Store").write_bytes(b"\0\0\0\1Bud1")
    RunDirectory.create(tmp_path, RECIPE, overwrite=False)
    assert {path.name for path in tmp_path.iterdir()} == {".DS_Store", "recipe.json"}
    (tmp_path / "other").mkdir()
    for name in (".DS_Store", ".DS_Store.tex"):
        (tmp_path / "other" / name).write_text("years", "utf-8")
    with pytest.raises(UsageError, match=r"holds other files \(\.DS_Store\.tex\)"):
        RunDirectory.create(tmp_path / "other", RECIPE, overwrite=False)


def test_a_folder_of_other_files_is_refused_even_with_overwrite(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years", "utf-8")
    (tmp_path / "model").mkdir()
    with pytest.raises(UsageError, match=r"holds other files \(model, thesis\.tex\)"):
        RunDirectory.create(tmp_path, RECIPE, overwrite=True)
    assert (tmp_path / "model").exists()


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "name", ["model/config.json", "checkpoints/mine", "recipe.json", "summary.json"]
)
def test_what_only_has_a_name_of_ours_is_not_removed(
    name: str, overwrite: bool, tmp_path: Path
) -> None:
    """As a model that was downloaded to the folder which the run is to lie in."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text('{"recipe": "of a cake"}', "utf-8")
    with pytest.raises(UsageError, match=rf"holds other files \({name.split('/')[0]}\)"):
        RunDirectory.create(tmp_path, RECIPE, overwrite=overwrite)
    assert path.read_text("utf-8") == '{"recipe": "of a cake"}'


def test_a_run_that_failed_before_its_first_step_blocks_nothing(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run", RECIPE, overwrite=False)
    directory.init.mkdir()
    (directory.path / "metrics.jsonl").touch()
    (directory.path / "events.jsonl").write_text("{}\n", "utf-8")
    assert not RunDirectory.holds_results(directory.path)
    RunDirectory.create(directory.path, {"job": "rl"}, overwrite=False)
    assert [path.name for path in directory.path.iterdir()] == ["recipe.json"]


def test_a_removal_that_was_interrupted_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory.create(tmp_path / "run", RECIPE, overwrite=False)
    directory.checkpoints.mkdir()
    directory.model.mkdir()
    with monkeypatch.context() as patched:

        def interrupt(path: Path) -> None:
            raise KeyboardInterrupt

        patched.setattr(shutil, "rmtree", interrupt)
        with pytest.raises(KeyboardInterrupt):
            RunDirectory.create(directory.path, RECIPE, overwrite=True)
    RunDirectory.create(directory.path, RECIPE, overwrite=True)
    assert [path.name for path in directory.path.iterdir()] == ["recipe.json"]


def test_what_a_link_leads_to_is_not_removed(tmp_path: Path) -> None:
    """As when checkpoints lie on another disk."""
    directory = RunDirectory.create(tmp_path / "run", RECIPE, overwrite=False)
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "step-000001").mkdir()
    directory.checkpoints.symlink_to(tmp_path / "disk")
    RunDirectory.create(directory.path, RECIPE, overwrite=True)
    assert [path.name for path in directory.path.iterdir()] == ["recipe.json"]
    assert (tmp_path / "disk" / "step-000001").exists()


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("", "utf-8")
    with pytest.raises(UsageError, match="is a file"):
        RunDirectory.create(tmp_path / "run", RECIPE, overwrite=True)


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1))
    with pytest.raises(RunError, match="the disk is full; make room"):
        RunDirectory.create(tmp_path / "run", RECIPE, overwrite=False)


def test_a_disk_that_fills_up_while_the_recipe_is_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match="the disk is full; make room"):
        RunDirectory.create(tmp_path / "run", RECIPE, overwrite=False)
    assert list((tmp_path / "run").iterdir()) == []


def test_a_place_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(
        RunError,
        match=r"cannot be written: .*Permission denied; make it writable, or choose another --run",
    ):
        RunDirectory.create(tmp_path / "run", RECIPE, overwrite=False)


def test_a_run_that_has_begun_is_not_sent_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No resume takes another run_dir."""
    directory = RunDirectory.create(tmp_path / "run", RECIPE, overwrite=False)
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n", "utf-8")

    def refuse(*args: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(RunError, match=r"Read-only file system; make it writable$"):
        directory.write_recipe(RECIPE)


def test_what_is_no_run_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no recipe\.json: it is not a run directory"):
        RunDirectory.open(tmp_path)
    with pytest.raises(UsageError, match="is no directory"):
        RunDirectory.open(tmp_path / "nowhere")
    (tmp_path / "recipe.json").write_text("[]", "utf-8")
    with pytest.raises(UsageError, match="is not a recipe that a run wrote"):
        RunDirectory.open(tmp_path).recipe()


def test_a_run_that_could_be_meant_is_named(tmp_path: Path) -> None:
    for name in ("gsm8k-grpo", "words/sft", "words/rl"):
        RunDirectory.create(tmp_path / name, RECIPE, overwrite=False)
    (tmp_path / "mine.toml").write_text("", "utf-8")
    for typed, suggestion in [
        ("mine.toml", "it is a recipe: name the directory that its run_dir says"),
        ("gsm8k-gpro", f"did you mean {tmp_path / 'gsm8k-grpo'}?"),
        ("word", f"did you mean {tmp_path / 'words'}?"),
        ("words", "it is not a run directory; runs in it: rl, sft"),
        ("words/slt", f"did you mean {tmp_path / 'words/sft'}?"),
        ("nowhere/near", "it is not a run directory"),
    ]:
        with pytest.raises(UsageError) as refused:
            RunDirectory.open(tmp_path / typed)
        assert str(refused.value).endswith(suggestion)


def test_what_a_kill_left_half_written_is_neither_others_nor_in_the_way(tmp_path: Path) -> None:
    """Killed before recipe.json had its name, there is nothing else to know a run by."""
    run = tmp_path / "run"
    run.mkdir()
    (run / ".recipe.json.17.tmp").write_text("{", "utf-8")
    (run / ".init.17.tmp").mkdir()
    RunDirectory.create(run, RECIPE, overwrite=False)
    assert sorted(path.name for path in run.iterdir()) == ["recipe.json"]
    (run / ".summary.json.17.tmp").write_text("{", "utf-8")
    RunDirectory.open(run).write_recipe(RECIPE)  # as a resume does
    assert sorted(path.name for path in run.iterdir()) == ["recipe.json"]


def test_a_summary_that_the_disk_does_not_take_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory.create(tmp_path / "run", RECIPE, overwrite=False)

    def fail(handle: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(RunError, match=r"cannot be written: .*Input/output error"):
        directory.write_summary({})
