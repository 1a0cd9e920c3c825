"""The algorithm pages say what the code does."""

import itertools
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest

from postgrad.algorithms.base import RolloutAlgorithm
from postgrad.algorithms.policy_gradient import PolicyGradient
from postgrad.algorithms.registry import ALGORITHMS, algorithm_class
from postgrad.core.errors import UsageError

RECIPES = Path(__file__).parents[2] / "recipes" / "algorithms"
PAGES = Path(__file__).parents[2] / "docs" / "algorithms"


def table(page: str) -> dict[str, dict[str, str]]:
    """algorithm -> setting -> default, as the page's settings table says."""
    lines = (PAGES / page).read_text("utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| setting"))
    end = next(i for i in range(start, len(lines)) if not lines[i].startswith("|"))
    header, _, *rows = [
        [cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines[start:end]
    ]
    cells: dict[str, dict[str, str]] = {name: {} for name in header[1:-1]}
    for row in rows:
        assert len(row) == len(header)
        for name, cell in zip(header[1:-1], row[1:-1], strict=True):
            if cell:
                cells[name][row[0]] = cell
    return cells


def page(name: str) -> str:
    return "reward-model.md" if name == "bradley_terry" else f"{name}.md"


def is_sampled(name: str) -> bool:
    """A policy gradient without a critic: their settings stand in one shared table."""
    algorithm = algorithm_class(name)
    return issubclass(algorithm, PolicyGradient) and not algorithm().needs().critic


def is_rollout(name: str) -> bool:
    algorithm = algorithm_class(name)
    return issubclass(algorithm, RolloutAlgorithm) and not algorithm().needs().critic


def shared_settings(name: str) -> dict[str, str]:
    """setting -> default, of the table of all policy gradients and the one of single algorithms."""
    documented = {
        setting: default
        for setting, default in table("index.md")["default"].items()
        if setting not in algorithm_class(name).unread
    }
    lines = (PAGES / "index.md").read_text("utf-8").splitlines()
    start = lines.index("| `type` | setting | default | meaning |") + 2
    for line in itertools.takewhile(lambda line: line.startswith("|"), lines[start:]):
        types, setting, default, _ = (cell.strip() for cell in line.split("|")[1:-1])
        if f"`{name}`" in types.split(", "):
            documented[setting.strip("`")] = default
    return documented


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_settings_table_lists_every_setting_with_its_default(name):
    algorithm, sampled = algorithm_class(name), is_sampled(name)
    documented = shared_settings(name) if sampled else table(page(name))[name]
    defaults = {
        key: repr(field.default).replace("'", '"')
        for key, field in algorithm.model_fields.items()
        if not sampled or key not in algorithm.unread
    }
    assert documented == defaults


def test_the_shared_page_names_every_setting_that_an_algorithm_refuses():
    text = (PAGES / "index.md").read_text("utf-8")
    (sentence,) = re.findall(
        r"A setting that an algorithm does not read is refused(.*?)\n\n", text, re.S
    )
    listed, _, last = sentence.partition("\nWhere ")
    refused: dict[str, set[str]] = {}
    for part in listed.split(";"):
        settings, _, names = part.partition("with")
        for name in re.findall("`(.*?)`", names):
            refused.setdefault(name, set()).update(re.findall("`(.*?)`", settings))
    wanted = {name: set(algorithm_class(name).unread) for name in ALGORITHMS if is_sampled(name)}
    wanted["cispo"].add("dual_clip")  # by a check of its own
    assert refused == {name: settings for name, settings in wanted.items() if settings}
    assert last == "`kl_in` is refused, so is `kl_target`."
    for name in (name for name in refused if "kl_in" in refused[name]):
        with pytest.raises(UsageError, match="kl_target: "):
            algorithm_class(name)(kl_target=0.1)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_a_page(name):
    text = (PAGES / page(name)).read_text("utf-8")
    assert f'type = "{name}"' in text
    assert "## Equations" in text
    assert "## What to watch" in text


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if is_rollout(name)])
def test_every_algorithm_has_a_recipe(name):
    folder = RECIPES.parent / "game" if name == "gigpo" else RECIPES  # it needs several turns
    recipe = tomllib.loads((folder / f"{name}.toml").read_text("utf-8"))
    assert recipe["algorithm"]["type"] == name
    pipeline = tomllib.loads((folder / "pipeline.toml").read_text("utf-8"))
    assert f"{name}.toml" in pipeline["recipes"]


def test_the_example_of_an_algorithm_of_ones_own_runs(tmp_path, monkeypatch, make_batch):
    (code,) = re.findall(r"```python\n(.*?)```", (PAGES / "index.md").read_text("utf-8"), re.S)
    (tmp_path / "best_of_group.py").write_text(code, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    algorithm = algorithm_class("best_of_group:BestOfGroup")(margin=0.1)
    batch = make_batch([0, 0, 1, 1], [1.0, 0.5, 0.0, 2.0])
    advantages = algorithm.credit(batch, None, None, None, {}).experience.columns["advantages"]
    np.testing.assert_allclose([row[-1] for row in advantages], [0, -0.4, -1.9, 0], rtol=1e-6)
