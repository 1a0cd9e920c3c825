"""Verifiers that read the thoughts of gpt-oss are named, with what to say."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.tiny_runs import MODEL, MakeRecipe
from helpers.tool_templates import GPT_OSS, QWEN
from postgrad.models.fresh import make_fresh
from postgrad.models.settings import ModelInit
from postgrad.models.tokenizer import load_tokenizer
from postgrad.training.channels import thoughts_read
from postgrad.training.prepare import warn_of_thoughts

REMEDY = 'say after = "<|channel|>final<|message|>" and special_tokens = true in each'
READS = {"type": "gsm8k"}
HARMONY = {"chat_template": GPT_OSS}


@pytest.fixture
def model(tmp_path: Path) -> str:
    make_fresh(ModelInit.model_validate(MODEL["init"]), [], 0, tmp_path / "model")
    return str(tmp_path / "model")


def test_a_run_names_the_rewards_that_read_the_channel_of_thoughts(
    make_recipe: MakeRecipe, model: str
) -> None:
    final = {"after": "<|channel|>final<|message|>", "special_tokens": True}
    rewards = [
        READS,
        {"type": "math", "name": "sum"},
        {"type": "exact_match", **final},
        {"type": "overlong", "buffer": 2},
        {"type": "format"},
    ]
    recipe = make_recipe("rl", data=HARMONY, rewards=rewards)
    events: list[tuple[str, str]] = []
    run: Any = SimpleNamespace(
        recipe=recipe,
        logs=SimpleNamespace(event=lambda kind, text: events.append((kind, text))),
        console=SimpleNamespace(warn=lambda text: events.append(("warning", text))),
    )
    warn_of_thoughts(run, model)
    kinds, texts = zip(*events, strict=True)
    assert kinds == ("thoughts_read", "warning")
    assert texts[0] == texts[1]
    assert texts[0].startswith("[[rewards]] 'gsm8k', 'sum': the chat template is that of gpt-oss")
    assert texts[0].endswith(REMEDY)


@pytest.mark.parametrize("job", ["rl", "sft"])
def test_the_tokenizers_own_template_and_an_environment_may_be_of_that_kind(
    make_recipe: MakeRecipe, model: str, job: str
) -> None:
    tokenizer: Any = load_tokenizer(model)
    plain = make_recipe(job, rewards=[READS])
    assert thoughts_read(plain, tokenizer) is None
    tokenizer.chat_template = GPT_OSS
    assert REMEDY in (thoughts_read(plain, tokenizer) or "")
    tokenizer.chat_template = QWEN
    tools = {"type": "tools", "tools": ["calculator"], "tool_format": "harmony"}
    played = make_recipe(job, rewards=[READS], environment=tools)
    assert REMEDY in (thoughts_read(played, tokenizer) or "")


def test_where_nothing_reads_answers_there_is_nothing_to_tell(
    make_recipe: MakeRecipe, model: str
) -> None:
    tokenizer = load_tokenizer(model)
    assert thoughts_read(make_recipe("preference"), tokenizer) is None
    recipe = make_recipe("rl", data=HARMONY, rewards=[{"type": "overlong", "buffer": 2}])
    assert thoughts_read(recipe, tokenizer) is None
