"""train, resume, verify-resume: commands that run a recipe."""

import argparse
from pathlib import Path
from typing import Any

from postgrad.cli.command import Commands, Ended, add_quiet, console_of
from postgrad.core.errors import UsageError
from postgrad.core.imports import heavy_imports


def add(commands: Commands) -> None:
    """The family's commands and their flags."""
    one = commands.add_for_recipe(
        "train", _train, "run a recipe, or the recipes of a folder with pipeline.toml", folders=True
    )
    one.add_argument("--dry-run", action="store_true", help="the plan, then all of it in small")
    one.add_argument("--profile", action="store_true", help="where the time of a step goes")
    one.add_argument("--overwrite", choices=("true", "false"), default="false")
    _add_run_flags(one)
    one = commands.add(
        "resume", _resume, "continue a run from its newest checkpoint", overrides=True
    )
    one.add_argument("run_dir", type=Path)
    _add_run_flags(one)
    one = commands.add_for_recipe(
        "verify-resume", _verify_resume, "show that kills and resumes change no bit"
    )
    one.add_argument("--kills", type=int, default=3, metavar="N")
    add_quiet(one)


def _add_run_flags(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "--allow-change", action="append", default=[], metavar="KEY",
        help="go on although this key of the recipe has changed",
    )  # fmt: skip
    add_quiet(one)


def _train(known: argparse.Namespace, rest: list[str]) -> Any:
    from postgrad.recipe.load import load_recipe
    from postgrad.recipe.pipeline import load_pipeline

    if known.dry_run:
        return _dry_run(known, rest)
    overwrite = known.overwrite == "true"
    if known.recipe.is_dir():
        if known.profile:
            raise UsageError("--profile is for one recipe, not for a folder")
        pipeline = load_pipeline(known.recipe, rest)
        with heavy_imports():
            from postgrad.jobs.pipeline import train_pipeline

        return train_pipeline(
            pipeline, console_of(known), overwrite=overwrite, allow_change=known.allow_change
        )
    recipe = load_recipe(known.recipe, rest)
    with heavy_imports():
        from postgrad.jobs.train import train

    return train(
        recipe,
        console_of(known),
        overwrite=overwrite,
        allow_change=known.allow_change,
        profile=known.profile,
    )


def _dry_run(known: argparse.Namespace, rest: list[str]) -> Ended:
    from postgrad.recipe.load import load_recipe
    from postgrad.recipe.pipeline import load_pipeline

    if known.recipe.is_dir():
        pipeline = load_pipeline(known.recipe, rest)
        with heavy_imports():
            from postgrad.jobs.dry_run.command import dry_run_pipeline, exit_code, pipeline_json

        reports = dry_run_pipeline(pipeline, console_of(known), tracebacks=known.debug)
        return Ended(pipeline_json(reports), exit_code(list(reports.values())))
    recipe = load_recipe(known.recipe, rest)
    with heavy_imports():
        from postgrad.jobs.dry_run.command import dry_run

    report = dry_run(recipe, console_of(known), tracebacks=known.debug)
    return Ended(report.to_json(), report.exit_code)


def _resume(known: argparse.Namespace, rest: list[str]) -> Any:
    with heavy_imports():
        from postgrad.jobs.train import resume

    return resume(known.run_dir, rest, known.allow_change, console_of(known))


def _verify_resume(known: argparse.Namespace, rest: list[str]) -> Any:
    from postgrad.recipe.load import load_recipe

    load_recipe(known.recipe, rest)  # what is wrong with it is told before anything runs
    from postgrad.jobs.verify_resume import verify_resume

    return verify_resume(known.recipe, rest, known.kills, console_of(known))
