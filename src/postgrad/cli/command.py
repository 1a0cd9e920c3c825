"""What all commands share: --json, --debug, and overrides for those that read a recipe."""

import argparse
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from postgrad.core.errors import UsageError
from postgrad.core.text import in_lines, nearest
from postgrad.recipe.shipped import located

if TYPE_CHECKING:  # the console is imported by the commands that need it
    from postgrad.observe.console import Console

OVERRIDES = "Every key of a recipe can be given as --section.key VALUE."

CommandFunction = Callable[[argparse.Namespace, list[str]], Any]


@dataclass(frozen=True, slots=True)
class CommandOutcome:
    """The result of a command that prints a report and may still have failed, such as a dry run."""

    result: Any  # what --json prints
    exit_code: int


class Commands:
    """The subcommands of a parser.

    A command is a function of the parsed flags and of the words that no flag took. It returns what
    --json prints.
    """

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser
        self._parsers: Any = parser.add_subparsers(
            title="commands", dest="command", metavar="COMMAND"
        )

    def refuse_unknown(self, arguments: Sequence[str]) -> None:
        """Raises UsageError where the first word is no command."""
        name = next((word for word in arguments if not word.startswith("-")), None)
        names: list[str] = list(self._parsers.choices)
        if name is not None and name not in names:
            close = nearest(name, names)
            hint = f"did you mean {close}?" if close else f"there are {', '.join(names)}"
            raise UsageError(f"no command is called {name!r}: {hint}")

    def add(
        self, name: str, run: CommandFunction, text: str, *, overrides: bool = False
    ) -> argparse.ArgumentParser:
        """Registers a command. overrides: words that no flag takes are overrides of its recipe."""
        parser: argparse.ArgumentParser = self._parsers.add_parser(
            name, help=text, description=text, epilog=OVERRIDES if overrides else None,
            allow_abbrev=False,
        )  # fmt: skip
        parser.set_defaults(run=run, takes_overrides=overrides)
        parser.add_argument(
            "--json", action="store_true", help="one JSON object on standard output"
        )
        parser.add_argument("--debug", action="store_true", help="show tracebacks")
        return parser

    def add_for_recipe(
        self, name: str, run: CommandFunction, text: str, *, folders: bool = False
    ) -> argparse.ArgumentParser:
        """Registers a command that reads a recipe; `folders`: or a folder with pipeline.toml."""
        parser = self.add(name, run, text, overrides=True)
        parser.add_argument(
            "recipe", type=located, metavar="RECIPE.toml|DIR" if folders else "RECIPE.toml",
            help=f"a file, {'a folder with pipeline.toml, ' if folders else ''}or the name of a "
            "recipe that `postgrad recipes` lists",
        )  # fmt: skip
        return parser


def add_run_dir(parser: argparse.ArgumentParser, text: str = "what a run has written") -> None:
    """Adds the directory of a run, `run_dir` of its recipe."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help=text)


def tell(text: str) -> None:
    """Prints a message of a command on standard error; on a terminal its lines are cut at words."""
    message = f"postgrad: {text}"
    if sys.stderr.isatty():
        message = in_lines(message, shutil.get_terminal_size().columns)
    print(message, file=sys.stderr)


def console_of(args: argparse.Namespace) -> "Console":
    """The console that --json and --quiet ask for."""
    from postgrad.observe.console import Console

    quiet = getattr(args, "quiet", False)
    if args.json:
        return Console("quiet", sys.stderr) if quiet else Console("json")
    return Console("quiet" if quiet else "auto")


def add_quiet(parser: argparse.ArgumentParser) -> None:
    """Adds --quiet, for a command that takes long."""
    parser.add_argument("--quiet", action="store_true", help="only warnings and errors")
