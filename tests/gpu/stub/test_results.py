"""The committed results say where each of them is from."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.stub_results import Results

FILE = Path(__file__).parent / "results.json"
SOURCE = {"commit", "date", "command"}


def entries(of_torch: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every entry below a version of torch: kinds without cases are entries themselves."""
    for kind, entry in of_torch.items():
        if kind != "versions":
            yield from [(kind, entry)] if "measured" in entry else entry.items()


@pytest.mark.parametrize("torch", ["2.11.0", "2.13.0"])
def test_each_entry_says_commit_date_and_command(torch: str) -> None:
    of_torch = json.loads(FILE.read_text("utf-8"))[torch]
    assert of_torch["versions"]["torch"] == torch
    named = list(entries(of_torch))
    assert len(named) > 40
    assert [name for name, entry in named if set(entry) != SOURCE | {"measured"}] == []
    assert [name for name, entry in named if not all(entry.values())] == []
    assert all(entry["command"].startswith("pytest ") for _, entry in named)


def test_no_result_names_a_folder_of_a_machine(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    message = (
        "out of memory at 3/4 of it: postgrad resume /tmp/a/b/7b-sft --batch.micro_train_tokens 8"
    )
    Results(file, {"torch": "2.11.0"}, {}).keep("jobs", {"run": {"refused": message}}, "sft")
    (entry,) = json.loads(file.read_text("utf-8"))["2.11.0"]["jobs"].values()
    assert entry["measured"]["run"]["refused"] == message.replace("/tmp/a/b/", "RUNS/")
    assert "/tmp/" not in FILE.read_text("utf-8")


def test_an_entry_replaces_the_one_before_and_no_other(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    first = Results(file, {"torch": "2.11.0"}, {"commit": "a"})
    first.keep("jobs", {"launches": 1, "waits": 0}, "sft")
    first.keep("jobs", {"launches": 2}, "dpo")
    first.keep("head", {"launches": 3})
    Results(file, {"torch": "2.11.0"}, {"commit": "b"}).keep("jobs", {"launches": 4}, "sft")
    Results(file, {"torch": "2.9.0"}, {"commit": "b"}).keep("head", {"launches": 5})
    assert json.loads(file.read_text("utf-8")) == {
        "2.11.0": {
            "versions": {"torch": "2.11.0"},
            "jobs": {
                "sft": {"commit": "b", "measured": {"launches": 4}},
                "dpo": {"commit": "a", "measured": {"launches": 2}},
            },
            "head": {"commit": "a", "measured": {"launches": 3}},
        },
        "2.9.0": {
            "versions": {"torch": "2.9.0"},
            "head": {"commit": "b", "measured": {"launches": 5}},
        },
    }
