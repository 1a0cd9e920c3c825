"""Plain transformers answers held-out questions with an exported model: no code of ours between."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from postgrad.data.prompts import load_prompts
from postgrad.data.settings import DataSettings


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model wrote for a question, beside the reference answer."""

    question: str
    reference: str | None
    answer: str

    def to_json(self) -> dict[str, str | None]:
        """For summary.json."""
        return {"question": self.question, "reference": self.reference, "answer": self.answer}


def ask(model: str, settings: DataSettings, count: int, max_new_tokens: int) -> list[Answer]:
    """Greedy answers to the first `count` questions of a dataset by `transformers.generate`."""
    tokenizer = cast(Any, AutoTokenizer).from_pretrained(model)
    lm = cast(Any, AutoModelForCausalLM).from_pretrained(model, dtype=torch.float32)
    few = settings.model_copy(update={"limit": count})
    prompts = load_prompts(few, tokenizer, max_prompt_tokens=settings.max_len - max_new_tokens)
    return [
        Answer(
            prompt.question,
            prompt.answer,
            _answer(lm, tokenizer, prompt.token_ids.tolist(), max_new_tokens),
        )
        for prompt in prompts.all()
    ]


def _answer(lm: Any, tokenizer: Any, prompt: Sequence[int], max_new_tokens: int) -> str:
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        written = lm.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_new_tokens,
        )
    return tokenizer.decode(written[0, len(prompt) :], skip_special_tokens=True).strip()
