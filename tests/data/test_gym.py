"""reasoning-gym: the same problems every time, and nothing shared between near seeds."""

from typing import Any

import pytest
import reasoning_gym

from postgrad.core.errors import UsageError
from postgrad.data import gym
from postgrad.data.overlap import keys
from postgrad.data.rows import read_rows
from postgrad.data.settings import DataSettings

PATH = "reasoning-gym:spell_backward"


def settings(**more: Any) -> DataSettings:
    return DataSettings(path=PATH, **{"size": 50, "task": {"min_word_len": 5}, **more})


def test_rows_name_what_makes_them_again() -> None:
    for row in read_rows(settings())[:3]:
        made = reasoning_gym.create_dataset(row.values["task"], **row.values["parameters"])
        assert made[row.values["index"]]["question"] == row.values["question"]
        assert made[row.values["index"]]["answer"] == row.values["answer"]
        assert len(row.values["answer"]) >= 5


def test_the_same_settings_give_the_same_problems_and_a_smaller_size_the_first_of_them() -> None:
    whole = [row.values["question"] for row in read_rows(settings())]
    assert whole == [row.values["question"] for row in read_rows(settings())]
    assert whole[:10] == [row.values["question"] for row in read_rows(settings(size=10))]


def test_a_task_is_made_once_however_often_its_rows_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []
    create = reasoning_gym.create_dataset

    def counted(task: str, **parameters: Any) -> Any:
        made.append(parameters["seed"])
        return create(task, **parameters)

    monkeypatch.setattr(reasoning_gym, "create_dataset", counted)
    monkeypatch.setattr(gym, "_made", {})
    first = read_rows(settings(seed=3))
    assert read_rows(settings(seed=3)) == first
    assert len(made) == 1
    for seed in range(3, 3 + gym.KEPT + 1):
        assert read_rows(settings(seed=seed))[0].values["parameters"]["seed"] == made[-1]
    assert len(made) == len(set(made)) == gym.KEPT + 1
    assert len(gym._made) == gym.KEPT


def test_near_seeds_share_no_more_than_chance() -> None:
    """reasoning-gym seeds problem i with seed + i: unmixed, seeds 1 and 2 share all but one."""
    assert len(keys(settings(seed=1)) & keys(settings(seed=2))) <= 2


def test_an_unknown_task_or_parameter_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'spell_backward'"):
        read_rows(DataSettings(path="reasoning-gym:spell_backwards"))
    with pytest.raises(UsageError, match="did you mean 'min_word_len'"):
        read_rows(settings(task={"min_word_length": 5}))
    with pytest.raises(UsageError, match=r"say data\.seed instead"):
        read_rows(settings(task={"seed": 5}))
    with pytest.raises(UsageError, match="refuses its parameters"):
        read_rows(settings(task={"min_word_len": 9, "max_word_len": 3}))
