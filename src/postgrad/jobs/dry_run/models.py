"""The models that a recipe names: reachable, of one vocabulary, with room for its rows, and with a
chat template whose turns end.
"""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from postgrad.data.templates import (
    Unmarkable,
    render_conversation,
    template_call,
    tokenise,
    turn_ends,
)
from postgrad.jobs import roles
from postgrad.jobs.dry_run.data import Sets
from postgrad.jobs.dry_run.report import Check, Report
from postgrad.jobs.dry_run.rows import special_ids
from postgrad.models.files import adapter_base, is_adapter
from postgrad.models.load import load_config, load_generation_config, load_tokenizer
from postgrad.models.rope import fixed_length, max_positions
from postgrad.recipe.load import ROLES
from postgrad.recipe.recipe import Answering, Recipe, RewardRecipe
from postgrad.rollout.local.stops import eos_token_ids

QUESTION = "What is one and one?"
ANSWER = "It is two."


def reach(report: Report, recipe: Recipe, init: Path) -> tuple[str, Any] | None:
    """The policy's start and its tokenizer; None where it has none. A fresh model is made in `init`
    as the run would make it. Models of other roles are looked at too.
    """
    found = None
    with report.check("model") as check:
        path = roles.base_model(recipe, init)
        config = load_config(path)
        found = path, load_tokenizer(path)
        check.detail = _about(config, path)
        _positions(report, check, recipe, config, path)
    for role, path in _others(recipe):
        with report.check(f"model of {role}") as check:
            config = load_config(path)
            load_tokenizer(path)
            check.detail = _about(config, path)
    return found


def _about(config: Any, path: str) -> str:
    merged = f", an adapter merged into {adapter_base(path)}" if is_adapter(path) else ""
    return f"{config.model_type}, vocabulary of {config.vocab_size}{merged}"


def _others(recipe: Recipe) -> list[tuple[str, str]]:
    """(role, path) of the models beside the policy's."""
    owners = [(role, getattr(recipe, role, None)) for role in ROLES if role]
    return [
        (role, owner.model.source)
        for role, owner in owners
        if owner is not None and owner.model.source not in (None, recipe.model.source)
    ]


def _positions(report: Report, check: Check, recipe: Recipe, config: Any, path: str) -> None:
    known = max_positions(config)
    longest = max([recipe.data.max_len, *(one.max_len for one in recipe.eval.sets)])
    if known is not None and longest > known:
        report.problem(
            check,
            f"rows may have {longest} tokens (data.max_len, eval.max_len), and {path} has "
            f"{known} positions ({_limit_of(config)}): what comes after them it was never made "
            f"for; say data.max_len = {known} or less",
        )


def _limit_of(config: Any) -> str:
    """The key that says how many positions a model has."""
    rotates = fixed_length(config) == max_positions(config)
    return "its rope_type rotates by length beyond them" if rotates else "max_position_embeddings"


def look_at_tokens(report: Report, recipe: Recipe, path: str, tokenizer: Any, sets: Sets) -> None:
    """Whether the model knows all token ids of the data, and how a turn ends."""
    with report.check("tokens") as check:
        size, largest = load_config(path).vocab_size, sets.largest_id
        check.detail = f"ids up to {largest} of {size}"
        if largest >= size:
            report.problem(
                check,
                f"the rows have token id {largest}, and {path} has embeddings for {size} "
                "tokens: its tokenizer is of another model, or tokens were added to it without "
                "rows for them (resize_token_embeddings)",
            )
    if not isinstance(recipe, RewardRecipe):
        with report.check("end of a turn") as check:
            _look_at_end(report, check, recipe, path, tokenizer)


def _look_at_end(report: Report, check: Check, recipe: Recipe, path: str, tokenizer: Any) -> None:
    """An answer has to end with a token that ends sampling, or no sample ever ends."""
    stops = _stop_ids(path, tokenizer)
    for source in recipe.data.sources:
        last = _last_token(tokenizer, template_call(source))
        if last is None:
            continue
        said = tokenizer.decode([last])
        check.detail = f"{said!r}"
        if last in stops or _stops_at(recipe, said):
            continue
        names = ", ".join(repr(tokenizer.decode([one])) for one in sorted(stops))
        what = (
            f"the chat template ends an answer with {said!r}, and sampling stops at {names}: what "
            "is trained here does not learn to stop, so that answers run on to max_new_tokens; "
        )
        remedy = f"name it in rollout.stop, or make it eos_token (generation_config.json of {path})"
        if last in special_ids(tokenizer):
            report.warn(check, what + remedy)
        else:
            report.problem(
                check,
                what + "give data.chat_template one that ends a turn with a token of its own",
            )


def _stop_ids(path: str, tokenizer: Any) -> set[int]:
    generation = load_generation_config(path)
    return set(eos_token_ids(SimpleNamespace(generation_config=generation), tokenizer))


def _stops_at(recipe: Recipe, said: str) -> bool:
    stop: Sequence[str] = recipe.rollout.stop if isinstance(recipe, Answering) else ()
    return any(one in said for one in stop)


def _last_token(tokenizer: Any, call: dict[str, Any]) -> int | None:
    """The last token that is learned of an answer; None where the template refuses this one, which
    says nothing about others.
    """
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": ANSWER},
    ]
    try:
        one = render_conversation(
            tokenizer, messages, ends=turn_ends(tokenizer), turns="last", variables=call
        )
    except Unmarkable:
        return None
    found = tokenise(tokenizer, [one])[0]
    if isinstance(found, Unmarkable):
        return None
    ids, mask = found
    return int(ids[mask][-1])
