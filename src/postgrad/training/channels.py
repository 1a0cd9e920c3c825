"""Whether verifiers read what a policy thinks as if it were its answer: gpt-oss writes both into
one turn, in channels that only special tokens tell apart.
"""

from collections.abc import Iterator
from typing import Any

from postgrad.data.templates import template_call
from postgrad.models.named_templates import chat_template_of
from postgrad.recipe.recipe import Answering, Recipe
from postgrad.rewards.learned import REWARD_MODELS
from postgrad.rewards.registry import component_names
from postgrad.rollout.environments.tool_calls import format_of

FINAL = "<|channel|>final<|message|>"
# Verifiers that read no answer: they count, or their pattern says what they look for.
READ_ALL = (
    *REWARD_MODELS, "overlong", "stop_properly", "target_length", "relative_length", "repetition",
    "format", "regex",
)  # fmt: skip


def thoughts_read(recipe: Recipe, tokenizer: Any) -> str | None:
    """What to tell where the policy writes harmony's channels and some of [[rewards]] read all of
    them; None where none does.
    """
    if not isinstance(recipe, Answering) or not recipe.rewards:
        return None
    names = component_names(recipe.rewards)
    reading = [
        name
        for name, reward in zip(names, recipe.rewards, strict=True)
        if reward.after is None and reward.type not in READ_ALL
    ]
    if not reading or "harmony" not in _formats(recipe, tokenizer):
        return None
    return (
        f"[[rewards]] {', '.join(map(repr, reading))}: the chat template is that of gpt-oss, whose "
        "turns have the policy's thoughts too (the channel `analysis`), and these verifiers read "
        f'them as part of the answer: say after = "{FINAL}" and special_tokens = true in each'
    )


def _formats(recipe: Answering, tokenizer: Any) -> Iterator[str | None]:
    """How the policy writes calls and channels: as environments say, and as templates teach it."""
    for environment in recipe.environment.sets if recipe.environment else ():
        yield (environment.model_extra or {}).get("tool_format")
    for source in (*recipe.data.sources, *(eval_set.data for eval_set in recipe.eval.sets)):
        stated = template_call(source).get("chat_template")
        if stated is not None or tokenizer.chat_template:
            yield format_of(chat_template_of(tokenizer, stated))
