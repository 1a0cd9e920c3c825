"""`postgrad eval` of a model behind a server."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.chat_server import Answer, chat_server
from helpers.image_directories import models as image_models
from helpers.image_directories import row
from postgrad.core.errors import UsageError
from postgrad.observe.console import Console
from postgrad.recipe.load import parse_recipe
from postgrad.tools.evaluate import evaluate
from postgrad.training.start import train

__all__ = ["image_models"]


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
        eval_result = evaluate(recipe(make_recipe, server.url, model="theirs"), models(0), console)
    asked = [body["messages"][-1]["content"] for _, _, body in server.requests]
    assert len(asked) == 32
    right = sum("e" not in prompt_text.rsplit(" ", 1)[-1] for prompt_text in asked) / 32
    assert 0.0 < right < 1.0
    assert eval_result["accuracy"] == right
    assert eval_result["failed"] == 0
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


@pytest.mark.slow
def test_rows_with_images_are_shown_to_a_server(
    image_models: Callable[[str], str], console: Console, tmp_path: Path
):
    """Of Qwen3.5: its tokenizer and image processor count the tokens, the server answers."""
    path, held_out = image_models("qwen3_5"), tmp_path / "held_out.jsonl"
    text = {"messages": [{"role": "user", "content": "word was"}], "answer": "saw"}
    rows = [{**row(n, ""), "answer": "?0 erutcip "} for n in range(2)] + [text]
    held_out.write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    with chat_server(lambda prompt, times: Answer(prompt.rsplit("word ")[-1][::-1])) as server:
        raw = {
            "job": "rl", "run_dir": str(tmp_path / "run"), "steps": 1, "model": {"path": path},
            "data": {"path": str(held_out), "messages": "messages", "max_len": 200},
            "eval": {"path": str(held_out)}, "rewards": [{"type": "exact_match"}],
            "algorithm": {"type": "grpo"}, "batch": {"n_samples_per_prompt": 2},
            "rollout": {"type": "openai", "max_new_tokens": 16, "openai": {"base_url": server.url}},
            "scoring": {"workers": 1},
        }  # fmt: skip
        eval_result = evaluate(parse_recipe(raw), path, console)
    assert (eval_result["rows"], eval_result["accuracy"]) == (3, 1.0)
    contents = [body["messages"][0]["content"] for _, _, body in server.requests]
    kinds = sorted(
        "text" if isinstance(each, str) else "-".join(part["type"] for part in each)
        for each in contents
    )
    assert set(kinds) == {"image_url-text", "text"}
