"""The run's state: all of it, or an error that says what is missing."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.checkpoint.state import Best, RunState
from postgrad.core.cursor import Cursor
from postgrad.core.errors import RunError

numbers = st.floats(allow_nan=False, allow_infinity=False)
states = st.builds(
    RunState,
    step=st.integers(0),
    update=st.integers(0),
    episodes=st.integers(0),
    cursor=st.builds(
        lambda frontier, beyond: Cursor(frontier, frozenset(frontier + 1 + n for n in beyond)),
        st.integers(0, 10**9),
        st.sets(st.integers(0, 100)),
    ),
    algorithm=st.dictionaries(st.text(), numbers),
    evaluations=st.dictionaries(st.text(), numbers),
    best=st.none() | st.builds(Best, st.text(), numbers, st.integers(0), st.integers(0)),
    choices=st.dictionaries(st.text(), st.none() | st.integers() | st.text()),
    log_offsets=st.dictionaries(st.text(), st.integers(0)),
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
        RunState.from_json({**make_state(1).to_json(), "format": 2})


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
        {"best": {"metric": "m", "value": 1.0, "step": 1, "mode": "max"}},
        {"evaluations": None},
        {"evaluations": [1.0]},
    ],
)
def test_broken_parts_are_errors(
    changes: dict[str, Any], make_state: Callable[..., RunState]
) -> None:
    with pytest.raises(RunError, match="not a run's state"):
        RunState.from_json({**make_state(1).to_json(), **changes})
