"""Curves of runs as a table and a picture."""

import json
from pathlib import Path
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from benchmarks import learning_curves
from benchmarks.curve_svg import mean, picture, ticks_between

NUMBERS = st.floats(-1e6, 1e6).map(lambda value: round(value, 3))


@given(NUMBERS, NUMBERS)
def test_ticks_hold_all_values_between_them(start: float, other: float) -> None:
    low, high = sorted((start, other))
    ticks = ticks_between(low, high)
    assert ticks == sorted(set(ticks))
    assert 2 <= len(ticks) <= 9
    slack = 1e-6 * (1 + abs(high) + abs(low))
    assert ticks[0] <= low + slack
    assert ticks[-1] >= high - slack


@given(st.dictionaries(st.integers(0, 500), NUMBERS, min_size=1, max_size=200))
def test_bins_keep_the_last_step_and_the_range(curve: dict[int, float]) -> None:
    short = learning_curves.binned(curve, 8)
    assert len(short) <= 8
    assert max(short) == max(curve)
    slack = 1e-6 * (1 + max(map(abs, curve.values())))
    assert min(curve.values()) - slack <= min(short.values())
    assert max(short.values()) <= max(curve.values()) + slack


def test_a_picture_is_xml_that_says_its_numbers() -> None:
    curves = {"0": {0: 0.25, 10: 0.5}, "1": {0: 0.35, 10: 0.7}}
    tree = ElementTree.fromstring(picture(curves, "accuracy <held out>"))
    lines = [node for node in tree if node.tag.endswith("polyline")]
    assert [line.get("class") for line in lines] == ["seed", "seed", "mean"]
    title = next(node for node in tree if node.tag.endswith("title"))
    assert title.text == "accuracy <held out>: 0.3 at step 0, 0.6 at step 10"
    assert mean(curves) == {0: 0.3, 10: 0.6}


def test_a_section_stands_in_place_of_the_one_before(tmp_path: Path) -> None:
    run = tmp_path / "runs-0"
    run.mkdir()
    rows = [{"step": s, "set": None, "accuracy": s / 100} for s in (0, 50)]
    (run / "eval.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    figure = learning_curves.Figure(
        "page", "accuracy", "What it is.", "a command", "runs", "accuracy", seeds=("0",)
    )
    assert learning_curves.curve(run, figure) is None  # it has not ended
    (run / "summary.json").write_text("{}", "utf-8")
    curve = learning_curves.curve(run, figure)
    assert curve == {0: 0.0, 50: 0.5}
    page = tmp_path / "page.md"
    page.write_text("# Page\n\nText.\n\n## Learning curves\n\nold\n", "utf-8")
    event, versions = {"time": "2026-11-22T01:02:03.456+00:00"}, {"torch": "2.13.0"}
    (run / "events.jsonl").write_text(json.dumps(event) + "\n{", "utf-8")
    recipe = {"versions": {"postgrad": "0.1.0", "transformers": "5.23.0", **versions}}
    (run / "recipe.json").write_text(json.dumps(recipe), "utf-8")
    caption = learning_curves.day_and_versions([run])
    learning_curves.write(page, learning_curves.section(figure, {"0": curve}, caption))
    text = page.read_text("utf-8")
    versions = "postgrad 0.1.0, torch 2.13.0, transformers 5.23.0"
    assert f"What it is. Made on 2026-11-22 with {versions} by\n\n```sh\na command\n" in text
    assert "old" not in text
    assert (
        "| seed | 0 | 50 | change |\n|---:|---:|---:|---:|\n| 0 | 0.000 | 0.500 | +0.500 |" in text
    )
