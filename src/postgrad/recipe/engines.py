"""Checks of the rollout engine that a recipe names: each yields (place, what is wrong)."""

from collections.abc import Iterator

from postgrad.recipe.lines import RecipeProblem
from postgrad.recipe.settings import AnsweringSections

TABLES = ("vllm", "openai")  # of engines that have settings of their own


def engine_problems(recipe: AnsweringSections) -> Iterator[RecipeProblem]:
    """Keys that this engine cannot take, and tables of engines that the recipe does not use."""
    rollout = recipe.rollout
    for name in TABLES:
        stated = getattr(rollout, name)
        if rollout.type != name and stated != type(stated)():
            yield ("rollout", name), f'is read only where rollout.type = "{name}"'
    if rollout.type != "local" and rollout.slots == "auto":
        yield (
            ("rollout", "slots"),
            f'"auto" tries the built-in engine: give a number, or leave it out for {rollout.type}',
        )
    if rollout.type == "openai":
        yield from _openai(recipe)


def _openai(recipe: AnsweringSections) -> Iterator[RecipeProblem]:
    server = recipe.rollout.openai
    if server.base_url is None:
        yield ("rollout", "openai", "base_url"), "which server? such as http://127.0.0.1:8000/v1"
    if server.endpoint == "chat" and recipe.environment is not None:
        yield (
            ("rollout", "openai", "endpoint"),
            "an environment's turns are rendered here, and a chat server renders its own: take "
            '"completions"',
        )
