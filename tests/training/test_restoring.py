"""A run whose machine is gone comes back from its mirror, to the same bits."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from helpers.failing_store import FailingStore, StoreKilled
from helpers.runs import assert_same_run, lines, train_until_killed
from helpers.tiny_runs import MakeRecipe
from postgrad.checkpoint import files
from postgrad.checkpoint.mirror import Mirror
from postgrad.checkpoint.state import Best, RunState
from postgrad.core.errors import DiskFull, RunError, UsageError
from postgrad.observe.console import Console
from postgrad.observe.run_dir import RunDirectory
from postgrad.recipe.load import with_overrides
from postgrad.recipe.recipe import Recipe
from postgrad.training import loop
from postgrad.training.rl import RLJob
from postgrad.training.saving import store_of
from postgrad.training.sft import SFTJob
from postgrad.training.start import resume, train

URL = "failing://bucket/run"
SAVES = {"save_steps": 1, "max_ckpt_num": 2}
MIRRORED = {"checkpoint": {**SAVES, "mirror": URL}}


@pytest.fixture(autouse=True)
def _empty_store() -> None:
    FailingStore.reset()


STALE = {
    "rollout": {"max_staleness": 1},
    "algorithm": {"correction": "tis"},
    "observe": {"compress": "gzip"},
}
Lost = Callable[..., Recipe]


@pytest.fixture
def lost(make_recipe: MakeRecipe, console: Console, monkeypatch: pytest.MonkeyPatch) -> Lost:
    """lost("sft", **sections): a run that was killed after two steps, and its machine with it."""

    def make(job: str = "sft", kind: type = SFTJob, **changes: Any) -> Recipe:
        recipe = make_recipe(job, **{**MIRRORED, **changes})
        train_until_killed(monkeypatch, kind, 2, recipe, console)
        shutil.rmtree(recipe.run_dir)
        return recipe

    return make


def events(recipe: Recipe, kind: str) -> list[dict[str, Any]]:
    path = Path(recipe.run_dir) / "events.jsonl"
    return [event for event in lines(path) if event["event"] == kind]


def objects() -> dict[str, bytes]:
    return {name: file.getvalue() for name, file in FailingStore.store.items()}


def damage(name: str) -> None:
    content = bytearray(FailingStore.store[f"/bucket/run/{name}"].getvalue())
    content[-1] ^= 1
    fsspec.filesystem("failing").pipe_file(f"/bucket/run/{name}", bytes(content))


def test_overwrite_empties_no_mirror_of_a_run_whose_download_was_killed(
    lost: Lost, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = lost()

    def killed(*_: object) -> int:
        raise StoreKilled

    with monkeypatch.context() as patch:
        patch.setattr(Mirror, "download", killed)
        with pytest.raises(StoreKilled):
            train(recipe, console)
    before = objects()
    with pytest.raises(UsageError, match="--overwrite true empties no mirror of another run"):
        train(recipe, console, overwrite=True)
    assert objects() == before
    assert train(recipe, console)["steps"] == 3


@pytest.mark.parametrize(
    ("job", "kind", "changes"),
    [
        ("sft", SFTJob, {}),
        ("rl", RLJob, STALE),
    ],
)
def test_on_another_machine_a_run_ends_with_the_same_bits(
    job: str,
    kind: type,
    changes: dict[str, Any],
    trained: MakeRecipe,
    lost: Lost,
    console: Console,
) -> None:
    never = trained(job, checkpoint=SAVES, **changes)
    recipe = lost(job, kind, **changes)
    train(recipe, console)
    assert_same_run(never, recipe, 3)
    assert [event["step"] for event in events(recipe, "restored")] == [2]
    here, there = ({*Path(run.run_dir).iterdir()} for run in (recipe, never))
    assert {path.name for path in here} == {path.name for path in there} | {"mirror.json"}
    assert Mirror(URL).steps() == [2, 3]


@pytest.fixture
def best_first(
    make_recipe: MakeRecipe, console: Console, monkeypatch: pytest.MonkeyPatch
) -> Recipe:
    """A run whose first step was the best, and whose machine is gone."""

    def better(run: Any, state: RunState, metrics: Any) -> tuple[Best | None, bool]:
        if not state.step:
            return None, False
        return Best("eval/accuracy", 1.0, 1, state.step - 1, "max"), state.step == 1

    monkeypatch.setattr(loop, "_better", better)
    best = {"best_metric": "eval/accuracy", "best_mode": "max", "max_ckpt_num": 1}
    recipe = make_recipe("sft", eval={"every": 1}, checkpoint={**SAVES, "mirror": URL, **best})
    train(recipe, console)
    assert Mirror(URL).steps() == [1, 3]
    shutil.rmtree(recipe.run_dir)
    return recipe


def test_the_best_checkpoint_comes_with_the_newest(best_first: Recipe, console: Console) -> None:
    train(best_first, console)
    store = store_of(best_first, RunDirectory(Path(best_first.run_dir)))
    assert (store.load().step, store.load("best").step) == (3, 1)
    train(with_overrides(best_first, ["--steps", "4"]), console)
    assert (store.steps(), Mirror(URL).steps()) == ([1, 4], [1, 4])


def test_a_best_checkpoint_that_is_damaged_is_told_and_the_run_goes_on(
    best_first: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    damage("checkpoints/step-000001/policy.weights.safetensors")
    train(best_first, Console("plain"))
    assert "the best checkpoint, of step 1, is damaged" in " ".join(capsys.readouterr().out.split())
    assert not list((Path(best_first.run_dir) / "checkpoints").glob(".*"))
    store = store_of(best_first, RunDirectory(Path(best_first.run_dir)))
    assert store.steps() == [3]


def test_a_run_that_has_ended_is_there_again_on_another_machine(
    make_recipe: MakeRecipe, console: Console
) -> None:
    recipe = make_recipe("sft", **MIRRORED)
    first = train(recipe, console)
    shutil.rmtree(recipe.run_dir)
    again = train(recipe, console)
    assert again["evaluations"] == first["evaluations"]
    assert again["mirror"] == {"url": URL, "step": 3, "behind": False}


def test_the_newer_checkpoint_wins_wherever_it_is(
    make_recipe: MakeRecipe, trained: MakeRecipe, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    never, recipe = trained("sft", checkpoint=SAVES), make_recipe("sft", **MIRRORED)
    train_until_killed(monkeypatch, SFTJob, 1, recipe, console)
    run, old = Path(recipe.run_dir), Path(recipe.run_dir).with_name("old")
    shutil.copytree(run, old)
    train_until_killed(monkeypatch, SFTJob, 2, recipe, console)
    with monkeypatch.context() as patch:  # as new as the mirror's: nothing is downloaded
        patch.setattr(Mirror, "download", None)
        train(with_overrides(recipe, ["--steps", "2"]), console)
    shutil.rmtree(run)
    old.rename(run)  # a machine that has an older state
    resume(run, [], [], console)
    assert [event["step"] for event in events(recipe, "restored")] == [2]
    assert_same_run(never, recipe, 3)


def test_a_damaged_checkpoint_of_the_disk_comes_from_the_mirror(
    make_recipe: MakeRecipe, trained: MakeRecipe, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    never, recipe = trained("sft", checkpoint=SAVES), make_recipe("sft", **MIRRORED)
    train_until_killed(monkeypatch, SFTJob, 2, recipe, console)
    path = Path(recipe.run_dir) / "checkpoints" / "step-000002" / "policy.weights.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    train(recipe, console)
    assert [event["step"] for event in events(recipe, "restored")] == [2]
    assert_same_run(never, recipe, 3)


@pytest.mark.parametrize("which", ["state.json", "policy.optimizer.safetensors", "table", "piece"])
def test_a_damaged_checkpoint_of_the_mirror_is_passed_over_and_named(
    which: str, lost: Lost, trained: MakeRecipe, console: Console
) -> None:
    never, recipe = trained("sft", checkpoint=SAVES), lost()
    if which == "piece":
        table = Mirror(URL).table(2)
        own_pieces = sorted(table.pieces - Mirror(URL).table(1).pieces)
        damage(f"pieces/{own_pieces[0]}")
    else:
        damage(
            "tables/step-000002.json" if which == "table" else f"checkpoints/step-000002/{which}"
        )
    train(recipe, console)
    [event] = events(recipe, "damaged_checkpoint")
    assert event["message"].startswith("the checkpoint of step 2 is damaged and skipped: ")
    assert URL in event["message"]
    assert_same_run(never, recipe, 3)
    assert Mirror(URL).steps() == [2, 3]
    Mirror(URL).download(2, Path(recipe.run_dir) / "again")  # it was saved anew


def test_where_no_checkpoint_of_the_mirror_is_intact_nothing_starts_over(
    lost: Lost, console: Console
) -> None:
    recipe = lost()
    for step in (1, 2):
        damage(f"checkpoints/step-00000{step}/state.json")
    with pytest.raises(RunError, match=r"no checkpoint to read: .*step 2 .*step 1 "):
        train(recipe, console)


def test_a_table_may_name_files_of_a_run_alone(lost: Lost, console: Console) -> None:
    recipe = lost()
    name = "/bucket/run/tables/step-000002.json"
    table = json.loads(FailingStore.store[name].getvalue())
    table["files"][".bashrc"] = table["files"]["recipe.json"]
    fsspec.filesystem("failing").pipe_file(name, json.dumps(table).encode())
    train(recipe, console)
    [event] = events(recipe, "damaged_checkpoint")
    assert "names '.bashrc', which is no file of a run" in event["message"]
    assert not (Path(recipe.run_dir) / ".bashrc").exists()


@pytest.mark.parametrize("point", ["checkpoint", "a file", "moves", "commit"])
def test_who_is_killed_while_he_restores_restores_again(
    point: str,
    lost: Lost,
    trained: MakeRecipe,
    console: Console,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    never, recipe = trained("sft", checkpoint=SAVES), lost()

    def killed(*arguments: Any) -> Any:
        raise StoreKilled

    with monkeypatch.context() as patch:
        if point == "checkpoint":
            patch.setattr("postgrad.training.restoring.read_checkpoint", killed)
        elif point == "a file":
            patch.setattr(Mirror, "download_file", killed)
            patch.setattr("postgrad.training.restoring._Restorer._require_same", lambda *_: None)
            patch.setattr("postgrad.training.restoring._Restorer._recipe_of", lambda *_: None)
        elif point == "moves":
            original_replace, moved = Path.replace, [0]

            def replace(path: Path, to: Path) -> Path:
                moved[0] += path.parent.name.startswith(".mirror")
                return killed() if moved[0] == 3 else original_replace(path, to)

            patch.setattr(Path, "replace", replace)
        else:
            patch.setattr(files, "commit", killed)
        with pytest.raises(StoreKilled):
            train(recipe, console)
    train(recipe, console)
    assert_same_run(never, recipe, 3)
    assert not list(Path(recipe.run_dir).glob(".*"))


def test_a_machine_without_room_is_told_before_anything_is_downloaded(
    lost: Lost, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = lost()
    monkeypatch.setattr(Mirror, "size", lambda self, step: 2**60)
    monkeypatch.setattr(Mirror, "download", None)
    with pytest.raises(DiskFull, match=r"make room, or choose another --run_dir"):
        train(recipe, console)


def test_another_recipe_is_refused_before_anything_is_downloaded(
    lost: Lost, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, before = lost(), objects()
    other = with_overrides(recipe, ["--learner.lr", "0.5"])
    monkeypatch.setattr(Mirror, "download", None)
    with pytest.raises(
        UsageError, match=r"failing://bucket/run already holds another run"
    ) as error:
        train(other, console)
    assert "learner.lr: 0.01 there, 0.5 here" in str(error.value)
    assert "name another folder with --checkpoint.mirror" in str(error.value)
    assert not Path(recipe.run_dir).exists()
    assert objects() == before


def test_another_recipe_is_refused_before_the_first_checkpoint_too(
    make_recipe: MakeRecipe, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe("sft", **MIRRORED)
    train_until_killed(monkeypatch, SFTJob, 0, recipe, console)
    shutil.rmtree(recipe.run_dir)
    with pytest.raises(UsageError, match="already holds another run"):
        train(with_overrides(recipe, ["--seed", "5"]), console)
    train(recipe, console)
    assert Mirror(URL).steps() == [2, 3]


def test_another_run_of_the_same_recipe_is_refused(
    make_recipe: MakeRecipe, lost: Lost, console: Console
) -> None:
    lost()
    before = objects()
    recipe = make_recipe("sft", "other", checkpoint=SAVES)
    train(with_overrides(recipe, ["--steps", "1"]), console)
    with pytest.raises(UsageError, match="holds another run than run_dir: name a folder"):
        resume(Path(recipe.run_dir), ["--checkpoint.mirror", URL], [], console)
    assert objects() == before


def test_a_recipe_that_loads_no_checkpoint_refuses_a_mirror_with_a_run(
    lost: Lost, console: Console
) -> None:
    with pytest.raises(UsageError, match="load_checkpoint is false: name another folder"):
        train(with_overrides(lost(), ["--checkpoint.load_checkpoint", "false"]), console)


def test_overwriting_empties_the_mirror_of_the_run_that_is_overwritten(
    make_recipe: MakeRecipe, console: Console
) -> None:
    recipe = make_recipe("sft", **MIRRORED)
    train(recipe, console)
    shorter = with_overrides(recipe, ["--steps", "1", "--learner.lr", "0.5"])
    train(shorter, console, overwrite=True)
    assert Mirror(URL).steps() == [1]
    owner = Mirror(URL).owner()
    assert owner is not None
    assert owner.recipe["recipe"]["learner"]["lr"] == 0.5


def test_overwriting_never_empties_the_mirror_of_a_run_that_is_not_here(
    lost: Lost, console: Console
) -> None:
    recipe, before = lost(), objects()
    with pytest.raises(UsageError, match="--overwrite true empties no mirror of another run"):
        train(recipe, console, overwrite=True)
    assert objects() == before


def test_a_run_may_get_a_mirror_later(
    make_recipe: MakeRecipe, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe("sft", checkpoint=SAVES)
    train_until_killed(monkeypatch, SFTJob, 2, recipe, console)
    resume(Path(recipe.run_dir), ["--checkpoint.mirror", URL, "--steps", "2"], [], console)
    assert Mirror(URL).steps() == [2]  # what was saved before it


def test_a_store_that_does_not_answer_starts_no_run(
    make_recipe: MakeRecipe, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It might hold the run, which would start over."""

    def down(*arguments: Any, **more: Any) -> Any:
        raise TimeoutError("no route")

    monkeypatch.setattr(FailingStore, "ls", down)
    recipe = make_recipe("sft", **MIRRORED)
    with pytest.raises(RunError, match=r"does not answer as expected, at its folder: TimeoutError"):
        train(recipe, console)
    assert not Path(recipe.run_dir).exists()
