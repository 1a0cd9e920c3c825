"""No order of saves, crashes, full disks and best-moves ever leaves zero good checkpoints."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from helpers.disk import Killed, full, went_well
from postgrad.checkpoint.settings import CheckpointSettings
from postgrad.checkpoint.state import Best
from postgrad.checkpoint.store import CheckpointStore

MakeState = Callable[..., Any]
MakeTensors = Callable[[int], Any]

TAKES_ROOM = ("save_file", "mkdir", "fsync", "replace")
FAILS = {
    "killed": lambda calls: Killed(),
    "full": lambda calls: full() if calls[-1] in TAKES_ROOM else None,
}
SAVES = st.tuples(
    st.integers(1, 3),  # steps since the last save
    st.booleans(),  # the best so far
    st.none() | st.tuples(st.sampled_from(sorted(FAILS)), st.integers(1, 40)),  # at which call
)


@pytest.fixture(autouse=True)
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.mark.slow
@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    keep=st.integers(1, 3),
    every=st.sampled_from([0, 2, 3]),
    history=st.lists(SAVES, min_size=1, max_size=8),
)
@example(  # the best one's save fails, and the one before it had not moved `best` either
    keep=1,
    every=0,
    history=[
        (1, True, None),
        (1, True, ("full", 17)),
        (1, True, ("full", 1)),
        (1, False, None),
    ],
)
def test_the_newest_and_the_best_that_were_saved_can_always_be_loaded(
    keep: int,
    every: int,
    history: list[tuple[int, bool, tuple[str, int] | None]],
    make_state: MakeState,
    make_tensors: MakeTensors,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    root: Path = tmp_path_factory.mktemp("rotation")
    now, best = 0, None  # of the process: what it would save next goes on from here
    saved: set[int] = set()  # the steps whose save ended well
    good: list[int] = []  # of these, those that were best when they were saved
    for steps, improved, fault in history:
        store = CheckpointStore(
            root, CheckpointSettings(max_ckpt_num=keep, save_steps=1, keep_steps=every)
        )
        now += steps
        best = Best("m", 0.0, now) if improved else best
        kind, number = fault or ("killed", 10**6)
        state, tensors = make_state(now, best=best), make_tensors(now)
        ended = went_well(
            number,
            lambda store=store, state=state, tensors=tensors, improved=improved: store.save(
                state, tensors, best=improved
            ),
            FAILS[kind],
        )
        newest = max(saved, default=None)
        if ended or now in store.steps():  # a commit counts though what follows it was cut off
            saved, newest = saved | {now}, now
            good += [now] if improved else []
        if newest is None:
            assert store.steps() == []
            assert not store.root.exists() or not list(store.root.glob("step-*"))
            best, now = (None, 0) if kind == "killed" else (best, now)
            continue
        loaded = store.load()
        assert (loaded.step, loaded.skipped) == (newest, ())
        assert all(info.complete for info in store.infos())
        if good:
            assert store.load("best").step == good[-1]
        always = {step for step in saved if every and step % every == 0}
        assert always <= set(store.steps())
        if ended:
            assert len(store.steps()) <= keep + 1 + len(always)
        if not ended and kind == "killed":  # the next process goes on from what is there
            now, best = loaded.step, loaded.state.best
