"""plan, config, translate: commands about recipes that run nothing."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from postgrad.cli.command import Commands, console_of
from postgrad.core.errors import UsageError


def add(commands: Commands) -> None:
    """The family's commands and their flags."""
    one = commands.add_for_recipe(
        "plan", _plan, "what a recipe needs and how long it takes, before it runs", folders=True
    )
    one.add_argument("--hardware", metavar="8xA100-80G", help="this machine where left out")
    one.add_argument("--fit", type=Path, metavar="OUT.toml", help="write the recipe as advised")
    one.add_argument("--search", action="store_true", help="which hardware would do")
    one.add_argument(
        "--rows", type=int, metavar="N",
        help="rows of an epoch: where the recipe says epochs and its data are not on this machine",
    )  # fmt: skip
    one.add_argument(
        "--calibrate", action="store_true",
        help="learn how fast this machine is from a run: plan --calibrate RUN_DIR",
    )  # fmt: skip
    commands.add_for_recipe("config", _config, "check a recipe and show it resolved", folders=True)
    one = commands.add(
        "translate", _translate, "turn another system's script or config into a recipe",
        overrides=True,
    )  # fmt: skip
    one.add_argument("system", metavar="openrlhf|open-instruct|trl")
    one.add_argument("--devices", type=int, metavar="N", help="that train, if the source is silent")
    one.usage = "postgrad translate openrlhf|open-instruct|trl FILE_OR_FLAGS [--devices N] [--json]"


def _plan(known: argparse.Namespace, rest: list[str]) -> Any:
    if known.calibrate:
        if rest or known.hardware or known.fit or known.search or known.rows:
            raise UsageError("plan --calibrate RUN_DIR goes with no other flag of plan")
        from postgrad.plan.calibrate import calibrate

        return calibrate(known.recipe, console_of(known))
    from postgrad.plan.command import plan

    return plan(
        known.recipe,
        rest,
        console_of(known),
        hardware=known.hardware,
        fit=known.fit,
        searching=known.search,
        rows=known.rows,
    )


def _config(known: argparse.Namespace, rest: list[str]) -> Any:
    from postgrad.recipe.load import load_recipe
    from postgrad.recipe.pipeline import load_pipeline

    if known.recipe.is_dir():
        stages = load_pipeline(known.recipe, rest).stages
        resolved: Any = {stage.name: stage.recipe.dump() for stage in stages}
    else:
        resolved = load_recipe(known.recipe, rest).dump()
    if not known.json:
        print(json.dumps(resolved, indent=2, ensure_ascii=False))
    return resolved


def _translate(known: argparse.Namespace, rest: list[str]) -> Any:
    from postgrad.recipe.translate.command import translate

    found = translate(known.system, rest, known.devices)
    if found.problem is not None:
        print(f"postgrad: not a whole recipe yet: {found.problem}", file=sys.stderr)
    if not known.json:
        print(found.text, end="")
    return found.to_json()
