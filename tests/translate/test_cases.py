"""Scripts and configs as other systems publish them, their recipes by hand.

A case is a source (NAME.sh, NAME.yaml or NAME.py) and what it has to become (NAME.toml); the first
line of the latter names the options that have no counterpart. `# words:` in a source says how it is
called.
Configs that a script names are in cases/configs.
"""

import importlib
import tomllib
from pathlib import Path

import pytest

from postgrad.recipe.load import parse_recipe
from postgrad.translate.translate import SYSTEMS, translate

CASES = Path(__file__).parent / "cases"
SOURCES = sorted(path for path in CASES.iterdir() if path.suffix in (".sh", ".yaml", ".py"))


def system_of(path: Path) -> str:
    return next(name for name in SYSTEMS if path.stem.startswith(name))


def words_of(path: Path) -> list[str]:
    """The source as it is called: words before a script, or behind a Python program."""
    first = path.read_text("utf-8").splitlines()[0]
    words = first.partition("# words:")[2].split()
    return [str(path), *words] if path.suffix == ".py" else [*words, str(path)]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_a_published_source_becomes_the_recipe_worked_out_by_hand(path: Path) -> None:
    expected = path.with_suffix(".toml").read_text("utf-8")
    translation = translate(system_of(path), words_of(path))
    assert translation.recipe == tomllib.loads(expected)
    missing = expected.splitlines()[0].removeprefix("# missing:").strip()
    named = sorted(name.strip() for name in missing.split(",") if name.strip())
    assert sorted({option.name for option in translation.draft.missing}) == named


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_what_is_written_is_a_whole_recipe(path: Path) -> None:
    translation = translate(system_of(path), words_of(path))
    assert translation.problem is None
    recipe = parse_recipe(tomllib.loads(translation.text), "translated", translation.text)
    recipe.geometry(rows=10_000)
    assert max(len(line) for line in translation.text.splitlines() if line.startswith("#")) <= 100


def test_every_system_has_cases_of_every_kind_of_job() -> None:
    jobs = {(system_of(path), tomllib.loads(path.with_suffix(".toml").read_text("utf-8"))["job"])
            for path in SOURCES}  # fmt: skip
    wanted = {
        (name, job)
        for name, module in SYSTEMS.items()
        for job, _ in importlib.import_module(f"postgrad.translate.{module}").JOBS.values()
    }
    assert {job for _, job in wanted} == {"sft", "reward", "preference", "rl"}
    assert wanted <= jobs
    assert len(SOURCES) >= 12
