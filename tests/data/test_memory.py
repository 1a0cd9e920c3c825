"""Memory that a run holds for the rows of its data: bytes for each, however long they are."""

import gc
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from postgrad.data import cache as caching
from postgrad.data import packed, texts
from postgrad.data.conversations import load_conversations
from postgrad.data.mixture import training_prompts, training_rows
from postgrad.data.overlap import HeldOut
from postgrad.data.pairs import load_labelled, load_pairs
from postgrad.data.settings import MixSettings, PairMixSettings
from postgrad.data.step_tokens import load_steps

FEW, MANY = 20, 80
LONG = "long words " * 40  # characters of each text of a row: a token each
HELD = 300  # bytes that a row may take: where it begins and ends in files, its order, its index


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(packed, "IN_MEMORY", 2**12)
    monkeypatch.setattr(packed, "PIECE", 2**12)
    monkeypatch.setattr(texts, "TOGETHER", 2**12)
    monkeypatch.setattr(caching, "SMALLEST", 2)


def conversations(path: str, tokenizer: Any, **settings: Any) -> Any:
    data = MixSettings(path=path, messages="messages", max_len=10**5, **settings)
    return training_rows(load_conversations, data, tokenizer, exclude=HeldOut())


def prompts(path: str, tokenizer: Any, **settings: Any) -> Any:
    data = MixSettings(path=path, max_len=10**5, **settings)
    return training_prompts(data, tokenizer, max_new_tokens=8, exclude=HeldOut())


def pairs(path: str, tokenizer: Any, **settings: Any) -> Any:
    data = PairMixSettings(path=path, max_len=10**5, **settings)
    return training_rows(load_pairs, data, tokenizer, exclude=HeldOut())


def labelled(path: str, tokenizer: Any, **settings: Any) -> Any:
    data = PairMixSettings(path=path, max_len=10**5, **settings)
    return training_rows(load_labelled, data, tokenizer, exclude=HeldOut())


def steps(path: str, tokenizer: Any, **settings: Any) -> Any:
    data = PairMixSettings(path=path, max_len=10**5, chosen="", completion="", **settings)
    return training_rows(load_steps, data, tokenizer, exclude=HeldOut())


def written(path: Path, rows: int) -> str:
    """Rows that every kind of data can read."""
    with path.open("w", encoding="utf-8") as file:
        for n in range(rows):
            turns = [("user", f"{n}? {LONG}"), ("assistant", f"{n}! {LONG}")]
            row = {
                "messages": [{"role": role, "content": text} for role, text in turns],
                "question": f"{n}?",
                "answer": LONG,
                "more": LONG,
                "prompt": f"{n}?",
                "chosen": f"yes {LONG}",
                "rejected": f"no {LONG}",
                "completions": [f"first {LONG}", f"second {LONG}"],
                "labels": [True, False],
            }
            file.write(json.dumps(row) + "\n")
    return str(path)


def held_for(load: Callable[[], Any]) -> int:
    """Bytes that what `load` returns holds, all of Python's and NumPy's.

    The lesser of two loads: a table of the whole process (weakref keeps one of all finalizers)
    sometimes doubles, and does so in one of them at most.
    """

    def traced() -> int:
        gc.collect()
        tracemalloc.start()
        try:
            kept = load()
            gc.collect()
            return tracemalloc.get_traced_memory()[0] + 0 * len(kept)
        finally:
            tracemalloc.stop()

    load()  # what is imported, and compiled, once
    return min(traced(), traced())


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (conversations, {}),
        (conversations, {"cache": False, "split": "train[1%:]"}),
        (prompts, {}),
        (pairs, {}),
        (labelled, {"cache": False}),
        (steps, {}),
    ],
)
def test_a_row_takes_some_bytes_of_memory_however_long_it_is(
    kind: Callable[..., Any], settings: dict[str, Any], tmp_path: Path, tokenizer: Any
) -> None:
    def held(rows: int) -> int:
        path = written(tmp_path / f"{rows}.jsonl", rows)
        return held_for(lambda: kind(path, tokenizer, **settings))

    assert (held(MANY) - held(FEW)) / (MANY - FEW) < HELD < len(LONG)
