"""The benchmark of learning curves by staleness: what it runs, its table, its picture."""

import argparse
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.staleness_curves import picture, recipe_of, run, table
from postgrad.recipe.recipe import RLRecipe

RUNS = [
    {"way": way, "max_staleness": staleness, "seed": seed, "accuracy": accuracy + 0.02 * seed}
    for way, line in {"none": (0.7, 0.1), "tis": (0.7, 0.6)}.items()
    for staleness, accuracy in zip((0, 4), line, strict=True)
    for seed in range(3)
]
RESULT: dict[str, Any] = {"settings": {"steps": 60}, "runs": RUNS}


def options(folder: Path) -> argparse.Namespace:
    return argparse.Namespace(
        work=folder, to=folder / "to.json", steps=60, prompts=32, lr=4e-4, slots=256, rows=1280,
        every=20, seeds=1, staleness=[4], ways=["none"],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("way", "correction", "old"),
    [("none", "off", "policy"), ("tis", "tis", "policy"), ("sampled", "off", "sampled")],
)
def test_a_way_is_what_corrects_for_older_samples(
    way: str, correction: str, old: str, tmp_path: Path
) -> None:
    recipe = recipe_of(options(tmp_path), way, 4, 2)
    assert isinstance(recipe, RLRecipe)
    algorithm: Any = recipe.algorithm
    assert (algorithm.correction, algorithm.old_logprobs) == (correction, old)
    assert (recipe.rollout.max_staleness, recipe.rollout.in_flight_updates) == (4, False)
    assert (recipe.seed, recipe.steps) == (2, 60)


def test_the_table_has_means_and_their_standard_errors() -> None:
    rows = table(RESULT).splitlines()
    assert rows[0] == "|  | 0 | 4 |"
    assert rows[2] == "| no correction | 0.72 ± 0.01 | 0.12 ± 0.01 |"  # 0.02 / sqrt(3)
    assert rows[3] == '| `correction = "tis"` | 0.72 ± 0.01 | 0.62 ± 0.01 |'


def test_the_picture_has_a_line_a_way_and_a_dot_a_run() -> None:
    svg = ElementTree.fromstring(picture(RESULT, "held-out accuracy"))
    name = "{http://www.w3.org/2000/svg}"
    assert len(svg.findall(f"{name}polyline")) == 2
    assert len(svg.findall(f"{name}circle")) == len(RUNS)
    title = svg.findtext(f"{name}title") or ""
    assert "no correction: 0.72 at 0, 0.12 at 4" in title


def test_runs_of_other_settings_are_not_mixed(tmp_path: Path) -> None:
    asked = options(tmp_path)
    asked.to.write_text('{"settings": {"steps": 5}, "runs": []}', "utf-8")
    with pytest.raises(SystemExit, match="name another file with --to"):
        run(asked)
