"""What `postgrad checkpoints` shows of a run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.runs import lines
from postgrad.observe.console import Console
from postgrad.tools.checkpoints import checkpoints
from postgrad.training.start import train


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")  # no line of a table is broken


@pytest.mark.slow
def test_results_older_than_their_checkpoint_are_shown_with_their_step(
    make_recipe: Callable[..., Any], console: Console, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(
        "rl",
        eval={"every": 2, "at_start": True},
        checkpoint={"save_steps": 1, "max_ckpt_num": 9, "best_metric": "eval/reward"},
    )
    train(recipe, console)
    run = Path(recipe.run_dir)
    rewards = {line["step"]: line["reward"] for line in lines(run / "eval.jsonl")}
    with (run / "eval.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 2, "rew')  # a kill tears a line
    listed = checkpoints(run, Console("plain"))
    assert [(checkpoint["step"], checkpoint["evaluated_at"]) for checkpoint in listed] == [
        (1, 0),
        (2, 2),
        (3, 3),
    ]
    for checkpoint in listed:
        assert checkpoint["evaluations"]["eval/reward"] == rewards[checkpoint["evaluated_at"]]
    shown = capsys.readouterr().out
    assert shown.count("of step") == 1
    weights = Path(listed[1]["path"]) / "policy.weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    damaged = checkpoints(run, Console("quiet"))[1]
    assert (damaged["evaluations"], damaged["evaluated_at"]) == ({}, None)
    assert f"eval/reward {rewards[0]:.3f}, of step 0" in shown


@pytest.mark.slow
def test_what_was_not_evaluated_yet_is_shown_without_results(
    make_recipe: Callable[..., Any], console: Console, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe("sft", eval={"at_start": False}, checkpoint={"save_steps": 1}, steps=2)
    train(recipe, console)
    first, last = checkpoints(Path(recipe.run_dir), Console("plain"))
    assert (first["evaluations"], first["evaluated_at"]) == ({}, None)
    assert (bool(last["evaluations"]), last["evaluated_at"]) == (True, 2)
    shown = capsys.readouterr().out
    assert shown.count("eval/accuracy") == 1
    assert "of step" not in shown


@pytest.mark.slow
def test_checkpoints_that_are_never_removed_are_marked(
    make_recipe: Callable[..., Any], console: Console, capsys: pytest.CaptureFixture[str]
) -> None:
    saves = {"save_steps": 1, "max_ckpt_num": 1, "keep_steps": 2}
    recipe = make_recipe("sft", eval={}, checkpoint=saves, steps=5)
    train(recipe, console)
    capsys.readouterr()
    listed = checkpoints(Path(recipe.run_dir), Console("plain"))
    assert [(checkpoint["step"], checkpoint["kept"]) for checkpoint in listed] == [
        (2, True),
        (4, True),
        (5, False),
    ]
    shown = capsys.readouterr().out
    assert shown.count("complete, kept") == 2
    assert "complete, latest" in shown
