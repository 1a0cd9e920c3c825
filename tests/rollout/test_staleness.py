"""The live source with samples ahead: in order, never too old, the same bits after any resume."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers import tiny_rewards
from helpers.lives import Life, Turns, shown
from helpers.rollouts import Numbers, Ticking, Words
from postgrad.core.cursor import Cursor
from postgrad.core.errors import RunError
from postgrad.rewards.scorer import Scorer
from postgrad.rewards.settings import RewardSettings, ScoringSettings
from postgrad.rollout.environment import Environments, SamplingSpec
from postgrad.rollout.pending import to_groups
from postgrad.rollout.settings import RolloutSettings
from postgrad.rollout.source import LiveSource


def settled_of(life: Life) -> range:
    """In ticket order there are no gaps."""
    assert not life.cursor.beyond
    return range(life.cursor.frontier)


LIVES = st.builds(
    Life,
    lengths=st.integers(0, 10_000),
    staleness=st.integers(0, 4),
    groups=st.integers(1, 3),
    samples=st.integers(2, 3),
    slots=st.integers(1, 12),
    turns=st.integers(1, 3),
    in_flight=st.booleans(),
    rollout=st.sampled_from([{}, {"dynamic_sampling": True, "max_rounds": 2}]),
)


@pytest.mark.slow
@given(LIVES)
def test_no_token_is_too_old_and_each_ticket_is_in_one_step_or_open(
    life: Life,
) -> None:
    trained: list[int] = []
    filtered: list[int] = []
    for step in range(6):
        sampled = life.next()
        ages = [step - v for g in sampled.all for r in g.rollouts for v, _ in r.versions]
        assert all(0 <= age <= life.staleness for age in ages)
        trained += [group.prompt.ticket for group in sampled.groups]
        filtered += sampled.reasons
        if not life.in_flight:
            assert all(len(r.versions) == 1 for g in sampled.all for r in g.rollouts)
        for rollout in (r for g in sampled.all for r in g.rollouts):
            lengths = [len(t.token_ids) for t in rollout.turns if t.author == "policy"]
            expected = [life.length(rollout.ticket, rollout.sample, t) for t in range(life.turns)]
            assert lengths == expected  # nothing is lost or written twice at a cut
            assert sum(n for _, n in rollout.versions) == sum(lengths)
    pairs = [(ticket, sample) for ticket in settled_of(life) for sample in range(life.samples)]
    assert sorted(life.scored) == pairs  # each once, and none before its step
    under_way = life.pending["tickets"][:, 0].tolist() if life.pending else []
    settled = sorted([*trained, *filtered])
    assert trained == sorted(trained)
    assert life.cursor == Cursor(len(settled))
    assert [*settled, *under_way] == list(range(len(settled) + len(under_way)))
    assert len(under_way) <= life.staleness * life.groups


@pytest.mark.slow
@given(LIVES, st.sets(st.integers(0, 5)))
def test_a_run_that_is_resumed_after_any_steps_draws_the_same_samples(
    life: Life, resumed_after: set[int]
) -> None:
    other = Life(**{name: getattr(life, name) for name in (
        "lengths", "staleness", "groups", "samples", "slots", "turns", "in_flight", "rollout",
    )})  # fmt: skip
    for step in range(6):
        first, second = life.next(), other.next()
        assert shown(first.all) == shown(second.all)
        assert (first.reasons, first.metrics) == (second.reasons, second.metrics)
        assert life.ahead == other.ahead
        assert life.pending.keys() == other.pending.keys()
        for name, array in life.pending.items():
            assert array.tobytes() == other.pending[name].tobytes()
        if step in resumed_after:
            other.start()


@given(st.integers(0, 1000), st.integers(1, 8))
def test_without_staleness_every_step_is_sampled_by_its_own_weights_alone(
    lengths: int, slots: int
) -> None:
    life = Life(lengths, 0, slots=slots)
    for step in range(4):
        sampled = life.next()
        assert life.pending == {}
        assert {v for g in sampled.all for r in g.rollouts for v, _ in r.versions} == {step}
        assert [g.prompt.ticket for g in sampled.all] == [2 * step, 2 * step + 1]


def test_samples_ahead_fill_the_rows_that_a_long_answer_leaves_empty() -> None:
    ticks: dict[int, int] = {}
    for staleness in (0, 1, 2, 4):
        life = Life(3, staleness, groups=4, slots=8)
        for _ in range(12):
            life.next()
        ticks[staleness] = life.engine.steps
    assert ticks[0] > ticks[1] > ticks[2] > ticks[4]


def test_a_long_answer_is_written_by_several_versions_and_metrics_say_how_much_is_ahead() -> None:
    life = Life(3, 2)
    first = life.next(), life.ahead
    sampled = [first[0], *(life.next() for _ in range(5))]
    versions = {len(r.versions) for s in sampled for g in s.all for r in g.rollouts}
    assert max(versions) >= 2
    assert first[1]["ahead/groups"] == 4.0
    assert life.ahead["ahead/tokens"] == len(life.pending["tokens"])
    assert life.ahead["ahead/ended_groups"] <= life.ahead["ahead/groups"]


def broken(change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    life = Life(3, 2, turns=2)
    life.next()
    arrays = dict(life.pending)
    change(arrays)
    return arrays


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop("spans"), "it has"),
        (lambda a: a.update(tokens=a["tokens"].astype(np.int64)), "tokens is int64"),
        (lambda a: a.update(tokens=a["tokens"][:-1]), "do not add up"),
        (lambda a: a.update(turns=a["turns"] - [0, 0, 9, 0, 0]), "do not add up"),
        (lambda a: a.update(turns=a["turns"] + [99, 0, 0, 0, 0]), "not under way"),
        (lambda a: a.update(spans=a["spans"] + 1), "other spans"),
    ],
)
def test_samples_of_a_checkpoint_that_do_not_fit_are_refused(
    change: Callable[[dict[str, Any]], None], message: str
) -> None:
    arrays = broken(change)
    spec = SamplingSpec(3, RolloutSettings(max_new_tokens=30), 0, Environments({None: Turns(2)}))
    with pytest.raises(RunError, match=message):
        to_groups(arrays, lambda ticket: Numbers(1000).draw(ticket, 0), spec, Words())


@pytest.mark.parametrize(("before", "after"), [(3, 1), (2, 0), (1, 3)])
def test_a_resume_with_another_bound_keeps_it_and_every_ticket(before: int, after: int) -> None:
    life = Life(3, before)
    trained = [g.prompt.ticket for _ in range(4) for g in life.next().groups]
    life.staleness = after
    life.start()
    for step in range(4, 9):
        sampled = life.next()
        trained += [group.prompt.ticket for group in sampled.groups]
        versions = [v for g in sampled.all for r in g.rollouts for v, _ in r.versions]
        assert all(0 <= step - version <= after for version in versions)
    assert trained == list(range(18))


@pytest.mark.slow
def test_a_verifier_that_hangs_holds_up_no_other_sample_and_its_ticket_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ticket 0 ends after two steps of decoding, and the verifier of its sample 1 never does. All
    others are written while it hangs the first time, before the second attempt that it gets.
    """
    monkeypatch.setenv("PYTHONPATH", str(Path(tiny_rewards.__file__).parent))
    attempts = tmp_path / "attempts"
    reward: dict[str, Any] = {"type": "tiny_rewards:hangs", "row": 0, "sample": 1}
    reward |= {"mark": str(attempts), "wall_seconds": 0.5}
    while_it_hangs: list[str] = []

    def rest() -> None:
        if engine.steps < 2:
            return
        until = time.monotonic() + 60
        while not attempts.exists() and time.monotonic() < until:
            time.sleep(0.01)
        assert attempts.read_text("utf-8") == "hangs\n"
        while_it_hangs.append(source.awaited())

    engine: Any = Ticking(lambda ticket, sample, turn: 2 if ticket == 0 else 20, 8, rest)
    sampling = RolloutSettings(max_new_tokens=30, max_staleness=1)
    with Scorer([RewardSettings(**reward)], ScoringSettings(workers=2)) as scorer:
        scorer.check([])  # until the workers are ready
        source = LiveSource(
            engine, Numbers(100), scorer, seed=0, prompts_per_step=2, samples_per_prompt=3,
            sampling=sampling, tokenizer=Words(),
        )  # fmt: skip
        sampled = source.next(1, Cursor(), {})
    assert len(while_it_hangs) == 18
    assert {held.split(", ")[0] for held in while_it_hangs} == {"ticket 0 (scores)"}
    (first, second) = sampled.groups
    (failure,) = first.failures
    assert (first.prompt.ticket, failure.sample, failure.cause) == (0, 1, "wall_clock")
    assert first.kept.tolist() == [True, False, True]
    assert (second.prompt.ticket, second.kept.all()) == (1, True)
    assert attempts.read_text("utf-8") == "hangs\nhangs\n"
    pending = source.pause().pending
    assert pending["tickets"][:, 0].tolist() == [2, 3]
    assert sampled.cursor == Cursor(2)
