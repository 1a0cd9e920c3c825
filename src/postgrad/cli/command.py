"""What every command has: --json, --debug, overrides of a recipe where it reads one."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from postgrad.core.errors import UsageError
from postgrad.core.names import nearest

if TYPE_CHECKING:  # the console is imported by the commands that need it
    from postgrad.observe.console import Console

OVERRIDES = "Every key of a recipe can be given as --section.key VALUE."

Run = Callable[[argparse.Namespace, list[str]], Any]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended that has something to tell and yet may not have gone well. result: what
    --json prints.
    """

    result: Any
    exit_code: int


class Commands:
    """The subcommands of a parser. A command gets its flags and the words that no flag took, and
    returns what --json prints."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser
        self._parsers: Any = parser.add_subparsers(
            title="commands", dest="command", metavar="COMMAND"
        )

    def refuse_unknown(self, arguments: Sequence[str]) -> None:
        """Raises UsageError where the first word is no command."""
        name = next((one for one in arguments if not one.startswith("-")), None)
        known: list[str] = list(self._parsers.choices)
        if name is not None and name not in known:
            close = nearest(name, known)
            hint = f"did you mean {close}?" if close else f"there are {', '.join(known)}"
            raise UsageError(f"no command is called {name!r}: {hint}")

    def add(
        self, name: str, run: Run, text: str, *, overrides: bool = False
    ) -> argparse.ArgumentParser:
        """A command; with `overrides`, words that no flag takes go to its recipe."""
        one: argparse.ArgumentParser = self._parsers.add_parser(
            name, help=text, description=text, epilog=OVERRIDES if overrides else None,
            allow_abbrev=False,
        )  # fmt: skip
        one.set_defaults(run=run, takes_overrides=overrides)
        one.add_argument("--json", action="store_true", help="one JSON object on standard output")
        one.add_argument("--debug", action="store_true", help="show tracebacks")
        return one

    def add_for_recipe(
        self, name: str, run: Run, text: str, *, folders: bool = False
    ) -> argparse.ArgumentParser:
        """A command that reads a recipe, or with `folders` also a folder with pipeline.toml."""
        one = self.add(name, run, text, overrides=True)
        one.add_argument(
            "recipe", type=Path, metavar="RECIPE.toml|DIR" if folders else "RECIPE.toml"
        )
        return one


def console_of(known: argparse.Namespace) -> "Console":
    """The console as --json and --quiet want it."""
    from postgrad.observe.console import Console

    quiet = getattr(known, "quiet", False)
    if known.json:
        return Console("quiet", sys.stderr) if quiet else Console("json")
    return Console("quiet" if quiet else "auto")


def add_quiet(one: argparse.ArgumentParser) -> None:
    """--quiet, of a command that takes long."""
    one.add_argument("--quiet", action="store_true", help="only warnings and errors")
