"""The command line: subcommands only, heavy imports inside them."""

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from postgrad import __version__
from postgrad.core.errors import PostgradError, UsageError
from postgrad.core.files import finite
from postgrad.core.imports import heavy_imports

OVERRIDES = "Every key of a recipe can be given as --section.key VALUE."


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0 done, 1 the run failed, 2 something is wrong."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # the console is ours
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    parser = _parser()
    known, rest = parser.parse_known_args(arguments)
    command: Callable[[argparse.Namespace, list[str]], Any] | None = getattr(known, "run", None)
    if command is None:
        parser.print_help()
        return 2
    try:
        if rest and not known.takes_overrides:
            raise UsageError(
                f"{known.command}: what is {rest[0]!r}? see postgrad {known.command} -h"
            )
        result = command(known, rest)
    except PostgradError as error:
        return _fail(error, known.debug, error.exit_code)
    except KeyboardInterrupt as error:
        return _fail(error, known.debug, 1, "interrupted: the last checkpoint stands")
    except OSError as error:  # a disk, a network: nobody's mistake here
        return _fail(error, known.debug, 1, f"{error}; mend that and start the command again")
    except Exception as error:  # noqa: BLE001  # whatever is left has one line for people too
        hint = "; run again with --debug to see where, and please report it"
        return _fail(error, known.debug, 1, f"{type(error).__name__}: {error}{hint}")
    if known.json:
        print(json.dumps(finite(result), ensure_ascii=False))
    return 0


def _fail(error: BaseException, debug: bool, code: int, text: str | None = None) -> int:
    if debug:
        traceback.print_exception(error)
    print(f"postgrad: {text or error}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="postgrad",
        description="Post-training of language models: exact, foreseen, the same everywhere.",
        epilog=OVERRIDES,
    )
    parser.add_argument("--version", action="version", version=f"postgrad {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="")

    def add(name: str, run: Callable[..., Any], text: str, overrides: bool = False) -> Any:
        one = commands.add_parser(
            name, help=text, description=text, epilog=OVERRIDES if overrides else None,
            allow_abbrev=False,
        )  # fmt: skip
        one.set_defaults(run=run, takes_overrides=overrides)
        one.add_argument("--json", action="store_true", help="one JSON object on standard output")
        one.add_argument("--debug", action="store_true", help="show tracebacks")
        return one

    _add_runs(add)
    _add_views(add)
    return parser


def _add_runs(add: Callable[..., Any]) -> None:
    """Commands that compute."""
    one = add("train", _train, "run a recipe, or the recipes of a folder with pipeline.toml", True)
    one.add_argument("recipe", type=Path, metavar="RECIPE.toml|DIR")
    one.add_argument("--dry-run", action="store_true", help="everything up to the first step")
    one.add_argument("--profile", action="store_true", help="where the time of a step goes")
    one.add_argument("--overwrite", choices=("true", "false"), default="false")
    _changes(one)
    one.add_argument("--quiet", action="store_true", help="only warnings and errors")
    one = add("resume", _resume, "continue a run from its newest checkpoint", True)
    one.add_argument("run_dir", type=Path)
    _changes(one)
    one.add_argument("--quiet", action="store_true", help="only warnings and errors")
    one = add("eval", _eval, "evaluate a model on the recipe's evaluation sets", True)
    one.add_argument("recipe", type=Path, metavar="RECIPE.toml")
    one.add_argument("--model", required=True, help="Hugging Face directory or hub id")
    one.add_argument("--against", help="a second model, side by side")
    one = add("serve-reward", _serve_reward, "put a reward model behind HTTP")
    _serving(one)
    one = add("verify-resume", _verify_resume, "show that kills and resumes change no bit", True)
    one.add_argument("recipe", type=Path, metavar="RECIPE.toml")
    one.add_argument("--kills", type=int, default=3, metavar="N")


def _serving(one: argparse.ArgumentParser) -> None:
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


def _add_views(add: Callable[..., Any]) -> None:
    """Commands that look at what is there, or copy it."""
    one = add("export", _export, "write a checkpoint as a Hugging Face directory")
    one.add_argument("run_dir", type=Path)
    one.add_argument("--checkpoint", default="latest", metavar="latest|best|STEP")
    one.add_argument("--role", metavar="policy|critic|reward|ema", help="what the job trains")
    one.add_argument("--adapter", action="store_true", help="the adapter alone, as PEFT reads it")
    one.add_argument("--to", type=Path, required=True, metavar="DIR")
    one = add("checkpoints", _checkpoints, "list the checkpoints of a run")
    one.add_argument("run_dir", type=Path)
    one = add("verify", _verify, "hash and load every checkpoint of a run")
    one.add_argument("run_dir", type=Path)
    one = add("plan", _plan, "what a recipe needs and how long it takes, before it runs", True)
    one.add_argument("recipe", type=Path, metavar="RECIPE.toml")
    one.add_argument("--hardware", metavar="8xA100-80G", help="this machine where left out")
    one.add_argument("--fit", type=Path, metavar="OUT.toml", help="write the recipe as advised")
    one.add_argument("--search", action="store_true", help="which hardware would do")
    one = add("config", _config, "check a recipe and show it resolved", True)
    one.add_argument("recipe", type=Path, metavar="RECIPE.toml|DIR")
    one = add("translate", _translate, "turn another system's script or config into a recipe", True)
    one.add_argument("system", metavar="openrlhf|open-instruct|trl")
    one.add_argument("--devices", type=int, metavar="N", help="that train, if the source is silent")
    one.usage = "postgrad translate openrlhf|open-instruct|trl FILE_OR_FLAGS [--devices N] [--json]"
    add("doctor", _doctor, "what this machine has, and what a run would choose on it")


def _changes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow-change", action="append", default=[], metavar="KEY",
        help="go on although this key of the recipe has changed",
    )  # fmt: skip


def _console(known: argparse.Namespace) -> Any:
    from postgrad.observe.console import Console

    if known.json:
        return Console("json")
    return Console("quiet" if getattr(known, "quiet", False) else "auto")


def _train(known: argparse.Namespace, rest: list[str]) -> Any:
    from postgrad.recipe.load import load_recipe
    from postgrad.recipe.pipeline import load_pipeline

    overwrite = known.overwrite == "true"
    if known.recipe.is_dir():
        if known.dry_run or known.profile:
            raise UsageError("--dry-run and --profile are for one recipe, not for a folder")
        pipeline = load_pipeline(known.recipe, rest)
        with heavy_imports():
            from postgrad.jobs.pipeline import train_pipeline

        return train_pipeline(
            pipeline, _console(known), overwrite=overwrite, allow_change=known.allow_change
        )
    recipe = load_recipe(known.recipe, rest)
    with heavy_imports():
        from postgrad.jobs.train import dry_run, train

    if known.dry_run:
        return dry_run(recipe, _console(known))
    return train(
        recipe,
        _console(known),
        overwrite=overwrite,
        allow_change=known.allow_change,
        profile=known.profile,
    )


def _resume(known: argparse.Namespace, rest: list[str]) -> Any:
    with heavy_imports():
        from postgrad.jobs.train import resume

    return resume(known.run_dir, rest, known.allow_change, _console(known))


def _eval(known: argparse.Namespace, rest: list[str]) -> Any:
    from postgrad.recipe.load import load_recipe

    recipe = load_recipe(known.recipe, rest)
    with heavy_imports():
        from postgrad.jobs.evaluate import evaluate

    return evaluate(recipe, known.model, _console(known), known.against)


def _export(known: argparse.Namespace, rest: list[str]) -> Any:
    with heavy_imports():
        from postgrad.jobs.export import export

    to = export(known.run_dir, known.checkpoint, known.to, known.role, adapter=known.adapter)
    reader = "PEFT" if known.adapter else "plain transformers"
    _console(known).note(f"saved {to}, and read it again with {reader}: the same logits")
    return {"model": str(to)}


def _checkpoints(known: argparse.Namespace, rest: list[str]) -> Any:
    from postgrad.jobs.checkpoints import checkpoints

    return checkpoints(known.run_dir, _console(known))


def _verify(known: argparse.Namespace, rest: list[str]) -> Any:
    from postgrad.jobs.verify import verify

    return verify(known.run_dir, _console(known))


def _serve_reward(known: argparse.Namespace, rest: list[str]) -> Any:
    with heavy_imports():
        from postgrad.jobs.serve.command import serve_reward
        from postgrad.jobs.serve.limits import limits_of

    limits = limits_of(known.max_batch_tokens, known.max_request_bytes, known.request_seconds)
    return serve_reward(
        known.model,
        _console(known),
        host=known.host,
        port=known.port,
        token_file=known.token_file,
        dtype=known.dtype,
        limits=limits,
    )


def _verify_resume(known: argparse.Namespace, rest: list[str]) -> Any:
    from postgrad.recipe.load import load_recipe

    load_recipe(known.recipe, rest)  # what is wrong with it is told before anything runs
    from postgrad.jobs.verify_resume import verify_resume

    return verify_resume(known.recipe, rest, known.kills, _console(known))


def _config(known: argparse.Namespace, rest: list[str]) -> Any:
    from postgrad.recipe.load import load_recipe
    from postgrad.recipe.pipeline import load_pipeline

    if known.recipe.is_dir():
        stages = load_pipeline(known.recipe, rest).stages
        resolved: Any = {stage.name: stage.recipe.dump() for stage in stages}
    else:
        resolved = load_recipe(known.recipe, rest).dump()
    if not known.json:
        print(json.dumps(resolved, indent=2, ensure_ascii=False))
    return resolved


def _plan(known: argparse.Namespace, rest: list[str]) -> Any:
    from postgrad.plan.command import plan

    return plan(
        known.recipe,
        rest,
        _console(known),
        hardware=known.hardware,
        fit=known.fit,
        searching=known.search,
    )


def _translate(known: argparse.Namespace, rest: list[str]) -> Any:
    from postgrad.recipe.translate.command import translate

    found = translate(known.system, rest, known.devices)
    if found.problem is not None:
        print(f"postgrad: not a whole recipe yet: {found.problem}", file=sys.stderr)
    if not known.json:
        print(found.text, end="")
    return found.to_json()


def _doctor(known: argparse.Namespace, rest: list[str]) -> Any:
    from postgrad.jobs.doctor import examine, rows

    facts = examine()
    _console(known).table("this machine", ("", ""), rows(facts))
    return facts
