"""The models that a recipe names: reachable, of one vocabulary, with room for its rows, and with a
chat template whose turns end.
"""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.data.answer_spans import Unmarkable
from postgrad.data.templates import (
    render_conversation,
    special_ids,
    template_call,
    tokenise,
    turn_ends,
)
from postgrad.fleet.local import base_model
from postgrad.models.attention import no_embedding
from postgrad.models.files import adapter_base, is_adapter
from postgrad.models.load import load_config, load_generation_config, load_tokenizer
from postgrad.models.rope import fixed_length, max_positions
from postgrad.models.supported import reads_images
from postgrad.recipe.recipe import Recipe
from postgrad.rollout.local.rows import eos_token_ids
from postgrad.tools.dry_run.data import Sets
from postgrad.tools.dry_run.outcome import Check, Report

QUESTION = "What is one and one?"
ANSWER = "It is two."


def check_models(report: Report, recipe: Recipe, init: Path) -> tuple[str, Any] | None:
    """The path of the policy's base model and its tokenizer; None where they cannot be read.

    A fresh model is made in `init` as the run would make it. Models of other roles are checked too.
    """
    start = None
    with report.check("model") as check:
        path = base_model(recipe, init)
        config = load_config(path)
        if reads_images(config):
            raise UsageError(
                f"{path} reads images, which a dry run does not try yet: --steps 1 tries them"
            )
        start = path, load_tokenizer(path)
        check.detail = _about(config, path)
        _check_positions(report, check, recipe, config, path)
    for role, path in _models_of_other_roles(recipe):
        with report.check(f"model of {role}") as check:
            config = load_config(path)
            load_tokenizer(path)
            check.detail = _about(config, path)
    return start


def _about(config: Any, path: str) -> str:
    merged = f", an adapter merged into {adapter_base(path)}" if is_adapter(path) else ""
    return f"{config.model_type}, vocabulary of {config.vocab_size}{merged}"


def _models_of_other_roles(recipe: Recipe) -> list[tuple[str, str]]:
    """(role, path) of the models beside the policy's."""
    return [
        (str(place[0]), table.source)
        for place, table in recipe.model_tables.items()
        if place[0] != "model" and table.source not in (None, recipe.model.source)
    ]


def _check_positions(report: Report, check: Check, recipe: Recipe, config: Any, path: str) -> None:
    positions = max_positions(config)
    longest = max([recipe.data.max_len, *(eval_set.max_len for eval_set in recipe.eval.sets)])
    if positions is not None and longest > positions:
        report.problem(
            check,
            f"rows may have {longest} tokens (data.max_len, eval.max_len), and {path} has "
            f"{positions} positions ({_limit_of(config)}): it was never trained on longer rows; "
            f"set data.max_len = {positions} or less",
        )


def _limit_of(config: Any) -> str:
    """Where the limit of positions comes from, for a message."""
    rotates = fixed_length(config) == max_positions(config)
    return "its rope_type rotates by length beyond them" if rotates else "max_position_embeddings"


def check_tokens(report: Report, recipe: Recipe, path: str, tokenizer: Any, sets: Sets) -> None:
    """Checks that the model has an embedding for every token id of the data, and that sampling
    stops at the token that ends a turn.
    """
    with report.check("tokens") as check:
        size, largest = load_config(path).vocab_size, sets.largest_id
        check.detail = f"ids up to {largest} of {size}"
        if largest >= size:
            report.problem(check, f"rows for {path}: {no_embedding(largest, size)}")
    if recipe.trained_role == "policy":
        with report.check("end of a turn") as check:
            _check_end_of_turn(report, check, recipe, path, tokenizer)


def _check_end_of_turn(
    report: Report, check: Check, recipe: Recipe, path: str, tokenizer: Any
) -> None:
    """Reports a chat template whose last token does not stop sampling: no sample would ever end."""
    stops = _stop_ids(path, tokenizer)
    for source in recipe.data.sources:
        last = _last_token(tokenizer, template_call(source))
        if last is None:
            continue
        last_text = tokenizer.decode([last])
        check.detail = f"{last_text!r}"
        if last in stops or _stops_at(recipe, last_text):
            continue
        names = ", ".join(repr(tokenizer.decode([stop_id])) for stop_id in sorted(stops))
        problem = (
            f"the chat template ends an answer with {last_text!r}, and sampling stops at {names}: "
            "the trained model does not learn to stop, so its answers run on to max_new_tokens; "
        )
        remedy = f"name it in rollout.stop, or make it eos_token (generation_config.json of {path})"
        if last in special_ids(tokenizer):
            report.warn(check, problem + remedy)
        else:
            report.problem(
                check,
                problem + "give data.chat_template one that ends a turn with a token of its own",
            )


def _stop_ids(path: str, tokenizer: Any) -> set[int]:
    generation = load_generation_config(path)
    return set(eos_token_ids(SimpleNamespace(generation_config=generation), tokenizer))


def _stops_at(recipe: Recipe, text: str) -> bool:
    settings = recipe.rollout_settings
    stop: Sequence[str] = () if settings is None else settings.stop
    return any(stop_string in text for stop_string in stop)


def _last_token(tokenizer: Any, call: dict[str, Any]) -> int | None:
    """The last loss token of an answer to a made-up question; None where the template refuses that
    conversation, which says nothing about others.
    """
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": ANSWER},
    ]
    try:
        rendered = render_conversation(
            tokenizer, messages, ends=turn_ends(tokenizer), turns="last", variables=call
        )
    except Unmarkable:
        return None
    tokenised = tokenise(tokenizer, [rendered])[0]
    if isinstance(tokenised, Unmarkable):
        return None
    ids, mask = tokenised
    return int(ids[mask][-1])
