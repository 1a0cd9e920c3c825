"""`postgrad plan --scale`: what it simulates, says and refuses."""

import json
import shlex
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from helpers.jobs import write_recipe
from helpers.pages import ROOT
from postgrad.cli.main import main
from postgrad.core.errors import UsageError
from postgrad.plan.scale_picture import write_picture
from postgrad.plan.scaling import STALENESS

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
    on_four_devices = [way for way in ways if way["devices"] == 4]
    assert [(way["staleness"], way["apart"], way["free"]) for way in on_four_devices] == [
        *((staleness, False, False) for staleness in (0, 1, 2, 4, 8)),
        *((staleness, True, False) for staleness in (1, 2, 4, 8)),
        *((staleness, True, True) for staleness in (1, 2, 4, 8)),
    ]
    for way in on_four_devices:
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
        {
            "ticket": ticket,
            "turns": [
                {"author": "policy", "token_ids": [1] * (2 + ticket)},
                {"author": "environment", "token_ids": [1] * 50},  # read, not sampled
                {"author": "policy", "token_ids": [1]},
            ],
        }
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
        ("grpo with kl", ["--svg", "a.svg"], "--svg is of --scale"),
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


RESULTS = json.loads((ROOT / "benchmarks" / "results" / "plan_scale.json").read_text("utf-8"))


@pytest.mark.slow
def test_the_recorded_table_is_what_its_command_prints(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first number of devices, and the table of docs/async.md."""
    monkeypatch.chdir(ROOT)
    words = shlex.split(RESULTS["command"])[1:]
    counts = words[words.index("--scale") + 1]
    words[words.index(counts)] = "8"
    assert main(words) == 0
    again = json.loads(capsys.readouterr().out)["scale"]
    recorded = [way for way in RESULTS["scale"] if way["devices"] == 8]
    for way, old in zip(again, recorded, strict=True):
        assert way["simulated"] == pytest.approx(old["simulated"], rel=1e-6)
        assert way["floor"] == pytest.approx(old["floor"], rel=1e-6)
    page = (ROOT / "docs" / "async.md").read_text("utf-8")
    for devices in map(int, counts.split(",")):
        best = [
            min(
                way["simulated"]["seconds"]
                for way in RESULTS["scale"]
                if (way["devices"], way["staleness"]) == (devices, staleness)
            )
            for staleness in STALENESS
        ]
        row = " | ".join(f"{seconds:.3g}" for seconds in best)
        assert f"| {devices} | {row} |" in page


def test_no_number_of_devices_breaks_the_law_of_the_longest_answer() -> None:
    """A step lasts at least (longest answer + learning) / (S + 1): answers are cut at the most
    tokens, and of 512 some reach it in every step. From some number of devices on it is near that.
    With a fixed schedule engines wait for the longest answer of each step, whatever S is.
    """
    for way in RESULTS["scale"]:
        assert way["simulated"]["seconds"] >= way["floor"]
        assert way["simulated"]["oldest"] <= way["staleness"]
        if way["devices"] == 4096:
            waits = way["apart"] and not way["free"]
            least = way["floor"] * (way["staleness"] + 1 if waits else 1)
            assert way["simulated"]["seconds"] < 1.2 * least
    assert RESULTS["devices_that_help"] == {"0": 64, "1": 128, "2": 256, "4": 512, "8": 512}


def test_the_picture_has_a_line_for_each_staleness(tmp_path: Path) -> None:
    curves = {0: {8: 90.0, 64: 50.0}, 2: {8: 50.0, 64: 20.0}}
    write_picture(tmp_path / "scale.svg", "a <recipe>", curves)
    root = ElementTree.fromstring((tmp_path / "scale.svg").read_text("utf-8"))
    space = "{http://www.w3.org/2000/svg}"
    lines = [line.attrib["points"].split() for line in root.iter(f"{space}polyline")]
    assert [len(points) for points in lines] == [2, 2]
    heights = [[float(point.split(",")[1]) for point in points] for points in lines]
    slow, fast = sorted(heights)  # up is less: 90 and 50 seconds, 50 and 20
    assert slow[0] < slow[1] == fast[0] < fast[1]
    words = [text.text for text in root.iter(f"{space}text")]
    assert "staleness 2" in words
    assert "a <recipe>: seconds of a step" in words
    with pytest.raises(UsageError, match="cannot be written"):
        write_picture(tmp_path / "nowhere" / "scale.svg", "a", curves)
