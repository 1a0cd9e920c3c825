"""What both sides do: the questions, what a sample is worth, and that none ends early."""

import json
import shutil
from pathlib import Path
from typing import Any

from benchmarks.speed.side import Options, read_work

PROMPTS = 16  # of a step; extra["prompts"] overrides it
NEVER = "<|never|>"
KINDS = 101  # of rewards: two samples of random tokens hardly ever get the same one


def points(text: str, equal: bool) -> float:
    """A sample's reward: of nothing but its text, the same for a whole group where it is `equal`,
    which then has no gradient.
    """
    return 0.0 if equal else sum(text.encode()) % KINDS / KINDS


def questions(folder: Path, options: Options) -> list[dict[str, Any]]:
    """The rows in order; `equal` at the share of each step's groups that the work asks for."""
    share = options.extra.get("without_gradient", 0.0)
    lines = (folder / "questions.jsonl").read_text("utf-8").splitlines()
    return [
        {**json.loads(line), "equal": int((number + 1) * share) > int(number * share)}
        for number, line in enumerate(lines)
    ]


def prompts(options: Options) -> int:
    """Questions of a step."""
    return options.extra.get("prompts", PROMPTS)


def sizes(folder: Path) -> tuple[int, int]:
    """Samples of a question, and tokens of each."""
    work = read_work(folder)
    return work["samples"], work["new_tokens"]


def endless(folder: Path) -> Path:
    """The work's model with an end-of-sequence token that is none of the model's, so that every
    sample has all its tokens on all sides, and no side pays for it.
    """
    to = folder / "endless"
    if to.exists():
        return to
    partial_copy = folder / "endless.part"
    shutil.copytree(folder / "model", partial_copy)
    vocabulary = json.loads((partial_copy / "config.json").read_text("utf-8"))["vocab_size"]
    for name in ("config.json", "generation_config.json"):
        _edit(partial_copy / name, {"eos_token_id": vocabulary})
    _edit(partial_copy / "tokenizer_config.json", {"eos_token": NEVER})
    tokenizer = json.loads((partial_copy / "tokenizer.json").read_text("utf-8"))
    tokenizer["model"]["vocab"][NEVER] = vocabulary
    special = {"id": vocabulary, "content": NEVER, "special": True, "normalized": False}
    edges = {"single_word": False, "lstrip": False, "rstrip": False}
    tokenizer["added_tokens"].append(special | edges)
    (partial_copy / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    partial_copy.rename(to)
    return to


def _edit(path: Path, changes: dict[str, Any]) -> None:
    config = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps(config | changes, indent=1), "utf-8")
