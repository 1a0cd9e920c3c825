"""The simulation against the source that it stands for: the same passes, the same waits."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.rollouts import Chosen, Numbers, Ticking, Words
from postgrad.core.cursor import Cursor
from postgrad.core.seeds import integer
from postgrad.plan.simulate import BatchLoad, Pace, Simulation, drawn_lengths, recorded_lengths
from postgrad.rollout.settings import RolloutSettings
from postgrad.rollout.source import LiveSource

TICK = Pace(4, math.inf, lambda rows, cached: 1.0, lambda tokens: 0.0, lambda tokens: 0.0, 0.0)


def length_of(seed: int):
    def length(ticket: int, sample: int) -> int:
        drawn = integer(seed, "length", ticket, sample)
        return 1 + drawn % (25 if drawn % 5 == 0 else 4)

    return length


def ticks_of_a_run(
    seed: int, staleness: int, groups: int, slots: int, steps: int, *, apart: bool = False
) -> int:
    """Passes that the engine of the real source makes. apart: it samples beside the learner."""
    return work_of_a_run(seed, staleness, groups, slots, steps, apart=apart)[-1][0]


def work_of_a_run(
    seed: int, staleness: int, groups: int, slots: int, steps: int, *, apart: bool
) -> list[tuple[int, int]]:
    """(passes, tokens) of the engine of the real source up to the end of each step."""
    length = length_of(seed)
    engine = Ticking(lambda ticket, sample, turn: length(ticket, sample), slots)
    source = LiveSource(
        engine, Numbers(1000), Chosen(lambda ticket, sample: float(sample)),
        seed=0, prompts_per_step=groups, samples_per_prompt=3,
        sampling=RolloutSettings(max_new_tokens=30, max_staleness=staleness), tokenizer=Words(),
    )  # fmt: skip
    cursor, pending = Cursor(), {}
    work: list[tuple[int, int]] = []
    for step in range(1, steps + 1):
        sampled = source.take(step, cursor, {}, pending)
        if apart:
            source.sample_ahead()
        cursor, pending = sampled.cursor, source.cut().pending
        work.append((engine.steps, engine.stats.response_tokens))
    return work


@pytest.mark.slow
@given(
    seed=st.integers(0, 1000),
    staleness=st.integers(0, 4),
    groups=st.integers(1, 4),
    slots=st.integers(1, 16),
)
def test_it_makes_exactly_the_passes_of_a_run(
    seed: int, staleness: int, groups: int, slots: int
) -> None:
    load = BatchLoad(groups, 3, 0, length_of(seed))
    pace = Pace(slots, math.inf, TICK.decode, TICK.prefill, TICK.learn, 0.0)
    simulated = Simulation(load, pace, 1, staleness, apart=False).run(6, 1)
    assert simulated.passes == ticks_of_a_run(seed, staleness, groups, slots, 6)


@pytest.mark.slow
@given(
    seed=st.integers(0, 1000),
    staleness=st.integers(1, 4),
    groups=st.integers(1, 4),
    slots=st.integers(1, 16),
    learn=st.sampled_from([0.0, 2.5, 7.0, 300.0]),
)
def test_beside_a_learner_it_makes_exactly_the_passes_of_a_run_however_long_that_learns(
    seed: int, staleness: int, groups: int, slots: int, learn: float
) -> None:
    load = BatchLoad(groups, 3, 0, length_of(seed))
    pace = Pace(slots, math.inf, TICK.decode, TICK.prefill, lambda tokens: learn, 0.0)
    simulated = Simulation(load, pace, 1, staleness, apart=True).run(6, 1)
    ticks = ticks_of_a_run(seed, staleness, groups, slots, 6, apart=True)
    assert simulated.passes == ticks


@pytest.mark.slow
@given(
    seed=st.integers(0, 1000),
    staleness=st.integers(1, 4),
    slots=st.integers(1, 16),
    learn=st.sampled_from([2.5, 300.0]),
    apart=st.booleans(),
    first=st.integers(1, 5),
)
def test_the_rows_that_a_run_leaves_empty_are_those_of_the_simulation(
    seed: int, staleness: int, slots: int, learn: float, apart: bool, first: int
) -> None:
    """What a run logs as idle/empty_rows_fraction, over the steps from number `first` on."""
    work = work_of_a_run(seed, staleness, 3, slots, 6, apart=apart)
    passes, tokens = (now - before for now, before in zip(work[-1], work[first - 1], strict=True))
    load = BatchLoad(3, 3, 0, length_of(seed))
    pace = Pace(slots, math.inf, TICK.decode, TICK.prefill, lambda tokens: learn, 0.0)
    simulated = Simulation(load, pace, 1, staleness, apart=apart).run(6, first)
    rows = slots * passes  # none where all of a step's samples had ended before it
    assert simulated.empty_rows == pytest.approx(1 - tokens / rows if rows else 0.0, abs=1e-9)
    assert simulated.engine_idle >= simulated.empty_rows - 1e-9  # which counts waiting too


@given(
    seed=st.integers(0, 1000),
    staleness=st.integers(1, 4),
    engines=st.integers(1, 5),
    learn=st.sampled_from([0.0, 3.0, 40.0]),
)
def test_apart_nothing_is_older_than_the_bound_and_the_longest_answer_is_a_floor(
    seed: int, staleness: int, engines: int, learn: float
) -> None:
    load = BatchLoad(2, 3, 5, length_of(seed))
    pace = Pace(4, math.inf, TICK.decode, TICK.prefill, lambda tokens: learn, 0.5)
    simulated = Simulation(load, pace, engines, staleness, apart=True).run(12, 4)
    assert 0 <= simulated.age <= simulated.oldest <= staleness
    assert simulated.seconds >= learn * (1 - 1e-9)
    assert -1e-9 <= simulated.learner_idle <= 1
    assert 0 <= simulated.engine_idle <= 1


def test_a_learner_alone_and_an_engine_alone_take_turns_or_not() -> None:
    """Answers of 10 tokens, four rows, a step of 12 rows: 30 passes; the learner takes 20."""
    load = BatchLoad(4, 3, 0, lambda ticket, sample: 10)
    pace = Pace(4, math.inf, TICK.decode, TICK.prefill, lambda tokens: 20.0, 0.0)
    turns = Simulation(load, pace, 1, 0, apart=False).run(4, 1)
    assert turns.seconds == pytest.approx(50.0)
    assert turns.learner_idle == pytest.approx(30 / 50)
    assert turns.engine_idle == pytest.approx(20 / 50)
    apart = Simulation(load, pace, 1, 2, apart=True).run(8, 4)
    assert apart.seconds == pytest.approx(30.0)
    assert apart.engine_idle == pytest.approx(0.0, abs=1e-9)
    assert apart.learner_idle == pytest.approx(1 / 3)


def test_no_number_of_engines_breaks_the_floor_that_the_longest_answer_sets() -> None:
    """A group begins after version v, and step v + staleness waits for it. With a fixed schedule an
    engine that has nothing of the next step waits, so many engines gain nothing from staleness.
    """
    load = BatchLoad(2, 2, 0, lambda ticket, sample: 1000 if ticket % 2 and sample else 10)
    for staleness in (1, 2, 4):
        free = Simulation(load, TICK, 64, staleness, apart=True, free=True).run(42, 12)
        assert free.seconds == pytest.approx(1000 / (staleness + 1))
        fixed = Simulation(load, TICK, 64, staleness, apart=True).run(42, 12)
        assert fixed.seconds == pytest.approx(1000)


def test_with_a_fixed_schedule_the_faster_side_waits_for_the_slower_one() -> None:
    """Answers of 10 tokens, four rows, a step of 12 rows: 30 passes."""
    load = BatchLoad(4, 3, 0, lambda ticket, sample: 10)
    for learn, engine_waits, learner_idle in ((20.0, 0.0, 1 / 3), (50.0, 2 / 5, 0.0)):
        pace = Pace(4, math.inf, TICK.decode, TICK.prefill, lambda tokens, s=learn: s, 0.0)
        simulated = Simulation(load, pace, 1, 2, apart=True).run(8, 4)
        assert simulated.seconds == pytest.approx(max(learn, 30.0))
        assert simulated.engine_waits == pytest.approx(engine_waits, abs=1e-9)
        assert simulated.learner_idle == pytest.approx(learner_idle, abs=1e-9)
        free = Simulation(load, pace, 1, 2, apart=True, free=True).run(8, 4)
        assert free.seconds == pytest.approx(max(learn, 30.0))


def test_drawn_lengths_have_their_mean_and_are_cut() -> None:
    length = drawn_lengths(300.0, 10_000, 8)
    drawn = [length(ticket, sample) for ticket in range(800) for sample in range(8)]
    assert sum(drawn) / len(drawn) == pytest.approx(300.0, rel=0.06)
    short = drawn_lengths(300.0, 400, 1)
    assert max(short(ticket, 0) for ticket in range(500)) == 400
    assert recorded_lengths([[3, 4], [5]])(3, 1) == 5
