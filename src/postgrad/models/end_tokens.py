"""The tokens that end an answer beside a model's own: model.eos_token."""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from transformers import GenerationConfig

from postgrad.core.errors import UsageError

SHOWN = 8  # special tokens in a message


def with_ends(
    generation: GenerationConfig | None, tokenizer: Any, eos_token: Sequence[str]
) -> GenerationConfig | None:
    """A model's generation config with the tokens `eos_token` before those that end its answers
    already: the config's, and the tokenizer's. Unchanged where eos_token is ().

    vLLM and transformers' `generate` stop at each of eos_token_id. Raises UsageError as
    require_special does.
    """
    if not eos_token:
        return generation
    added = require_special(tokenizer, eos_token)
    stated = generation.eos_token_id if generation is not None else None
    several = stated if isinstance(stated, Iterable) else [stated]
    ends = dict.fromkeys([*added, *several, tokenizer.eos_token_id])
    if generation is None:
        generation = GenerationConfig(pad_token_id=tokenizer.pad_token_id)
    changed = copy.deepcopy(generation)  # a model in this process may have the same
    changed.eos_token_id = [int(token_id) for token_id in ends if token_id is not None]
    return changed


def require_special(tokenizer: Any, eos_token: Sequence[str]) -> list[int]:
    """The ids of the tokens. Raises UsageError for a text that is not a special token."""
    ids = {str(token): token_id for token_id, token in tokenizer.added_tokens_decoder.items()}
    for text in eos_token:
        if text not in ids:
            few = ", ".join(map(repr, list(ids)[:SHOWN])) + (", ..." if len(ids) > SHOWN else "")
            raise UsageError(
                f"model.eos_token: {text!r} is not a special token of the tokenizer at "
                f"{tokenizer.name_or_path}, so no answer could end with it: give one of its own "
                f"({few}), or leave the key out; rollout.stop takes any text"
            )
    return [ids[text] for text in eos_token]
