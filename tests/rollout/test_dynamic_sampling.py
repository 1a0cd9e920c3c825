"""Dynamic sampling and the curriculum: every ticket is settled once, whatever happens."""

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from helpers.rollouts import Answers, Chosen, Numbers
from postgrad.core.cursor import Cursor
from postgrad.core.errors import RunError
from postgrad.core.records import Prompt, Rollout, ScoredGroup, Turn
from postgrad.core.seeds import integer
from postgrad.rollout.curriculum import judged_scores, reason_to_filter
from postgrad.rollout.settings import RolloutSettings
from postgrad.rollout.source import LiveSource

Reward = Callable[[int, int], float | None]


def live(
    reward: Reward,
    *,
    rows: int = 10,
    prompts: int = 4,
    samples: int = 2,
    length: Callable[[int, int], float] | None = None,
    correctness: str | None = None,
    **rollout: Any,
) -> tuple[LiveSource, Answers]:
    engine = Answers()
    source = LiveSource(
        engine,
        Numbers(rows),
        Chosen(reward, length),
        seed=0,
        prompts_per_step=prompts,
        samples_per_prompt=samples,
        sampling=RolloutSettings.model_validate(rollout),
        tokenizer=None,
        correctness=correctness,
    )
    return source, engine


def even_are_equal(ticket: int, sample: int) -> float:
    return float(sample) if ticket % 2 else 1.0


def test_groups_that_are_all_equal_are_replaced_until_the_step_is_full() -> None:
    source, engine = live(even_are_equal, dynamic_sampling=True)
    sampled = source.next(1, Cursor(), {})
    assert [group.prompt.ticket for group in sampled.groups] == [1, 3, 5, 7]
    assert sampled.reasons == {0: "equal", 2: "equal", 4: "equal", 6: "equal"}
    assert engine.sampled == [0, 1, 2, 3, 4, 5, 6, 7]  # 4, then 2, then 1, then 1
    assert sampled.cursor == Cursor(8)
    assert [group.prompt.ticket for group in sampled.all] == list(range(8))
    assert sampled.metrics == {
        "sampling/rounds": 4.0,
        "sampling/groups": 8.0,
        "sampling/filtered_groups": 4.0,
        "sampling/missing_groups": 0.0,
        "sampling/filtered_equal": 4.0,
        "sampling/filtered_below": 0.0,
        "sampling/filtered_above": 0.0,
        "sampling/filtered_failed": 0.0,
    }


def test_after_the_last_round_the_step_takes_what_there_is_and_says_so() -> None:
    source, _ = live(even_are_equal, dynamic_sampling=True, max_rounds=2)
    sampled = source.next(1, Cursor(), {})
    assert [group.prompt.ticket for group in sampled.groups] == [1, 3, 5]
    assert sampled.metrics["sampling/missing_groups"] == 1.0
    nothing, engine = live(lambda ticket, sample: 0.0, dynamic_sampling=True, max_rounds=3)
    empty = nothing.next(1, Cursor(), {})
    assert empty.groups == []
    assert empty.cursor == Cursor(12)
    assert engine.sampled == list(range(12))


def test_without_dynamic_sampling_equal_groups_stay() -> None:
    source, _ = live(even_are_equal)
    sampled = source.next(1, Cursor(), {})
    assert [group.prompt.ticket for group in sampled.groups] == [0, 1, 2, 3]
    assert sampled.metrics == {}


def test_groups_outside_a_range_and_groups_of_failed_samples_are_filtered_too() -> None:
    rewards = {0: (0.0, 0.1), 1: (0.9, 1.0), 2: (None, 0.5), 3: (0.2, 0.6), 4: (0.5, 0.5)}
    source, _ = live(
        lambda ticket, sample: rewards.get(ticket, (0.4, 0.8))[sample],
        dynamic_sampling=True,
        keep_above=0.1,
        keep_below=0.9,
    )
    sampled = source.next(1, Cursor(), {})
    assert sampled.reasons == {0: "below", 1: "above", 2: "failed", 4: "equal"}
    assert [group.prompt.ticket for group in sampled.groups] == [3, 5, 6, 7]


def shorter_is_better(ticket: int, sample: int) -> float:
    return -0.125 * sample


def test_a_group_of_right_answers_is_filtered_although_their_lengths_earn_differently() -> None:
    """Groups that are all right or all wrong teach length alone (DAPO filters on accuracy)."""
    source, _ = live(even_are_equal, length=shorter_is_better, dynamic_sampling=True)
    sampled = source.next(1, Cursor(), {})
    assert set(sampled.reasons) == {0, 2, 4, 6}
    by_name, _ = live(
        even_are_equal, length=shorter_is_better, dynamic_sampling=True, filter_on="r"
    )
    assert by_name.next(1, Cursor(), {}).reasons == sampled.reasons


def test_the_shaped_total_and_any_component_can_be_filtered_on_by_name() -> None:
    def right(ticket: int, sample: int) -> float:
        return 1.0

    total, _ = live(right, length=shorter_is_better, dynamic_sampling=True, filter_on="total")
    assert total.next(1, Cursor(), {}).reasons == {}
    length, _ = live(
        right, length=lambda ticket, sample: float(ticket > 1),
        dynamic_sampling=True, filter_on="length", keep_above=0.5,
    )  # fmt: skip
    assert length.next(1, Cursor(), {}).reasons == {
        0: "below", 1: "below", 2: "equal", 3: "equal",
        **dict.fromkeys(range(4, 16), "equal"),
    }  # fmt: skip


def test_without_a_name_it_is_the_component_that_evaluation_takes_for_right() -> None:
    source, _ = live(
        lambda ticket, sample: 1.0,
        length=shorter_is_better,
        correctness="length",
        dynamic_sampling=True,
    )
    assert source.next(1, Cursor(), {}).reasons == {}


def group_of(rewards: dict[str, list[float]], kept: list[bool] | None = None) -> ScoredGroup:
    n = len(next(iter(rewards.values())))
    turn = Turn("policy", np.array([1], np.int32), np.zeros(1, np.float32))
    rollouts = tuple(Rollout(0, i, (turn,), "stop", ((0, 1),), "") for i in range(n))
    columns = {name: np.array(values) for name, values in rewards.items()}
    total = np.sum([np.nan_to_num(rewards, nan=0.5) for rewards in columns.values()], axis=0)
    prompt = Prompt(0, np.array([1], np.int32), "q", "a", "rows", 0)
    return ScoredGroup(prompt, rollouts, columns, total, np.array(kept or [True] * n))


def test_samples_that_the_component_failed_on_do_not_say_that_a_group_differs() -> None:
    """on_failure = "score" keeps them in the total; what is right of them nobody knows."""
    settings = RolloutSettings(dynamic_sampling=True)
    some = group_of({"math": [1.0, 1.0, math.nan], "format": [0.0, 1.0, 0.0]})
    assert judged_scores(some, None).tolist() == [1.0, 1.0]
    assert reason_to_filter(some, settings, None) == "equal"
    failed_group = group_of({"math": [1.0, math.nan, math.nan]})
    assert reason_to_filter(failed_group, settings, "math") == "failed"
    dropped = group_of({"math": [1.0, 0.0, 0.0]}, kept=[False, True, True])
    assert reason_to_filter(dropped, settings, "math") == "equal"


def test_a_row_that_the_named_component_does_not_score_is_judged_by_the_first_that_does() -> None:
    code = group_of({"code": [0.0, 1.0], "format": [1.0, 1.0]})
    assert judged_scores(code, "math").tolist() == [0.0, 1.0]


def test_a_curriculum_reads_the_component_too() -> None:
    """A right row is learned, whatever its answers' lengths take from its reward."""
    source, _ = live(
        lambda ticket, sample: 1.0 if ticket == 0 else float(sample),
        rows=4, length=shorter_is_better, curriculum={"retire_at": 1.0},
    )  # fmt: skip
    state = source.next(1, Cursor(), {}).state
    assert state["rows"] == {
        "numbers:0": [1.0, 0], "numbers:1": [0.5, 0], "numbers:2": [0.5, 0], "numbers:3": [0.5, 0],
    }  # fmt: skip


def test_one_sample_a_prompt_is_never_an_equal_group() -> None:
    source, _ = live(lambda ticket, sample: 1.0, samples=1, dynamic_sampling=True)
    assert len(source.next(1, Cursor(), {}).groups) == 4


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"keep_above": 0.1}, "set dynamic_sampling = true"),
        ({"filter_on": "gsm8k"}, "filter_on is read by dynamic sampling and by a curriculum"),
        (
            {"dynamic_sampling": True, "keep_above": 0.5, "keep_below": 0.5},
            r"keep_above = .* must be below keep_below = .*: no group",
        ),
        (
            {"curriculum": {"retire_at": 0.5, "postpone_at": 0.5}},
            r"postpone_at = .* must be below retire_at = ",
        ),
    ],
)
def test_ranges_that_make_no_sense_are_refused(rollout: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RolloutSettings.model_validate(rollout)


def test_a_learned_row_is_retired_and_a_hopeless_one_waits() -> None:
    def reward(ticket: int, sample: int) -> float:
        row = ticket % 5
        return 1.0 if row == 0 else 0.0 if row == 1 else float(sample)

    curriculum = {"retire_at": 1.0, "postpone_at": 0.0, "postpone_epochs": 2}
    source, engine = live(reward, rows=5, prompts=5, curriculum=curriculum)
    cursor, state = Cursor(), {}
    seen: list[list[int]] = []
    for step in range(1, 5):
        engine.sampled.clear()
        sampled = source.next(step, cursor, state)
        cursor, state = sampled.cursor, json.loads(json.dumps(sampled.state))
        seen.append(list(engine.sampled))
    # Row 0 is never seen again, row 1 not in epochs 1 and 2.
    assert seen == [[0, 1, 2, 3, 4], [7, 8, 9, 12, 13], [14, 16, 17, 18, 19], [22, 23, 24, 27, 28]]
    assert cursor == Cursor(29)
    assert state["rows"]["numbers:0"] == [1.0, 0]
    assert state["rows"]["numbers:1"] == [0.0, 3]


def test_a_retired_row_comes_back_after_its_epochs() -> None:
    curriculum = {"retire_at": 1.0, "revisit_epochs": 1}
    source, engine = live(
        lambda ticket, sample: 1.0 if ticket < 2 else float(sample),
        rows=2, prompts=2, curriculum=curriculum,
    )  # fmt: skip
    first = source.next(1, Cursor(), {})
    source.next(2, first.cursor, first.state)
    assert engine.sampled == [0, 1, 4, 5]


def test_a_curriculum_that_leaves_nothing_ends_the_run() -> None:
    source, _ = live(lambda ticket, sample: 1.0, rows=4, curriculum={"retire_at": 1.0})
    first = source.next(1, Cursor(), {})
    with pytest.raises(RunError, match="skipped every prompt for two epochs"):
        source.next(2, first.cursor, first.state)


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 1000),
    rows=st.integers(3, 12),
    prompts=st.integers(1, 5),
    dynamic=st.booleans(),
    max_rounds=st.integers(1, 4),
    curriculum=st.booleans(),
    kills=st.lists(st.booleans(), min_size=3, max_size=8),
)
def test_every_ticket_below_the_frontier_is_settled_exactly_once_over_any_history(
    seed: int,
    rows: int,
    prompts: int,
    dynamic: bool,
    max_rounds: int,
    curriculum: bool,
    kills: list[bool],
) -> None:
    """Filters, failures, rows that are passed over, and kills: a killed step is sampled again from
    the cursor and the state of the checkpoint, and gives the same groups.
    """

    def reward(ticket: int, sample: int) -> float | None:
        drawn = integer(seed, "reward", ticket, sample) % 7
        return None if drawn == 0 else float(drawn % 2)

    rollout: dict[str, Any] = {"dynamic_sampling": dynamic, "max_rounds": max_rounds}
    if curriculum:
        rollout["curriculum"] = {"retire_at": 1.0, "revisit_epochs": 2, "postpone_at": 0.0}
    source, _ = live(reward, rows=rows, prompts=prompts, **rollout)
    cursor, state = Cursor(), {}
    trained: list[int] = []
    filtered: list[int] = []
    passed = 0
    for step, killed in enumerate(kills, 1):
        try:
            sampled = source.next(step, cursor, state)
        except RunError:
            break
        if killed:  # sampled, and lost before it was saved
            lost, sampled = sampled, source.next(step, cursor, state)
            assert [g.prompt.ticket for g in lost.all] == [g.prompt.ticket for g in sampled.all]
            assert (lost.cursor, lost.state) == (sampled.cursor, sampled.state)
        trained += [group.prompt.ticket for group in sampled.groups]
        filtered += list(sampled.reasons)
        assert len(sampled.groups) <= prompts
        passed += int(sampled.metrics.get("curriculum/passed_over", 0))
        cursor = Cursor.from_json(json.loads(json.dumps(sampled.cursor.to_json())))
        state = json.loads(json.dumps(sampled.state))
    settled = [*trained, *filtered]
    assert len(settled) == len(set(settled))
    assert cursor.beyond == frozenset()
    assert set(settled) <= set(range(cursor.frontier))
    assert len(settled) + passed == cursor.frontier
    if not curriculum:
        assert sorted(settled) == list(range(cursor.frontier))
