"""When a sentinel speaks: one event and one warning, what it remembers, and how a run stops."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.observe.sentinels.base import SentinelStop
from postgrad.observe.sentinels.watch import Sentinels
from postgrad.observe.settings import SentinelSettings
from postgrad.observe.sinks import Logs

CUT, WHOLE = ({"truncated_fraction": share, "samples": 8, "response_length": 9} for share in (1, 0))


Watch = Callable[..., tuple[Sentinels, "Listener"]]


class Listener:
    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.now: dict[str, str | None] = {}

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def spoken(self, name: str, text: str | None) -> None:
        self.now[name] = text


@contextmanager
def watching(
    folder: Path, action: str = "warn", steps: int = 2
) -> Iterator[tuple[Sentinels, Listener]]:
    listener, logs = Listener(), Logs(folder)
    settings = SentinelSettings.model_validate({"truncation": {"action": action, "steps": steps}})
    try:
        yield Sentinels(settings, logs, listener), listener
    finally:
        logs.close()


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    with ExitStack() as stack:
        yield lambda *action: stack.enter_context(watching(tmp_path, *action))


def events(folder: Path) -> list[dict[str, Any]]:
    path = folder / "events.jsonl"
    return (
        [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
    )


def look_at(sentinels: Sentinels, steps: list[Any]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for number, seen in enumerate(steps, 1):
        state, _ = sentinels.look(number, seen, state)
    return state


def test_what_goes_on_is_told_once_and_its_end_is_recorded(watch: Watch, tmp_path: Path) -> None:
    sentinels, listener = watch()
    state = look_at(sentinels, [CUT, CUT, CUT, CUT])
    assert state["truncation"] == {"since": 2, "memory": {"row": 2}}
    assert len(listener.warnings) == 1
    assert listener.warnings[0].startswith("sentinel truncation: 100% of the answers are cut off")
    assert listener.now["truncation"] is not None
    state, _ = sentinels.look(5, WHOLE, state)
    assert state["truncation"] == {"since": None, "memory": {"row": 0}}
    assert listener.now["truncation"] is None
    recorded = [(event["event"], event["sentinel"], event["step"]) for event in events(tmp_path)]
    assert recorded == [("sentinel", "truncation", 2), ("sentinel_silent", "truncation", 5)]
    assert len(listener.warnings) == 1


def test_observe_is_silent_but_recorded(watch: Watch, tmp_path: Path) -> None:
    sentinels, listener = watch("observe")
    look_at(sentinels, [CUT, CUT])
    assert (listener.warnings, listener.now) == ([], {})
    assert [event["action"] for event in events(tmp_path)] == ["observe"]
    sentinels.stop()


def test_off_does_not_look(watch: Watch, tmp_path: Path) -> None:
    sentinels, listener = watch("off")
    assert "truncation" not in look_at(sentinels, [CUT, CUT])
    assert (listener.warnings, events(tmp_path)) == ([], [])


def test_stop_ends_the_run_when_it_is_asked_and_not_in_the_middle(watch: Watch) -> None:
    sentinels, listener = watch("stop")
    look_at(sentinels, [CUT])
    sentinels.stop()
    look_at(sentinels, [CUT, CUT])
    with pytest.raises(SentinelStop, match=r"^sentinel truncation: 100%"):
        sentinels.stop()
    assert listener.warnings == []  # the error is what is told


def test_before_the_first_step_a_stop_is_at_once(watch: Watch) -> None:
    sentinels, _ = watch()
    with pytest.raises(SentinelStop, match="does not have the policy's weights"):
        sentinels.at_once(0, {"sentinel/publish_difference": 1.0, "sentinel/policy_moved": 1.0})


@given(st.lists(st.booleans(), max_size=30), st.integers(0, 30), st.integers(1, 4))
def test_a_process_that_goes_on_from_saved_state_speaks_as_one_that_never_ended(
    tmp_path_factory: pytest.TempPathFactory, cut: list[bool], killed: int, steps: int
) -> None:
    seen = [CUT if is_cut else WHOLE for is_cut in cut]
    uninterrupted = tmp_path_factory.mktemp("whole")
    with watching(uninterrupted, steps=steps) as (sentinels, _):
        wanted = look_at(sentinels, seen)
    parts = tmp_path_factory.mktemp("parts")
    state: dict[str, Any] = {}
    for number, metrics in enumerate(seen, 1):
        if number - 1 == killed:
            state = json.loads(json.dumps(state))
        with watching(parts, steps=steps) as (sentinels, _):
            state, _ = sentinels.look(number, metrics, state)
    assert state == wanted
    assert [event["message"] for event in events(parts)] == [
        event["message"] for event in events(uninterrupted)
    ]
