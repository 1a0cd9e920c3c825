"""Every command that README, the pages and the recipes' comments show does what it says.

The rule, by subcommand:

- RUN: seconds anywhere, so it is run, on a small run that stands under the name that is shown;
- LONG: minutes, GPUs or the hub, so its words are parsed, its recipe is loaded with its overrides,
  and each recipe is planned; an evaluation that needs the hub and a run that is made longer belong
  here too;
- SERVES: ends when somebody says so, so its words are parsed.

A synopsis (`[--flag]`, `a|b`) and a command in a sentence name a command and flags that there are.
A program that is not ours is in OTHERS, with what is looked at.
"""

import argparse
import gzip
import importlib.util
import json
import re
import shutil
import tomllib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from helpers.hub_server import hub_server
from helpers.pages import ROOT, Command, commands
from postgrad.cli.main import all_commands, main
from postgrad.core.files import finite
from postgrad.models import vision_tiny
from postgrad.models.adapter_files import write_adapter
from postgrad.models.adapters import add_adapter
from postgrad.models.load import load_model
from postgrad.models.settings import LoraSettings
from postgrad.recipe.load import load_recipe, recipe_from_json, with_overrides
from postgrad.recipe.pipeline import load_pipeline, with_models
from postgrad.recipe.sweep import parse_swept, sweep_of
from postgrad.tools.new import new

RUN = (
    "plan", "config", "translate", "doctor", "checkpoints", "verify", "report", "export", "eval",
    "resume", "fork", "new", "recipes", "completion", "merge", "add-tokens",
)  # fmt: skip
LONG = ("train", "verify-resume", "generate")
SERVES = ("watch", "serve-reward", "chat")
CASES = ROOT / "tests" / "translate" / "cases"
MODELS = ("NEW", "OLD", "OTHER", "DIR", "MODEL")  # a page's words for a model's directory
ROW = {"question": "1 + 1?", "answer": "It is 2. #### 2"}
PAIR = {
    "chosen": "\n\nHuman: Hi\n\nAssistant: Hello.",
    "rejected": "\n\nHuman: Hi\n\nAssistant: No.",
}

SHOWN = [command for command in commands() if command.shown and not command.is_synopsis]
TOLD = [command for command in commands() if not command.shown or command.is_synopsis]
OURS = [command for command in SHOWN if command.words[0] == "postgrad"]


def parsers() -> dict[str, argparse.ArgumentParser]:
    (subparsers,) = [
        a for a in all_commands().parser._actions if isinstance(a, argparse._SubParsersAction)
    ]
    return dict(subparsers.choices)


def unique(shown_commands: list[Command]) -> list[Command]:
    """Each command once, wherever it stands first."""
    return list({command.words: command for command in reversed(shown_commands)}.values())[::-1]


def needs_hub(command: Command) -> bool:
    """Whether an evaluation asks a model or data that are not on this machine."""
    if command.words[1] != "eval":
        return False
    recipe = load_recipe(command.words[2])
    return recipe.data.path.count("/") == 1 or any(
        "/" in w and w[0].isupper() for w in command.words
    )


def stand_ins(folder: Path, command: Command) -> None:
    """What the command takes for granted: a run, a model, rows, another system's script."""
    for before, word in pairwise(command.words[1:]):
        place = folder / word
        if word in MODELS:
            shutil.copytree(folder / "RUN_DIR" / "model", place)
        elif word == "ADAPTER":
            adapter_on(str(folder / "RUN_DIR" / "model"), place)
        elif word.startswith("runs/") and before != "--to":
            shutil.copytree(
                folder / "RUN_DIR", folder / word.removesuffix("/model"), dirs_exist_ok=True
            )
        elif word == "recipes/vision_tiny":
            vision_tiny.write(folder / "runs/vision_tiny/start", train=20, held_out=8)
        elif word == "gsm8k.jsonl":
            place.write_text(f"{json.dumps(ROW)}\n" * 200, "utf-8")
        elif word.endswith(".jsonl.gz"):
            place.write_bytes(gzip.compress(f"{json.dumps(PAIR)}\n".encode() * 400))
        elif word == "my-run/recipe.toml":
            new(folder / "my-run", "rl")
        elif word == "merge.yml":
            for name in MODELS[:3]:
                shutil.copytree(folder / "RUN_DIR" / "model", folder / name)
            page = (ROOT / "docs" / "merging.md").read_text("utf-8")
            place.write_text(page.partition("```yaml\n")[2].partition("```")[0], "utf-8")
        elif word == "train_ppo.sh":
            shutil.copy(CASES / "openrlhf-ppo.sh", place)
        elif word == "train_sft.py":
            shutil.copy(CASES / "trl-program-sft.py", place)
        elif word.endswith(".yaml"):
            place.parent.mkdir(exist_ok=True)
            shutil.copy(CASES / "open-instruct-sft.yaml", place)


def adapter_on(base: str, to: Path) -> None:
    settings = LoraSettings(rank=2)
    adapter = add_adapter(load_model(base, dtype=torch.float32).lm, settings, seed=0)
    write_adapter(adapter.parameters(), settings, base, to)


def searches(command: Command) -> bool:
    """Whether the command plans hundreds of recipes, which takes over a second."""
    return not {"--search", "--scale"}.isdisjoint(command.words)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(c, marks=pytest.mark.slow if searches(c) else (), id=str(c))
        for c in unique([c for c in OURS if c.words[1] in RUN])
    ],
)
def test_a_command_of_seconds_runs(
    command: Command,
    with_runs: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if needs_hub(command):
        plan(command, with_runs)
        return
    stand_ins(with_runs, command)
    if "--steps" in command.words:
        kept = json.loads((with_runs / command.words[2] / "recipe.json").read_text("utf-8"))
        with_overrides(recipe_from_json(kept["recipe"]), command.words[3:])
        return
    with hub_server(monkeypatch) if "--push-to-hub" in command.words else nullcontext():
        code = main(with_a_step(command.words[1:]))
    assert code == 0, capsys.readouterr().err


def with_a_step(words: Sequence[str]) -> list[str]:
    """The words with the step of a checkpoint that the stand-in has."""
    named = [before == "--checkpoint" and word.isdecimal() for before, word in pairwise(words)]
    return ["3" if is_step else word for is_step, word in zip([False, *named], words, strict=True)]


@pytest.mark.parametrize("command", unique([c for c in OURS if c.words[1] in LONG]), ids=str)
def test_a_long_command_has_recipes_that_can_be_planned(command: Command, with_runs: Path) -> None:
    stand_ins(with_runs, command)
    plan(command, with_runs)


def plan(command: Command, folder: Path) -> None:
    """Parses the words, loads the recipe with them, plans it; of a folder each of its recipes."""
    options, overrides = all_commands().parser.parse_known_args(command.words[1:])
    if command.words[1] == "generate" and options.model:  # instead of the recipe's own
        overrides = [*overrides, "--model.path", str(options.model)]
    if getattr(options, "sweep", None):
        sweep_of(options.recipe, overrides, parse_swept(options.sweep))
    if options.recipe.is_dir():
        stages = load_pipeline(options.recipe, overrides).stages
        if any(stage.generate is not None for stage in stages):  # whose rows are not there
            assert main(["plan", str(options.recipe), *overrides, "--json"]) == 0
            return
        start = folder / "runs" / options.recipe.name / "start"  # of images: written before
        model = str((start if start.exists() else folder / "RUN_DIR") / "model")
        models = {stage.name: model for stage in stages}
        for stage in stages:
            resolved = folder / f"{stage.name}.toml"
            resolved.write_text(toml(with_models(stage.recipe, models).dump()), "utf-8")
            assert main(["plan", str(resolved), "--json"]) == 0
    else:
        load_recipe(options.recipe, overrides)
        assert main(["plan", str(options.recipe), *overrides, "--json"]) == 0


def toml(recipe: dict[str, object]) -> str:
    """A resolved recipe as TOML: every table inline."""
    return "\n".join(
        f"{key} = {value(setting)}"
        for key, setting in finite(recipe).items()
        if setting is not None
    )


def value(setting: object) -> str:
    if isinstance(setting, dict):
        inner = ", ".join(
            f"{json.dumps(k)} = {value(v)}" for k, v in setting.items() if v is not None
        )
        return f"{{ {inner} }}"
    if isinstance(setting, list):
        return f"[{', '.join(value(v) for v in setting)}]"
    return json.dumps(setting, ensure_ascii=False)


@pytest.mark.parametrize("command", unique([c for c in OURS if c.words[1] in SERVES]), ids=str)
def test_a_command_that_serves_has_words_that_its_parser_knows(command: Command) -> None:
    _, left = all_commands().parser.parse_known_args(command.words[1:])
    assert left == []


def test_the_rule_knows_every_command() -> None:
    assert {*RUN, *LONG, *SERVES} >= set(parsers())
    assert {command.words[1] for command in OURS} <= set(parsers())


@pytest.mark.parametrize("command", unique(TOLD), ids=str)
def test_a_synopsis_and_a_sentence_name_commands_and_flags_that_there_are(command: Command) -> None:
    parser = parsers()[command.words[1]]
    flags = {flag for action in parser._actions for flag in action.option_strings}
    named = set(re.findall(r"--[a-z-]+(?![\w.-])", command.text))
    keys = {"--seed", "--steps", "--epochs"} if parser.get_default("takes_overrides") else set()
    assert named <= flags | keys or command.words[1] == "translate"


def makes(command: Command) -> None:
    """A target of the Makefile: it installs and runs for minutes."""
    targets = re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"))
    assert set(command.words[1:]) <= set(targets)


def installs(command: Command) -> None:
    """An extra or a group that pyproject.toml has; packages of others are theirs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    for extras in re.findall(r"(?:postgrad|\.)\[([\w,]+)\]", command.text):
        assert set(extras.split(",")) <= set(project["project"]["optional-dependencies"])
    for group in re.findall(r"--group (\w+)", command.text):
        assert group in project["dependency-groups"]


def is_a_module(command: Command) -> None:
    """A module of benchmarks or docs that has the flags."""
    assert command.words[1] == "-m"
    spec = importlib.util.find_spec(command.words[2])
    assert spec is not None
    assert spec.origin is not None
    file = Path(spec.origin)
    files = file.parent.glob("*.py") if file.name == "__init__.py" else [file]
    source = "\n".join(path.read_text("utf-8") for path in files)
    assert all(f'"{flag}"' in source for flag in command.words[3:] if flag.startswith("--"))


def is_theirs(command: Command) -> None:
    """A program of others."""


OTHERS: dict[str, Callable[[Command], None]] = {
    "make": makes,
    "pip": installs,
    "python": is_a_module,
    ".": is_theirs,
    "git": is_theirs,
    "cd": is_theirs,
    "curl": is_theirs,
    "lm_eval": is_theirs,
    "ssh": is_theirs,
}


@pytest.mark.parametrize(
    "command", unique([command for command in SHOWN if command.words[0] != "postgrad"]), ids=str
)
def test_a_command_of_another_program_names_what_there_is(command: Command) -> None:
    OTHERS[command.words[0]](command)
