"""`postgrad verify-resume`: runs a recipe, runs it again with kills, and compares the two."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from postgrad.checkpoint.files import STATE
from postgrad.core.errors import RunError
from postgrad.core.seeds import uniform
from postgrad.observe.console import Console
from postgrad.observe.follow import read_lines

STEPS = "6"  # of the short run, where the command says nothing else
LENGTHS = ("--steps", "--epochs", "--total_episodes")
TIMED = ("_seconds", "_bytes", "_per_second")
LOGS = ("metrics.jsonl", "eval.jsonl", "samples.jsonl")


def verify_resume(
    recipe: Path, overrides: Sequence[str], kills: int, console: Console, seed: int = 0
) -> dict[str, Any]:
    """Runs the recipe once, and once with up to `kills` SIGKILLs at moments drawn from `seed`.

    Compares the last checkpoint's files and the logs without times. Raises RunError that names the
    files that differ.
    """
    stated = [word.partition("=")[0] for word in overrides]
    length = [] if any(word in LENGTHS for word in stated) else ["--steps", STEPS]
    with TemporaryDirectory(prefix="postgrad-") as folder:
        unbroken, killed = Path(folder) / "whole", Path(folder) / "killed"
        words = [*overrides, *length, "--checkpoint.save_steps", "1"]
        words += ["--checkpoint.push_to_hub", ""]  # nothing of it is anybody's model
        began = time.monotonic()
        _end(_start(recipe, unbroken, words))
        seconds = time.monotonic() - began
        console.note(f"a run that is left alone: {seconds:.1f} s")
        shares = sorted(0.2 + 0.75 * float(uniform(seed, "kills", i)) for i in range(kills))
        moments = [seconds * share for share in shares]  # early ones first: less is left each time
        done = _run_with_kills(recipe, killed, words, moments, console)
        expected, resumed = fingerprint(unbroken), fingerprint(killed)
    different = sorted(
        name for name in {*expected, *resumed} if expected.get(name) != resumed.get(name)
    )
    rows = [
        (name, "differs" if name in different else "the same bits") for name in sorted(expected)
    ]
    console.table(f"{done} kills and resumes against none", ("file", ""), rows)
    if different:
        raise RunError(f"a killed and resumed run differs in {', '.join(different)}")
    return {"kills": done, "same": sorted(expected)}


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
    recipe: Path, run: Path, words: Sequence[str], moments: Sequence[float], console: Console
) -> int:
    """Runs the recipe, kills it at each moment (seconds after its start) and resumes it. Returns
    the number of kills before the run ended.
    """
    for number, moment in enumerate(moments):
        process = _start(recipe, run, words)
        try:
            process.wait(timeout=moment)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            console.note(f"kill {number + 1}: after {moment:.1f} s")
            continue
        _end(process)
        return number
    _end(_start(recipe, run, words))
    return len(moments)


def _start(recipe: Path, run: Path, words: Sequence[str]) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "postgrad", "train", str(recipe), "--quiet"]
    return subprocess.Popen(
        [*command, *words, "--run_dir", str(run)],
        start_new_session=True,  # its workers die with it
        stderr=subprocess.PIPE,
        text=True,
    )


def _end(process: "subprocess.Popen[str]") -> None:
    _, errors = process.communicate()
    if process.returncode:
        raise RunError(f"the run failed, exit code {process.returncode}: {errors.strip()}")
