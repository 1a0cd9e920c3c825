"""Answers of an exported model to held-out questions, written by plain transformers.

Where the recipe has an environment, it answers the model's turns, as in an evaluation.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from postgrad.core.records import Author, Prompt
from postgrad.data.prompts import load_prompts
from postgrad.jobs import environments
from postgrad.models.load import load_tokenizer, read_plain
from postgrad.recipe.recipe import Answering
from postgrad.rollout.engine import Completion
from postgrad.rollout.environment import Environment, SingleTurn
from postgrad.rollout.local.stops import eos_token_ids


@dataclass(frozen=True, slots=True)
class Answer:
    """The conversation after a question."""

    question: str
    reference: str | None  # answer
    # (author, text) in turn; the model ("policy") has the first and the last, between them it
    # alternates with the environment
    turns: tuple[tuple[Author, str], ...]

    @property
    def answer(self) -> str:
        """The model's last turn."""
        return self.turns[-1][1]

    @property
    def written(self) -> tuple[str, ...]:
        """All turns of the model."""
        return tuple(text for author, text in self.turns if author == "policy")

    def to_json(self) -> dict[str, Any]:
        """Its entry in summary.json; turns only where there are several."""
        turns = [{"author": author, "text": text} for author, text in self.turns]
        return {
            "question": self.question,
            "reference": self.reference,
            "answer": self.answer,
            **({"turns": turns} if len(turns) > 1 else {}),
        }


def ask(model: str, recipe: Answering, count: int) -> list[Answer]:
    """Greedy answers to the first `count` questions of the recipe's first evaluation set by
    `transformers.generate`.
    """
    tokenizer = load_tokenizer(model)
    lm = read_plain(model, AutoModelForCausalLM, torch.float32)
    writer = _Writer(lm, tokenizer, recipe)
    world = environments.environment_of(recipe, tokenizer) or SingleTurn()
    first = recipe.eval.sets[0].data
    prompts = load_prompts(
        environments.with_tools(recipe, first).model_copy(update={"limit": count}),
        tokenizer,
        max_prompt_tokens=first.max_len - writer.most,
    )
    return [_answer(writer, world, prompt) for prompt in prompts.all()]


def _answer(writer: "_Writer", world: Environment, prompt: Prompt) -> Answer:
    episode = world.reset(prompt, 0)
    ids: list[int] = prompt.token_ids.tolist()
    turns: list[tuple[Author, str]] = []
    while True:
        written = writer.write(ids, prompt.ticket, len(turns) // 2)
        turns.append(("policy", written.text.strip()))
        seen = episode.step(written)
        ids += [*written.token_ids.tolist(), *seen.token_ids.tolist()]
        if seen.done or not writer.room(ids):
            return Answer(prompt.question, prompt.answer, tuple(turns))
        turns.append(("environment", writer.text(seen.token_ids.tolist()).strip()))


class _Writer:
    """The model's next turn, greedily, with the limits of the recipe's evaluation."""

    def __init__(self, lm: Any, tokenizer: Any, recipe: Answering) -> None:
        self._lm = lm
        self._tokenizer = tokenizer
        self._stop = recipe.rollout.stop
        self._max_len = max(eval_set.max_len for eval_set in recipe.eval.sets)
        self.most = recipe.eval.max_new_tokens or recipe.rollout.max_new_tokens
        self._ends = eos_token_ids(lm, tokenizer)

    def room(self, ids: list[int]) -> int:
        """How many tokens the next turn may have after `ids`."""
        return max(0, min(self.most, self._max_len - len(ids)))

    def text(self, ids: list[int]) -> str:
        """Decodes `ids` without special tokens."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    @torch.inference_mode()
    def write(self, ids: list[int], ticket: int, turn: int) -> Completion:
        """Writes the model's next turn after `ids`, greedily."""
        prefix = torch.tensor([ids])
        limits = {"stop_strings": list(self._stop), "tokenizer": self._tokenizer}
        out = self._lm.generate(
            input_ids=prefix,
            attention_mask=torch.ones_like(prefix),
            do_sample=False,
            max_new_tokens=self.room(ids),
            **(limits if self._stop else {}),
        )
        new: list[int] = out[0, len(ids) :].tolist()
        text = self.text(new)
        ended = new[-1] in self._ends or any(stop in text for stop in self._stop)
        return Completion(
            ticket=ticket,
            sample=0,
            turn=turn,
            token_ids=np.array(new, np.int32),
            logprobs=np.zeros(len(new), np.float32),  # greedy; no environment reads them
            finish_reason="stop" if ended else "length",
            versions=((0, len(new)),),
            text=text,
        )
