"""Several environments in a recipe: each dataset is played by one of them, or by none."""

from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from helpers.chat import HERMES, chat_tokenizer
from postgrad.core.errors import UsageError
from postgrad.core.records import Prompt
from postgrad.data.settings import DataSettings, MixSettings
from postgrad.rollout.environment import SingleTurn
from postgrad.rollout.environments.chat import Dialogue
from postgrad.rollout.environments.sets import as_played, check_rows, dialogues
from postgrad.rollout.settings import EnvironmentSets, EnvironmentSettings

BOTH = EnvironmentSets.model_validate_json(
    """{"sets": [{"type": "guess_number", "max_turns": 5},
        {"type": "tools", "name": "sums", "tools": ["calculator"], "turn_tokens": [8, 4]}]}"""
)
ONE = EnvironmentSets.model_validate_json('{"sets": [{"type": "guess_number"}]}')


def prompt(environment: str | None, **row: Any) -> Prompt:
    tokens = np.arange(3, dtype=np.int32)
    return Prompt(0, tokens, "?", None, "rows.jsonl", 4, row, environment=environment)


class Drawn:
    """The prompts of one dataset."""

    def __init__(self, *prompts: Prompt) -> None:
        self.prompts = prompts

    def all(self) -> tuple[Prompt, ...]:
        return self.prompts


def test_a_prompt_is_played_by_the_environment_that_its_dataset_names() -> None:
    with ExitStack() as stack:
        played = dialogues(BOTH, MixSettings(path="a"), chat_tokenizer(HERMES), stack)
        game, sums = played.of(prompt("guess_number")), played.of(prompt("sums"))
        assert isinstance(game, Dialogue)
        assert isinstance(sums, Dialogue)
        assert (game.settings.max_turns, game.settings.type) == (5, "guess_number")
        assert (list(sums.turn_tokens), sums.settings.type) == ([8, 4], "tools")
        assert isinstance(played.of(prompt(None)), SingleTurn)
        assert sums.close.alive
    assert not sums.close.alive


def test_a_run_is_as_exact_as_its_least_exact_environment() -> None:
    moody = BOTH.sets[0].model_copy(update={"deterministic": False})
    late = EnvironmentSettings(type="helpers.courses:Late", concurrent=3)
    mixed = BOTH.model_copy(update={"sets": (moody, BOTH.sets[1], late)})
    tokenizer = chat_tokenizer(HERMES)
    assert dialogues(BOTH, MixSettings(path="a"), tokenizer).deterministic
    played = dialogues(mixed, MixSettings(path="a"), tokenizer)
    assert not played.deterministic
    assert played.of(prompt("sums")).deterministic
    # guess_number replies at once: nothing of it waits while the engine decodes
    assert (played.of(prompt("guess_number")).concurrent, played.concurrent) == (0, 3)


def test_only_prompts_of_an_environment_have_its_tools() -> None:
    data = MixSettings.model_validate_json(
        """{"sets": [{"path": "a", "environment": "sums"}, {"path": "b", "environment": "none"},
            {"path": "c", "environment": "guess_number"}]}"""
    )
    a, b, c = as_played(BOTH, data).sources
    assert (a.environment, b.environment, c.environment) == ("sums", None, "guess_number")
    assert [tool["function"]["name"] for tool in a.chat_template_kwargs["tools"]] == ["calculator"]
    assert b.chat_template_kwargs == c.chat_template_kwargs == {}


def test_a_single_environment_plays_all_datasets_that_do_not_say_none() -> None:
    assert as_played(ONE, DataSettings(path="a")).environment == "guess_number"
    assert as_played(ONE, DataSettings(path="a", environment="guess_number")).environment
    assert as_played(ONE, DataSettings(path="a", environment="none")).environment is None


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (None, "there are 2 environments: say one of 'guess_number', 'sums', or 'none'"),
        ("tools", "no environment is called 'tools'; known: guess_number, sums"),
        ("sum", "did you mean 'sums'"),
    ],
)
def test_a_dataset_that_several_environments_could_play_names_its_own(
    name: str | None, why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        BOTH.plays(name)


def test_rows_are_checked_by_the_environment_that_plays_them() -> None:
    playable = {"low": 1, "high": 9, "secret": 7}
    rows: Any = Drawn(prompt("guess_number", **playable), prompt("sums"), prompt(None))
    check_rows(BOTH, rows)
    wrong: Any = Drawn(prompt("guess_number", **playable), prompt("sums"), prompt("guess_number"))
    with pytest.raises(UsageError, match=r"1 of 2 rows.*'guess_number'.*column 'low'"):
        check_rows(BOTH, wrong)
