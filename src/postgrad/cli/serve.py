"""serve-reward: a reward model for others to ask."""

import argparse
from pathlib import Path
from typing import Any

from postgrad.cli.command import Commands, console_of
from postgrad.core.imports import heavy_imports


def add(commands: Commands) -> None:
    """The family's commands and their flags."""
    one = commands.add("serve-reward", _serve_reward, "put a reward model behind HTTP")
    one.add_argument("model", type=Path, metavar="DIR")
    one.add_argument("--host", default="127.0.0.1", help="other than 127.0.0.1: with a token only")
    one.add_argument("--port", type=int, default=8000, help="0: any that is free")
    one.add_argument(
        "--token-file", type=Path, metavar="FILE",
        help="the bearer token that clients send; or in POSTGRAD_SERVE_TOKEN",
    )  # fmt: skip
    one.add_argument("--max-batch-tokens", type=int, metavar="N", help="in one call of the model")
    one.add_argument("--max-request-bytes", type=int, metavar="N")
    one.add_argument("--request-seconds", type=float, metavar="S")
    one.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")


def _serve_reward(known: argparse.Namespace, rest: list[str]) -> Any:
    with heavy_imports():
        from postgrad.jobs.serve.command import serve_reward
        from postgrad.jobs.serve.limits import limits_of

    limits = limits_of(known.max_batch_tokens, known.max_request_bytes, known.request_seconds)
    return serve_reward(
        known.model,
        console_of(known),
        host=known.host,
        port=known.port,
        token_file=known.token_file,
        dtype=known.dtype,
        limits=limits,
    )
