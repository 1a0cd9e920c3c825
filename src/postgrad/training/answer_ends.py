"""Whether sampling stops where the chat template of the training data ends an answer, and a call of
a tool.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from postgrad.data.answer_spans import Unmarkable
from postgrad.data.chat_format import Message
from postgrad.data.loss_masks import tokenise
from postgrad.data.settings import DataSettings, RowSettings
from postgrad.data.templates import render_conversation, template_call, turn_ends
from postgrad.models.config import load_generation_config
from postgrad.models.end_tokens import with_ends
from postgrad.recipe.recipe import Recipe, RLRecipe
from postgrad.rollout.environments.sets import as_played
from postgrad.rollout.local.rows import eos_token_ids

QUESTION = "What is one and one?"
ANSWER = "It is two."
CALL_ID = "call00000"  # as templates of Mistral demand


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """The last token of the answers of a dataset, or of the calls of tools in them, as its chat
    template writes them.
    """

    text: str
    problem: str = ""  # why sampling runs on behind it; "": it stops there
    is_learned: bool = True  # a token of its own, which the policy learns to write at the end


def answer_ends(recipe: Recipe, path: str, tokenizer: Any) -> Iterator[AnswerEnd]:
    """Of each dataset whose answers the policy at `path` learns, or is asked to write.

    In RL the policy learns from what it samples: there a template without an end token is no
    problem.
    """
    generation = with_ends(load_generation_config(path), tokenizer, recipe.model.eos_token)
    stops = set(eos_token_ids(SimpleNamespace(generation_config=generation), tokenizer))
    names = ", ".join(repr(tokenizer.decode([stop_id])) for stop_id in sorted(stops))
    rollout = recipe.rollout_settings
    rl = isinstance(recipe, RLRecipe)
    data = as_played(recipe.environment, recipe.data) if rl else recipe.data
    for source, (kind, turn) in [(s, turn) for s in data.sources for turn in _turns(s)]:
        last = _last_token(tokenizer, source, turn)
        if last is None:
            continue
        text = tokenizer.decode([last])
        special = turn_ends(tokenizer).fullmatch(text) is not None
        if last in stops or any(stop in text for stop in (rollout.stop if rollout else ())):
            yield AnswerEnd(text)
        elif special:
            yield AnswerEnd(
                text,
                f"the chat template ends {kind} with {text!r}, and sampling stops only at "
                f"{names}: answers run on behind this end to max_new_tokens, here and wherever "
                f"the exported model is used; set model.eos_token = {json.dumps(text)}, which the "
                "export has as eos_token_id in generation_config.json",
            )
        elif not rl:
            yield AnswerEnd(
                text,
                f"the chat template ends an answer with {text!r}, and sampling stops at {names}: "
                "the trained model does not learn to stop, so its answers run on to "
                "max_new_tokens; give data.chat_template one that ends a turn with a token of its "
                "own",
                is_learned=False,
            )


def _turns(source: RowSettings) -> Iterator[tuple[str, Message]]:
    """What the policy may write to end a turn: in words, and as a message."""
    yield "an answer", {"role": "assistant", "content": ANSWER}
    tools: Sequence[Any] = template_call(source).get("tools") or ()
    for tool in tools[:1]:
        function: dict[str, Any] = {
            "name": tool.get("function", tool).get("name", "get"),
            "arguments": {},
        }
        call: dict[str, Any] = {"type": "function", "id": CALL_ID, "function": function}
        yield "a call of a tool", {"role": "assistant", "content": "", "tool_calls": [call]}


def _last_token(tokenizer: Any, source: Any, turn: Message) -> int | None:
    """The last loss token of an answer to a made-up question; None for plain text, and where the
    template refuses that conversation, which says nothing about others.
    """
    if isinstance(source, DataSettings) and source.text:
        return None
    try:
        rendered = render_conversation(
            tokenizer,
            [{"role": "user", "content": QUESTION}, turn],
            ends=turn_ends(tokenizer),
            turns="last",
            variables=template_call(source),
        )
    except Unmarkable:
        return None
    (tokenised,) = tokenise(tokenizer, [rendered])
    if isinstance(tokenised, Unmarkable):
        return None
    return int(tokenised.ids[tokenised.mask][-1])
