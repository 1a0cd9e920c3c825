"""In a step of RL every role is asked before any answer is waited for, so that roles on other
machines work at the same time.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from postgrad.algorithms.base import RolloutAlgorithm
from postgrad.algorithms.grpo import GRPO
from postgrad.algorithms.on_policy_distillation import OnPolicyDistillation
from postgrad.algorithms.online_dpo import OnlineDPO
from postgrad.algorithms.ppo import PPO
from postgrad.core.process import Handle, done
from postgrad.core.ragged import Ragged
from postgrad.learner.learner import UpdateResult
from postgrad.training.rl import RLJob, Roles

Work = Callable[[str], Any]  # what a call such as "policy.logprobs" returns
SECONDS = 60.0  # a machine that is shared; who never comes breaks the barrier
COLUMN = Ragged.of([[0.0, -1.0]], np.float32)
RESULT = UpdateResult({}, np.zeros(2, np.float32))
COLUMNS = ["policy.logprobs", "reference.logprobs", "critic.scores"]
UPDATES = ["critic.update", "policy.update"]


class Recorded(Handle[Any]):
    """A finished handle that notes when it is waited for."""

    def __init__(self, name: str, events: list[str]) -> None:
        super().__init__()
        self._name, self._events = name, events
        self.set_result(RESULT if name.endswith("update") else COLUMN)

    def result(self, timeout: float | None = None) -> Any:
        self._events.append(f"wait for {self._name}")
        return super().result(timeout)


class FakeRole:
    """Every call goes to `work` by its name."""

    def __init__(self, name: str, work: Work, *, has_dropout: bool = False) -> None:
        self.has_dropout = has_dropout
        self.logprobs = lambda sequences: work(f"{name}.logprobs")
        self.grade = lambda batch, prompts: work(f"{name}.grade")
        self.scores = lambda sequences: work(f"{name}.scores")
        self.update = lambda update, algorithm: work(f"{name}.update")


def job(
    work: Work, algorithm: RolloutAlgorithm, updates_per_step: int = 2, *, dropout: bool = False
) -> Any:
    """An RL job with nothing but roles. Its two methods are called as `step` calls them."""
    needs = algorithm.needs()
    critic = FakeRole("critic", work) if needs.critic else None
    reference = FakeRole("reference", work) if needs.reference else None
    teacher = FakeRole("teacher", work) if needs.teacher else None
    policy = FakeRole("policy", work, has_dropout=dropout)
    of_all: Any = policy, critic, reference, None, teacher
    roles: Any = Roles(*of_all)
    run: Any = SimpleNamespace(
        geometry=SimpleNamespace(updates_per_step=updates_per_step),
        stop=SimpleNamespace(hold=lambda: None),
        advance=lambda: None,
        tell_skipped=lambda updates, step: None,
    )
    parts: Any = SimpleNamespace(roles=roles, algorithm=algorithm)
    return RLJob(run, parts)


ROWS: Any = SimpleNamespace(unmasked=None)  # sequences, or an update of them
BATCH: Any = SimpleNamespace(sequences=ROWS)
FIRST_STEP: Any = SimpleNamespace(step=0)


@pytest.fixture
def events() -> list[str]:
    return []


@pytest.fixture
def recorded(events: list[str]) -> Work:
    """Notes calls, and when their results are waited for."""

    def work(name: str) -> Handle[Any]:
        events.append(name)
        return Recorded(name, events)

    return work


def test_logprobs_and_values_are_asked_before_any_is_waited_for(
    events: list[str], recorded: Work
) -> None:
    before, columns = job(recorded, PPO(kl_coef=0.05))._columns(BATCH, [])
    assert before is COLUMN
    assert columns == {"old": COLUMN, "ref": COLUMN, "values": COLUMN}
    assert events == [*COLUMNS, *(f"wait for {name}" for name in COLUMNS)]


def test_what_the_algorithm_does_not_need_is_neither_asked_nor_waited_for(
    events: list[str], recorded: Work
) -> None:
    on_policy = GRPO(kl_coef=0.0)
    nothing = {"old": None, "ref": None, "values": None}
    assert job(recorded, on_policy, updates_per_step=1)._columns(BATCH, []) == (None, nothing)
    assert events == []
    assert job(recorded, on_policy)._columns(BATCH, []) == (COLUMN, {**nothing, "old": COLUMN})
    assert events == ["policy.logprobs", "wait for policy.logprobs"]


@pytest.mark.parametrize(
    ("algorithm", "updates_per_step"),
    [(GRPO(), 1), (GRPO(old_logprobs="sampled"), 2), (OnlineDPO(), 2)],
    ids=["one update", "the sampler's are the old ones", "no ratio"],
)
def test_with_dropout_the_policy_is_asked_and_credit_gets_no_more_than_without(
    algorithm: RolloutAlgorithm, updates_per_step: int, events: list[str], recorded: Work
) -> None:
    dropping = job(recorded, algorithm, updates_per_step, dropout=True)
    before, columns = dropping._columns(BATCH, [])
    assert before is COLUMN
    assert columns["old"] is None
    assert events[0] == "policy.logprobs"


def test_a_teacher_is_asked_with_the_other_roles(events: list[str], recorded: Work) -> None:
    _, columns = job(recorded, OnPolicyDistillation(kl_coef=0.05))._columns(BATCH, [])
    assert columns == {"old": COLUMN, "ref": COLUMN, "values": None, "teacher": COLUMN}
    asked = ["policy.logprobs", "reference.logprobs", "teacher.grade"]
    assert events == [*asked, *(f"wait for {name}" for name in asked)]


def test_critic_and_policy_learn_from_an_update_at_once_and_one_update_after_another(
    events: list[str], recorded: Work
) -> None:
    results = job(recorded, PPO())._update([ROWS, ROWS], FIRST_STEP)
    of_one_update = [*UPDATES, *(f"wait for {name}" for name in UPDATES)]
    assert events == 2 * of_one_update
    assert {role: len(role_results) for role, role_results in results.items()} == {
        "policy": 2,
        "critic": 2,
    }


def test_a_policy_whose_critic_is_not_warm_is_not_asked(events: list[str], recorded: Work) -> None:
    warming = job(recorded, PPO(critic_warmup_steps=1))
    assert warming._update([ROWS], FIRST_STEP) == {"policy": [], "critic": [RESULT]}
    assert events == ["critic.update", "wait for critic.update"]
    later: Any = SimpleNamespace(step=1)
    assert warming._update([ROWS], later) == {"policy": [RESULT], "critic": [RESULT]}


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def together(threads: ThreadPoolExecutor, parties: int, value: Any) -> Work:
    """Calls that end only once so many of them are under way."""
    barrier = threading.Barrier(parties)

    def meet() -> Any:
        barrier.wait(SECONDS)
        return value

    return lambda name: threads.submit(meet)


def test_roles_whose_answers_come_later_compute_columns_at_the_same_time(
    threads: ThreadPoolExecutor,
) -> None:
    work = together(threads, 3, COLUMN)
    _, columns = job(work, PPO(kl_coef=0.05))._columns(BATCH, [])
    assert columns == {"old": COLUMN, "ref": COLUMN, "values": COLUMN}


def test_roles_whose_answers_come_later_learn_at_the_same_time(
    threads: ThreadPoolExecutor,
) -> None:
    results = job(together(threads, 2, RESULT), PPO())._update([ROWS, ROWS], FIRST_STEP)
    assert results == {"policy": [RESULT] * 2, "critic": [RESULT] * 2}


def test_an_error_of_one_role_is_raised_where_its_result_is_waited_for() -> None:
    def work(name: str) -> Handle[Any]:
        if name != "reference.logprobs":
            return done(COLUMN)
        handle: Handle[Any] = Handle()
        handle.set_exception(MemoryError("on rank 1"))
        return handle

    with pytest.raises(MemoryError, match="on rank 1"):
        job(work, PPO(kl_coef=0.05))._columns(BATCH, [])
