"""`postgrad report` as a person types it."""

import json
from pathlib import Path

import pytest

from helpers.made_run import made_run
from postgrad.cli.main import main
from postgrad.observe.console import Console
from postgrad.observe.report.selection import Cap
from postgrad.recipe.load import load_recipe
from postgrad.tools.pages import about, contents, difference_rows, report

QUIET = Console("quiet")


def test_a_run_becomes_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made_run(tmp_path / "run", steps=2)
    assert main(["report", str(run), "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["report"] == str(run / "report.html")
    assert output["bytes"] == (run / "report.html").stat().st_size
    assert output["samples"] == 16
    assert main(["report", str(run), "--to", str(tmp_path / "deep" / "page.html")]) == 0
    assert (tmp_path / "deep" / "page.html").read_bytes() == (run / "report.html").read_bytes()


def test_the_cap_and_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made_run(tmp_path / "run", steps=4)
    to = tmp_path / "page.html"
    assert report([run], to, QUIET, cap=Cap(samples=16))["samples"] == 16
    monkeypatch.setattr("postgrad.observe.report.selection.Cap.__init__.__defaults__", (8, 1e9))
    assert main(["report", str(run), "--to", str(to)]) == 0
    few = to.stat().st_size
    assert main(["report", str(run), "--to", str(to), "--all"]) == 0
    assert to.stat().st_size > few


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made_run(tmp_path / "run", steps=1)
    for arguments, message in (
        ([str(tmp_path)], "it is not a run directory"),
        ([str(tmp_path / "gone")], "is no directory"),
        ([str(run)] * 13, "at most 12 side by side"),
        ([str(run), "--to", str(tmp_path)], "name a file in it"),
    ):
        assert main(["report", *arguments]) == 2
        assert message in capsys.readouterr().err


def test_recipes_are_compared_key_by_key() -> None:
    recipe_table = {"seed": 0, "learner": {"lr": 1.0}, "rewards": [{"type": "a"}]}
    two = {"seed": 0, "learner": {"lr": 2.0}, "rewards": [{"type": "b"}]}
    three = {"seed": 1, "learner": {"lr": 1.0}, "rewards": [{"type": "a"}], "eval": None}
    assert difference_rows([recipe_table, two, three]) == [
        ["learner.lr", 1.0, 2.0, 1.0],
        ["rewards.0.type", "a", "b", "a"],
        ["seed", 0, 0, 1],
    ]
    assert difference_rows([recipe_table]) == []
    none = {**recipe_table, "rewards": []}
    assert difference_rows([recipe_table, two, none])[1:] == [
        ["rewards.0.type", "a", "b", None],
        ["rewards", [{"type": "a"}], [{"type": "b"}], []],
    ]


def test_batch_numbers_come_with_their_formulas() -> None:
    recipe = load_recipe(Path(__file__).parents[2] / "recipes" / "gsm8k_grpo.toml").dump()
    rows = {name: (number, text) for name, number, text in about(recipe)["batch"]}
    assert rows["samples_per_step"] == (
        "128",
        "samples = rollout_batch_size * n_samples_per_prompt",
    )
    problem = about({**recipe, "job": "of another version"})
    assert problem["batch"] == []
    assert "not one of this version" in problem["batch_problem"]


def test_a_title_names_up_to_three_runs(tmp_path: Path) -> None:
    runs = [made_run(tmp_path / name, steps=1) for name in "abcd"]
    assert contents(runs[:3])["title"] == "a against b against c"
    assert contents(runs)["title"] == "4 runs"
