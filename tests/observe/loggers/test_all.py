"""Every logger is told each step once, and none of them ends a run."""

import importlib.util
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from postgrad.core.errors import UsageError
from postgrad.observe.loggers import all as module
from postgrad.observe.loggers.all import (
    ADAPTERS,
    Loggers,
    new_id,
    numbers,
    of_evaluation,
    recorded,
    require_installed,
)
from postgrad.observe.loggers.base import RunIdentity


class Remembers:
    """A logger in memory."""

    last = -1

    def __init__(self, run: RunIdentity) -> None:
        self.logged: list[tuple[int, Mapping[str, float]]] = []
        self.closed = 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.logged.append((step, values))

    def close(self) -> None:
        self.closed += 1


class KnowsTwo(Remembers):
    last = 2


class Fails(Remembers):
    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step == 2:
            raise ConnectionError("the network is away")
        super().log(step, values)


class NeverStarts(Remembers):
    def __init__(self, run: RunIdentity) -> None:
        raise OSError("no key")


def opened(folder: Path, patch: pytest.MonkeyPatch, *kinds: Any) -> tuple[Loggers, Any, list[str]]:
    """Loggers under their real names, of other kinds; what is told; warnings."""
    warnings: list[str] = []
    loggers = Loggers(warnings.append)
    names = list(ADAPTERS)[: len(kinds)]

    class Module:
        def __init__(self, kind: Any) -> None:
            self.TensorBoard = self.WandB = self.Trackio = kind

    modules = {
        f"postgrad.observe.loggers.{n}": Module(k) for n, k in zip(names, kinds, strict=True)
    }
    patch.setattr(module.importlib, "import_module", modules.__getitem__)
    loggers.open(names, RunIdentity(folder, "p", "n", "id", 0, {}))
    return loggers, loggers._loggers, warnings


def write(folder: Path) -> None:
    metrics = [{"step": n, "loss": n / 2, "reward": None} for n in (1, 2, 3)]
    text = "".join(json.dumps(line) + "\n" for line in metrics)
    (folder / "metrics.jsonl").write_text(text, "utf-8")
    lines = [
        {"step": 0, "update": 0, "set": None, "accuracy": 0.25, "evaluate_seconds": 1.0},
        {"step": 3, "update": 3, "set": "hard", "accuracy": 0.5, "margin_histogram": {}},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "eval.jsonl").write_text(text, "utf-8")


def test_the_runs_own_files_give_whole_steps_in_order(tmp_path: Path) -> None:
    assert list(recorded(tmp_path)) == []
    write(tmp_path)
    assert list(recorded(tmp_path)) == [
        (0, {"eval/accuracy": 0.25}),
        (1, {"loss": 0.5}),
        (2, {"loss": 1.0}),
        (3, {"loss": 1.5, "eval/hard/accuracy": 0.5}),
    ]


def test_a_logger_that_joins_is_told_what_it_lacks_and_no_step_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    loggers, loggers_by_name, warnings = opened(tmp_path, monkeypatch, Remembers, KnowsTwo)
    loggers.log(4, {"loss": 2.0})
    new, old = loggers_by_name.values()
    assert [step for step, _ in new.logged] == [0, 1, 2, 3, 4]
    assert [step for step, _ in old.logged] == [3, 4]
    assert new.logged[-1] == (4, {"loss": 2.0})
    loggers.close()
    loggers.close()
    assert (new.closed, warnings) == (1, [])


def test_a_logger_that_fails_is_told_of_once_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loggers, loggers_by_name, warnings = opened(
        tmp_path, monkeypatch, Fails, Remembers, NeverStarts
    )
    failing, other = loggers_by_name.values()
    for step in (1, 2, 3):
        loggers.log(step, {"loss": 1.0})
    assert [step for step, _ in failing.logged] == [1]
    assert failing.closed == 1
    assert [step for step, _ in other.logged] == [1, 2, 3]
    assert len(warnings) == 2
    assert "the logger trackio failed" in warnings[0]
    assert "OSError: no key" in warnings[0]
    assert "ConnectionError: the network is away" in warnings[1]


def test_only_finite_numbers_are_drawn() -> None:
    line = {"step": 3, "loss": 1, "nan": math.nan, "none": None, "text": "x", "inf": math.inf}
    assert numbers(line) == {"loss": 1.0}


def test_evaluations_have_the_names_of_the_recipe() -> None:
    line = {"step": 1, "update": 1, "set": None, "rows": 4, "accuracy": 0.5, "evaluate_seconds": 1}
    assert of_evaluation(line) == {"eval/rows": 4, "eval/accuracy": 0.5}
    assert "eval/hard/accuracy" in of_evaluation({**line, "set": "hard"})


def test_a_package_that_is_not_there_is_said_before_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"'wandb' needs .*: pip install 'postgrad\[wandb\]'"):
        require_installed(["wandb"])
    require_installed([])


def test_two_runs_of_a_recipe_are_two_curves() -> None:
    assert new_id() != new_id()
