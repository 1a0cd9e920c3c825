"""A TRL script, as a person starts it: scripts/train_grpo.py."""

import sys
from pathlib import Path

from benchmarks.speed.side import Options, Round
from benchmarks.speed.start.processes import NEW_TOKENS, QUESTIONS, SAMPLES, Starts


def prepare(folder: Path, options: Options) -> Round:
    """See Side."""
    script = Path(__file__).parent / "scripts" / "train_grpo.py"
    sizes = map(str, (options.threads, QUESTIONS, SAMPLES, NEW_TOKENS))
    command = [sys.executable, str(script), str(folder), options.precision, *sizes]
    return Starts(lambda _: command)
