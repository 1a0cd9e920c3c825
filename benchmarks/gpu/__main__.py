"""Checks and measures postgrad on a GPU in one command, without a network.

    python -m benchmarks.gpu --minutes 9 --to DIR

Parts in order of worth: checks, training, decode, step, planner, learning. Each runs in a process
with a limit of its own; DIR/results.json has each case's result as soon as it is there, DIR/log.txt
what the processes print, DIR/hardware.toml a row for plan/hardware.toml. At the end a table of
goals, and a list of what missed them or did not run. The exit status is 0 where every part came to
an end, also where goals are missed.

    python -m benchmarks.gpu --needs        packages that are missing here, as pip calls them
    python -m benchmarks.gpu --table DIR    the table of results that are there
    python -m benchmarks.gpu --page DIR     docs/performance.md gets the figures of DIR
    python -m benchmarks.gpu --device cpu --small --minutes 20 --to DIR    a dry run
"""

import argparse
import importlib
import shlex
import signal
import sys
from pathlib import Path

from benchmarks.gpu import goals, needs, page, runner
from benchmarks.gpu.session import PARTS, RESULTS, Session, Store, serve


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=runner.MINUTES)
    parser.add_argument("--to", type=Path, metavar="DIR", help="an empty or a new folder")
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="only these")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes: a dry run")
    parser.add_argument("--needs", action="store_true")
    parser.add_argument("--table", type=Path, metavar="DIR")
    parser.add_argument("--page", type=Path, metavar="DIR")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--session", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """The exit status."""
    args = arguments()
    if args.part:
        runner.end_with_parent()
        session = Session.from_json(args.session)
        module = importlib.import_module(f"benchmarks.gpu.{args.part}")
        serve(args.part, module.cases(session), session)
        return 0
    if args.needs:
        print(needs.text())
        return 0
    if args.page:
        page.write(Store(args.page).read())
        return 0
    if args.table:
        print(goals.report(Store(args.table).read()))
        return 0
    if args.to is None:
        sys.exit("--to DIR is needed: a folder for the results")
    return measure(args)


def measure(args: argparse.Namespace) -> int:
    """A session; its exit status."""
    args.to.mkdir(parents=True, exist_ok=True)
    if (args.to / RESULTS).exists():
        sys.exit(f"{args.to / RESULTS} is there already: name another folder")
    if missing := needs.missing():
        print(f"missing here: {', '.join(need.package for need in missing)}", file=sys.stderr)
        if not all(need.words for need in missing):
            return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the child, prints the table
    store = Store(args.to)
    store.about({
        "command": shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]]),
        "minutes": args.minutes, "device": args.device, "small": args.small, "done": False,
        **needs.versions(),
    })  # fmt: skip
    parts = runner.parts_of(args.parts)
    try:
        with runner.scratch() as scratch:
            session = Session(args.to.resolve(), scratch, args.device, args.small, 0.0)
            runner.run(session, args.minutes, parts)
        store.about({"done": True})
    finally:
        print(goals.report(store.read()))
    broken = [part for part in parts if "its process" in store.part(part).get("ended", "")]
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
