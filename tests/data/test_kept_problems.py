"""Problems on disk: made once for all that they depend on (core.files.computed_once)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from postgrad.core import files
from postgrad.data import gym
from postgrad.data.gym import read_gym

MADE = [{"question": "é?", "answer": None, "metadata": {"score": 0.1, "far": float("inf")}}]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path))
    return tmp_path / "problems"


@pytest.fixture
def asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests that were made anew."""
    requests: list[str] = []
    monkeypatch.setattr(gym, "_ask", lambda request: requests.append(request) or MADE)
    return requests


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """read(): the problems, as a process that has just started reads them."""

    def reader(task: str = "any", size: int = 1, seed: int = 0) -> list[Any]:
        monkeypatch.setattr(gym, "_cached_entries", {})
        return list(read_gym(task, {"least": 3}, size, seed))

    return reader


def test_problems_are_made_once_for_all_commands(
    folder: Path, asked: list[str], read: Callable[..., list[Any]]
) -> None:
    first = read()
    assert first[0][1].items() >= MADE[0].items()
    assert read() == first
    assert len(asked) == len(list(folder.iterdir())) == 1


def test_other_problems_are_made(asked: list[str], read: Callable[..., list[Any]]) -> None:
    for other in ({}, {"task": "other"}, {"size": 2}, {"seed": 1}):
        read(**other)
    assert len(set(asked)) == 4


def test_another_version_of_a_library_makes_them_again(
    asked: list[str], read: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    read()
    assert {"reasoning-gym", "sympy", "mpmath"} <= gym._libraries()
    monkeypatch.setattr(
        gym, "version", lambda name: "0" if name == "mpmath" else files.version(name)
    )
    read()
    read()
    assert len(asked) == 2
