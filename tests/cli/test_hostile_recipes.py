"""Recipes that nobody meant: loading, config and plan end with one message and exit code 2."""

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from helpers.hostile_recipes import PIPELINES, SHIPPED, mutate, overrides
from helpers.hostile_runs import at_most
from postgrad.cli.main import main

CASES, EVERY_CHANGE = 2000, 400  # of which so many run before every change
SECONDS = 20  # of one command


@pytest.fixture(autouse=True)
def _own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTGRAD_CALIBRATION", str(tmp_path / "calibration.toml"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def problem(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What is wrong with how a command ended, "" where it is as it should be."""
    try:
        with at_most(SECONDS):
            code = main(words)
    except SystemExit as error:
        return f"{words[0]}: exit {error.code}: {capsys.readouterr().err[-200:]}"
    except Exception as error:  # noqa: BLE001
        return f"{words[0]}: {type(error).__name__}: {error}"[:300]
    stderr = capsys.readouterr().err
    if "report it" in stderr or "Traceback" in stderr or code not in (0, 2):
        return f"{words[0]}: exit code {code}: {stderr[-300:]}"
    if code and not stderr.startswith("postgrad: "):
        return f"{words[0]}: no message: {stderr[:300]}"
    if len(stderr) > 20_000:
        return f"{words[0]}: a message of {len(stderr)} characters: {stderr[:200]}"
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases", [range(EVERY_CHANGE), pytest.param(range(EVERY_CHANGE, CASES), marks=pytest.mark.long)]
)
def test_no_mutated_recipe_breaks_loading_config_or_plan(
    cases: range, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong: list[str] = []
    path = tmp_path / "recipe.toml"
    for number in cases:
        drawn = random.Random(number)
        shipped = drawn.choice(SHIPPED)
        text = shipped.read_text("utf-8")
        flags: list[str] = []
        if drawn.random() < 0.75:
            path.write_bytes(mutate(drawn, text))
        else:
            path.write_text(text, "utf-8")
            flags = overrides(drawn, text)
        for words in (["config", str(path), *flags], ["plan", str(path), *flags]):
            failure = problem([*words, "--json"], capsys)
            if failure:
                wrong.append(f"case {number}, {shipped.name} {flags}: {failure}"[:600])
    assert not wrong, "\n".join([f"{len(wrong)} wrong", *wrong])


@pytest.mark.slow
def test_no_mutated_pipeline_breaks_config_or_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong: list[str] = []
    for number in range(CASES // 20):
        drawn = random.Random(f"pipeline {number}")
        folder = tmp_path / str(number)
        shutil.copytree(drawn.choice(PIPELINES), folder)
        path = folder / "pipeline.toml"
        path.write_bytes(mutate(drawn, path.read_text("utf-8")))
        failure = problem(["config", str(folder), "--json"], capsys)
        if failure:
            wrong.append(f"case {number}: {failure}"[:600])
        shutil.rmtree(folder)
    assert not wrong, "\n".join([f"{len(wrong)} wrong", *wrong])
