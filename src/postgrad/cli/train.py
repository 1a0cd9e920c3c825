"""train, resume, verify-resume: commands that run a recipe."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from postgrad.cli.command import CommandOutcome, Commands, add_quiet, add_run_dir, console_of
from postgrad.core.errors import UsageError
from postgrad.core.process import heavy_imports

if TYPE_CHECKING:  # the commands import what they need
    from postgrad.observe.console import Console
    from postgrad.tools.sweep.results import Standing
    from postgrad.tools.sweep.run import Command


def add(commands: Commands) -> None:
    """Registers the commands of this file and their flags."""
    parser = commands.add_for_recipe(
        "train", _train, "run a recipe, or the recipes of a folder with pipeline.toml", folders=True
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="plan the run, then run every phase at a small scale"
    )
    parser.add_argument(
        "--profile", action="store_true", help="measure where the time of a step goes"
    )
    parser.add_argument(
        "--overwrite", choices=("true", "false"), default="false",
        help="true: delete what an earlier run wrote into run_dir, and start over",
    )  # fmt: skip
    parser.add_argument("--choices-of", type=Path, help=argparse.SUPPRESS)  # for verify-resume
    parser.add_argument(
        "--sweep", action="append", default=[], metavar="KEY=VALUE,VALUE",
        help="one run per value, such as learner.lr=1e-4,3e-4; repeat it for a grid",
    )  # fmt: skip
    _add_run_flags(parser)
    parser = commands.add(
        "resume", _resume, "continue a run, or a sweep, from its newest checkpoints", overrides=True
    )
    add_run_dir(parser, "what a run, or a sweep, has written")
    _add_run_flags(parser)
    parser = commands.add_for_recipe(
        "verify-resume", _verify_resume, "kill and resume a run, and check that no bit changes"
    )
    parser.add_argument(
        "--kills", type=int, default=3, metavar="N", help="how often the run is killed; default: 3"
    )
    add_quiet(parser)


def _add_run_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow-change", action="append", default=[], metavar="KEY",
        help="continue although this recipe key has changed",
    )  # fmt: skip
    parser.add_argument(
        "--at-once", type=int, metavar="N",
        help="for a sweep: number of concurrent runs; default: what cores and memory allow",
    )  # fmt: skip
    add_quiet(parser)


def _train(args: argparse.Namespace, rest: list[str]) -> Any:
    from postgrad.recipe.compare import require_known
    from postgrad.recipe.load import load_recipe
    from postgrad.recipe.pipeline import load_pipeline

    if args.sweep:
        return _sweep(args, rest)
    _refuse_at_once(args)
    if args.dry_run:
        return _dry_run(args, rest)
    overwrite = args.overwrite == "true"
    if args.recipe.is_dir():
        if args.profile:
            raise UsageError("--profile is for one recipe, not for a folder")
        pipeline = load_pipeline(args.recipe, rest)
        with heavy_imports():
            from postgrad.tools.pipeline import train_pipeline

        return _ended(
            train_pipeline(
                pipeline, console_of(args), overwrite=overwrite, allow_change=args.allow_change
            )
        )
    recipe = load_recipe(args.recipe, rest)
    with heavy_imports():
        from postgrad.training.saving import open_store
        from postgrad.training.start import CHOSEN, train

    require_known(args.allow_change, recipe, recipe, CHOSEN)
    of_run = args.choices_of and open_store(args.choices_of).load().state.choices
    return _ended(
        train(
            recipe,
            console_of(args),
            overwrite=overwrite,
            allow_change=args.allow_change,
            profile=args.profile,
            choices=of_run,
        )
    )


def _ended(summary: dict[str, Any]) -> CommandOutcome:
    """The summary of a run; exit code 1 where its mirror is behind: its machine is still needed."""
    from postgrad.training.summary import is_behind

    return CommandOutcome(summary, int(is_behind(summary)))


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


def _sweep(args: argparse.Namespace, rest: list[str]) -> CommandOutcome:
    for flag in ("dry_run", "profile"):
        if getattr(args, flag):
            raise UsageError(f"--{flag.replace('_', '-')} is for one run: leave out --sweep")
    from postgrad.recipe.sweep import parse_swept, sweep_of

    sweep = sweep_of(args.recipe, rest, parse_swept(args.sweep))
    from postgrad.tools.sweep.run import train_sweep

    console = console_of(args)
    return _swept(train_sweep(sweep, console, _command(args)), console)


def _command(args: argparse.Namespace) -> "Command":
    from postgrad.tools.sweep.run import Command

    stream = None if args.quiet else sys.stderr if args.json else sys.stdout
    overwrite = getattr(args, "overwrite", "false") == "true"
    return Command(overwrite, args.allow_change, args.at_once, stream)


def _swept(result: "Standing", console: "Console") -> CommandOutcome:
    """Shows a sweep; the exit code is 1 where a run of it failed."""
    from postgrad.tools.sweep.run import show

    show(result, console)
    failed = any(run.state == "failed" for run in result.results)
    return CommandOutcome(result.to_json(), int(failed))


def _refuse_at_once(args: argparse.Namespace) -> None:
    if args.at_once is not None:
        raise UsageError("--at-once is for a sweep: give --sweep KEY=VALUE,VALUE too")


def _resume(args: argparse.Namespace, rest: list[str]) -> Any:
    from postgrad.recipe.sweep import is_sweep

    if is_sweep(args.run_dir):
        from postgrad.tools.sweep.run import resume_sweep

        console = console_of(args)
        return _swept(resume_sweep(args.run_dir, rest, console, _command(args)), console)
    _refuse_at_once(args)
    with heavy_imports():
        from postgrad.training.start import resume

    return _ended(resume(args.run_dir, rest, args.allow_change, console_of(args)))


def _verify_resume(args: argparse.Namespace, rest: list[str]) -> Any:
    from postgrad.recipe.load import load_recipe

    load_recipe(args.recipe, rest)  # a wrong recipe is refused before anything runs
    from postgrad.tools.verify_resume import verify_resume

    return verify_resume(args.recipe, rest, args.kills, console_of(args))
