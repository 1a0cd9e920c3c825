"""chat: talk to a model, or to two."""

import argparse
from typing import Any

from postgrad.cli.command import Commands, console_of
from postgrad.core.errors import UsageError
from postgrad.core.process import heavy_imports


def add(commands: Commands) -> None:
    """Registers the commands of this file and their flags."""
    parser = commands.add("chat", _chat, "talk to a model or a run's checkpoint, or to two at once")
    parser.add_argument("model", metavar="MODEL_DIR|RUN_DIR", help="or a hub id, or a checkpoint")
    parser.add_argument("other", nargs="?", metavar="OTHER", help="a second one, side by side")
    parser.add_argument(
        "--checkpoint", metavar="latest|best|STEP", help="of a run; else the newest"
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message; else the run's own")
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="0: the likeliest token always"
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=512, metavar="N", help="of one answer"
    )
    parser.add_argument("--max-len", type=int, default=4096, metavar="N", help="of a conversation")
    parser.add_argument("--seed", type=int, default=0, help="the same seed, the same answers")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")


def _chat(args: argparse.Namespace, rest: list[str]) -> Any:
    wrong = [
        f"{flag} {value}: {wanted}"
        for flag, value, right, wanted in (
            ("--temperature", args.temperature, args.temperature >= 0, "0 or more is wanted"),
            ("--max-new-tokens", args.max_new_tokens, args.max_new_tokens > 0, "1 or more"),
            ("--max-len", args.max_len, args.max_len > 1, "2 or more"),
            ("--seed", args.seed, args.seed >= 0, "0 or more is wanted"),
        )
        if not right
    ]
    if wrong:
        raise UsageError("; ".join(wrong))
    with heavy_imports():
        from postgrad.rollout.settings import SamplingSettings
        from postgrad.tools.chat.session import chat

    return chat(
        [args.model, *([args.other] if args.other else [])],
        console_of(args),
        checkpoint=args.checkpoint,
        dtype=args.dtype,
        system=args.system,
        sampling=SamplingSettings(temperature=args.temperature, max_new_tokens=args.max_new_tokens),
        seed=args.seed,
        max_len=args.max_len,
        as_json=args.json,
    )
