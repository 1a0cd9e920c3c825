"""The page about rewards says what the code does."""

import re
import textwrap
from pathlib import Path

import pytest

from postgrad.core.names import resolve
from postgrad.rewards.registry import VERIFIERS
from postgrad.rewards.verifier import PromptView, RolloutView

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text("utf-8")


@pytest.mark.parametrize("name", sorted(VERIFIERS))
def test_the_table_names_every_setting_of_a_verifier(name):
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |")]
    kind = resolve(name, VERIFIERS, "verifier")
    assert set(kind.model_fields) <= set(re.findall(r"`(\w+)", row))


def test_the_examples_of_own_verifiers_run():
    blocks = re.findall(r"(?:^    .*\n|^\n)+", PAGE, re.MULTILINE)
    names = {}
    for block in blocks:
        if "import" in block:
            exec(textwrap.dedent(block), names)  # noqa: S102  # our own page
    prompt, rollout = PromptView("?", "Paris"), RolloutView("paris " * 100)
    score = names["brevity"](prompt, rollout)
    assert (score.value, score.detail) == (400 / 600, {"characters": 600})
    assert names["Contains"]().score(prompt, rollout) == 1.0
    assert names["Contains"](ignore_case=False).score(prompt, rollout) == 0.0
