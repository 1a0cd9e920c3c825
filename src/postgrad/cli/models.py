"""eval, generate, chat, serve-reward, merge, add-tokens: what a model can do, several together, and
new tokens.
"""

import argparse
from pathlib import Path
from typing import Any

from postgrad.cli.command import Commands, add_quiet, console_of
from postgrad.core.errors import UsageError
from postgrad.core.process import heavy_imports


def add(commands: Commands) -> None:
    """Registers the commands of this file and their flags."""
    _add_eval(commands)
    _add_generate(commands)
    _add_chat(commands)
    _add_serve_reward(commands)
    _add_merge(commands)
    _add_add_tokens(commands)


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


def _add_generate(commands: Commands) -> None:
    parser = commands.add_for_recipe(
        "generate", _generate, "sample and score answers to a recipe's prompts, and select rows"
    )
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="output folder")
    parser.add_argument(
        "--model", help="directory, hub id, run directory or checkpoint; default: model.path"
    )
    parser.add_argument("--samples", type=int, metavar="N", help="samples per prompt")
    parser.add_argument("--rows", type=int, metavar="N", help="use only the first N prompts")
    parser.add_argument("--shard", type=int, metavar="N", help="prompts per file of samples")
    parser.add_argument("--select", metavar="all|best|above|pairs|difficulty", help="default: all")
    parser.add_argument("--top", type=int, metavar="N", help="best: answers per prompt")
    parser.add_argument("--threshold", type=float, metavar="R", help="best, above: lowest reward")
    parser.add_argument("--pairs", metavar="best_worst|random|all", help="default: best_worst")
    parser.add_argument("--margin", type=float, metavar="M", help="pairs: least difference")
    parser.add_argument(
        "--pass-rate", type=float, nargs=2, metavar=("LOW", "HIGH"), help="difficulty: keep these"
    )
    parser.add_argument(
        "--keep-truncated", action="store_true", help="also select truncated answers"
    )
    parser.add_argument(
        "--rows-to", type=Path, metavar="FILE.jsonl|FILE.parquet", help="default: DIR/SELECT.jsonl"
    )
    add_quiet(parser)


def _add_chat(commands: Commands) -> None:
    parser = commands.add("chat", _chat, "talk to a model or a run's checkpoint, or to two at once")
    parser.add_argument("model", metavar="MODEL_DIR|RUN_DIR", help="or a hub id, or a checkpoint")
    parser.add_argument("other", nargs="?", metavar="OTHER", help="a second model to compare with")
    parser.add_argument(
        "--checkpoint", metavar="latest|best|STEP", help="of a run directory; default: latest"
    )
    parser.add_argument(
        "--system", metavar="TEXT", help="the system message; default: the run's own"
    )
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="0: always the most likely token"
    )
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1: off")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="0: off")
    parser.add_argument("--min-p", type=float, default=0.0, metavar="P", help="0: off")
    parser.add_argument(
        "--max-new-tokens", type=int, default=512, metavar="N", help="of one answer"
    )
    parser.add_argument("--max-len", type=int, default=4096, metavar="N", help="of a conversation")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same answers")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")


def _add_serve_reward(commands: Commands) -> None:
    parser = commands.add("serve-reward", _serve_reward, "put a reward model behind HTTP")
    parser.add_argument("model", type=Path, metavar="DIR", help="an exported reward model")
    parser.add_argument(
        "--host", default="127.0.0.1", help="any other than 127.0.0.1 needs a token"
    )
    parser.add_argument("--port", type=int, default=8000, help="0: any free port")
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE",
        help="the bearer token that clients send; or in POSTGRAD_SERVE_TOKEN",
    )  # fmt: skip
    parser.add_argument("--max-batch-tokens", type=int, metavar="N", help="tokens per model call")
    parser.add_argument("--max-request-bytes", type=int, metavar="N", help="of a request's body")
    parser.add_argument(
        "--request-seconds", type=float, metavar="S", help="from a request's start to its answer"
    )
    parser.add_argument(
        "--images", type=Path, metavar="DIR",
        help="images that clients may name by their hash: the folder images/ of a run",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")


def _add_merge(commands: Commands) -> None:
    parser = commands.add("merge", _merge, "merge models of one architecture into a new one")
    parser.add_argument(
        "method", metavar="METHOD|FILE.yml",
        help="linear, slerp, task_arithmetic, ties, dare_linear, dare_ties or adapter; or a file "
        "in mergekit's format",
    )  # fmt: skip
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help="directories, hub ids, directories of adapters"
    )
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="output folder")
    parser.add_argument("--base", metavar="MODEL", help="what the models were trained from")
    numbers = {"type": float, "nargs": "+", "metavar": "W"}
    parser.add_argument("--weights", help="one per model; default: 1", **numbers)
    parser.add_argument(
        "--density", help="share of each model's changes to keep: one, or one a model; default: 1",
        **numbers,
    )  # fmt: skip
    parser.add_argument("--t", type=float, metavar="T", help="slerp: 0 first model, 1 second")
    parser.add_argument(
        "--lambda", type=float, dest="scale", metavar="L", help="scales the change of the base"
    )
    parser.add_argument(
        "--normalize", action=argparse.BooleanOptionalAction, default=None,
        help="divide by the sum of the weights; default: for linear, ties and dare_ties",
    )  # fmt: skip
    parser.add_argument("--dtype", metavar="float32|bfloat16|float16", help="default: as stored")
    parser.add_argument("--seed", type=int, default=0, help="decides what DARE drops")


def _add_add_tokens(commands: Commands) -> None:
    parser = commands.add("add-tokens", _add_tokens, "give a model new tokens to learn")
    parser.add_argument("model", metavar="MODEL", help="a directory or hub id")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="output folder")
    texts: Any = {"nargs": "+", "metavar": "TEXT", "default": []}
    parser.add_argument("--token", help="texts that are one token each from now on", **texts)
    parser.add_argument(
        "--special", help="the same, which decoded text does not show: marks of a template", **texts
    )


def _eval(args: argparse.Namespace, rest: list[str]) -> Any:
    from postgrad.recipe.load import load_recipe

    recipe = load_recipe(args.recipe, rest)
    with heavy_imports():
        from postgrad.tools.evaluate import evaluate

    return evaluate(recipe, args.model, console_of(args), args.against, args.to)


def _generate(args: argparse.Namespace, rest: list[str]) -> Any:
    from postgrad.recipe.load import load_recipe
    from postgrad.tools.selection import require_rows_file, select, selection_for

    recipe, console = load_recipe(args.recipe, rest), console_of(args)
    flags = {
        "kind": args.select, "top": args.top, "threshold": args.threshold, "pairs": args.pairs,
        "margin": args.margin, "pass_rate": args.pass_rate and tuple(args.pass_rate),
    }  # fmt: skip
    stated = {name: value for name, value in flags.items() if value is not None}
    selection = selection_for(recipe, **stated, keep_truncated=args.keep_truncated)
    rows = args.rows_to or args.to / f"{selection.kind}.jsonl"
    require_rows_file(rows)  # before anything is sampled
    with heavy_imports():
        from postgrad.tools.generate import Extent, generate

    extent = Extent(args.samples, args.rows, args.shard)
    generated = generate(recipe, args.to, console, extent, args.model)
    selected = select(generated.groups(rows), selection, rows, generated.name)
    console.table(f"rows selected: {rows}", ("", ""), selected.table())
    return {"samples": str(args.to), "rows": str(rows), "counts": dict(selected.counts)}


def _chat(args: argparse.Namespace, rest: list[str]) -> Any:
    wrong = [
        f"{flag} {value}: {wanted}"
        for flag, value, right, wanted in (
            ("--temperature", args.temperature, args.temperature >= 0, "0 or more is expected"),
            ("--top-p", args.top_p, 0 < args.top_p <= 1, "above 0 and at most 1 is expected"),
            ("--top-k", args.top_k, args.top_k >= 0, "0 or more is expected"),
            ("--min-p", args.min_p, 0 <= args.min_p < 1, "0 or more and below 1 is expected"),
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
        sampling=SamplingSettings(
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            min_p=args.min_p,
            max_new_tokens=args.max_new_tokens,
        ),
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
        images=args.images,
    )


def _merge(args: argparse.Namespace, rest: list[str]) -> Any:
    from postgrad.tools.merge_settings import from_mergekit, requested

    flags = {name: getattr(args, name) for name in
             ("base", "weights", "density", "t", "scale", "normalize")}  # fmt: skip
    stated = {name: value for name, value in flags.items() if value is not None}
    if args.method.endswith((".yml", ".yaml")):
        if args.models or stated:
            raise UsageError(
                f"{args.method} defines the merge: only --to, --dtype and --seed go beside it"
            )
        asked = from_mergekit(Path(args.method), dtype=args.dtype, seed=args.seed)
    else:
        asked = requested(args.method, args.models, dtype=args.dtype, seed=args.seed, **stated)
    with heavy_imports():
        from postgrad.tools.merge import merge

    result = merge(asked, args.to, console_of(args))
    console_of(args).note(
        f"saved {args.to}, and read it again with plain transformers: the same logits"
    )
    return result


def _add_tokens(args: argparse.Namespace, rest: list[str]) -> Any:
    with heavy_imports():
        from postgrad.tools.add_tokens import add_tokens

    console = console_of(args)
    result = add_tokens(args.model, args.token, args.special, args.to, console)
    rows = [(text, str(token_id)) for text, token_id in result["tokens"].items()]
    console.table("new tokens", ("token", "id"), rows)
    before, after = result["rows"]["before"], result["rows"]["after"]
    grown = "spare rows were enough" if before == after else f"{before} rows became {after}"
    console.note(
        f"saved {args.to} ({grown}), and read it again with plain transformers: the same logits"
    )
    return result
