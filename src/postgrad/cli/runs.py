"""export, checkpoints, verify, fork, report, watch: what a run directory has."""

import argparse
from pathlib import Path
from typing import Any

from postgrad.cli.command import Commands, add_run_dir, console_of
from postgrad.core.errors import UsageError
from postgrad.core.process import heavy_imports


def add(commands: Commands) -> None:
    """Registers the commands of this file and their flags."""
    parser = commands.add("export", _export, "write a checkpoint as a Hugging Face directory")
    add_run_dir(parser)
    parser.add_argument(
        "--checkpoint", default="latest", metavar="latest|best|STEP", help="default: latest"
    )
    parser.add_argument(
        "--role", metavar="policy|critic|reward|ema", help="default: what the job trains"
    )
    parser.add_argument(
        "--adapter", action="store_true", help="write only the adapter, in PEFT's format"
    )
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="output folder")
    parser.add_argument(
        "--push-to-hub", metavar="ORG/NAME", help="also push it to the hub, with its model card"
    )
    parser.add_argument(
        "--private", action="store_true", help="make the repository private if the push creates it"
    )
    parser = commands.add("checkpoints", _checkpoints, "list the checkpoints of a run")
    add_run_dir(parser)
    parser = commands.add("verify", _verify, "hash and load every checkpoint of a run")
    add_run_dir(parser)
    parser = commands.add(
        "fork", _fork, "make a new run of an earlier checkpoint; the run that it is from stays"
    )
    add_run_dir(parser)
    parser.add_argument(
        "--checkpoint", default="latest", metavar="latest|best|STEP", help="default: latest"
    )
    parser.add_argument(
        "--to", type=Path, required=True, metavar="DIR", help="the new run directory"
    )
    parser = commands.add(
        "report", _report, "one HTML file that shows a run, or several side by side, or a sweep"
    )
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR")
    parser.add_argument("--to", type=Path, metavar="FILE.html", help="default: RUN_DIR/report.html")
    parser.add_argument(
        "--all", action="store_true", help="include every sample, whatever the file size"
    )
    parser = commands.add("watch", _watch, "the page of runs that are in progress, live")
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR")
    parser.add_argument("--port", type=int, default=0, help="default: any free port")


def _export(args: argparse.Namespace, rest: list[str]) -> Any:
    if args.private and args.push_to_hub is None:
        raise UsageError("--private needs --push-to-hub ORG/NAME: it makes that repository private")
    with heavy_imports():
        from postgrad.tools.export import export
        from postgrad.training.card import push, require_repository

    if args.push_to_hub is not None:
        require_repository(args.push_to_hub, "--push-to-hub")
    to = export(args.run_dir, args.checkpoint, args.to, args.role, adapter=args.adapter)
    reader = "PEFT" if args.adapter else "plain transformers"
    console_of(args).note(f"saved {to}, and read it again with {reader}: the same logits")
    if args.push_to_hub is None:
        return {"model": str(to)}
    message = f"{args.checkpoint} checkpoint of {args.run_dir.resolve().name}"
    pushed = push(to, args.push_to_hub, private=args.private, message=message)
    console_of(args).note(f"pushed it to {pushed['url']}")
    return {"model": str(to), "pushed": pushed}


def _checkpoints(args: argparse.Namespace, rest: list[str]) -> Any:
    from postgrad.tools.checkpoints import checkpoints

    return checkpoints(args.run_dir, console_of(args))


def _verify(args: argparse.Namespace, rest: list[str]) -> Any:
    from postgrad.tools.checkpoints import verify

    return verify(args.run_dir, console_of(args))


def _fork(args: argparse.Namespace, rest: list[str]) -> Any:
    with heavy_imports():
        from postgrad.tools.fork import fork

    return fork(args.run_dir, args.checkpoint, args.to, console_of(args))


def _report(args: argparse.Namespace, rest: list[str]) -> Any:
    from postgrad.recipe.sweep import is_sweep
    from postgrad.tools.pages import EVERYTHING, report

    cap = EVERYTHING if args.all else None
    if len(args.run_dirs) == 1 and is_sweep(args.run_dirs[0]):
        from postgrad.tools.sweep.run import report_sweep

        return report_sweep(args.run_dirs[0], args.to, console_of(args), cap)
    return report(args.run_dirs, args.to, console_of(args), cap=cap)


def _watch(args: argparse.Namespace, rest: list[str]) -> Any:
    from postgrad.recipe.sweep import is_sweep
    from postgrad.tools.pages import watch

    run_dirs = args.run_dirs
    if len(run_dirs) == 1 and is_sweep(run_dirs[0]):
        from postgrad.tools.sweep.run import runs_to_show

        run_dirs = runs_to_show(run_dirs[0])
    return watch(run_dirs, console_of(args), args.port)
