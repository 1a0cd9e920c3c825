"""The end of an answer, as the training data's chat template writes it, has to stop sampling."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.tiny_runs import MODEL, MakeRecipe
from postgrad.models.fresh import make_fresh
from postgrad.models.settings import ModelInit
from postgrad.models.tokenizer import load_tokenizer
from postgrad.training.answer_ends import answer_ends
from postgrad.training.prepare import warn_of_answer_ends

TEMPLATE = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + end }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@pytest.fixture
def end_warnings(make_recipe: MakeRecipe, tmp_path: Path) -> Any:
    """end_warnings(job, end, **sections): the warnings of a run whose answers end so."""
    make_fresh(ModelInit.model_validate(MODEL["init"]), [], 0, tmp_path / "model")

    def tell(job: str, end: str, text: str = "", **sections: Any) -> list[str]:
        data = {"chat_template": TEMPLATE, "chat_template_kwargs": {"end": end}}
        recipe = make_recipe(job, data=data, **sections)
        if text:
            recipe = recipe.model_copy(
                update={"data": recipe.data.model_copy(update={"text": text})}
            )
        events: list[tuple[str, str]] = []
        warnings: list[str] = []
        run: Any = SimpleNamespace(
            recipe=recipe,
            logs=SimpleNamespace(event=lambda kind, text: events.append((kind, text))),
            console=SimpleNamespace(warn=warnings.append),
        )
        warn_of_answer_ends(run, str(tmp_path / "model"))
        assert events == [("answer_end", text) for text in warnings]
        return warnings

    return tell


@pytest.mark.parametrize("job", ["sft", "preference", "rl"])
def test_a_run_warns_where_sampling_runs_on_behind_the_token_that_ends_an_answer(
    end_warnings: Any, job: str
) -> None:
    (text,) = end_warnings(job, "<|im_start|>")
    assert "ends an answer with '<|im_start|>', and sampling stops only at '<|im_end|>'" in text
    assert 'set model.eos_token = "<|im_start|>"' in text
    assert "eos_token_id in generation_config.json" in text
    assert end_warnings(job, "<|im_end|>") == []
    model = {**MODEL, "eos_token": ["<|im_start|>", "<|im_end|>"]}
    assert end_warnings(job, "<|im_start|>", model=model) == []


def test_a_stop_string_of_the_recipe_is_an_end_too(end_warnings: Any) -> None:
    assert end_warnings("rl", "<|im_start|>", rollout={"stop": ["<|im_start|>"]}) == []


def test_an_answer_without_an_end_token_is_told_where_the_policy_learns_it(
    end_warnings: Any,
) -> None:
    (text,) = end_warnings("sft", "")
    assert "does not learn to stop" in text
    assert end_warnings("rl", "") == []  # it learns from what it samples itself


def test_reward_models_and_plain_texts_have_no_answers_to_end(end_warnings: Any) -> None:
    assert end_warnings("reward", "<|im_start|>") == []
    assert end_warnings("sft", "<|im_start|>", text="text") == []


def test_a_run_warns_where_sampling_runs_on_behind_a_call_of_a_tool(
    make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    """As gpt-oss ends calls with a token of their own."""
    make_fresh(ModelInit.model_validate(MODEL["init"]), [], 0, tmp_path / "model")
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    calls = "{% for call in m.tool_calls %}{{ call.function.name }}{% endfor %}"
    template = TEMPLATE.replace(
        "+ end }}",
        "}}{% if m.tool_calls %}" + calls + "{{ '<|im_start|>' }}{% else %}{{ end }}{% endif %}",
    )
    data = {"chat_template": template, "chat_template_kwargs": {"end": "<|im_end|>"}}
    tools = {"type": "tools", "tools": ["calculator"], "tool_format": "hermes"}
    recipe = make_recipe("rl", data=data, environment=tools)
    answer, call = answer_ends(recipe, str(tmp_path / "model"), tokenizer)
    assert (answer.text, answer.problem) == ("<|im_end|>", "")
    assert "ends a call of a tool with '<|im_start|>', and sampling stops only at" in call.problem
    assert 'set model.eos_token = "<|im_start|>"' in call.problem
    both = make_recipe(
        "rl", data=data, environment=tools, model={**MODEL, "eos_token": ["<|im_start|>"]}
    )
    assert [end.problem for end in answer_ends(both, str(tmp_path / "model"), tokenizer)] == [
        "",
        "",
    ]
