"""serve-reward: a reward model for others to ask."""

import argparse
from pathlib import Path
from typing import Any

from postgrad.cli.command import Commands, console_of
from postgrad.core.process import heavy_imports


def add(commands: Commands) -> None:
    """Registers the commands of this file and their flags."""
    parser = commands.add("serve-reward", _serve_reward, "put a reward model behind HTTP")
    parser.add_argument("model", type=Path, metavar="DIR")
    parser.add_argument(
        "--host", default="127.0.0.1", help="other than 127.0.0.1: with a token only"
    )
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free")
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE",
        help="the bearer token that clients send; or in POSTGRAD_SERVE_TOKEN",
    )  # fmt: skip
    parser.add_argument(
        "--max-batch-tokens", type=int, metavar="N", help="in one call of the model"
    )
    parser.add_argument("--max-request-bytes", type=int, metavar="N")
    parser.add_argument("--request-seconds", type=float, metavar="S")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")


def _serve_reward(args: argparse.Namespace, rest: list[str]) -> Any:
    with heavy_imports():
        from postgrad.tools.serve.serve import serve_reward
        from postgrad.tools.serve.wire import limits_of

    limits = limits_of(args.max_batch_tokens, args.max_request_bytes, args.request_seconds)
    return serve_reward(
        args.model,
        console_of(args),
        host=args.host,
        port=args.port,
        token_file=args.token_file,
        dtype=args.dtype,
        limits=limits,
    )
