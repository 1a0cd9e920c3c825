"""A side of a benchmark that does what its options say, in a process that imports no torch."""

import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.speed.side import Options, Round


def burn(seconds: float) -> None:
    """Use that much CPU time."""
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def prepare(folder: Path, options: Options) -> Round:
    """extra: name; tokens of a round; cpu seconds by precision; fail, child, allocate (bytes)."""
    extra = options.extra
    rounds = 0

    def one_round() -> Mapping[str, int]:
        nonlocal rounds
        rounds += 1
        print("a library that prints")
        with (folder / "order").open("a") as order:
            print(f"{extra['name']}-{options.precision}", file=order)
        if extra.get("fail"):
            raise RuntimeError("out of luck")
        if extra.get("child"):
            code = "import time\nwhile time.process_time() < 0.3: pass"
            subprocess.run([sys.executable, "-c", code], check=True)
        burn(extra.get("cpu", {}).get(options.precision, 0.0))
        if rounds == 1:
            bytearray(b"x" * extra.get("allocate", 0))
        return {"tokens": extra.get("tokens", 7)}

    return one_round
