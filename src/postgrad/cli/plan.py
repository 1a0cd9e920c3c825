"""plan, config, translate, doctor: what is known before a run."""

import argparse
import json
from pathlib import Path
from typing import Any

from postgrad.cli.command import Commands, console_of, tell
from postgrad.core.errors import UsageError


def add(commands: Commands) -> None:
    """Registers the commands of this file and their flags."""
    parser = commands.add_for_recipe(
        "plan", _plan, "what a recipe needs and how long it takes, before it runs", folders=True
    )
    parser.add_argument("--hardware", metavar="8xA100-80G", help="default: this machine")
    parser.add_argument("--fit", type=Path, metavar="OUT.toml", help="write the advised recipe")
    parser.add_argument("--search", action="store_true", help="list hardware on which it fits")
    parser.add_argument(
        "--rows", type=int, metavar="N",
        help="plan for N rows of an epoch; lengths stay those of the rows that are here",
    )  # fmt: skip
    parser.add_argument(
        "--scale", metavar="8,64,512",
        help="simulate a step of RL on these numbers of devices, with max_staleness 0 to 8",
    )  # fmt: skip
    parser.add_argument(
        "--lengths", type=Path, metavar="RUN_DIR",
        help="for --scale: use the answer lengths of this run",
    )  # fmt: skip
    parser.add_argument("--svg", type=Path, metavar="FILE", help="for --scale: draw its last table")
    parser.add_argument(
        "--calibrate", action="store_true",
        help="measure this machine's speed from a run: plan --calibrate RUN_DIR",
    )  # fmt: skip
    parser = commands.add_for_recipe(
        "config", _config, "check a recipe and show it resolved", folders=True
    )
    parser.add_argument("--toml", action="store_true", help="print a recipe with every key")
    parser = commands.add(
        "translate", _translate, "turn another system's script or config into a recipe",
        overrides=True,
    )  # fmt: skip
    parser.add_argument(
        "system", metavar="openrlhf|open-instruct|trl|prime-rl|nemo-rl|verl",
        help="then a script, a config or flags of that system",
    )  # fmt: skip
    parser.add_argument(
        "--devices", type=int, metavar="N", help="devices that train, if the source does not say"
    )
    parser.add_argument(
        "--command", type=int, metavar="N",
        help="number of the command to translate; default: the first that trains",
    )  # fmt: skip
    parser.usage = (
        "postgrad translate openrlhf|open-instruct|trl|prime-rl|nemo-rl|verl FILE_OR_FLAGS "
        "[--devices N] [--command N] [--json]"
    )
    commands.add("doctor", _doctor, "what this machine has, and what a run would choose on it")


def _plan(args: argparse.Namespace, rest: list[str]) -> Any:
    if args.calibrate:
        if rest or args.hardware or args.fit or args.search or args.rows or args.scale:
            raise UsageError("plan --calibrate RUN_DIR takes no other flag of plan")
        from postgrad.plan.calibrate import calibrate

        return calibrate(args.recipe, console_of(args))
    for flag in ("lengths", "svg"):
        if getattr(args, flag) is not None and not args.scale:
            raise UsageError(f"--{flag} is of --scale: give both")
    if args.scale:
        if args.fit or args.search or args.rows:
            raise UsageError(
                "plan --scale takes --hardware, --lengths and --svg, no other flag of plan"
            )
        from postgrad.plan.scaling import scale

        return scale(
            args.recipe, rest, console_of(args),
            counts=args.scale, hardware=args.hardware, run=args.lengths, svg=args.svg,
        )  # fmt: skip
    from postgrad.plan.planner import plan

    return plan(
        args.recipe,
        rest,
        console_of(args),
        hardware=args.hardware,
        fit=args.fit,
        searching=args.search,
        rows=args.rows,
    )


def _config(args: argparse.Namespace, rest: list[str]) -> Any:
    from postgrad.recipe.load import load_recipe
    from postgrad.recipe.pipeline import load_pipeline

    if args.recipe.is_dir():
        if args.toml:
            raise UsageError("--toml prints one recipe: name a TOML file, not a folder")
        stages = load_pipeline(args.recipe, rest).stages
        resolved: Any = {stage.name: stage.recipe.dump() for stage in stages}
    else:
        resolved = load_recipe(args.recipe, rest).dump()
    if args.toml and not args.json:
        from postgrad.recipe.load import as_toml

        print(as_toml(resolved), end="")
    elif not args.json:
        print(json.dumps(resolved, indent=2, ensure_ascii=False))
    return resolved


def _translate(args: argparse.Namespace, rest: list[str]) -> Any:
    from postgrad.translate.translate import translate

    translation = translate(args.system, rest, args.devices, args.command)
    if translation.problem is not None:
        tell(f"not a complete recipe yet: {translation.problem}")
    if not args.json:
        print(translation.text, end="")
    return translation.to_json()


def _doctor(args: argparse.Namespace, rest: list[str]) -> Any:
    from postgrad.tools.doctor import examine, rows

    facts = examine()
    console_of(args).table("this machine", ("", ""), rows(facts))
    return facts
