"""The run's state: all of it, or an error that says what is missing."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from postgrad.algorithms.base import ADAPTED
from postgrad.checkpoint.schema import MOST, AlgorithmSchema, ChoicesSchema
from postgrad.checkpoint.state import Best, RunState
from postgrad.core.cursor import Cursor
from postgrad.core.errors import RunError
from postgrad.fleet.choices import Choices
from postgrad.observe.sinks import FILES

numbers = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, MOST)


def unknown_to(schema: type[BaseModel]) -> st.SearchStrategy[str]:
    """Names that `schema` gives no type. Hypothesis also tries the strings of this package's code,
    and of `squares` alone the schema rightly says that two of its three are missing.
    """
    return st.text().filter(lambda name: name not in schema.model_fields)


states = st.builds(
    RunState,
    step=counts,
    update=counts,
    episodes=st.integers(2 * 10**9, MOST),
    cursor=st.builds(
        lambda frontier, beyond: Cursor(frontier, frozenset(frontier + 1 + n for n in beyond)),
        st.integers(0, 10**9),
        st.sets(st.integers(0, 100)),
    ),
    algorithm=st.dictionaries(unknown_to(AlgorithmSchema), numbers),
    evaluations=st.dictionaries(st.text(), numbers),
    best=st.none() | st.builds(Best, st.text(), numbers, st.just(0), counts),
    choices=st.dictionaries(unknown_to(ChoicesSchema), st.none() | st.integers() | st.text()),
    log_offsets=st.dictionaries(st.sampled_from(FILES), counts),
)


@given(states)
def test_every_state_comes_back_from_its_json(state: RunState) -> None:
    assert RunState.from_json(json.loads(json.dumps(state.to_json()))) == state


@pytest.mark.parametrize(
    "name",
    [
        "step",
        "update",
        "episodes",
        "cursor",
        "algorithm",
        "evaluations",
        "best",
        "choices",
        "log_offsets",
    ],
)
def test_missing_state_is_an_error(name: str, make_state: Callable[..., RunState]) -> None:
    data = make_state(1).to_json()
    del data[name]
    with pytest.raises(RunError, match=rf"missing \['{name}'\]"):
        RunState.from_json(data)


def test_unknown_state_is_an_error(make_state: Callable[..., RunState]) -> None:
    with pytest.raises(RunError, match=r"unknown \['ema'\]"):
        RunState.from_json({**make_state(1).to_json(), "ema": {}})


def test_another_format_names_the_way_out(make_state: Callable[..., RunState]) -> None:
    with pytest.raises(RunError, match="resume with the version of postgrad that wrote it"):
        RunState.from_json({**make_state(1).to_json(), "format": 9})


def test_an_evaluation_without_a_value_is_saved_too(make_state: Callable[..., RunState]) -> None:
    """As when every verifier failed: its mean reward is NaN, which JSON cannot say."""
    state = make_state(1, evaluations={"eval/reward": math.nan, "eval/accuracy": 0.5})
    text = json.dumps(state.to_json(), allow_nan=False)
    read = RunState.from_json(json.loads(text)).evaluations
    assert math.isnan(read["eval/reward"])
    assert read["eval/accuracy"] == 0.5


@pytest.mark.parametrize(
    "changes",
    [
        {"cursor": {"frontier": "x", "beyond": []}},
        {"cursor": {"frontier": 1}},
        {"cursor": None},
        {"best": {}},
        {"best": {"metric": "m", "value": 1.0, "step": 1, "mode": "most"}},
        {"best": {"metric": "m", "value": 1.0, "step": 1, "direction": "max"}},
        {"evaluations": None},
        {"evaluations": [1.0]},
    ],
)
def test_broken_parts_are_errors(
    changes: dict[str, Any], make_state: Callable[..., RunState]
) -> None:
    with pytest.raises(RunError, match="not a run's state"):
        RunState.from_json({**make_state(1).to_json(), **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": 1.0}, "step is 1.0"),
        ({"update": -1}, "update is -1"),
        ({"episodes": True}, "episodes is True"),
        ({"step": 10**400}, "step is a whole number of more than 77 digits"),
        ({"cursor": {"frontier": 10**17, "beyond": []}}, "cursor.frontier is 1000"),
        ({"cursor": {"frontier": 10**15, "beyond": []}}, f"cursor: {10**15} tickets are settled"),
        ({"cursor": {"frontier": 3, "beyond": [3]}}, "cursor: `beyond` are rising numbers"),
        ({"cursor": {"frontier": 3, "beyond": [9, 5]}}, "cursor: `beyond` are rising numbers"),
        ({"log_offsets": {"eval.jsonl": []}}, "log_offsets.eval.jsonl is a list of 0"),
        ({"log_offsets": {"../../etc/passwd": 1}}, "log_offsets"),
        ({"choices": {"device": 1.5}}, "choices.device is 1.5"),
        ({"choices": {"threads": 0}}, "choices.threads is 0"),
        ({"choices": {"dtype": "float8"}}, "choices.dtype is 'float8'"),
        ({"choices": {"slots": -4}}, "choices.slots is -4"),
        ({"choices": {"frozen": {"policy": 1}}}, "choices.frozen.policy is 1"),
        ({"choices": {"products": ["mkl"]}}, "choices.products is a list of 1"),
        ({"algorithm": {"kl_coef": "0.1"}}, "algorithm.kl_coef is '0.1'"),
        ({"algorithm": {"entropy_coef": "0.1"}}, "algorithm.entropy_coef is '0.1'"),
        ({"algorithm": {"rewards": [1, 2]}}, "algorithm.rewards is a list of 2"),
        ({"algorithm": {"weight": 0.0, "sum": 1.0, "squares": 1.0}}, "algorithm.weight is 0.0"),
        ({"algorithm": {"sum": 1.0}}, "algorithm: a scale has `weight`"),
        ({"source": {"rows": {"a:1": [0.5]}}}, "source.rows.a:1 is a list of 1"),
        ({"sentinels": {"entropy": {"since": "x", "memory": {}}}}, "sentinels.entropy.since"),
        ({"sentinels": {"entropy": []}}, "sentinels.entropy is a list of 0"),
        ({"loggers": {"id": "../x"}}, "loggers: id is '../x'"),
        ({"best": {"metric": "m", "value": 1.0, "step": 2}}, "the best step is 2, after this"),
        ({"evaluations": {"eval/accuracy": "1"}}, "evaluations.eval/accuracy is '1'"),
        ({"evaluations": {"eval/accuracy": math.inf}}, "evaluations.eval/accuracy is inf"),
    ],
)
def test_a_value_of_another_type_or_range_is_named_with_its_key(
    changes: dict[str, Any], message: str, make_state: Callable[..., RunState]
) -> None:
    with pytest.raises(RunError, match=re.escape(message)):
        RunState.from_json({**make_state(1).to_json(), **changes})


def test_what_passes_the_schema_is_kept_to_the_bit(make_state: Callable[..., RunState]) -> None:
    """An evaluation that is a whole number stays one: a resumed run writes the same state."""
    state = make_state(1, evaluations={"eval/rows": 64, "eval/accuracy": 0.1})
    text = json.dumps(state.to_json())
    assert json.dumps(RunState.from_json(json.loads(text)).to_json()) == text


def test_a_state_of_format_1_which_has_no_samples_under_way_is_read(
    make_state: Callable[..., RunState],
) -> None:
    state = make_state(3)
    assert RunState.from_json({**state.to_json(), "format": 1}) == state
    with pytest.raises(RunError, match="format 3, this version reads"):
        RunState.from_json({**state.to_json(), "format": 3})


def test_every_choice_of_a_run_has_a_type_in_the_schema() -> None:
    assert {field.name for field in fields(Choices)} == set(ChoicesSchema.model_fields)


def test_every_coefficient_that_adapts_has_a_type_in_the_schema() -> None:
    assert set(ADAPTED) <= set(AlgorithmSchema.model_fields)
