"""The models that a recipe names: reachable, of one vocabulary, with room for its rows, and with a
chat template whose turns end.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from postgrad.fleet.loading import base_model
from postgrad.learner.tensor import require_divisible
from postgrad.models.attention import no_embedding
from postgrad.models.config import load_config
from postgrad.models.files import adapter_base, is_adapter
from postgrad.models.image_reader import ImageReader
from postgrad.models.rope import require_length, unseen_length
from postgrad.models.tokenizer import load_tokenizer
from postgrad.recipe.recipe import Recipe
from postgrad.tools.dry_run.data import Sets
from postgrad.tools.dry_run.outcome import Check, Report
from postgrad.training.answer_ends import answer_ends
from postgrad.training.channels import thoughts_read
from postgrad.training.prepare import longest_row
from postgrad.training.rows import image_reader


@dataclass(frozen=True, slots=True)
class PolicyBase:
    """The policy's base model, without its weights."""

    path: str
    tokenizer: Any
    reader: ImageReader | None  # of its images; None where it reads text alone


def check_models(report: Report, recipe: Recipe, init: Path) -> PolicyBase | None:
    """The policy's base model; None where it cannot be read.

    A fresh model is made in `init` as the run would make it. Models of other roles are checked too.
    """
    start = None
    with report.check("model") as check:
        path = base_model(recipe, init)
        config = load_config(path)
        tokenizer = load_tokenizer(path)
        start = PolicyBase(path, tokenizer, image_reader(path, tokenizer))
        check.detail = _about(config, path)
        require_divisible(recipe.learner, path)
        _check_length(report, check, recipe, config.get_text_config(), path)
    for role, path in _models_of_other_roles(recipe):
        with report.check(f"model of {role}") as check:
            config = load_config(path)
            load_tokenizer(path)
            check.detail = _about(config, path)
            _check_length(report, check, recipe, config.get_text_config(), path)
    return start


def _about(config: Any, path: str) -> str:
    merged = f", an adapter merged into {adapter_base(path)}" if is_adapter(path) else ""
    return f"{config.model_type}, vocabulary of {_vocabulary(config)}{merged}"


def _vocabulary(config: Any) -> int:
    return int(config.get_text_config().vocab_size)


def _models_of_other_roles(recipe: Recipe) -> list[tuple[str, str]]:
    """(role, path) of the models beside the policy's."""
    return [
        (str(place[0]), table.source)
        for place, table in recipe.model_tables.items()
        if place[0] != "model" and table.source not in (None, recipe.model.source)
    ]


def _check_length(report: Report, check: Check, recipe: Recipe, config: Any, path: str) -> None:
    """As the run: refuses rows that the model cannot compute, warns of those it never saw."""
    longest = longest_row(recipe)
    require_length(config, longest, path)
    if warning := unseen_length(config, longest, path):
        report.warn(check, warning)


def check_tokens(report: Report, recipe: Recipe, start: PolicyBase, sets: Sets) -> None:
    """Checks that the model has an embedding for every token id of the data, and that sampling
    stops at the token that ends a turn.
    """
    path = start.path
    with report.check("tokens") as check:
        size, largest = _vocabulary(load_config(path)), sets.largest_id
        check.detail = f"ids up to {largest} of {size}"
        if largest >= size:
            report.problem(check, f"rows for {path}: {no_embedding(largest, size)}")
    if recipe.trained_role == "policy":
        with report.check("end of a turn") as check:
            _check_answer_ends(report, check, recipe, path, start.tokenizer)
            if problem := thoughts_read(recipe, start.tokenizer):
                report.warn(check, problem)


def _check_answer_ends(
    report: Report, check: Check, recipe: Recipe, path: str, tokenizer: Any
) -> None:
    """Reports answers behind whose end sampling runs on. A policy that learns an end token can be
    stopped there later, by whoever uses it; one that learns none has to be trained again.
    """
    for end in answer_ends(recipe, path, tokenizer):
        check.detail = f"{end.text!r}"
        if end.problem:
            tell = report.warn if end.is_learned else report.problem
            tell(check, end.problem)
