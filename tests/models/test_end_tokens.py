"""model.eos_token in a generation config: before the ends that are there, and none twice."""

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GenerationConfig

from postgrad.core.errors import UsageError
from postgrad.models.end_tokens import with_ends

TOKENIZER: Any = SimpleNamespace(
    added_tokens_decoder={5: "<eos>", 6: "<end_of_turn>", 7: "<|eot_id|>"},
    eos_token_id=5,
    pad_token_id=0,
    name_or_path="org/base",
)


@pytest.mark.parametrize(
    ("stated", "named", "wanted"),
    [
        (5, ["<end_of_turn>"], [6, 5]),
        ([1, 5], ["<|eot_id|>", "<end_of_turn>"], [7, 6, 1, 5]),
        ([5, 6], ["<end_of_turn>"], [6, 5]),
        (None, ["<end_of_turn>"], [6, 5]),
        (0, ["<eos>"], [5, 0]),  # 0 is a token too
    ],
)
def test_named_tokens_come_before_those_that_end_answers_already(
    stated: Any, named: list[str], wanted: list[int]
) -> None:
    generation = GenerationConfig(eos_token_id=stated, temperature=0.5, do_sample=True)
    changed: Any = with_ends(generation, TOKENIZER, named)
    assert changed.eos_token_id == wanted
    assert changed.temperature == 0.5
    assert generation.eos_token_id == stated  # of a model that others may have too


def test_a_model_without_a_generation_config_gets_one() -> None:
    changed: Any = with_ends(None, TOKENIZER, ["<end_of_turn>"])
    assert (changed.eos_token_id, changed.pad_token_id) == ([6, 5], 0)


def test_nothing_changes_where_nothing_is_named() -> None:
    generation = GenerationConfig(eos_token_id=5)
    assert with_ends(generation, TOKENIZER, ()) is generation
    assert with_ends(None, TOKENIZER, ()) is None


def test_a_text_that_is_no_special_token_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"'<\|im_end\|>' is not a special token .* org/base"):
        with_ends(None, TOKENIZER, ["<eos>", "<|im_end|>"])
