"""The generated pages say of keys and commands what the code says, in a person's words."""

import re
import tomllib
from typing import Annotated, Any, Literal

import pytest
from docs.tools.fields import comments, keys, prose, words, written
from docs.tools.reference import commands_page, recipe_page
from pydantic import Field

from helpers.pages import ROOT
from postgrad.core.settings import Settings
from postgrad.data.settings import MixSettings, PairMixSettings
from postgrad.recipe.eval_settings import EvalSettings
from postgrad.rewards.settings import RewardSettings, ScoringSettings
from postgrad.rollout.settings import EnvironmentSets, EnvironmentSettings

RECIPES = sorted(p for p in (ROOT / "recipes").rglob("*.toml") if p.name != "pipeline.toml")


class Knobs(Settings):
    """A table. rate: how fast, and `size`."""

    rate: float = Field(default=1e-6, gt=0.0)
    size: Annotated[int, Field(ge=2)] | Literal["auto"] | None = None
    # Names of files,
    # one each.
    files: tuple[str, ...] = ()
    pair: tuple[float, float] = (0.9, 0.999)  # of "a" and "b"
    on: bool = Field(
        default=True,
    )  # or off


def test_a_key_has_its_type_bounds_default_and_comment() -> None:
    described = {key.name: (key.kind, key.default, key.note) for key in keys(Knobs)}
    assert described == {
        "rate": ("number > 0", "`1e-06`", ""),
        "size": ('whole number ≥ 2 or `"auto"`', "", ""),
        "files": ("list of text", "`[]`", "Names of files, one each."),
        "pair": ("2 × number", "`[0.9, 0.999]`", 'of "a" and "b"'),
        "on": ("true or false", "`true`", "or off"),
    }


def test_a_docstring_marks_the_keys_that_it_explains() -> None:
    assert prose(Knobs) == "A table. `rate`: how fast, and `size`."


def test_a_subclass_keeps_the_comments_of_its_base() -> None:
    class More(Knobs):
        extra: int = 0  # its own

    assert comments(More)["pair"] == 'of "a" and "b"'
    assert comments(More)["extra"] == "its own"


@pytest.mark.parametrize(
    ("value", "text"), [(None, ""), (False, "`false`"), ("", '`""`'), (10_000.0, "`10000`")]
)
def test_a_default_is_written_as_in_a_recipe(value: Any, text: str) -> None:
    assert written(value) == text


def test_a_choice_is_told_with_its_values() -> None:
    assert words(Literal["max", "min"]) == '`"max"` or `"min"`'


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_key_that_ships_stands_in_its_section(path: Any) -> None:
    sections = dict(re.findall(r"(?ms)^## ([^\n]+)\n(.*?)(?=^## |\Z)", recipe_page()))
    for place, names in _tables(tomllib.loads(path.read_text("utf-8"))):
        title = place or "At the top"
        text = sections.get(f"[{title}]") or sections.get(f"[[{title}]]") or sections.get(title)
        assert text is not None, title
        same = re.search(r"The keys of `\[([\w.]+)\]`", text)
        text = sections[f"[{same[1]}]"] if same else text
        assert all(f"| `{name}` |" in text for name in names), (title, names)


def _tables(table: dict[str, Any], place: str = "") -> list[tuple[str, list[str]]]:
    """(section, its plain keys) of a recipe, but for what its `type` adds."""
    tables: list[tuple[str, list[str]]] = []
    plain = [key for key, value in table.items() if not isinstance(value, dict | list)]
    if place not in ("algorithm", "rewards", "environment"):
        tables.append((place, plain))
    for key, value in table.items():
        below = f"{place}.{key}".lstrip(".")
        entries = value if isinstance(value, list) else [value]
        for entry in entries:
            if isinstance(entry, dict) and key not in ("task", "chat_template_kwargs", "when"):
                tables += _tables(entry, below)
    if place == "eval":  # one set's keys stand in [eval]
        return []
    return tables


def test_every_command_has_its_flags_and_their_defaults() -> None:
    page = commands_page()
    assert "| `--checkpoint latest or best or STEP` |" in page
    assert "| `--port PORT` | 0: any free port | `8000` |" in page
    assert page.count("\n## ") >= 14


@pytest.mark.parametrize(
    ("heading", "tables"),
    [
        ("[data], [eval], [[eval.sets]]", (MixSettings, PairMixSettings, EvalSettings)),
        ("[[rewards]], [scoring]", (RewardSettings, ScoringSettings)),
        ("[environment]", (EnvironmentSettings, EnvironmentSets)),
    ],
)
def test_the_page_of_recipes_lists_every_key_of_a_section(
    heading: str, tables: tuple[type[Settings], ...]
) -> None:
    text = (ROOT / "docs" / "recipes.md").read_text("utf-8")
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([a-z_]+)`", section))
    assert {key for table in tables for key in table.model_fields} - named - {"sets"} == set()
