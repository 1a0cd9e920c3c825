"""`postgrad new`: a recipe with comments beside a few rows of data, to be changed into your own."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import tomlkit

from postgrad.core.errors import UsageError
from postgrad.core.files import names_in, write_text
from postgrad.recipe.load import load_recipe
from postgrad.recipe.overrides import change, parse_overrides
from postgrad.recipe.shipped import START, shipped_folder

JOBS = ("sft", "reward", "preference", "rl")
FILE = "recipe.toml"
# What a model that has been trained already takes; the files' numbers are for a fresh one.
OF_TRAINED = {
    "sft": {"learner.lr": "1e-5", "data.max_len": "2048"},
    "reward": {"learner.lr": "5e-6", "data.max_len": "2048"},
    "preference": {"learner.lr": "5e-7", "data.max_len": "2048"},
    "rl": {
        "learner.lr": "1e-6",
        "data.max_len": "1024",
        "rollout.max_new_tokens": "512",
        "sentinels.truncation.action": "warn",
        "sentinels.gradient.factor": "20",
        "sentinels.repetition.limit": "0.5",
    },
}
PATH = '[model]\npath = ""\n\n'  # in place of the fresh model's tables


def new(folder: Path, job: str, model: str | None = None) -> Path:
    """Writes `folder` with recipe.toml, train.jsonl and eval.jsonl; returns the recipe's path.

    model: the model to start from, instead of a small fresh one. Raises UsageError where the folder
    has files already, and for a job that does not exist.
    """
    if job not in JOBS:
        raise UsageError(f"--job {job}: there are {', '.join(JOBS)}")
    if folder.exists() and (not folder.is_dir() or names_in(folder)):
        raise UsageError(f"{folder} exists already: name a new folder")
    source = shipped_folder() / START / job
    text = (source / FILE).read_text("utf-8")
    changes = {
        "run_dir": f"runs/{folder.name}",
        "data.path": str(folder / "train.jsonl"),
        "eval.path": str(folder / "eval.jsonl"),
    }
    if model is not None:
        text = re.sub(r"\[model\.init\].*?(?=\[data\])", PATH, text, flags=re.DOTALL)
        changes |= {"model.path": model, **OF_TRAINED[job]}
    words = [word for key, value in changes.items() for word in (f"--{key}", value)]
    document = tomlkit.parse(text)
    change(document, parse_overrides(words))
    comments = {  # commands in them name what is written here
        f"recipes/{START}/{job}/{FILE}": shlex.quote(str(folder / FILE)),
        f"runs/{START}/{job}/model": shlex.quote(f"{changes['run_dir']}/model"),
    }
    text = tomlkit.dumps(document)
    for of_shipped, of_new in comments.items():
        text = text.replace(of_shipped, of_new)
    files = {name: (source / name).read_text("utf-8") for name in ("train.jsonl", "eval.jsonl")}
    _write(folder, files | {FILE: text})
    return folder / FILE


def _write(folder: Path, files: Mapping[str, str]) -> None:
    """Writes the files and loads the recipe among them; leaves nothing where that fails."""
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for name, text in files.items():
            write_text(folder / name, text)
        load_recipe(folder / FILE)
    except BaseException:
        for name in files:
            (folder / name).unlink(missing_ok=True)
        if is_new:
            folder.rmdir()
        raise
