"""export, checkpoints, verify: what a run has saved."""

import argparse
from pathlib import Path
from typing import Any

from postgrad.cli.command import Commands, console_of
from postgrad.core.imports import heavy_imports


def add(commands: Commands) -> None:
    """The family's commands and their flags."""
    one = commands.add("export", _export, "write a checkpoint as a Hugging Face directory")
    one.add_argument("run_dir", type=Path)
    one.add_argument("--checkpoint", default="latest", metavar="latest|best|STEP")
    one.add_argument("--role", metavar="policy|critic|reward|ema", help="what the job trains")
    one.add_argument("--adapter", action="store_true", help="the adapter alone, as PEFT reads it")
    one.add_argument("--to", type=Path, required=True, metavar="DIR")
    one = commands.add("checkpoints", _checkpoints, "list the checkpoints of a run")
    one.add_argument("run_dir", type=Path)
    one = commands.add("verify", _verify, "hash and load every checkpoint of a run")
    one.add_argument("run_dir", type=Path)


def _export(known: argparse.Namespace, rest: list[str]) -> Any:
    with heavy_imports():
        from postgrad.jobs.export import export

    to = export(known.run_dir, known.checkpoint, known.to, known.role, adapter=known.adapter)
    reader = "PEFT" if known.adapter else "plain transformers"
    console_of(known).note(f"saved {to}, and read it again with {reader}: the same logits")
    return {"model": str(to)}


def _checkpoints(known: argparse.Namespace, rest: list[str]) -> Any:
    from postgrad.jobs.checkpoints import checkpoints

    return checkpoints(known.run_dir, console_of(known))


def _verify(known: argparse.Namespace, rest: list[str]) -> Any:
    from postgrad.jobs.verify import verify

    return verify(known.run_dir, console_of(known))
