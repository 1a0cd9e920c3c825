"""report, watch: a run as a page."""

import argparse
from pathlib import Path
from typing import Any

from postgrad.cli.command import Commands, console_of


def add(commands: Commands) -> None:
    """Registers the commands of this file and their flags."""
    parser = commands.add(
        "report", _report, "one HTML file that shows a run, or several side by side"
    )
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR")
    parser.add_argument(
        "--to", type=Path, metavar="FILE.html", help="RUN_DIR/report.html if left out"
    )
    parser.add_argument("--all", action="store_true", help="every sample, however large the file")
    parser = commands.add("watch", _watch, "the same page of runs that are under way, live")
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR")
    parser.add_argument("--port", type=int, default=0, help="any that is free if left out")


def _report(args: argparse.Namespace, rest: list[str]) -> Any:
    from postgrad.tools.pages import EVERYTHING, report

    return report(args.run_dirs, args.to, console_of(args), cap=EVERYTHING if args.all else None)


def _watch(args: argparse.Namespace, rest: list[str]) -> Any:
    from postgrad.tools.pages import watch

    return watch(args.run_dirs, console_of(args), args.port)
