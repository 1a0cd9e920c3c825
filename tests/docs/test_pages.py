"""What the pages show as TOML and Python is that, and nothing on them leads nowhere."""

import ast
import re
import tomllib
from typing import Any

import pytest
import yaml

from helpers.pages import PAGES, ROOT, Block, blocks
from postgrad.core.errors import UsageError
from postgrad.plan.hardware import Device
from postgrad.recipe.load import load_recipe, parse_recipe
from postgrad.recipe.pipeline import PipelineSettings
from postgrad.recipe.recipe import JOBS

# The least that a job needs beside a part of a recipe.
DATA, MODEL = {"path": "openai/gsm8k"}, {"path": "Qwen/Qwen3-0.6B"}
SCORED = {"rewards": [{"type": "gsm8k"}]}
RL = {"algorithm": {"type": "grpo"}, **SCORED}
PAGE_OWN = ("my_", "package.")  # code that a reader writes: only its keys are left out
LENGTHS = ("steps", "epochs", "total_episodes")


def is_toml(block: Block) -> bool:
    first = block.text.splitlines()[0] if block.text else ""
    return block.language == "toml" or (
        block.language == "" and re.match(r"\[\[?[a-z_.]+\]\]?", first) is not None
    )


EXPLAINED = "docs/recipes-explained.md"  # its parts are those of files that ship
TOML = [block for block in blocks() if is_toml(block) and block.page != EXPLAINED]


def complete(part: dict[str, Any], job: str) -> dict[str, Any]:
    """The part with what its job needs beside it."""
    base: dict[str, Any] = {"run_dir": "run", "data": DATA, "model": MODEL}
    by_loss = part.get("checkpoint", {}).get("best_metric") == "eval/loss"  # nothing is scored
    base |= {"rl": RL, "sft": {} if by_loss else SCORED}.get(job, {})
    base |= {} if any(key in part for key in LENGTHS) else {"steps": 1}
    merged = {**base, **part, "job": job}
    if "sets" not in merged["data"]:
        merged["data"] = {**DATA, **merged["data"]}
    if "init" not in merged["model"]:
        merged["model"] = {**MODEL, **merged["model"]}
    if "tools" in merged.get("environment", {}):
        theirs = [tool for tool in part["environment"]["tools"] if not tool.startswith(PAGE_OWN)]
        merged["environment"] = {**part["environment"], "tools": theirs}
    if merged.get("environment", {}).get("agent", "").startswith(PAGE_OWN):
        merged["environment"] = {**merged["environment"], "agent": "json:loads"}
    kind = merged.get("algorithm", {}).get("type", "")
    if kind.startswith(PAGE_OWN):
        merged["algorithm"] = {"type": "grpo"}
    if merged.get("algorithm", {}).keys() and not kind:
        merged["algorithm"] = {"type": "grpo", **merged["algorithm"]}
    return merged


@pytest.mark.parametrize("block", TOML, ids=str)
def test_a_toml_block_is_a_recipe_or_a_part_of_one(block: Block) -> None:
    part = tomllib.loads(block.text)
    if "recipes" in part:
        PipelineSettings.model_validate(part)
        return
    if block.page == "docs/planning.md":  # a row of the hardware table
        for row in part.values():
            Device.model_validate({"name": "a device", **row})
        return
    jobs = [part["job"]] if "job" in part else list(JOBS)
    refusals: list[str] = []
    for job in jobs:
        try:
            parse_recipe(complete(part, job))
            return
        except UsageError as error:
            refusals.append(f"{job}: {error}")
    pytest.fail("\n".join(refusals))


def test_the_recipes_that_are_explained_are_those_that_ship() -> None:
    text = (ROOT / EXPLAINED).read_text("utf-8")
    for section in text.split("\n## ")[1:]:
        name, _, rest = section.partition("\n")
        load_recipe(ROOT / name)
        shipped = (ROOT / name).read_text("utf-8")
        shown = re.findall(r"(?s)```toml\n(.*?)\n```", rest)
        assert len(shown) > 1
        assert all(part in shipped for part in shown), name


@pytest.mark.parametrize("block", [b for b in blocks() if b.language == "python"], ids=str)
def test_a_python_block_is_python(block: Block) -> None:
    ast.parse(block.text)


def test_links_of_pages_outside_the_site_lead_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text("utf-8")):
            assert (ROOT / target).exists(), f"{page.name}: {target}"


def test_every_page_is_in_the_navigation() -> None:
    def pages(node: Any) -> list[str]:
        if isinstance(node, str):
            return [node]
        parts = node.values() if isinstance(node, dict) else node
        return [page for part in parts for page in pages(part)]

    listed = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"])
    there = {
        str(page.relative_to(ROOT / "docs")) for page in PAGES if page.is_relative_to(ROOT / "docs")
    }
    assert there <= set(listed)
    assert len(listed) == len(set(listed))


def test_every_picture_has_words_for_those_who_do_not_see_it() -> None:
    for page in PAGES:
        for words, target in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text("utf-8")):
            assert len(words) > 15, f"{page}: {target}"
            picture = page.parent / target
            if picture.suffix == ".svg":
                assert "prefers-color-scheme: dark" in picture.read_text("utf-8"), target
