"""export, checkpoints, verify: what a run has saved."""

import argparse
from pathlib import Path
from typing import Any

from postgrad.cli.command import Commands, console_of
from postgrad.core.errors import UsageError
from postgrad.core.process import heavy_imports


def add(commands: Commands) -> None:
    """Registers the commands of this file and their flags."""
    parser = commands.add("export", _export, "write a checkpoint as a Hugging Face directory")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--checkpoint", default="latest", metavar="latest|best|STEP")
    parser.add_argument("--role", metavar="policy|critic|reward|ema", help="what the job trains")
    parser.add_argument(
        "--adapter", action="store_true", help="the adapter alone, as PEFT reads it"
    )
    parser.add_argument("--to", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--push-to-hub", metavar="ORG/NAME", help="and push it, with its model card"
    )
    parser.add_argument("--private", action="store_true", help="where that makes a repository")
    parser = commands.add("checkpoints", _checkpoints, "list the checkpoints of a run")
    parser.add_argument("run_dir", type=Path)
    parser = commands.add("verify", _verify, "hash and load every checkpoint of a run")
    parser.add_argument("run_dir", type=Path)


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
