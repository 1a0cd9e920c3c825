"""Models that would disappoint later: out of reach, too short, of another vocabulary, endless."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from helpers.hostile_models import edit
from helpers.model_types import make_model
from postgrad.core.errors import UsageError
from postgrad.core.records import Prompt
from postgrad.data.account import RowAccount
from postgrad.data.draws import DrawnSet
from postgrad.models.tokenizer import load_tokenizer
from postgrad.observe.console import Console
from postgrad.tools.dry_run.data import Sets
from postgrad.tools.dry_run.models import PolicyBase, check_models, check_tokens
from postgrad.tools.dry_run.outcome import RECIPE, Report
from postgrad.training.prepare import check_lengths

TEMPLATE = "{% for m in messages %}{{ m.role + ': ' + m.content + end }}{% endfor %}"
WITH_PROMPT = TEMPLATE + "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"


@pytest.fixture
def report(console: Console) -> Report:
    return Report(console)


def sets_with(token: int) -> Sets:
    rows = [Prompt(0, np.array([1, token], np.int32), "q", "a", "rows", 0)]
    return Sets(DrawnSet(rows, RowAccount("rows", 1, {"kept": 1}, {}), True))


def test_a_model_that_cannot_be_reached_is_a_problem_of_the_recipe(
    report: Report, make_recipe: Any, tmp_path: Path
) -> None:
    recipe = make_recipe("sft", model={"path": str(tmp_path / "nowhere")})
    assert check_models(report, recipe, tmp_path / "init") is None
    (problem,) = report.problems
    assert problem.exit_code == RECIPE
    assert "no model at" in problem.message


def test_models_of_other_roles_are_looked_at_too(
    report: Report, make_recipe: Any, models: Any, tmp_path: Path
) -> None:
    recipe = make_recipe(
        "rl",
        model={"path": models(0)},
        algorithm={"type": "grpo", "kl_coef": 0.1},
        reference={"model": {"path": str(tmp_path / "nowhere")}},
    )
    assert check_models(report, recipe, tmp_path / "init") is not None
    assert [problem.check for problem in report.problems] == ["model of reference"]


def test_layers_that_ranks_cannot_share_are_named_before_weights_are_loaded(
    report: Report, make_recipe: Any, models: Any, tmp_path: Path
) -> None:
    learner, cluster = {"ranks": 4, "tensor_parallel": 4}, {"type": "ray"}
    recipe = make_recipe(
        "sft", model={"path": models(0), "init": None}, learner=learner, cluster=cluster
    )
    check_models(report, recipe, tmp_path / "init")
    (problem,) = report.problems
    assert (problem.check, problem.exit_code) == ("model", RECIPE)
    assert "learner.tensor_parallel = 4" in problem.message


def test_rows_longer_than_rotary_positions_that_were_trained_are_a_warning_as_in_the_run(
    report: Report, make_recipe: Any, models: Any, tmp_path: Path
) -> None:
    recipe = make_recipe("sft", model={"path": models(0), "init": None}, data={"max_len": 100})
    check_models(report, recipe, tmp_path / "init")
    assert report.problems == []
    (warning,) = report.warnings
    assert warning.check == "model"
    assert "never trained on more than 64" in warning.message
    events: list[tuple[str, str]] = []
    run: Any = SimpleNamespace(
        recipe=recipe,
        logs=SimpleNamespace(event=lambda kind, text: events.append((kind, text))),
        console=SimpleNamespace(warn=lambda text: events.append(("warning", text))),
    )
    check_lengths(run, models(0))
    assert events == [("unseen_length", warning.message), ("warning", warning.message)]


@pytest.mark.parametrize("role", ["policy", "reference"])
def test_rows_longer_than_a_table_of_positions_are_refused_as_in_the_run(
    report: Report, make_recipe: Any, models: Any, tmp_path: Path, role: str
) -> None:
    tokenizer = Path(models(0))
    size = len(load_tokenizer(str(tokenizer)))
    table = make_model("gpt2", tokenizer, size, tmp_path / "gpt2")
    other = make_model("llama", tokenizer, size, tmp_path / "llama")
    edit("config.json", max_position_embeddings=256)(other)
    paths = {"policy": str(other), "reference": str(other)} | {role: str(table)}
    recipe = make_recipe(
        "rl",
        model={"path": paths["policy"], "init": None},
        data={"max_len": 129},
        algorithm={"type": "grpo", "kl_coef": 0.1},
        reference={"model": {"path": paths["reference"]}},
    )
    check_models(report, recipe, tmp_path / "init")
    (problem,) = report.problems
    assert "a table of 128 positions" in problem.message
    assert problem.exit_code == RECIPE
    run: Any = SimpleNamespace(recipe=recipe)
    with pytest.raises(UsageError) as refused:
        check_lengths(run, paths["policy"])
    assert str(refused.value) == problem.message


def test_token_ids_without_an_embedding_are_found(
    report: Report, make_recipe: Any, models: Any
) -> None:
    path = models(0)
    size = json.loads((Path(path) / "config.json").read_text("utf-8"))["vocab_size"]
    recipe, tokenizer = make_recipe("reward"), load_tokenizer(path)
    check_tokens(report, recipe, PolicyBase(path, tokenizer, None), sets_with(size - 1))
    assert report.problems == []
    check_tokens(report, recipe, PolicyBase(path, tokenizer, None), sets_with(size))
    assert f"token id {size}" in report.problems[0].message


def ends(report: Report, recipe: Any, path: str, end: str) -> None:
    data = recipe.data.model_copy(
        update={"chat_template": WITH_PROMPT, "chat_template_kwargs": {"end": end}}
    )
    with_template = recipe.model_copy(update={"data": data})
    check_tokens(report, with_template, PolicyBase(path, load_tokenizer(path), None), sets_with(1))


def test_a_template_whose_turns_end_with_no_token_is_found(
    report: Report, make_recipe: Any, models: Any
) -> None:
    ends(report, make_recipe("sft"), models(0), "")
    (problem,) = report.problems
    assert problem.check == "end of a turn"
    assert "does not learn to stop" in problem.message


def test_a_template_whose_turns_end_with_a_token_that_stops_nothing_is_told(
    report: Report, make_recipe: Any, models: Any
) -> None:
    ends(report, make_recipe("sft"), models(0), "<|im_start|>")
    assert report.problems == []
    assert "model.eos_token" in report.warnings[0].message
    report.warnings.clear()
    ends(report, make_recipe("sft", rollout={"stop": ["<|im_start|>"]}), models(0), "<|im_start|>")
    ends(report, make_recipe("sft"), models(0), "<|im_end|>")
    assert report.warnings == []
