"""train, resume, verify-resume: commands that run a recipe."""

import argparse
from pathlib import Path
from typing import Any

from postgrad.cli.command import CommandOutcome, Commands, add_quiet, console_of
from postgrad.core.errors import UsageError
from postgrad.core.process import heavy_imports


def add(commands: Commands) -> None:
    """Registers the commands of this file and their flags."""
    parser = commands.add_for_recipe(
        "train", _train, "run a recipe, or the recipes of a folder with pipeline.toml", folders=True
    )
    parser.add_argument("--dry-run", action="store_true", help="the plan, then all of it in small")
    parser.add_argument("--profile", action="store_true", help="where the time of a step goes")
    parser.add_argument("--overwrite", choices=("true", "false"), default="false")
    _add_run_flags(parser)
    parser = commands.add(
        "resume", _resume, "continue a run from its newest checkpoint", overrides=True
    )
    parser.add_argument("run_dir", type=Path)
    _add_run_flags(parser)
    parser = commands.add_for_recipe(
        "verify-resume", _verify_resume, "show that kills and resumes change no bit"
    )
    parser.add_argument("--kills", type=int, default=3, metavar="N")
    add_quiet(parser)


def _add_run_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow-change", action="append", default=[], metavar="KEY",
        help="go on although this key of the recipe has changed",
    )  # fmt: skip
    add_quiet(parser)


def _train(args: argparse.Namespace, rest: list[str]) -> Any:
    from postgrad.recipe.load import load_recipe
    from postgrad.recipe.pipeline import load_pipeline

    if args.dry_run:
        return _dry_run(args, rest)
    overwrite = args.overwrite == "true"
    if args.recipe.is_dir():
        if args.profile:
            raise UsageError("--profile is for one recipe, not for a folder")
        pipeline = load_pipeline(args.recipe, rest)
        with heavy_imports():
            from postgrad.tools.pipeline import train_pipeline

        return train_pipeline(
            pipeline, console_of(args), overwrite=overwrite, allow_change=args.allow_change
        )
    recipe = load_recipe(args.recipe, rest)
    with heavy_imports():
        from postgrad.training.start import train

    return train(
        recipe,
        console_of(args),
        overwrite=overwrite,
        allow_change=args.allow_change,
        profile=args.profile,
    )


def _dry_run(args: argparse.Namespace, rest: list[str]) -> CommandOutcome:
    from postgrad.recipe.load import load_recipe
    from postgrad.recipe.pipeline import load_pipeline

    if args.recipe.is_dir():
        pipeline = load_pipeline(args.recipe, rest)
        with heavy_imports():
            from postgrad.tools.dry_run.dry_run import dry_run_pipeline, exit_code, pipeline_json

        reports = dry_run_pipeline(pipeline, console_of(args), tracebacks=args.debug)
        return CommandOutcome(pipeline_json(reports), exit_code(list(reports.values())))
    recipe = load_recipe(args.recipe, rest)
    with heavy_imports():
        from postgrad.tools.dry_run.dry_run import dry_run

    report = dry_run(recipe, console_of(args), tracebacks=args.debug)
    return CommandOutcome(report.to_json(), report.exit_code)


def _resume(args: argparse.Namespace, rest: list[str]) -> Any:
    with heavy_imports():
        from postgrad.training.start import resume

    return resume(args.run_dir, rest, args.allow_change, console_of(args))


def _verify_resume(args: argparse.Namespace, rest: list[str]) -> Any:
    from postgrad.recipe.load import load_recipe

    load_recipe(args.recipe, rest)  # a wrong recipe is refused before anything runs
    from postgrad.tools.verify_resume import verify_resume

    return verify_resume(args.recipe, rest, args.kills, console_of(args))
