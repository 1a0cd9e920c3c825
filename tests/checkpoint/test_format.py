"""docs/checkpoint-format.md is all that a reader needs: its own reader reads what we write."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from postgrad.checkpoint.settings import CheckpointSettings
from postgrad.checkpoint.store import CheckpointStore

PAGE = Path(__file__).parents[2] / "docs" / "checkpoint-format.md"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}


@pytest.fixture
def reader() -> dict[str, Any]:
    """The names that the page's Python defines."""
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert len(code) == 1
    names: dict[str, Any] = {}
    exec(code[0], names)  # noqa: S102  # our own page
    return names


def test_the_reader_of_the_page_finds_the_newest_whole_one_and_reads_every_bit(
    reader: dict[str, Any],
    tmp_path: Path,
    make_state: Callable[..., Any],
    make_tensors: Callable[[int], Any],
    same: Callable[..., bool],
) -> None:
    store = CheckpointStore(tmp_path, CheckpointSettings())
    for step in (1, 2, 3):
        store.save(make_state(step), make_tensors(step))
    (tmp_path / "step-000003" / "state.json").write_text("{}", "utf-8")
    newest = reader["newest"](tmp_path)
    assert newest.name == "step-000002"
    for stem, wanted in make_tensors(2).items():
        read = reader["tensors"](newest / f"{stem}.safetensors")
        tensors = {
            name: torch.frombuffer(bytearray(data), dtype=DTYPES[dtype]).reshape(shape)
            for name, (dtype, shape, data) in read.items()
        }
        assert same(tensors, wanted)


def test_every_key_of_state_and_manifest_is_on_the_page(
    tmp_path: Path, make_state: Callable[..., Any], make_tensors: Callable[[int], Any]
) -> None:
    path = CheckpointStore(tmp_path, CheckpointSettings()).save(make_state(1), make_tensors(1))
    page = PAGE.read_text("utf-8")
    for name in ("state.json", "manifest.json"):
        for key in json.loads((path / name).read_text("utf-8")):
            assert f"`{key}`" in page, f"{name}: {key}"
