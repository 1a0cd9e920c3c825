"""One begin of text wherever a conversation becomes tokens, though the tokenizer writes one too."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.chat import chat_tokenizer, with_begin
from postgrad.data.conversations import load_conversations
from postgrad.data.pairs import load_pairs
from postgrad.data.prompts import load_prompts
from postgrad.data.settings import DataSettings, PairSettings
from postgrad.models.fresh import TEMPLATE
from postgrad.rollout.environments.template import Template
from postgrad.rollout.settings import SamplingSettings
from postgrad.tools.chat.talker import Talker
from postgrad.tools.serve.images import RequestImages
from postgrad.tools.serve.wire import Encoder, ServerLimits, parse

USER = {"role": "user", "content": "q"}
GOOD = {"role": "assistant", "content": "good"}
BAD = {"role": "assistant", "content": "bad"}
Ids = list[int]


def of_transformers(tokenizer: Any, messages: list[dict[str, str]], generation: bool) -> Ids:
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=generation)
    return list(rendered["input_ids"])


def up_to_end(tokenizer: Any, messages: list[dict[str, str]]) -> Ids:
    """Without the line break behind the token that ends the answer, which nothing learns from."""
    ids = of_transformers(tokenizer, messages, False)
    return ids[: len(ids) - ids[::-1].index(tokenizer.eos_token_id)]


def of_rows(tokenizer: Any, folder: Path) -> list[tuple[Ids, Ids]]:
    """Tokens of rows of every job, each with those of transformers."""
    path = folder / "rows.jsonl"
    path.write_text(json.dumps({"question": "q", "answer": "good"}))
    paired = folder / "pairs.jsonl"
    paired.write_text(json.dumps({"chosen": [USER, GOOD], "rejected": [USER, BAD]}))
    rows = DataSettings(path=str(path))
    (learned,) = load_conversations(rows, tokenizer).all()
    prompt = load_prompts(rows, tokenizer, max_prompt_tokens=90).draw(0, seed=0)
    (pair,) = load_pairs(PairSettings(path=str(paired)), tokenizer).all()
    return [
        (learned.token_ids.tolist(), of_transformers(tokenizer, [USER, GOOD], False)),
        (prompt.token_ids.tolist(), of_transformers(tokenizer, [USER], True)),
        (pair.chosen.tolist(), up_to_end(tokenizer, [USER, GOOD])),
        (pair.rejected.tolist(), up_to_end(tokenizer, [USER, BAD])),
    ]


def of_environments(tokenizer: Any, folder: Path) -> list[tuple[Ids, Ids]]:
    """A conversation that an environment begins, and one that goes on after its reply."""
    template = Template(tokenizer, {})
    begun, _ = template.opening([USER])
    turn = tokenizer("good" + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
    reply = template.after([USER], closed=True).tolist()
    return [
        (begun.tolist(), of_transformers(tokenizer, [USER], True)),
        ([*begun.tolist(), *turn, *reply], of_transformers(tokenizer, [USER, GOOD, USER], True)),
    ]


def of_chat(tokenizer: Any, folder: Path) -> list[tuple[Ids, Ids]]:
    """The prompt of `postgrad chat` after an answer."""
    engine: Any = SimpleNamespace(max_len=200)
    talker = Talker(engine, tokenizer, variables={}, system=None)
    talker.messages = [USER, GOOD]
    asked = talker.request("q", SamplingSettings(max_new_tokens=8), 0).token_ids
    return [(asked.tolist(), of_transformers(tokenizer, [USER, GOOD, USER], True))]


def of_serve_reward(tokenizer: Any, folder: Path) -> list[tuple[Ids, Ids]]:
    """Messages that a client sends, and the same as text."""
    text = tokenizer.apply_chat_template([USER, GOOD], tokenize=False)
    inputs = [{"messages": [USER, GOOD]}, {"text": text}]
    request = parse(json.dumps({"inputs": inputs}).encode(), ServerLimits())
    (ids, read), _ = Encoder(tokenizer, 200).encode(request.inputs, RequestImages(None))
    full_ids = of_transformers(tokenizer, [USER, GOOD], False)
    return [(ids.tolist(), up_to_end(tokenizer, [USER, GOOD])), (read.tolist(), full_ids)]


@pytest.mark.parametrize("writes", [True, False], ids=["template with begin", "template without"])
@pytest.mark.parametrize("read", [of_rows, of_environments, of_chat, of_serve_reward])
def test_tokens_are_those_of_transformers_with_no_second_begin_of_text(
    read: Callable[[Any, Path], list[tuple[Ids, Ids]]], writes: bool, tmp_path: Path
) -> None:
    begin = "{{ bos_token }}" if writes else ""
    tokenizer = with_begin(chat_tokenizer(begin + TEMPLATE))
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    for ids, wanted in read(tokenizer, tmp_path):
        assert ids == wanted
        assert ids.count(tokenizer.bos_token_id) == writes
