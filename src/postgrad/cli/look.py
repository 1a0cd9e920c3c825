"""report, watch: a run as a page."""

import argparse
from pathlib import Path
from typing import Any

from postgrad.cli.command import Commands, console_of


def add(commands: Commands) -> None:
    """The family's commands and their flags."""
    one = commands.add("report", _report, "one HTML file that shows a run, or several side by side")
    one.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR")
    one.add_argument("--to", type=Path, metavar="FILE.html", help="RUN_DIR/report.html if left out")
    one.add_argument("--all", action="store_true", help="every sample, however large the file")
    one = commands.add("watch", _watch, "the same page of runs that are under way, live")
    one.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR")
    one.add_argument("--port", type=int, default=0, help="any that is free if left out")


def _report(known: argparse.Namespace, rest: list[str]) -> Any:
    from postgrad.jobs.report import EVERYTHING, report

    return report(
        known.run_dirs, known.to, console_of(known), cap=EVERYTHING if known.all else None
    )


def _watch(known: argparse.Namespace, rest: list[str]) -> Any:
    from postgrad.jobs.watch import watch

    return watch(known.run_dirs, console_of(known), known.port)
