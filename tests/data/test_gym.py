"""reasoning-gym: the same problems every time, and nothing shared between near seeds."""

from pathlib import Path
from typing import Any

import pytest

from postgrad.core.errors import UsageError
from postgrad.data import gym
from postgrad.data.overlap import keys
from postgrad.data.rows import read_rows
from postgrad.data.settings import DataSettings

PATH = "reasoning-gym:spell_backward"


def settings(**more: Any) -> DataSettings:
    return DataSettings(path=PATH, **{"size": 50, "task": {"min_word_len": 5}, **more})


@pytest.mark.slow
def test_rows_name_what_makes_them_again() -> None:
    import reasoning_gym  # half a second: not at collection

    for row in list(read_rows(settings()))[:3]:
        task = reasoning_gym.create_dataset(row.values["task"], **row.values["parameters"])
        assert task[row.values["index"]]["question"] == row.values["question"]
        assert task[row.values["index"]]["answer"] == row.values["answer"]
        assert len(row.values["answer"]) >= 5


@pytest.mark.slow
def test_the_same_settings_give_the_same_problems_and_a_smaller_size_the_first_of_them() -> None:
    questions = [row.values["question"] for row in list(read_rows(settings()))]
    assert questions == [row.values["question"] for row in list(read_rows(settings()))]
    assert questions[:10] == [row.values["question"] for row in list(read_rows(settings(size=10)))]


@pytest.mark.slow
def test_a_task_is_made_once_however_often_its_rows_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path))
    asked: list[str] = []
    ask = gym._ask

    def counted(request: str) -> Any:
        asked.append(request)
        return ask(request)

    monkeypatch.setattr(gym, "_ask", counted)
    monkeypatch.setattr(gym, "_cached_entries", {})
    monkeypatch.setattr(gym, "KEPT", 4)
    first = list(read_rows(settings(seed=3)))
    assert list(read_rows(settings(seed=3))) == first
    assert len(asked) == 1
    monkeypatch.setattr(gym, "_ask", lambda request: asked.append(request) or [{"question": "?"}])
    for seed in range(4, 4 + gym.KEPT):
        list(read_rows(settings(seed=seed)))
    assert len(asked) == len(set(asked)) == gym.KEPT + 1
    assert len(gym._cached_entries) == gym.KEPT


@pytest.mark.slow
@pytest.mark.parametrize(
    "task", ["word_ladder", pytest.param("polynomial_multiplication", marks=pytest.mark.slow)]
)
def test_problems_do_not_depend_on_the_order_of_hashes(
    task: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows: list[Any] = []
    for order in ("1", "2"):
        monkeypatch.setenv("POSTGRAD_CACHE", str(tmp_path / order))
        monkeypatch.setenv("PYTHONHASHSEED", order)
        monkeypatch.setattr(gym, "_cached_entries", {})
        rows.append(
            [
                row.values
                for row in list(read_rows(DataSettings(path=f"reasoning-gym:{task}", size=3)))
            ]
        )
    assert rows[0] == rows[1]


def test_a_problem_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __getitem__(self, index: int) -> Any:
            raise RuntimeError("no path")

    monkeypatch.setattr("reasoning_gym.create_dataset", lambda task, **parameters: Broken())
    with pytest.raises(UsageError, match=r"'maze' makes no problem 0 .* RuntimeError: no path"):
        gym._entries("maze", {}, {"size": 1, "seed": 1})


@pytest.mark.slow
def test_near_seeds_share_no_more_than_chance() -> None:
    """reasoning-gym seeds problem i with seed + i: unmixed, seeds 1 and 2 share all but one."""
    assert len(keys(settings(seed=1)) & keys(settings(seed=2))) <= 2


@pytest.mark.slow
def test_an_unknown_task_or_parameter_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'spell_backward'"):
        list(read_rows(DataSettings(path="reasoning-gym:spell_backwards")))
    for parameters, reason in (
        ({"min_word_length": 5}, "did you mean 'min_word_len'"),
        ({"seed": 5}, r"say data\.seed instead"),
        ({"min_word_len": 9, "max_word_len": 3}, "refuses its parameters"),
    ):
        with pytest.raises(UsageError, match=reason):
            gym._entries("spell_backward", parameters, {**parameters, "size": 1, "seed": 1})
