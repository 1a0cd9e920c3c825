"""Whether recipes of `postgrad translate` compute what their sources do.

    python -m benchmarks.peer_objectives verl CHECKOUT
    python -m benchmarks.peer_objectives trl CHECKOUT --to benchmarks/results/peer_objectives.json

CHECKOUT: a working tree of one of the systems, or the folder of packages that TRL is installed in.
Its own functions for advantages and losses, loaded
as single files, and the recipe that its options become run on the same samples: groups with answers
of one token, a group of equal rewards, answers that were cut off, tokens of an environment, ratios
beyond every clip. Losses of pairs, of labels, of SFT and of reward models run on an update of two
micro-batches of texts with answers of one token. All logprobs are float64. Each case is one
objective, on one update of all samples of a step; shown are the greatest relative differences of
loss and gradient over the draws. Of a reward shown are the mean scores of collected answers, and
the share of answers whose score is another:

Learning rates are compared update by update over 50 steps, optimizers on the weights of a small
model, filters on collected groups of scores, and coefficients of a KL that adapts over 20 steps.

- equal: to 1e-5, as advantages and weights are float32 here;
- told: the recipe has a comment, or a lost option, that says what is computed there;
- known: the difference is small or of a run that the recipe does not have; the table says why;
- lost: no recipe has the objective, and `translate` refuses it or names the option as lost;
- differs: none of these. The exit code is 1.

TRL's trainers need the package `accelerate`, and Open-Instruct's verifiers
antlr4-python3-runtime 4.11 for formulas and langdetect for instructions about languages, which are
left out without it; nothing of the other systems has to be installed.
"""

import argparse
import json
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.peer_objectives.comparing import Comparable, Row, compared, shown
from postgrad.translate.translate import SYSTEMS

# of objectives, in modules of their own
KINDS = ("_pairs", "_online", "_supervised", "_rewards", "_learning", "_filters", "_shaping")


def commit_of(system: str, checkout: Path) -> str:
    """The commit of a working tree, or the version of a package in a folder of them; "" where
    neither is known.
    """
    installed = [
        distribution
        for distribution in distributions(path=[str(checkout)])
        if distribution.name == system
    ]
    if installed:
        return installed[0].version
    words = ["git", "-C", str(checkout), "rev-parse", "--short=12", "HEAD"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def version_of(system: str, checkout: Path) -> str:
    """ "_0_8" for a checkout of OpenRLHF from before 0.11, whose modules are others; else ""."""
    file = checkout / "version.txt"
    before = system == "openrlhf" and file.exists()
    numbers = [int(part) for part in file.read_text("utf-8").split(".")[:2]] if before else [0, 11]
    return "_0_8" if numbers < [0, 11] else ""


def cases(system: str, checkout: Path) -> Iterator[Comparable]:
    """All cases of a system: of its module, and of those for other kinds of objectives."""
    for kind in ("", *KINDS):
        name = f"benchmarks.peer_objectives.{SYSTEMS[system]}{version_of(system, checkout)}{kind}"
        if not kind or find_spec(name) is not None:
            yield from import_module(name).cases(checkout)


def record(path: Path, system: str, entry: dict[str, Any], rows: Sequence[Row]) -> None:
    """Writes the entry of one system, beside those of others that the file has."""
    recorded = json.loads(path.read_text("utf-8")) if path.exists() else {}
    recorded[system] = {
        **entry,
        "verdicts": dict(Counter(row.verdict for row in rows)),
        "cases": [row.to_json() for row in rows],
    }
    path.write_text(json.dumps(recorded, indent=1) + "\n", "utf-8")


def main(words: Sequence[str]) -> int:
    """Prints the table of one checkout. Returns 1 where a case differs and nothing says why."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peer_objectives", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--draws", type=int, default=20, help="of samples, for each case")
    parser.add_argument("--to", type=Path, help="a JSON file; entries of other systems stay")
    parser.add_argument("--commit", help="of a checkout that is no git repository")
    args = parser.parse_args(words)
    rows = [compared(args.system, case, args.draws) for case in cases(args.system, args.checkout)]
    print(shown(rows))
    if args.to is not None:
        command = ["python", "-m", "benchmarks.peer_objectives", args.system, "CHECKOUT"]
        command += ["--draws", str(args.draws)]
        entry = {
            "command": shlex.join(command),
            "commit": args.commit or commit_of(args.system, args.checkout),
        }
        version = " 0.8" if version_of(args.system, args.checkout) else ""
        record(args.to, f"{args.system}{version}", entry, rows)
    return int(any(row.verdict == "differs" for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
