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

SHOWN = [one for one in commands() if one.shown and not one.is_synopsis]
TOLD = [one for one in commands() if not one.shown or one.is_synopsis]
OURS = [one for one in SHOWN if one.words[0] == "postgrad"]


def parsers() -> dict[str, argparse.ArgumentParser]:
    (found,) = [
        a for a in all_commands().parser._actions if isinstance(a, argparse._SubParsersAction)
    ]
    return dict(found.choices)


def unique(found: list[Command]) -> list[Command]:
    """Each command once, wherever it stands first."""
    return list({one.words: one for one in reversed(found)}.values())[::-1]


def needs_hub(one: Command) -> bool:
    """Whether an evaluation asks a model or data that are not on this machine."""
    if one.words[1] != "eval":
        return False
    recipe = load_recipe(one.words[2])
    return recipe.data.path.count("/") == 1 or any("/" in w and w[0].isupper() for w in one.words)


def stand_ins(folder: Path, one: Command) -> None:
    """What the command takes for granted: a run, a model, rows, another system's script."""
    for before, word in pairwise(one.words[1:]):
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


def searches(one: Command) -> bool:
    """Whether the command plans hundreds of recipes, which takes over a second."""
    return not {"--search", "--scale"}.isdisjoint(one.words)


@pytest.mark.parametrize(
    "one",
    [
        pytest.param(c, marks=pytest.mark.slow if searches(c) else (), id=str(c))
        for c in unique([c for c in OURS if c.words[1] in RUN])
    ],
)
def test_a_command_of_seconds_runs(
    one: Command,
    with_runs: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if needs_hub(one):
        plan(one, with_runs)
        return
    stand_ins(with_runs, one)
    if "--steps" in one.words:
        kept = json.loads((with_runs / one.words[2] / "recipe.json").read_text("utf-8"))
        with_overrides(recipe_from_json(kept["recipe"]), one.words[3:])
        return
    with hub_server(monkeypatch) if "--push-to-hub" in one.words else nullcontext():
        code = main(with_a_step(one.words[1:]))
    assert code == 0, capsys.readouterr().err


def with_a_step(words: Sequence[str]) -> list[str]:
    """The words with the step of a checkpoint that the stand-in has."""
    named = [before == "--checkpoint" and word.isdecimal() for before, word in pairwise(words)]
    return ["3" if is_step else word for is_step, word in zip([False, *named], words, strict=True)]


@pytest.mark.parametrize("one", unique([c for c in OURS if c.words[1] in LONG]), ids=str)
def test_a_long_command_has_recipes_that_can_be_planned(one: Command, with_runs: Path) -> None:
    stand_ins(with_runs, one)
    plan(one, with_runs)


def plan(one: Command, folder: Path) -> None:
    """Parses the words, loads the recipe with them, plans it; of a folder each of its recipes."""
    known, overrides = all_commands().parser.parse_known_args(one.words[1:])
    if one.words[1] == "generate" and known.model:  # instead of the recipe's own
        overrides = [*overrides, "--model.path", str(known.model)]
    if getattr(known, "sweep", None):
        sweep_of(known.recipe, overrides, parse_swept(known.sweep))
    if known.recipe.is_dir():
        stages = load_pipeline(known.recipe, overrides).stages
        if any(stage.generate is not None for stage in stages):  # whose rows are not there
            assert main(["plan", str(known.recipe), *overrides, "--json"]) == 0
            return
        start = folder / "runs" / known.recipe.name / "start"  # of images: written before
        model = str((start if start.exists() else folder / "RUN_DIR") / "model")
        models = {stage.name: model for stage in stages}
        for stage in stages:
            resolved = folder / f"{stage.name}.toml"
            resolved.write_text(toml(with_models(stage.recipe, models).dump()), "utf-8")
            assert main(["plan", str(resolved), "--json"]) == 0
    else:
        load_recipe(known.recipe, overrides)
        assert main(["plan", str(known.recipe), *overrides, "--json"]) == 0


def toml(recipe: dict[str, object]) -> str:
    """A resolved recipe as TOML: every table inline."""
    return "\n".join(
        f"{key} = {value(one)}" for key, one in finite(recipe).items() if one is not None
    )


def value(one: object) -> str:
    if isinstance(one, dict):
        inner = ", ".join(f"{json.dumps(k)} = {value(v)}" for k, v in one.items() if v is not None)
        return f"{{ {inner} }}"
    if isinstance(one, list):
        return f"[{', '.join(value(v) for v in one)}]"
    return json.dumps(one, ensure_ascii=False)


@pytest.mark.parametrize("one", unique([c for c in OURS if c.words[1] in SERVES]), ids=str)
def test_a_command_that_serves_has_words_that_its_parser_knows(one: Command) -> None:
    _, left = all_commands().parser.parse_known_args(one.words[1:])
    assert left == []


def test_the_rule_knows_every_command() -> None:
    assert {*RUN, *LONG, *SERVES} >= set(parsers())
    assert {one.words[1] for one in OURS} <= set(parsers())


@pytest.mark.parametrize("one", unique(TOLD), ids=str)
def test_a_synopsis_and_a_sentence_name_commands_and_flags_that_there_are(one: Command) -> None:
    parser = parsers()[one.words[1]]
    flags = {flag for action in parser._actions for flag in action.option_strings}
    named = set(re.findall(r"--[a-z-]+(?![\w.-])", one.text))
    keys = {"--seed", "--steps", "--epochs"} if parser.get_default("takes_overrides") else set()
    assert named <= flags | keys or one.words[1] == "translate"


def makes(one: Command) -> None:
    """A target of the Makefile: it installs and runs for minutes."""
    targets = re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"))
    assert set(one.words[1:]) <= set(targets)


def installs(one: Command) -> None:
    """An extra or a group that pyproject.toml has; packages of others are theirs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    for extras in re.findall(r"(?:postgrad|\.)\[([\w,]+)\]", one.text):
        assert set(extras.split(",")) <= set(project["project"]["optional-dependencies"])
    for group in re.findall(r"--group (\w+)", one.text):
        assert group in project["dependency-groups"]


def is_a_module(one: Command) -> None:
    """A module of benchmarks or docs that has the flags."""
    assert one.words[1] == "-m"
    found = importlib.util.find_spec(one.words[2])
    assert found is not None
    assert found.origin is not None
    file = Path(found.origin)
    files = file.parent.glob("*.py") if file.name == "__init__.py" else [file]
    source = "\n".join(path.read_text("utf-8") for path in files)
    assert all(f'"{flag}"' in source for flag in one.words[3:] if flag.startswith("--"))


def is_theirs(one: Command) -> None:
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
    "one", unique([one for one in SHOWN if one.words[0] != "postgrad"]), ids=str
)
def test_a_command_of_another_program_names_what_there_is(one: Command) -> None:
    OTHERS[one.words[0]](one)
