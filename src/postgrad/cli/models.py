"""eval, chat, serve-reward: what a model can do."""

import argparse
from pathlib import Path
from typing import Any

from postgrad.cli.command import Commands, add_quiet, console_of
from postgrad.core.errors import UsageError
from postgrad.core.process import heavy_imports


def add(commands: Commands) -> None:
    """Registers the commands of this file and their flags."""
    _add_eval(commands)
    _add_chat(commands)
    _add_serve_reward(commands)


def _add_eval(commands: Commands) -> None:
    parser = commands.add_for_recipe(
        "eval", _eval, "evaluate a model on the recipe's evaluation sets"
    )
    parser.add_argument(
        "--model",
        required=True,
        help="Hugging Face directory, hub id, run directory or checkpoint",
    )
    parser.add_argument("--against", help="a second model to compare with")
    parser.add_argument(
        "--to", type=Path, metavar="FILE", help="write every answer with its scores, as JSON lines"
    )
    add_quiet(parser)


def _add_chat(commands: Commands) -> None:
    parser = commands.add("chat", _chat, "talk to a model or a run's checkpoint, or to two at once")
    parser.add_argument("model", metavar="MODEL_DIR|RUN_DIR", help="or a hub id, or a checkpoint")
    parser.add_argument("other", nargs="?", metavar="OTHER", help="a second one to compare with")
    parser.add_argument(
        "--checkpoint", metavar="latest|best|STEP", help="of a run; default: the newest"
    )
    parser.add_argument(
        "--system", metavar="TEXT", help="the system message; default: the run's own"
    )
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="0: always the most likely token"
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=512, metavar="N", help="of one answer"
    )
    parser.add_argument("--max-len", type=int, default=4096, metavar="N", help="of a conversation")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same answers")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")


def _add_serve_reward(commands: Commands) -> None:
    parser = commands.add("serve-reward", _serve_reward, "put a reward model behind HTTP")
    parser.add_argument("model", type=Path, metavar="DIR")
    parser.add_argument(
        "--host", default="127.0.0.1", help="any other than 127.0.0.1 needs a token"
    )
    parser.add_argument("--port", type=int, default=8000, help="0: any free port")
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


def _eval(args: argparse.Namespace, rest: list[str]) -> Any:
    from postgrad.recipe.load import load_recipe

    recipe = load_recipe(args.recipe, rest)
    with heavy_imports():
        from postgrad.tools.evaluate import evaluate

    return evaluate(recipe, args.model, console_of(args), args.against, args.to)


def _chat(args: argparse.Namespace, rest: list[str]) -> Any:
    wrong = [
        f"{flag} {value}: {wanted}"
        for flag, value, right, wanted in (
            ("--temperature", args.temperature, args.temperature >= 0, "0 or more is expected"),
            ("--max-new-tokens", args.max_new_tokens, args.max_new_tokens > 0, "1 or more"),
            ("--max-len", args.max_len, args.max_len > 1, "2 or more"),
            ("--seed", args.seed, args.seed >= 0, "0 or more is expected"),
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
