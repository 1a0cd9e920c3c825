"""`postgrad verify-resume`: runs a recipe, runs it again with kills, and compares the two."""

import hashlib
import json
import re
import signal
import subprocess
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from postgrad.checkpoint.files import STATE, steps_in
from postgrad.core.errors import RunError, UsageError
from postgrad.core.process import command_of_child, interrupt, kill_group, signals_handled
from postgrad.core.seeds import permutation, uniform
from postgrad.observe.console import Console
from postgrad.observe.follow import read_lines
from postgrad.observe.run_dir import SAMPLES, RunDirectory

STEPS = 6  # of the short run, where the command says nothing else
LENGTHS = ("--steps", "--epochs", "--total_episodes")
TIMED = ("_seconds", "_bytes", "_per_second", "_time_fraction")
LOGS = ("metrics.jsonl", "eval.jsonl", "schedule.jsonl", *SAMPLES)
POLL_SECONDS = 0.002  # a save of a small model takes a few times as long
SIGNALS = (signal.SIGTERM, signal.SIGHUP)  # beside Ctrl-C
# Nothing of a copy is anybody's model, checkpoint or curve: the recipe's own run may have those.
OF_A_COPY = {
    "checkpoint.save_steps": "1",
    "checkpoint.push_to_hub": "",
    "checkpoint.mirror": "",
    "observe.loggers": "[]",
}


@dataclass(frozen=True, slots=True)
class Kill:
    """When to kill a run: while it saves a step, or a part of a step's time after that save."""

    step: int
    seconds: float | None  # after the save of `step`; None: during it

    def __str__(self) -> str:
        if self.seconds is None:
            return f"during the save of step {self.step}"
        return f"{self.seconds:.2f} s into step {self.step + 1}"


def verify_resume(
    recipe: Path, overrides: Sequence[str], kills: int, console: Console, seed: int = 0
) -> dict[str, Any]:
    """Runs the recipe once, and once with `kills` SIGKILLs at steps drawn from `seed`: every second
    one during a save, the others within a step.

    Compares the last checkpoint's files and the logs without times. Where the clock decides what
    engines do (rollout.schedule = "free") the killed run is compared with a replay of its schedule
    that nobody kills. What the recipe leaves open is chosen by the first run, and the others take
    it: measured again, it may round differently.

    Raises UsageError where the run has too few steps for the kills; RunError where it ended before
    all of them, and where files differ, by name.
    """
    if kills < 1:
        raise UsageError(f"--kills {kills}: 1 or more is expected")
    stated = [word.partition("=")[0] for word in overrides]
    length = (
        [] if any(word in LENGTHS for word in stated) else ["--steps", str(max(STEPS, kills + 1))]
    )
    words = [*overrides, *length]
    with TemporaryDirectory(prefix="postgrad-") as folder, signals_handled(SIGNALS, interrupt):
        unbroken, killed = Path(folder) / "whole", Path(folder) / "killed"
        began = time.monotonic()
        _run_to_end(recipe, unbroken, words)
        console.note(f"a run without kills: {time.monotonic() - began:.1f} s")
        if reason := _not_exact(unbroken):
            console.warn(f"{reason}; the two runs are compared all the same")
        planned = _planned(unbroken, kills, seed)
        words += ["--choices-of", str(unbroken)]
        _run_with_kills(recipe, killed, words, planned, console)
        if _is_free(unbroken):
            unbroken = Path(folder) / "replayed"
            replay = ["--rollout.schedule", "replay", "--rollout.schedule_path", str(killed)]
            _run_to_end(recipe, unbroken, [*words, *replay])
        expected, resumed = fingerprint(unbroken), fingerprint(killed)
    different = sorted(
        name for name in {*expected, *resumed} if expected.get(name) != resumed.get(name)
    )
    rows = [
        (name, "differs" if name in different else "the same bits") for name in sorted(expected)
    ]
    title = f"{kills} kills and resumes against none; seconds and bytes in logs are left out"
    console.table(title, ("file", ""), rows)
    if different:
        why = f" as is to be expected: {reason}" if reason else ""
        raise RunError(f"a killed and resumed run differs in {', '.join(different)}{why}")
    return {"kills": kills, "same": sorted(expected)}


def _is_free(run: Path) -> bool:
    """Whether two runs of a recipe differ, without any kill."""
    return RunDirectory.open(run).recipe().get("rollout", {}).get("schedule") == "free"


def _not_exact(run: Path) -> str | None:
    """Why a run says that no other has its bits; None where it does not."""
    events = read_lines(run / "events.jsonl")
    return next((str(e["message"]) for e in events if e.get("event") == "not_exact"), None)


def _planned(unbroken: Path, kills: int, seed: int) -> list[Kill]:
    """The kills of a run like `unbroken`, each at a step of its own, in their order."""
    lines = list(read_lines(unbroken / "metrics.jsonl"))
    steps = int(lines[-1]["step"])
    if kills >= steps:
        raise UsageError(
            f"--kills {kills}: the run has {steps} steps, and every kill needs a step before the "
            f"last; take --steps {kills + 1} or more, or fewer kills"
        )
    mean = fmean(
        sum(value for name, value in line.items() if re.fullmatch(r"[a-z]+_seconds", name))
        for line in lines
    )
    drawn = sorted(int(step) + 1 for step in permutation(steps - 1, seed, "kills")[:kills])
    shares = uniform(seed, "kills", range(kills))
    return [Kill(step, None if i % 2 else mean * float(shares[i])) for i, step in enumerate(drawn)]


def fingerprint(run: Path) -> dict[str, str]:
    """SHA-256 by file name of the latest checkpoint's tensors and state, and of the logs. Leaves
    out what may differ between equal runs: times and sizes.
    """
    latest = run / "checkpoints" / (run / "checkpoints" / "latest").read_text("utf-8").strip()
    hashes = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(latest.glob("*.safetensors"))
    }
    state = json.loads((latest / STATE).read_text("utf-8"))
    hashes[STATE] = _hash({key: value for key, value in state.items() if key != "log_offsets"})
    for name in LOGS:
        lines = [
            {key: value for key, value in line.items() if not key.endswith(TIMED)}
            for line in read_lines(run / name)
        ]
        if lines:
            hashes[name] = _hash(lines)
    return hashes


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _run_with_kills(
    recipe: Path, run: Path, words: Sequence[str], kills: Sequence[Kill], console: Console
) -> None:
    """Runs the recipe, kills it as planned and resumes it. Raises RunError where it ends first."""
    for number, kill in enumerate(kills, start=1):
        with _started(recipe, run, words) as process:
            _wait_for(kill, run / "checkpoints", process)
            if process.poll() is not None:
                _require_success(process, run)
                raise RunError(
                    f"the run ended before kill {number} of {len(kills)} ({kill}): its steps are "
                    "too short to be hit; take more steps (--steps N) or a larger batch"
                )
        console.note(f"kill {number}: {kill}")
    _run_to_end(recipe, run, words)


def _wait_for(kill: Kill, checkpoints: Path, process: "subprocess.Popen[str]") -> None:
    """Returns at the moment of the kill, or where the process has ended."""
    saving = f".saving-{kill.step}-*"
    while process.poll() is None:
        if max(steps_in(checkpoints), default=0) >= kill.step:
            break
        if kill.seconds is None and any(checkpoints.glob(saving)):
            return
        time.sleep(POLL_SECONDS)
    try:
        process.wait(timeout=kill.seconds or 0)
    except subprocess.TimeoutExpired:
        return


def _run_to_end(recipe: Path, run: Path, words: Sequence[str]) -> None:
    with _started(recipe, run, words) as process:
        _require_success(process, run)


@contextmanager
def _started(recipe: Path, run: Path, words: Sequence[str]) -> Generator["subprocess.Popen[str]"]:
    """A process that trains in `run`, killed at the end of the block with all that it started."""
    keys = {**OF_A_COPY, "checkpoint.ckpt_path": str(run / "checkpoints"), "run_dir": str(run)}
    process = subprocess.Popen(
        [
            *command_of_child(["train", str(recipe), "--quiet", *words]),
            *(word for key, value in keys.items() for word in (f"--{key}", value)),
        ],
        start_new_session=True,  # its workers die with it
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            kill_group(process.pid)
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def _require_success(process: "subprocess.Popen[str]", run: Path) -> None:
    """Waits for the end of a run. Raises RunError with its message where it failed."""
    _, errors = process.communicate()
    if process.returncode:
        raise RunError(
            f"a copy of the run, in {run.parent}, failed with exit code {process.returncode}: "
            f"{errors.strip().removeprefix('postgrad: ')} (the variable TMPDIR names another place "
            "for copies)"
        )
