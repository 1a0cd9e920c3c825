"""A wrong value is told in one line, by the key that the recipe has and in the words of TOML."""

import copy
import re
from typing import Any

import pytest

from postgrad.core.errors import UsageError
from postgrad.recipe.load import parse_recipe

RL: dict[str, Any] = {
    "job": "rl",
    "run_dir": "run",
    "steps": 1,
    "model": {"path": "some/model"},
    "data": {"path": "rows.jsonl"},
    "rewards": [{"type": "math"}],
    "algorithm": {"type": "grpo"},
}
DPO = {key: value for key, value in RL.items() if key not in ("rewards", "algorithm")} | {
    "job": "preference"
}
LOSSES = r"'sigmoid', .* or 'apo_down'"


def refused(recipe: dict[str, Any], key: str, value: Any) -> str:
    raw = table = copy.deepcopy(recipe)
    *path, name = key.split(".")
    for part in path:
        table = table.setdefault(part, {})
    table[name] = value
    with pytest.raises(UsageError) as error:
        parse_recipe(raw)
    return str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("batch.micro_train_tokens", "autoo", "'auto' or a valid integer"),
        ("batch.micro_train_tokens", 1, "'auto' or greater than or equal to 2"),
        ("rollout.slots", 0, "'auto' or greater than or equal to 1"),
        ("model.compile", "yes", "'auto' or a valid boolean"),
        ("checkpoint.save_hf", "all", "'each' or a valid boolean"),
        ("observe.samples", "none", "'all' or 'some' or a valid integer"),
    ],
)
def test_a_key_of_several_types_has_one_message_with_all_of_them(
    key: str, value: Any, wanted: str
) -> None:
    assert refused(RL, key, value) == f"recipe: {key} = {value!r}: input should be {wanted}"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("ipo", f"algorithm.loss = 'ipo': input should be {LOSSES} or a table of keys"),
        ({"sigmoid": "x"}, r"algorithm\.loss\.sigmoid = 'x': input should be a valid number"),
        ({"ipo": 1.0}, rf"algorithm\.loss\.ipo = 'ipo': input should be {LOSSES}"),
    ],
)
def test_a_table_that_may_also_be_a_name_is_judged_as_what_it_is(value: Any, message: str) -> None:
    error_message = refused(DPO, "algorithm", {"type": "dpo", "loss": value})
    assert re.fullmatch(f"recipe: {message}", error_message)


def test_a_value_within_a_list_of_several_types_is_named_by_its_place() -> None:
    message = refused(RL, "rewards", [{"type": "math", "when": {"level": [{"a": 1}]}}])
    wanted = "a valid string, a valid integer, a valid number or a valid boolean"
    assert message == f"recipe: rewards.0.when.level.0 = {{'a': 1}}: input should be {wanted}"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("learner.betas", [0.9], "learner.betas = [0.9]: more values are wanted"),
        ("algorithm", {"type": "grpo", "reward_clip": [1, 2, 3]},
         "algorithm.reward_clip = (1, 2, 3): at most 2 values are wanted, not 3"),
        ("environment", {"type": "tools", "tools": ["calculator"], "turn_tokens": 3},
         "environment.turn_tokens = 3: a list is wanted: [3]"),
    ],
)  # fmt: skip
def test_a_list_that_is_wrong_has_one_message_without_words_of_its_reader(
    key: str, value: Any, message: str
) -> None:
    assert refused(RL, key, value) == f"recipe: {message}"


def test_a_switch_is_shown_as_toml_writes_it() -> None:
    message = refused(RL, "rollout.router_replay", True)
    wanted = "input should be 'off', 'sampled' or 'old'"
    assert message == f"recipe: rollout.router_replay = true: {wanted}"


def test_a_key_of_another_algorithm_is_told_with_the_algorithms_that_have_it() -> None:
    message = refused(RL, "algorithm", {"type": "rloo", "leave_one_out": False})
    start = "recipe: unknown key 'algorithm.leave_one_out': rloo does not have it; it is a key of "
    assert message.startswith(start + "grpo, ")
    assert "rloo" not in message.removeprefix(start)


def test_a_setting_of_one_environment_beside_several_is_told_where_it_stands() -> None:
    tool_environment = {"type": "tools", "name": "maths", "tools": ["calculator"]}
    message = refused(RL, "environment", {"tools": ["calculator"], "sets": [tool_environment]})
    where = "the settings of one type of environment stand in its own [[environment.sets]]"
    assert message == f"recipe: unknown key 'environment.tools': {where}"
    close = refused(RL, "environment", {"max_turn": 2, "sets": [tool_environment]})
    assert "did you mean 'environment.max_turns'?" in close


def test_a_name_that_is_nearly_known_is_asked_for_in_a_sentence_of_its_own() -> None:
    message = refused(RL, "environment", {"type": "toolz"})
    assert "'toolz': did you mean 'tools'? Your own is 'package.module:Name'" in message


def test_an_empty_path_of_a_model_is_no_name_for_the_hub() -> None:
    message = refused(RL, "model.path", "")
    assert message == "recipe: model.path = '': string should have at least 1 character"
