"""postgrad beside a peer on the same model, data, samples, token counts and precision.

    python -m benchmarks.speed rollout --against transformers --data DIR --to rollout.json

Both sides take turns in one run. Printed are the processor, medians (least to most) and ratios of
medians, by the wall clock and in CPU time; on a shared machine the latter is the steadier one.
--precision best lets each side compute in float32 and in bfloat16 and takes the faster. A peer that
lives in another environment is named by --peer-python.
"""

import argparse
import json
import os
import shlex
import sys
import tempfile
from pathlib import Path

from benchmarks.speed.harness import Contestant, Refused, compete
from benchmarks.speed.report import machine, measured_on, report, table
from benchmarks.speed.side import Options, Precision
from benchmarks.speed.workload import SHAPES, WORKS, make

OURS = "postgrad"
PRECISIONS: dict[str, tuple[Precision, ...]] = {
    "float32": ("float32",),
    "bfloat16": ("bfloat16",),
    "best": ("float32", "bfloat16"),
}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("--against", required=True, metavar="PEER", help="transformers, trl, vllm")
    parser.add_argument("--precision", choices=PRECISIONS, default="float32")
    parser.add_argument("--model", choices=SHAPES, default="6m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--peer-python", default=sys.executable, metavar="PATH")
    parser.add_argument(
        "--data",
        type=Path,
        default=os.environ.get("POSTGRAD_TEST_DATA"),
        help="the folder of gsm8k.jsonl and hh-rlhf-harmless.jsonl.gz",
    )
    parser.add_argument("--extra", type=json.loads, default={}, help="JSON for Options.extra")
    parser.add_argument("--to", type=Path, help="where the JSON goes")
    arguments = parser.parse_args()
    if arguments.data is None:
        parser.error("--data or POSTGRAD_TEST_DATA is needed")
    return arguments


def contestants(args: argparse.Namespace) -> list[Contestant]:
    """Every side at every precision that it may use."""
    work = WORKS[args.work]
    return [
        Contestant(
            side,
            f"benchmarks.speed.{work.sides}.{side}",
            python,
            Options(precision, args.threads, work.extra | args.extra),
        )
        for side, python in ((OURS, sys.executable), (args.against, args.peer_python))
        for precision in PRECISIONS[args.precision]
    ]


def main() -> None:
    """Make the work, let the sides compete, print."""
    args = arguments()
    work = WORKS[args.work]
    with tempfile.TemporaryDirectory(prefix="postgrad-speed-") as temporary:
        folder = Path(temporary)
        make(folder, args.data, args.model, work.vocabulary)
        side_results = compete(contestants(args), folder, rounds=args.rounds, equal=work.equal)
    result = {
        "command": shlex.join(["python", "-m", "benchmarks.speed", *sys.argv[1:]]),
        "model": args.model,
        "threads": args.threads,
        "machine": machine(),
        **report(side_results, OURS, args.against),
    }
    print(measured_on(result["machine"], args.threads))
    print(table(result))
    if args.to:
        args.to.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    try:
        main()
    except Refused as refused:
        sys.exit(f"refused: {refused}")
