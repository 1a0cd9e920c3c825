"""A fork is the run as it was at a checkpoint, and the run that it is from stays as it is."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.saved_run import IMAGE, WEIGHTS, SavedRun
from helpers.tiny_runs import recipe_in
from postgrad.api.run import Run
from postgrad.checkpoint.settings import CheckpointSettings
from postgrad.checkpoint.store import CheckpointStore
from postgrad.core import files
from postgrad.core.errors import RunError, UsageError
from postgrad.core.files import link_or_copy
from postgrad.observe.console import Console
from postgrad.observe.run_dir import RunDirectory, claimed
from postgrad.tools import fork as module
from postgrad.tools.fork import fork
from postgrad.training.start import resume


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> SavedRun:
    folder = tmp_path_factory.mktemp("saved")
    return SavedRun.create(folder / "run", recipe_in(folder, "rl", "run", {}), steps=5)


@pytest.fixture
def run(saved: SavedRun, tmp_path: Path) -> SavedRun:
    return saved.copied(tmp_path / "run")


def seen(folder: Path) -> dict[str, Any]:
    """Everything of a directory that a reader must not change: contents, modes and times."""
    return {
        str(path): (path.stat().st_mode, path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


def objects(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_a_fork_has_the_logs_and_the_state_of_its_step_and_the_run_is_untouched(
    run: SavedRun, tmp_path: Path, console: Console
) -> None:
    run.directory.write_plans([{"after_step": n} for n in (0, 2, 4)])
    before, to = seen(run.path), tmp_path / "fork"
    manifest = (run.path / "checkpoints/step-000004/manifest.json").read_bytes()
    fork_facts = fork(run.path, "4", to, console)
    assert seen(run.path) == before
    digest = hashlib.sha256(manifest).hexdigest()
    source = str(run.path)
    facts = {"source": source, "step": 4, "manifest_sha256": digest}
    assert fork_facts == {"run_dir": str(to), **facts, "best": 2}
    assert sorted(path.name for path in to.iterdir()) == [
        "checkpoints", "events.jsonl", "images", "init", "metrics.jsonl", "plan.json",
        "recipe.json", "samples.jsonl.gz", "tokenizer.json",
    ]  # fmt: skip
    assert [line["step"] for line in objects(to / "metrics.jsonl")] == [1, 2, 3, 4]
    assert [line["step"] for line in Run(to).samples()] == [1, 2, 3, 4]
    assert [plan["after_step"] for plan in RunDirectory(to).plans()] == [0, 2]
    *earlier, last = objects(to / "events.jsonl")
    assert [event["step"] for event in earlier] == [1, 2, 3]  # the save of 4 came after it
    assert {**facts, "event": "forked"}.items() <= last.items()
    raw = json.loads((run.path / "recipe.json").read_text("utf-8"))
    raw["recipe"]["run_dir"] = str(to)
    assert json.loads((to / "recipe.json").read_text("utf-8")) == raw
    assert [path.name for path in (to / "images").iterdir()] == [IMAGE]
    assert (to / "init" / "config.json").read_text("utf-8") == "{}"
    store = CheckpointStore(to / "checkpoints", CheckpointSettings())
    infos = {info.step: (info.latest, info.best, info.complete) for info in store.infos()}
    assert infos == {2: (False, True, True), 4: (True, False, True)}
    assert (to / "checkpoints" / "latest").read_text("utf-8") == "step-000004\n"
    assert (to / "checkpoints" / "best").read_text("utf-8") == "step-000002\n"
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["fork", "run"]


def test_a_best_checkpoint_that_came_later_is_not_in_the_fork(
    run: SavedRun, tmp_path: Path, console: Console
) -> None:
    run.step(6, best=6)
    assert fork(run.path, "best", tmp_path / "six", console)["step"] == 6
    assert fork(run.path, "5", tmp_path / "five", console)["best"] == 2
    fork_facts = fork(run.path, "1", tmp_path / "one", console)
    assert fork_facts["best"] == 1  # as it was then
    store = CheckpointStore(tmp_path / "one" / "checkpoints", CheckpointSettings())
    assert (store.steps(), store.load("best").step) == ([1], 1)


@pytest.mark.parametrize("how", ["gone", "damaged"])
def test_a_best_checkpoint_that_is_not_there_any_more_is_told(
    how: str, run: SavedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = run.path / "checkpoints" / "step-000002"
    if how == "gone":
        shutil.rmtree(best)
    else:
        (best / WEIGHTS).write_bytes(b"")
    assert fork(run.path, "3", tmp_path / "fork", Console("plain"))["best"] is None
    shown = capsys.readouterr()
    assert "the best checkpoint so far, of step 2, is " in shown.out + shown.err
    settings = CheckpointSettings(best_metric="m")
    store = CheckpointStore(tmp_path / "fork" / "checkpoints", settings)
    assert store.steps() == [3]
    assert not (store.root / "best").exists()
    with pytest.raises(RunError, match=r"best after step 2 .* could not be saved or is gone"):
        store.load("best")


def test_checkpoints_are_hard_links_and_keep_their_modes(
    run: SavedRun, tmp_path: Path, console: Console
) -> None:
    fork(run.path, "5", tmp_path / "fork", console)
    for name in (f"checkpoints/step-000005/{WEIGHTS}", f"images/{IMAGE}", "tokenizer.json"):
        assert (tmp_path / "fork" / name).samefile(run.path / name)
    # what is appended to, or replaced, is nobody else's
    for name in ("metrics.jsonl", "samples.jsonl.gz", "events.jsonl", "recipe.json"):
        assert not (tmp_path / "fork" / name).samefile(run.path / name)
    shutil.rmtree(run.path)  # and the fork needs nothing of it
    assert CheckpointStore(tmp_path / "fork/checkpoints", CheckpointSettings()).load().step == 5


def test_where_there_are_no_hard_links_files_are_copied(
    run: SavedRun, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(files.os, "link", refuse)
    fork(run.path, "5", tmp_path / "fork", console)
    name = f"checkpoints/step-000005/{WEIGHTS}"
    copy = tmp_path / "fork" / name
    assert not copy.samefile(run.path / name)
    assert copy.read_bytes() == (run.path / name).read_bytes()


def test_a_file_of_somebody_else_is_copied(
    run: SavedRun, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner could change what is in it."""
    monkeypatch.setattr(files.os, "geteuid", lambda: os.getuid() + 1)
    fork(run.path, "5", tmp_path / "fork", console)
    name = f"checkpoints/step-000005/{WEIGHTS}"
    assert not (tmp_path / "fork" / name).samefile(run.path / name)


def test_the_curves_of_the_run_at_its_loggers_are_not_written_on(
    run: SavedRun, tmp_path: Path, console: Console
) -> None:
    run.step(6, loggers={"id": "0a1b2c3d"})
    manifest = run.path / "checkpoints/step-000006/manifest.json"
    fork_facts = fork(run.path, "latest", tmp_path / "fork", console)
    stores = [
        CheckpointStore(path / "checkpoints", CheckpointSettings())
        for path in (run.path, tmp_path / "fork")
    ]
    of_run, of_fork = (store.load().state for store in stores)
    assert (of_run.loggers, of_fork.loggers) == ({"id": "0a1b2c3d"}, {})
    assert replace(of_run, loggers={}) == of_fork
    assert fork_facts["manifest_sha256"] == hashlib.sha256(manifest.read_bytes()).hexdigest()


def test_the_recipe_of_a_fork_is_the_one_that_was_in_force(
    run: SavedRun, tmp_path: Path, console: Console
) -> None:
    run.change("lr", 0.5)
    run.step(6)
    run.change("lr", 0.25)
    run.step(7)
    for step, lr, kept in ((5, 0.01, []), (6, 0.5, [1]), (7, 0.25, [1, 2])):
        to = tmp_path / str(step)
        fork(run.path, str(step), to, console)
        assert Run(to).recipe.learner.lr == lr
        names = [f"recipe-{number}.json" for number in kept]
        assert sorted(path.name for path in to.glob("recipe-*")) == names
        fork(to, str(step), tmp_path / f"{step} again", console)
        assert Run(tmp_path / f"{step} again").recipe.learner.lr == lr


def test_a_change_that_was_killed_before_it_was_written_is_found_all_the_same(
    run: SavedRun, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(Exception):
        pass

    def kill(*_: Any) -> None:
        raise Killed

    for number in (1, 2):
        with monkeypatch.context() as patch:
            if number == 1:  # just before recipe.json is replaced; then just after
                patch.setattr(RunDirectory, "write_recipe", kill)
            patch.setattr("postgrad.training.start._execute", kill)
            with pytest.raises(Killed):
                resume(run.path, ["--learner.lr", "0.5"], ["learner.lr"], console)
        fork(run.path, "5", tmp_path / str(number), console)
        assert Run(tmp_path / str(number)).recipe.learner.lr == 0.01
    assert Run(run.path).recipe.learner.lr == 0.5


def test_checkpoints_elsewhere_are_taken_and_the_fork_saves_in_its_own_directory(
    make_recipe: Any, tmp_path: Path, console: Console
) -> None:
    elsewhere = tmp_path / "disk"
    recipe = make_recipe("rl", checkpoint={"ckpt_path": str(elsewhere)})
    run = SavedRun.create(tmp_path / "run", recipe)
    run.store = CheckpointStore(elsewhere, CheckpointSettings())
    run.step(1)
    fork(run.path, "latest", tmp_path / "fork", console)
    assert Run(tmp_path / "fork").recipe.checkpoint.ckpt_path is None
    assert [info.step for info in Run(tmp_path / "fork").checkpoints] == [1]


def test_a_model_that_both_would_push_is_told(
    make_recipe: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe("rl", checkpoint={"save_hf": True, "push_to_hub": "me/model"})
    run = SavedRun.create(tmp_path / "run", recipe, steps=1)
    fork(run.path, "latest", tmp_path / "fork", Console("plain"))
    shown = capsys.readouterr()
    assert "at its end the fork pushes its model to me/model" in shown.out + shown.err
    assert Run(tmp_path / "fork").recipe.checkpoint.push_to_hub == "me/model"


def test_a_fork_does_not_write_to_the_mirror_of_its_source(
    make_recipe: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe("rl", checkpoint={"mirror": "s3://bucket/run"})
    run = SavedRun.create(tmp_path / "run", recipe, steps=1)
    fork(run.path, "latest", tmp_path / "fork", Console("plain"))
    shown = capsys.readouterr()
    assert "checkpoint.mirror is left out" in shown.out + shown.err
    assert Run(tmp_path / "fork").recipe.checkpoint.mirror == ""


def test_of_damaged_latest_checkpoints_the_newest_good_one_is_forked(
    run: SavedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = run.path / "checkpoints" / "step-000005" / WEIGHTS
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    assert fork(run.path, "latest", tmp_path / "a", Console("plain"))["step"] == 4
    shown = capsys.readouterr()
    assert f"{damaged} has changed since it was written" in shown.out + shown.err
    with pytest.raises(RunError, match=rf"step 5 is damaged: {damaged} has changed"):
        fork(run.path, "5", tmp_path / "b", Console("quiet"))
    assert not (tmp_path / "b").exists()


Break = Callable[[SavedRun], object]
WRONG: dict[str, tuple[Break, str, str]] = {
    "no such step": (lambda run: None, "9", "no checkpoint of step 9; there are: 1, 2, 3, 4, 5"),
    "no such word": (lambda run: None, "newest", "latest, best, or the number of a step"),
    "no checkpoint": (
        lambda run: shutil.rmtree(run.path / "checkpoints"), "latest", "no checkpoint was saved"
    ),
    "lost lines": (
        lambda run: os.truncate(run.path / "metrics.jsonl", 9), "4", r"metrics\.jsonl has 9 bytes"
    ),
    "lost events": (
        lambda run: os.truncate(run.path / "events.jsonl", 9), "4", r"events\.jsonl has 9 bytes"
    ),
    "no log": (lambda run: (run.path / "metrics.jsonl").unlink(), "4", "No such file"),
    "another recipe": (
        lambda run: (run.path / "recipe.json").write_text('{"recipe": {"job": "x"}}'), "4", "job"
    ),
    "a recipe of another place": (
        lambda run: run.logs.event("recipe_changed", "", kept="../../recipe-1.json"), "4",
        "recipe-N.json is expected",
    ),
    "a pipe": (lambda run: _pipe(run.path / "tokenizer.json"), "4", "is a pipe, where a file is"),
}  # fmt: skip


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_forked_is_one_message_and_leaves_nothing(
    case: str, run: SavedRun, tmp_path: Path, console: Console
) -> None:
    spoil, which, message = WRONG[case]
    spoil(run)
    with pytest.raises((UsageError, RunError), match=message):
        fork(run.path, which, tmp_path / "fork", console)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    "name",
    [
        "recipe.json", "metrics.jsonl", "samples.jsonl.gz", "events.jsonl", "tokenizer.json",
        "init", "init/config.json", "images", f"images/{IMAGE}", "checkpoints",
        "checkpoints/step-000004", f"checkpoints/step-000004/{WEIGHTS}",
        "checkpoints/step-000004/manifest.json",
    ],
)  # fmt: skip
def test_no_link_in_the_run_is_followed(
    name: str, run: SavedRun, tmp_path: Path, console: Console
) -> None:
    path, outside = run.path / name, tmp_path / "outside"
    path.rename(outside)
    path.symlink_to(outside)
    with pytest.raises((UsageError, RunError), match=r"is a link|is missing"):
        fork(run.path, "4", tmp_path / "fork", console)
    assert not (tmp_path / "fork").exists()


def test_a_checkpoint_that_its_run_removes_meanwhile_is_one_message(
    run: SavedRun, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, taken = run.path / "checkpoints" / "step-000003", list[Path]()

    def racing(source: Path, to: Path) -> None:
        if len(taken) == 1 and path.exists():
            shutil.rmtree(path)
        link_or_copy(source, to)
        taken.append(source)

    monkeypatch.setattr(module, "link_or_copy", racing)
    with pytest.raises(RunError, match=r"step-000003 was removed while it was read: .* newer"):
        fork(run.path, "3", tmp_path / "fork", console)
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]
    assert fork(run.path, "latest", tmp_path / "fork", console)["step"] == 5


def test_where_a_fork_goes_is_empty_and_outside(
    run: SavedRun, tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, link, file = tmp_path / "full", tmp_path / "link", tmp_path / "file"
    full.mkdir()
    (full / "mine.txt").write_text("mine", "utf-8")
    link.symlink_to(tmp_path / "nowhere")
    file.write_text("mine", "utf-8")
    for to, message in (
        (full, "is not empty"),
        (link, "a file or a link"),
        (file, "a file or a link"),
        (run.path, "in the run that is forked"),
        (run.path / "fork", "in the run that is forked"),
    ):
        with pytest.raises(UsageError, match=message):
            fork(run.path, "5", to, console)
    for name in ("empty", "shown"):
        (tmp_path / name).mkdir()
    (tmp_path / "shown" / ".DS_Store").touch()  # as macOS's Finder writes it
    for name in ("empty", "shown"):
        fork(run.path, "5", tmp_path / name, console)
        assert Run(tmp_path / name).recipe.run_dir == str(tmp_path / name)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    fork(run.path, "5", Path("deep/er"), console)
    assert Run("deep/er").recipe.run_dir == "deep/er"


def test_one_run_of_a_pipeline_or_a_sweep_is_forked(
    run: SavedRun, tmp_path: Path, console: Console
) -> None:
    above = tmp_path / "above"
    above.mkdir()
    run.path.rename(above / "rl")
    with pytest.raises(UsageError, match=rf"several runs, .* name its directory: {above / 'rl'}"):
        fork(above, "latest", tmp_path / "fork", console)
    (above / "sweep.json").write_text("{}", "utf-8")
    with pytest.raises(UsageError, match="is a sweep, and one run is forked"):
        fork(above, "latest", tmp_path / "fork", console)
    with pytest.raises(UsageError, match="is not a run directory"):
        fork(above / "rl" / "init", "latest", tmp_path / "fork", console)
    fork(above / "rl", "latest", tmp_path / "fork", console)


def test_what_a_killed_fork_left_is_removed_and_one_under_way_is_not(
    run: SavedRun, tmp_path: Path, console: Console
) -> None:
    left = tmp_path / ".fork.4711.tmp"
    left.mkdir()
    (left / "metrics.jsonl").write_text("", "utf-8")
    with claimed(left), pytest.raises(UsageError, match="another process is running in"):
        fork(run.path, "5", tmp_path / "fork", console)
    assert left.exists()
    fork(run.path, "5", tmp_path / "fork", console)
    assert not left.exists()


def test_a_fork_without_its_checkpoints_does_not_start_over(
    run: SavedRun, tmp_path: Path, console: Console
) -> None:
    fork(run.path, "1", tmp_path / "fork", console)
    shutil.rmtree(tmp_path / "fork" / "checkpoints")
    with pytest.raises(UsageError, match="has saved checkpoints, the last one of step 1"):
        resume(tmp_path / "fork", [], [], console)


def test_python_makes_a_fork_too(run: SavedRun, tmp_path: Path) -> None:
    forked_run = Run(run.path).fork(tmp_path / "fork", 3)
    assert [info.step for info in forked_run.checkpoints] == [2, 3]
    assert forked_run.events()[-1]["event"] == "forked"
