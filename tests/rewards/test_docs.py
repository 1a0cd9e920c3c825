"""The page about rewards says what the code does."""

import json
import re
import tomllib
from pathlib import Path

import pytest

from postgrad.core.text import resolve
from postgrad.rewards.registry import VERIFIERS, build
from postgrad.rewards.settings import RewardSettings
from postgrad.rewards.verifier import PromptView, RolloutView

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text("utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", sorted(VERIFIERS))
def test_the_table_names_every_setting_of_a_verifier(name):
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |")]
    kind = resolve(name, VERIFIERS, "verifier")
    assert set(kind.model_fields) <= set(re.findall(r"`(\w+)", row))


def test_the_examples_of_rewards_are_rewards():
    tables = [block for block in blocks("toml") if "[[rewards]]" in block]
    rewards = [reward for text in tables for reward in tomllib.loads(text)["rewards"]]
    settings = [RewardSettings.model_validate_json(json.dumps(r), strict=True) for r in rewards]
    built = [build(reward) for reward in settings if ":" not in reward.type]
    assert {type(verifier).__name__ for verifier in built} >= {
        "GSM8K",
        "Format",
        "Judge",
        "IFEval",
        "Code",
    }


def test_the_examples_of_own_verifiers_run():
    names = {}
    for block in blocks("python"):
        if "import" in block:
            exec(block, names)  # noqa: S102  # our own page
    prompt, rollout = PromptView("?", "Paris"), RolloutView("paris " * 100)
    score = names["brevity"](prompt, rollout)
    assert (score.value, score.detail) == (400 / 600, {"characters": 600})
    assert names["Contains"]().score(prompt, rollout) == 1.0
    assert names["Contains"](ignore_case=False).score(prompt, rollout) == 0.0
