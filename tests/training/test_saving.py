"""What is said about disk and pauses, held to what happens."""

import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from helpers.runs import assert_same_run, lines
from postgrad.checkpoint.state import RunState
from postgrad.checkpoint.store import CheckpointStore
from postgrad.core.errors import RunError
from postgrad.observe.console import Console
from postgrad.training.sft import SFTJob
from postgrad.training.start import resume, train


@pytest.mark.parametrize(
    ("job", "ema_decay"),
    [
        ("sft", 0.9),
        ("rl", 0.0),
        pytest.param("sft", 0.0, marks=pytest.mark.slow),
        pytest.param("rl", 0.9, marks=pytest.mark.slow),
    ],
)
def test_the_size_estimated_is_the_size_on_the_disk(
    job: str, ema_decay: float, make_recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    estimated: list[int] = []
    ask = CheckpointStore.require_space

    def note(self: CheckpointStore, size: int) -> int:
        estimated.append(size)
        return ask(self, size)

    monkeypatch.setattr(CheckpointStore, "require_space", note)
    recipe = make_recipe(job, learner={"ema_decay": ema_decay})
    output = StringIO()
    train(recipe, Console("plain", output))
    newest = Path(recipe.run_dir) / "checkpoints" / "step-000003"
    tensors = sum(path.stat().st_size for path in newest.glob("*.safetensors"))
    assert estimated[0] == estimated[-1]  # before the run, and of its last save
    assert estimated[0] <= tensors <= estimated[0] + 20_000  # safetensors' headers
    assert f"disk: a checkpoint takes {estimated[0] / 2**20:,.1f} MiB" in output.getvalue()


@pytest.mark.slow
def test_a_disk_without_room_for_all_of_them_is_told_before_the_run(
    make_recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe("sft", checkpoint={"max_ckpt_num": 2, "best_metric": "eval/accuracy"})
    output = StringIO()
    monkeypatch.setattr(CheckpointStore, "require_space", lambda self, size: 4 * size - 1)
    train(recipe, Console("plain", output))
    assert "there is no room for 4 checkpoints" in output.getvalue()
    output = StringIO()
    kept = {"max_ckpt_num": 2, "best_metric": "eval/accuracy"}
    recipe = make_recipe("sft", "two", checkpoint=kept)
    monkeypatch.setattr(CheckpointStore, "require_space", lambda self, size: 4 * size)
    train(recipe, Console("plain", output))
    assert "there is no room" not in output.getvalue()


@pytest.mark.slow
def test_a_run_whose_directory_is_moved_stops_and_continues_from_there(
    make_recipe: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next save would make a directory of the old name, without recipe and logs."""
    never = make_recipe("sft", "never", checkpoint={"save_steps": 1})
    train(never, console)
    recipe = make_recipe("sft", checkpoint={"save_steps": 1})
    run_dir = Path(recipe.run_dir)
    moved = run_dir.with_name("moved")
    step = SFTJob.step

    def move_at_third(job: SFTJob, state: RunState) -> Any:
        if state.step == 2:
            while not (run_dir / "checkpoints" / "step-000002").exists():  # written behind
                time.sleep(0.01)
            run_dir.rename(moved)
        return step(job, state)

    with monkeypatch.context() as patch:
        patch.setattr(SFTJob, "step", move_at_third)
        with pytest.raises(RunError, match=f"run_dir {run_dir} was moved or removed"):
            train(recipe, console)
    assert not run_dir.exists()
    resume(moved, [], [], console)
    moved.rename(run_dir)
    assert_same_run(never, recipe, 3)


def test_every_save_logs_its_pause_and_its_size(make_recipe: Any, console: Console) -> None:
    recipe = make_recipe("sft", steps=4, checkpoint={"save_steps": 1})
    train(recipe, console)
    save_events = [
        line for line in lines(Path(recipe.run_dir) / "events.jsonl") if line["event"] == "saved"
    ]
    assert [line["step"] for line in save_events] == [1, 2, 3, 4]
    assert [line["behind"] for line in save_events] == [True, True, True, False]
    for line in save_events:
        assert line["pause_seconds"] > 0.0
        assert line["write_seconds"] > 0.0
        assert line["size_bytes"] == save_events[0]["size_bytes"]
    assert save_events[-1]["pause_seconds"] >= save_events[-1]["write_seconds"]
