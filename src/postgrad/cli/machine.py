"""doctor: what this machine has."""

import argparse
from typing import Any

from postgrad.cli.command import Commands, console_of


def add(commands: Commands) -> None:
    """Registers the commands of this file and their flags."""
    commands.add("doctor", _doctor, "what this machine has, and what a run would choose on it")


def _doctor(args: argparse.Namespace, rest: list[str]) -> Any:
    from postgrad.tools.doctor import examine, rows

    facts = examine()
    console_of(args).table("this machine", ("", ""), rows(facts))
    return facts
