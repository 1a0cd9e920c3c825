"""new, recipes, completion: what comes before a recipe of one's own."""

import argparse
import shlex
from pathlib import Path
from typing import Any

from postgrad.cli.command import Commands, console_of

SHELLS = ("bash", "zsh", "fish", "tcsh")


def add(commands: Commands) -> None:
    """Registers the commands of this file and their flags."""
    parser = commands.add("new", _new, "write a recipe with comments and a few rows of data")
    parser.add_argument("folder", type=Path, metavar="DIR", help="the new folder")
    parser.add_argument(
        "--job", default="sft", metavar="sft|reward|preference|rl", help="default: sft"
    )
    parser.add_argument("--model", metavar="MODEL", help="default: a small fresh model")
    commands.add("recipes", _recipes, "list the recipes that come with postgrad")
    parser = commands.add("completion", _completion, "print a script that completes commands")
    parser.add_argument("shell", choices=SHELLS)
    parser.set_defaults(parser=commands.parser)


def _new(args: argparse.Namespace, rest: list[str]) -> Any:
    from postgrad.tools.new import new

    recipe = new(args.folder, args.job, args.model)
    if not args.json:
        named = shlex.quote(str(recipe))
        print(
            f"wrote {recipe}, train.jsonl and eval.jsonl. Next:\n"
            f"  postgrad plan {named}\n"
            f"  postgrad train {named}"
        )
    return {"recipe": str(recipe)}


def _recipes(args: argparse.Namespace, rest: list[str]) -> Any:
    from postgrad.recipe.shipped import shipped, summary_of

    listed = {name: summary_of(path) for name, path in shipped()}
    console = console_of(args)
    console.table("recipes: postgrad train NAME", ("name", "what it does"), list(listed.items()))
    return listed


def _completion(args: argparse.Namespace, rest: list[str]) -> Any:
    import shtab

    script = shtab.complete(args.parser, args.shell)
    if not args.json:
        print(script)
    return {"script": script}
