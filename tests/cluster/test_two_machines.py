"""A Ray cluster of two machines, which are network namespaces: it trains, loses a rank or not, then
a machine, and goes on.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.jobs import MODEL
from helpers.machines import OPEN, PORT, Machine, reason_not, two_machines
from helpers.processes import SECONDS, postgrad
from helpers.runs import lines, whole_lines

pytest.importorskip("ray")
WHY_NOT = reason_not()
pytestmark = [
    pytest.mark.ranks,
    pytest.mark.slow,
    pytest.mark.skipif(WHY_NOT is not None, reason=f"no network namespaces: {WHY_NOT}"),
]
RECIPE = (
    """
job = "rl"
run_dir = "{folder}/run"
steps = {steps}
"""
    + MODEL
    + """[data]
path = "reasoning-gym:spell_backward"
size = 40
max_len = 96
[[rewards]]
type = "tiny_rewards:vowels"
[scoring]
workers = 1
[algorithm]
type = "grpo"
[batch]
rollout_batch_size = 4
n_samples_per_prompt = 4
[rollout]
max_new_tokens = 6
[learner]
ranks = 2
sharding = "zero3"
threads = 1
[cluster]
type = "ray"
start_seconds = 600.0
policy = {{ machines = 2 }}
rollout = {{ workers = 2, machines = 2 }}
[checkpoint]
save_steps = 2
max_ckpt_num = 9
[sentinels]
truncation = "off"
"""
)


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[Machine, Machine]]:
    with two_machines() as (first, second):
        first.start_ray()
        second.start_ray(first.address)
        yield first, second


Holds = Callable[[list[dict[str, Any]]], bool]


def when(path: Path, holds: Holds, strike: Callable[[], None]) -> threading.Thread:
    """Strikes once the lines of a file are so."""

    def watch() -> None:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            if holds(whole_lines(path)):
                strike()
                return
            time.sleep(0.02)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def saved(step: int, restarts: int = 0) -> Holds:
    """Once so many restarts and, after them, a checkpoint of that step or a later one are told."""

    def holds(events: list[dict[str, Any]]) -> bool:
        kinds = [event["event"] for event in events]
        if kinds.count("restarted") < restarts:
            return False
        since = len(kinds) - kinds[::-1].index("restarted") if restarts else 0
        return any(event["event"] == "saved" and event["step"] >= step for event in events[since:])

    return holds


def places(events: Path, role: str) -> list[list[Any]]:
    return [event["places"] for event in whole_lines(events) if event.get("role") == role][-1]


@pytest.mark.parametrize("kills", [0, pytest.param(1, marks=pytest.mark.long)])
def test_ranks_on_two_machines_train_lose_a_machine_and_go_on(
    machines: tuple[Machine, Machine], tmp_path: Path, kills: int
) -> None:
    """kills: of a rank, before the machine is lost."""
    first, second = machines
    recipe, events = tmp_path / "recipe.toml", tmp_path / "run" / "events.jsonl"
    steps = 24 + 16 * kills
    recipe.write_text(RECIPE.format(folder=tmp_path, steps=steps))

    def kill_rank() -> None:
        os.kill(places(events, "policy")[1][1], signal.SIGKILL)

    def lose_machine() -> None:
        second.switch_off()
        second.start_ray(first.address)

    strikes = [when(events, saved(4), kill_rank)] if kills else []
    strikes.append(when(events, saved(4 + 4 * kills, restarts=kills), lose_machine))
    address = f"{first.address}:{PORT}"
    flags = ["--cluster.address", address, "--quiet"]
    ended = postgrad("train", str(recipe), *flags, before=first.inside, extra=OPEN)
    assert ended.code == 0, ended.message
    for strike in strikes:
        strike.join()
    restarts = [event for event in lines(events) if event["event"] == "restarted"]
    assert len(restarts) == kills + 1
    assert all(event["message"].startswith("rank 1 died: ") for event in restarts[:kills])
    assert all(event["step"] >= 4 * number for number, event in enumerate(restarts, 1))
    assert sorted(at for at, _ in places(events, "policy")) == [first.address, second.address]
    workers = [event["places"] for event in lines(events) if event.get("role") == "rollout"][-2:]
    assert sorted(at for ((at, _),) in workers) == [first.address, second.address]

    resumed = postgrad(
        "resume", str(tmp_path / "run"), "--steps", f"{steps + 18}", "--quiet",
        before=first.inside, extra=OPEN,
    )  # fmt: skip
    assert resumed.code == 0, resumed.message
    drawn = [
        (sample["ticket"], sample["sample"]) for sample in lines(tmp_path / "run" / "samples.jsonl")
    ]
    tickets = range(4 * (steps + 18))
    assert sorted(drawn) == [(ticket, sample) for ticket in tickets for sample in range(4)]


def test_a_placement_that_the_machines_have_no_room_for_is_told_with_what_they_have(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    first, second = machines
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(folder=tmp_path, steps=1))
    flags = ["--cluster.address", f"{first.address}:{PORT}", "--cluster.start_seconds", "1"]
    flags += ["--learner.ranks", "3", "--cluster.policy.machines", "3", "--quiet"]
    ended = postgrad("train", str(recipe), *flags, before=first.inside, extra=OPEN)
    assert ended.code == 2
    assert "learner.ranks = 3 needs 3 machines with as many processes on each" in ended.message
    assert f"{second.address} has 0 GPUs and 2 cores" in ended.message
