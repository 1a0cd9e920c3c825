"""A real run, seen in its terminal and on its page while it goes on."""

import copy
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from helpers.runs import lines
from helpers.terminal import Terminal
from helpers.tiny_runs import RL
from postgrad.observe.console import Console
from postgrad.observe.report.selection import Cap
from postgrad.tools.pages import Feed, reader
from postgrad.training.start import train

STEP = re.compile(r"^step +━*─* +(\d+)/500 ", re.MULTILINE)
ENDS = list("aeiouAEIOU .,;:!?bcdfghjklmnpqrstvwxyz")  # so that answers end by themselves


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A run that is healthy, and longer than anybody waits."""
    raw = copy.deepcopy(RL) | {"run_dir": str(tmp_path / "run"), "steps": 500}
    raw["rollout"] = {"max_new_tokens": 6, "stop": ENDS}
    raw["learner"] = {"lr": 1e-4, "threads": 1}
    path = tmp_path / "recipe.toml"
    path.write_text(tomlkit.dumps(raw), "utf-8")
    return path


def steps_in(screen: list[str]) -> int:
    """The step that the block tells."""
    step_matches = STEP.findall("\n".join(screen))
    return int(step_matches[-1]) if step_matches else 0


def shows_a_healthy_run(screen: list[str]) -> bool:
    """Numbers, the machine beside what was estimated, and the sentinels; nothing half drawn."""
    block = "   ".join(screen[-12:])
    labels = ("reward", "eval acc", "entropy", "length", "grad norm")
    machine = r"memory [\d.]+ GiB of [\d.]+ estimated", r"a step [\d.]+ s of [\d.]+ estimated"
    wanted = [*(rf"\b{label} +[\d.-]+%? " for label in labels), *machine]
    silent = screen[-1] == "sentinels silent: nothing looks wrong"
    return silent and all(re.search(part, block) for part in wanted)


def feed_page(feed: Feed, generation: str = "", start: int = 0) -> dict[str, Any]:
    feed_message = json.loads(feed.messages(generation, start))
    assert not feed_message["more"]
    return feed_message


def metric_steps(page: dict[str, Any]) -> list[int]:
    of_metrics = [message for message in page["messages"] if message["kind"] == "metrics"]
    return [line["step"] for metrics_message in of_metrics for line in metrics_message["lines"]]


@pytest.mark.slow
def test_a_person_sees_a_run_move_and_stops_it(recipe: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "postgrad", "train", str(recipe)]
    with Terminal(command, columns=100, rows=45) as terminal:
        terminal.wait_for(lambda screen: steps_in(screen) >= 3)
        feed = Feed(tmp_path / "run")
        first = feed_page(feed)
        seen = metric_steps(first)
        assert seen == list(range(1, len(seen) + 1))

        def later() -> dict[str, Any]:
            return feed_page(feed, first["generation"], first["next"])

        terminal.wait_for(lambda _: len(metric_steps(later())) >= 3)
        more = later()
        assert metric_steps(more)[:3] == [seen[-1] + n for n in (1, 2, 3)]
        assert {"groups", "counts"} <= {message["kind"] for message in more["messages"]}
        terminal.wait_for(shows_a_healthy_run)
        terminal.type("\x03")
        assert terminal.ended() == 1
        assert "the checkpoint of step" in terminal.lines[-2]
        assert not any(line.startswith("sentinels silent") for line in terminal.lines)
    assert b"\x1b[?25h" in terminal.output[-4096:]  # the cursor is back
    events = [event["event"] for event in lines(tmp_path / "run" / "events.jsonl")]
    assert "sentinel" not in events


def test_the_page_of_a_moved_run_shows_text_without_its_model(
    make_recipe: Any, models: Any, console: Console, tmp_path: Path
) -> None:
    start = tmp_path / "start"
    shutil.copytree(models(0), start)
    recipe = make_recipe("rl", steps=1, model={"path": str(start), "init": None})
    train(recipe, console)
    shutil.rmtree(start)
    moved = shutil.move(recipe.run_dir, tmp_path / "moved")
    run_reader = reader(Path(moved), 0, Cap())
    counts = [message for message in run_reader.poll() if message["kind"] == "counts"]
    assert counts[0]["pieces"]
    assert "<|im_start|>" in run_reader.bodies([0])["vocab"].values()
