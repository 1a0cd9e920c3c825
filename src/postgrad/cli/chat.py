"""chat: talk to a model, or to two."""

import argparse
from typing import Any

from postgrad.cli.command import Commands, console_of
from postgrad.core.errors import UsageError
from postgrad.core.imports import heavy_imports


def add(commands: Commands) -> None:
    """The family's commands and their flags."""
    one = commands.add("chat", _chat, "talk to a model or a run's checkpoint, or to two at once")
    one.add_argument("model", metavar="MODEL_DIR|RUN_DIR", help="or a hub id, or a checkpoint")
    one.add_argument("other", nargs="?", metavar="OTHER", help="a second one, side by side")
    one.add_argument("--checkpoint", metavar="latest|best|STEP", help="of a run; else the newest")
    one.add_argument("--system", metavar="TEXT", help="the system message; else the run's own")
    one.add_argument("--temperature", type=float, default=1.0, help="0: the likeliest token always")
    one.add_argument("--max-new-tokens", type=int, default=512, metavar="N", help="of one answer")
    one.add_argument("--max-len", type=int, default=4096, metavar="N", help="of a conversation")
    one.add_argument("--seed", type=int, default=0, help="the same seed, the same answers")
    one.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")


def _chat(known: argparse.Namespace, rest: list[str]) -> Any:
    wrong = [
        f"{flag} {value}: {wanted}"
        for flag, value, right, wanted in (
            ("--temperature", known.temperature, known.temperature >= 0, "0 or more is wanted"),
            ("--max-new-tokens", known.max_new_tokens, known.max_new_tokens > 0, "1 or more"),
            ("--max-len", known.max_len, known.max_len > 1, "2 or more"),
            ("--seed", known.seed, known.seed >= 0, "0 or more is wanted"),
        )
        if not right
    ]
    if wrong:
        raise UsageError("; ".join(wrong))
    with heavy_imports():
        from postgrad.jobs.chat.command import chat
        from postgrad.rollout.settings import SamplingSettings

    return chat(
        [known.model, *([known.other] if known.other else [])],
        console_of(known),
        checkpoint=known.checkpoint,
        dtype=known.dtype,
        system=known.system,
        sampling=SamplingSettings(
            temperature=known.temperature, max_new_tokens=known.max_new_tokens
        ),
        seed=known.seed,
        max_len=known.max_len,
        as_json=known.json,
    )
