"""A base model under a chat template: its own end is <|endoftext|>, a turn's is <|im_end|>."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from helpers.tiny_runs import MODEL
from postgrad.models.fresh import make_fresh
from postgrad.models.settings import ModelInit

END, TURN_END = "<|endoftext|>", "<|im_end|>"
END_ID, TURN_END_ID = 0, 2


@torch.no_grad()
def write_base(to: Path) -> str:
    """Writes the model; behind a question it answers with <|im_end|>, and again."""
    make_fresh(ModelInit.model_validate(copy.deepcopy(MODEL["init"])), [], 0, to)
    for name, value in (("tokenizer_config", END), ("generation_config", END_ID)):
        file = to / f"{name}.json"
        stated: dict[str, Any] = json.loads(file.read_text())
        key = "eos_token_id" if isinstance(value, int) else "eos_token"
        file.write_text(json.dumps({**stated, key: value}))
    lm: Any = AutoModelForCausalLM.from_pretrained(to, dtype=torch.float32)
    hidden = lm.model(torch.tensor([[5]])).last_hidden_state[0, -1]
    embedding = lm.get_input_embeddings().weight
    embedding.copy_(0.01 * embedding)
    embedding[:] += 0.02 * hidden  # every token leads to the same state,
    embedding[TURN_END_ID] = hidden  # and that to the end of a turn
    lm.save_pretrained(to)
    return str(to)
