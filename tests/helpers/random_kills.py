"""A run with samples ahead whose process is killed at random times, again and again."""

import json
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from helpers.faults import Fault, Machine
from helpers.jobs import COMMON
from postgrad.checkpoint.files import STATE
from postgrad.core.seeds import uniform
from postgrad.observe.follow import read_lines
from postgrad.tools.verify_resume import fingerprint

STEPS, SAMPLES = 8, 4  # of a run, of a prompt
# Groups of equal rewards and groups with a failure are settled without training, so that a ticket
# may end in each of the three ways.
RECIPE = COMMON.format(job="rl", ema_decay=0.0) + (
    """
[data]
path = "{rows}"
max_len = 64
eval_fraction = 0.1
[eval]
every = 5
max_new_tokens = 4
[[rewards]]
type = "tiny_rewards:rarely_broken"
on_failure = "drop_group"
[scoring]
workers = 1
max_failed_fraction = 1.0
[rollout]
max_new_tokens = 6
max_staleness = {staleness}
slots = 5
dynamic_sampling = true
max_rounds = 50
[batch]
rollout_batch_size = 2
n_samples_per_prompt = 4
[algorithm]
type = "grpo"
correction = "tis"
[sentinels]
truncation = "off"
verifier = "off"
"""
)


@dataclass
class Kills:
    """What was counted."""

    runs: int = 0  # that ended, and were compared
    kills: int = 0
    tickets: Counter[str] = field(default_factory=Counter[str])  # by what became of them
    steps: Counter[int] = field(default_factory=Counter[int])  # kills by the newest checkpoint

    def __add__(self, other: "Kills") -> "Kills":
        """Both together."""
        return Kills(
            self.runs + other.runs,
            self.kills + other.kills,
            self.tickets + other.tickets,
            self.steps + other.steps,
        )


def write(folder: Path, staleness: int, steps: int) -> Path:
    """The recipe, with its rows, in a new folder."""
    folder.mkdir()
    rows = folder / "rows.jsonl"
    numbers = ({"question": f"{number}?", "answer": "a"} for number in range(40))
    rows.write_text("".join(json.dumps(row) + "\n" for row in numbers), "utf-8")
    text = RECIPE.replace("{rows}", str(rows)).replace("{staleness}", str(staleness))
    path = folder / "recipe.toml"
    path.write_text(text.replace("\nsteps = 4\n", f"\nsteps = {steps}\n"), "utf-8")
    return path


def train(machine: Machine, recipe: Path, run: Path, fault: Fault) -> bool:
    """Whether the run ended; False: it was killed. Whatever else becomes of it is an error."""
    words = ["train", str(recipe), "--run_dir", str(run), "--quiet"]
    ended = machine.call("postgrad.cli.main:main", [words], run, fault)
    assert ended.status in (0, -9), ended.message
    return ended.status == 0


def fates(run: Path) -> Counter[str]:
    """What became of the tickets. Each of 0..n-1 must be there once, with all its samples, and be
    trained, filtered or failed; n is what the last checkpoint has settled.
    """
    samples: Counter[tuple[int, int]] = Counter()
    became: dict[int, set[str]] = {}
    for line in read_lines(run / "samples.jsonl"):
        samples[line["ticket"], line["sample"]] += 1
        fate = "trained" if "advantages" in line else "filtered"
        if line["failures"]:
            fate = "failed"
        became.setdefault(line["ticket"], set()).add(fate)
    latest = run / "checkpoints" / (run / "checkpoints" / "latest").read_text("utf-8").strip()
    cursor = json.loads((latest / STATE).read_text("utf-8"))["cursor"]
    settled = {*range(cursor["frontier"]), *cursor["beyond"]}
    assert settled == set(range(len(settled)))
    wanted = Counter((ticket, sample) for ticket in settled for sample in range(SAMPLES))
    assert samples == wanted, f"{samples - wanted} too often, {wanted - samples} missing"
    for ticket, ways in became.items():
        if "failed" in ways:  # the group of a sample that failed is not trained on
            assert "trained" not in ways, ticket
            became[ticket] = {"failed"}
        assert len(became[ticket]) == 1, (ticket, ways)
    return Counter(next(iter(ways)) for ways in became.values())


def kill_runs(
    machine: Machine, recipe: Path, kills: int, *, life: float, seed: int, wanted: dict[str, str]
) -> Kills:
    """Runs one after the other, each killed after random times of at most `life` seconds and
    resumed until it ends, and then compared with `wanted`, the undisturbed run's fingerprint. After
    so many kills the last one ends undisturbed.
    """
    counted, run = Kills(), recipe.parent / "run"
    while counted.kills < kills or run.exists():
        seconds = life * float(uniform(seed, "kills", counted.kills, counted.runs))
        fault = Fault(seconds=seconds if counted.kills < kills else None)
        if not train(machine, recipe, run, fault):
            counted.kills += 1
            counted.steps[newest(run)] += 1
            continue
        assert fingerprint(run) == wanted, (counted, seconds)
        counted.tickets += fates(run)
        counted.runs += 1
        shutil.rmtree(run)
    return counted


def newest(run: Path) -> int:
    """The step of the newest checkpoint; 0 where there is none."""
    latest = run / "checkpoints" / "latest"
    return int(latest.read_text("utf-8").strip().rpartition("-")[2]) if latest.exists() else 0
