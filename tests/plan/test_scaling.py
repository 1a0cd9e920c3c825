"""`postgrad plan --scale`: what it simulates, says and refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.jobs import write_recipe
from postgrad.cli.main import main

HARDWARE = ["--hardware", "H100"]


def scaled(recipe: Path, counts: str, capsys: pytest.CaptureFixture[str], *more: str) -> Any:
    assert main(["plan", str(recipe), "--scale", counts, "--json", *HARDWARE, *more]) == 0
    return json.loads(capsys.readouterr().out)


def test_each_number_of_devices_is_simulated_in_turns_and_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = scaled(write_recipe("grpo with kl", tmp_path), "1,4", capsys)
    ways = report["scale"]
    assert [way["staleness"] for way in ways if way["devices"] == 1] == [0, 1, 2, 4, 8]
    four = [way for way in ways if way["devices"] == 4]
    assert [(way["staleness"], way["apart"]) for way in four] == [
        *((staleness, False) for staleness in (0, 1, 2, 4, 8)),
        *((staleness, True) for staleness in (1, 2, 4, 8)),
    ]
    for way in four:
        result = way["simulated"]
        assert way["engines"] + (way["learners"] if way["apart"] else 0) == 4
        assert result["seconds"] > 0
        assert result["oldest"] <= way["staleness"]
        assert 0 <= result["learner_idle"] <= 1
        assert 0 <= result["engine_idle"] <= 1
        # An answer of the most tokens need not be drawn, so the floor is above what it would be.
        assert way["floor"] * (way["staleness"] + 1) >= result["seconds"] * 0.5


def test_answers_are_as_long_as_those_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe("grpo with kl", tmp_path)
    run = tmp_path / "recorded"
    run.mkdir()
    lines = [
        {"ticket": ticket, "turns": [{"token_ids": [1] * (2 + ticket)}, {"token_ids": [1]}]}
        for ticket in (0, 0, 1)
    ]
    (run / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    report = scaled(recipe, "1", capsys, "--lengths", str(run))
    assert report["lengths"] == f"answers as long as the 2 groups of {run}"
    (run / "samples.jsonl").write_text("{}\n", "utf-8")
    assert main(["plan", str(recipe), "--scale", "1", "--lengths", str(run), *HARDWARE]) == 2
    assert "samples.jsonl:1: not a sample" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("job", "words", "message"),
    [
        ("sft", ["--scale", "8"], 'simulates job = "rl"'),
        ("grpo with kl", ["--scale", "8,x"], "--scale 8,x: numbers of devices"),
        ("grpo with kl", ["--scale", "0"], "--scale 0: numbers of devices"),
        ("grpo with kl", ["--lengths", "run"], "--lengths is of --scale"),
        ("grpo with kl", ["--scale", "8", "--search"], "no other flag of plan"),
        ("grpo with kl", ["--scale", "8", "--lengths", "nowhere"], "no file nowhere"),
    ],
)
def test_what_it_cannot_simulate_is_refused(
    job: str, words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(job, tmp_path)
    assert main(["plan", str(recipe), *HARDWARE, *words]) == 2
    assert message in capsys.readouterr().err
