"""benchmarks/ifbench, with checkers that are written here."""

import json
from pathlib import Path

import pytest

from benchmarks.ifbench import ASKED, main
from postgrad.rewards.ifeval import copying, counts, markup, sequences, tasks


class NoWhitespace:
    """Takes a tab for none."""

    def __init__(self, name: str) -> None:
        self.name = name

    def build_description(self) -> None:
        pass

    def check_following(self, text: str) -> bool:
        return not any(sign in text for sign in " \r\n")


def test_every_kind_of_ifbench_is_asked() -> None:
    kinds = counts.KINDS | markup.KINDS | sequences.KINDS | tasks.KINDS
    repeats = {name for name in copying.KINDS if name.startswith("repeat:")}
    assert ASKED.keys() == kinds.keys() | repeats


def test_a_response_that_two_checkers_judge_differently_is_named_and_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    verifiers = {"format:no_whitespace": NoWhitespace}
    monkeypatch.setattr("benchmarks.ifbench.registry", lambda _: verifiers)
    assert main([str(tmp_path), "--to", str(tmp_path / "results.json")]) == 1
    written = json.loads((tmp_path / "results.json").read_text("utf-8"))
    row = written["kinds"]["format:no_whitespace"]
    assert (row["differ"], row["why"]) == (["tab"], [""])
    assert (row["follow here"], row["follow there"]) == (4, 5)
