"""What the last model of a pipeline answers to a few questions, as plain transformers runs it: no
engine of ours, and the model's own code for images.
"""

import inspect
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from postgrad.core.media import images_kept_in
from postgrad.core.records import Author, Prompt
from postgrad.evaluation.answers import read_set
from postgrad.models.config import load_config
from postgrad.models.export import read_plain
from postgrad.models.image_reader import ImageReader
from postgrad.models.supported import causal_class
from postgrad.models.tokenizer import load_tokenizer
from postgrad.recipe.recipe import Answering
from postgrad.rollout.engine import Completion
from postgrad.rollout.environment import Environment
from postgrad.rollout.environments.sets import dialogues
from postgrad.rollout.local.rows import eos_token_ids
from postgrad.training.rows import image_reader

# Arguments of forwards that say which tokens are of images (Qwen's types, Gemma 3).
MARKS = "mm_token_type_ids", "token_type_ids"


@dataclass(frozen=True, slots=True)
class Answer:
    """The conversation after a question."""

    question: str
    reference: str | None  # answer
    # (author, text) in turn; the model ("policy") has the first and the last, between them it
    # alternates with the environment. Where that failed, the last is why.
    turns: tuple[tuple[Author, str], ...]

    @property
    def answer(self) -> str:
        """The model's last turn."""
        return self.written[-1]

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
    `transformers.generate`. A model that reads images sees those of the rows and of replies.
    """
    tokenizer = load_tokenizer(model)
    lm = read_plain(model, causal_class(load_config(model)), torch.float32)
    reader = image_reader(model, tokenizer)
    writer = _Writer(lm, tokenizer, recipe, reader)
    environments = dialogues(recipe.environment, recipe.data, tokenizer, reader=reader)
    with TemporaryDirectory(prefix="postgrad-") as folder, images_kept_in(Path(folder)):
        prompts = read_set(recipe, 0, tokenizer, reader).all()[:count]  # none is trained on
        return [_answer(writer, environments.of(prompt), prompt) for prompt in prompts]


def _answer(writer: "_Writer", world: Environment, prompt: Prompt) -> Answer:
    episode = world.reset(prompt, 0)
    ids: list[int] = prompt.token_ids.tolist()
    images = [image.digest for image in prompt.images]
    turns: list[tuple[Author, str]] = []
    while True:
        written = writer.write(ids, images, prompt.ticket, len(turns) // 2)
        turns.append(("policy", written.text.strip()))
        seen = episode.step(written).result()
        if seen.failure is not None:  # told here: an error would lose the trained stages' summary
            turns.append(("environment", f"(no reply: {seen.failure.message})"))
            return Answer(prompt.question, prompt.answer, tuple(turns))
        ids += [*written.token_ids.tolist(), *seen.token_ids.tolist()]
        images += [image.digest for image in seen.images]
        if seen.done or not writer.room(ids):
            return Answer(prompt.question, prompt.answer, tuple(turns))
        turns.append(("environment", writer.text(seen.token_ids.tolist()).strip()))


class _Writer:
    """The model's next turn, greedily, with the limits of the recipe's evaluation."""

    def __init__(
        self, lm: Any, tokenizer: Any, recipe: Answering, reader: ImageReader | None
    ) -> None:
        self._lm = lm
        self._reader = reader
        taken = inspect.signature(lm.forward).parameters
        self._marks = [name for name in MARKS if name in taken]
        self._tokenizer = tokenizer
        self._stop = recipe.rollout.stop
        self._max_len = max(eval_set.max_len for eval_set in recipe.eval.sets)
        first = recipe.eval.samplings[0]
        self.most = first.max_new_tokens or recipe.rollout.max_new_tokens
        self._ends = eos_token_ids(lm, tokenizer)

    def room(self, ids: list[int]) -> int:
        """How many tokens the next turn may have after `ids`."""
        return max(0, min(self.most, self._max_len - len(ids)))

    def text(self, ids: list[int]) -> str:
        """Decodes `ids` without special tokens."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    @torch.inference_mode()
    def write(self, ids: list[int], images: list[str], ticket: int, turn: int) -> Completion:
        """Writes the model's next turn after `ids`, greedily. images: the hashes of those among
        them.
        """
        prefix = torch.tensor([ids])
        limits = {"stop_strings": list(self._stop), "tokenizer": self._tokenizer}
        out = self._lm.generate(
            input_ids=prefix,
            attention_mask=torch.ones_like(prefix),
            do_sample=False,
            max_new_tokens=self.room(ids),
            **self._pictures(prefix, images),
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

    def _pictures(self, prefix: Tensor, images: list[str]) -> dict[str, Tensor]:
        """What the model's own forward takes of the images among `prefix` [1, T]."""
        if not images or self._reader is None:
            return {}
        pixels = self._reader.together(images)
        of_images = (prefix == self._reader.token_id).int()
        arrays = {name: torch.as_tensor(array) for name, array in pixels.items()}
        return arrays | dict.fromkeys(self._marks, of_images)
