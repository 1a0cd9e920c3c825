"""The examples do what their pages say: each is run as its page runs it, for a few steps."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from postgrad.recipe.load import load_recipe

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SHORT = {
    "tools_chat": ["--steps", "2"],
    "own_verifier": ["--steps", "2"],
    "own_game": ["--sft.steps", "3", "--rl.steps", "2"],
    "own_agent": ["--sft.steps", "3", "--rl.steps", "2"],
    "spreadsheet_dpo": ["--steps", "2"],
    "reward_to_ppo": ["--sft.steps", "3", "--reward.steps", "2", "--ppo.steps", "2"],
}


def page_commands(example: str) -> list[list[str]]:
    """The words of the commands of an example's page, assignments left out."""
    page = (EXAMPLES / example / "README.md").read_text("utf-8")
    (block,) = re.findall(r"(?s)```sh\n(.*?)```", page)
    lines = [line.removeprefix("PYTHONPATH=. ").split() for line in block.splitlines()]
    assert lines[0] == ["cd", f"examples/{example}"]
    return lines[1:]


def run(words: list[str], folder: Path) -> str:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), "."]),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("example", SHORT)
def test_an_examples_commands_run(example: str, tmp_path: Path) -> None:
    folder = tmp_path / example
    shutil.copytree(EXAMPLES / example, folder)
    for program, command, *rest in page_commands(example):
        assert program == "postgrad"
        short = SHORT[example] if command == "train" else []
        run([sys.executable, "-m", "postgrad", command, *rest, *short], folder)
    assert list(folder.glob("runs/**/summary.json"))
    assert list(folder.glob("runs/**/report.html")) or example in ("tools_chat", "spreadsheet_dpo")


@pytest.mark.slow
def test_the_notebook_runs_from_its_first_cell_to_its_last(tmp_path: Path) -> None:
    cells = json.loads((EXAMPLES / "first_run.ipynb").read_text("utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 6
    program = "\n".join(code)
    for long, short in (('"40"', '"6"'), ("step=40", "step=6"), ('"60"', '"9"')):
        assert program.count(long) == 1
        program = program.replace(long, short)
    stdout = run([sys.executable, "-c", program], tmp_path)
    assert "->" in stdout
    assert (tmp_path / "runs/my-run/model/model.safetensors").exists()


def test_every_example_is_listed_and_the_one_for_machines_is_a_recipe() -> None:
    listed = set(re.findall(r"\]\((\w+)/README.md\)", (EXAMPLES / "README.md").read_text("utf-8")))
    assert listed == {path.parent.name for path in EXAMPLES.glob("*/README.md")}
    assert listed == {*SHORT, "two_machines"}
    recipe = load_recipe(EXAMPLES / "two_machines" / "recipe.toml")
    assert recipe.learner.ranks == 6
    assert recipe.cluster.engines(6) == 2
