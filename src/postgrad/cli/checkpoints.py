"""export, checkpoints, verify: what a run has saved."""

import argparse
from pathlib import Path
from typing import Any

from postgrad.cli.command import Commands, console_of
from postgrad.core.errors import UsageError
from postgrad.core.imports import heavy_imports


def add(commands: Commands) -> None:
    """The family's commands and their flags."""
    one = commands.add("export", _export, "write a checkpoint as a Hugging Face directory")
    one.add_argument("run_dir", type=Path)
    one.add_argument("--checkpoint", default="latest", metavar="latest|best|STEP")
    one.add_argument("--role", metavar="policy|critic|reward|ema", help="what the job trains")
    one.add_argument("--adapter", action="store_true", help="the adapter alone, as PEFT reads it")
    one.add_argument("--to", type=Path, required=True, metavar="DIR")
    one.add_argument("--push-to-hub", metavar="ORG/NAME", help="and push it, with its model card")
    one.add_argument("--private", action="store_true", help="where that makes a repository")
    one = commands.add("checkpoints", _checkpoints, "list the checkpoints of a run")
    one.add_argument("run_dir", type=Path)
    one = commands.add("verify", _verify, "hash and load every checkpoint of a run")
    one.add_argument("run_dir", type=Path)


def _export(known: argparse.Namespace, rest: list[str]) -> Any:
    if known.private and known.push_to_hub is None:
        raise UsageError("--private says how --push-to-hub ORG/NAME makes a repository: name one")
    with heavy_imports():
        from postgrad.jobs.export import export
        from postgrad.jobs.push import push, require_repository

    if known.push_to_hub is not None:
        require_repository(known.push_to_hub, "--push-to-hub")
    to = export(known.run_dir, known.checkpoint, known.to, known.role, adapter=known.adapter)
    reader = "PEFT" if known.adapter else "plain transformers"
    console_of(known).note(f"saved {to}, and read it again with {reader}: the same logits")
    if known.push_to_hub is None:
        return {"model": str(to)}
    told = f"{known.checkpoint} checkpoint of {known.run_dir.resolve().name}"
    pushed = push(to, known.push_to_hub, private=known.private, message=told)
    console_of(known).note(f"pushed it to {pushed['url']}")
    return {"model": str(to), "pushed": pushed}


def _checkpoints(known: argparse.Namespace, rest: list[str]) -> Any:
    from postgrad.jobs.checkpoints import checkpoints

    return checkpoints(known.run_dir, console_of(known))


def _verify(known: argparse.Namespace, rest: list[str]) -> Any:
    from postgrad.jobs.verify import verify

    return verify(known.run_dir, console_of(known))
