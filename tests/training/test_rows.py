"""A run shows and records where every row went; the cache of tokens changes none of its bits."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from helpers.runs import assert_same_run, lines
from postgrad.data import cache
from postgrad.observe.console import Console
from postgrad.training import rows
from postgrad.training.start import train


@pytest.mark.slow
@pytest.mark.parametrize("job", ["sft", "rl"])
def test_a_run_has_the_same_bits_with_the_cache_and_without(
    job: str, make_recipe: Any, console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "SMALLEST", 2)
    monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path / "cache"))
    plain = make_recipe(job, "plain", data={"cache": False}, steps=2)
    first, again = (make_recipe(job, name, steps=2) for name in ("first", "again"))
    for recipe in (plain, first, again):
        train(recipe, console)
    assert len(list((tmp_path / "cache" / "tokens").iterdir())) == 1
    notes = [
        next(
            line for line in lines(Path(recipe.run_dir) / "events.jsonl") if line["event"] == "data"
        )
        for recipe in (plain, first, again)
    ]
    assert [line.get("notes") for line in notes] == [
        None,
        None,
        ["tokens from the cache (data.cache)"],
    ]
    assert_same_run(plain, first, 2)
    assert_same_run(plain, again, 2)


@pytest.mark.slow
def test_a_run_shows_one_table_of_its_rows_and_records_it(make_recipe: Any) -> None:
    spell = {"path": "reasoning-gym:spell_backward", "size": 40}
    sets = [{**spell, "seed": 1, "limit": 30}, {**spell, "seed": 2}]
    recipe = make_recipe("sft", data={"sets": sets, "dedup": "exact"}, steps=1)
    shown = io.StringIO()
    train(recipe, Console("plain", shown))
    data_events = [
        line for line in lines(Path(recipe.run_dir) / "events.jsonl") if line["event"] == "data"
    ]
    fates = ("kept", "excluded", "duplicate")
    assert [line["rows"] for line in data_events] == [30, 40, 8]
    assert [sum(line.get(fate, 0) for fate in fates) for line in data_events] == [30, 40, 8]
    assert data_events[1]["excluded"] >= 8
    text = shown.getvalue()
    assert "rows of the training data" in text
    assert "rows of the evaluation data" in text
    (together,) = (line for line in text.splitlines() if "together" in line)
    counts = [int(word) for word in together.split()[1:]]
    assert counts[0] == sum(counts[1:]) == 70


def test_episodes_that_cannot_close_are_recorded_and_the_first_is_a_warning() -> None:
    events: list[tuple[str, str]] = []
    warnings: list[str] = []
    console = SimpleNamespace(warn=warnings.append)
    logs = SimpleNamespace(event=lambda *event: events.append(event))
    tell = rows._close_failed(cast(Any, SimpleNamespace(logs=logs, console=console)))
    for text in ("a", "b", "c"):
        tell(text)
    assert events == [("environment_close_failed", text) for text in ("a", "b", "c")]
    assert warnings == ["a; events.jsonl has all such failures"]
