"""Rows from a Python function of the user's own."""

from collections.abc import Iterator
from typing import Any

import pytest

from postgrad.core.errors import UsageError
from postgrad.data.gym import is_function
from postgrad.data.prompts import load_prompts
from postgrad.data.rows import read_rows
from postgrad.data.settings import DataSettings


def sums(size: int, seed: int, *, most: int = 9) -> Iterator[dict[str, Any]]:
    for i in range(size):
        a, b = (seed + i) % most, i % most
        yield {"question": f"{a} + {b}?", "answer": str(a + b), "parts": (a, b)}


def odd(size: int, seed: int) -> Iterator[Any]:
    yield {"question": "?", "answer": float("nan")}


def lists(size: int, seed: int) -> Iterator[Any]:
    yield ["?"]


def stops(size: int, seed: int) -> Iterator[Any]:
    yield {"question": "?", "answer": "1"}
    raise KeyError("level")


def nothing(size: int, seed: int) -> None: ...


def settings(function: str, **more: Any) -> DataSettings:
    return DataSettings(path=f"{__name__}:{function}", **more)


def test_a_function_gives_rows_for_its_size_seed_and_task() -> None:
    rows = list(read_rows(settings("sums", size=3, seed=2, task={"most": 4})))
    assert [row.values["question"] for row in rows] == ["2 + 0?", "3 + 1?", "0 + 2?"]
    assert rows[1].values["parts"] == [3, 1]
    assert rows[1].place.endswith("test_made:sums row 1")


def test_its_other_columns_are_the_prompts_metadata(tokenizer: Any) -> None:
    prompts = load_prompts(settings("sums", size=2), tokenizer, max_prompt_tokens=200)
    assert prompts.all()[1].metadata == {"parts": [1, 1]}
    assert prompts.all()[1].answer == "2"


@pytest.mark.parametrize(
    ("function", "task", "why"),
    [
        ("sum", {}, "has no 'sum'; did you mean 'sums'"),
        ("sums", {"least": 1}, r"cannot be called with \(size, seed, least=\)"),
        ("odd", {}, "row 0: not JSON"),
        ("lists", {}, "row 0: a row is a JSON object, this is list"),
        ("stops", {}, "stops row 1: the function raised KeyError: 'level'"),
        ("nothing", {}, "nothing row 0: the function raised TypeError: 'NoneType'"),
    ],
)
def test_what_is_wrong_with_a_function_or_its_rows_is_told(
    function: str, task: dict[str, Any], why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        list(read_rows(settings(function, size=2, task=task)))


def test_hub_ids_files_and_gym_tasks_are_no_functions() -> None:
    for path in (
        "openai/gsm8k",
        "rows.jsonl",
        "C:\\rows.jsonl",
        "a:b/c",
        "reasoning-gym:chain_sum",
    ):
        assert not is_function(path)
    assert is_function("my_package.my_file:rows")
