"""`postgrad eval` of a model behind a server."""

from typing import Any

import pytest

from helpers.chat_server import Answer, chat_server
from postgrad.core.errors import UsageError
from postgrad.observe.console import Console
from postgrad.tools.evaluate import evaluate
from postgrad.training.start import train


def backward(prompt: str, times: int) -> Answer:
    """Right for words without an e."""
    word = prompt.rsplit(" ", 1)[-1].strip()
    return Answer(word if "e" in word else word[::-1])


def recipe(make_recipe: Any, url: str, **more: Any) -> Any:
    rollout = {"type": "openai", "max_new_tokens": 6, "openai": {"base_url": url, **more}}
    rewards = [{"type": "reasoning_gym"}]
    return make_recipe("rl", rollout=rollout, rewards=rewards, eval={"greedy": False, "size": 16})


@pytest.mark.slow
def test_the_answers_of_a_server_are_scored(make_recipe: Any, models: Any, console: Console):
    with chat_server(backward) as server:
        found = evaluate(recipe(make_recipe, server.url, model="theirs"), models(0), console)
    asked = [body["messages"][-1]["content"] for _, _, body in server.requests]
    assert len(asked) == 32
    right = sum("e" not in one.rsplit(" ", 1)[-1] for one in asked) / 32
    assert 0.0 < right < 1.0
    assert found["accuracy"] == right
    assert found["failed"] == 0
    assert {body["model"] for _, _, body in server.requests} == {"theirs"}


@pytest.mark.slow
def test_the_evaluated_path_names_the_model_where_nothing_else_does(
    make_recipe: Any, models: Any, console: Console
):
    with chat_server(backward) as server:
        evaluate(recipe(make_recipe, server.url), models(0), console)
    assert {body["model"] for _, _, body in server.requests} == {models(0)}


def test_it_is_not_trained(make_recipe: Any, console: Console):
    with pytest.raises(UsageError, match=r"can be evaluated \(postgrad eval\) and not trained"):
        train(recipe(make_recipe, "http://127.0.0.1:9/v1"), console)
