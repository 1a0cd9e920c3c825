"""SFT in which the student answers a share of the rows itself (GKD's lambda): which rows, what is
trained on, and the same bits after a resume.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.runs import lines, tensors, timeless
from helpers.tiny_runs import MakeRecipe
from postgrad.core.errors import UsageError
from postgrad.core.records import FinishReason
from postgrad.core.seeds import uniform
from postgrad.data.conversations import Conversation
from postgrad.observe.console import Console
from postgrad.observe.sentinels.publish import DIFFERENCE
from postgrad.plan.hardware import parse_hardware
from postgrad.plan.plan import make_plan
from postgrad.plan.planner import facts_of
from postgrad.recipe.recipe import Recipe
from postgrad.rollout.engine import Completion
from postgrad.rollout.settings import SamplingSettings
from postgrad.training.sft import OwnAnswers, SFTJob, answer_metrics, last_answer, with_answer
from postgrad.training.start import train

Models = Callable[[int], str]


def row(ticket: int, mask: list[int]) -> Conversation:
    ids = np.arange(len(mask), dtype=np.int32) + 100
    return Conversation(ticket, ticket, ids, np.array(mask, np.bool_))


@pytest.mark.parametrize(
    ("mask", "place"),
    [([0, 0, 1, 1], 2), ([0, 1, 1, 0, 0, 1, 0], 5), ([1, 1], 0), ([0, 1, 0, 1, 1, 1], 3)],
)
def test_the_last_answer_begins_where_its_loss_does(mask: list[int], place: int) -> None:
    assert last_answer(np.array(mask, np.bool_)) == place


def test_a_row_gets_the_answer_in_place_of_its_last_one_and_loss_on_it_alone() -> None:
    before = row(7, [0, 1, 0, 0, 1, 1, 0])
    drawn = np.array([5, 6, 2], np.int32)
    answer = Completion(7, 0, 0, drawn, np.zeros(3, np.float32), "stop", ((0, 3),), "")
    after = with_answer(before, before.token_ids[:4], answer)
    assert after.token_ids.tolist() == [100, 101, 102, 103, 5, 6, 2]
    assert after.loss_mask.tolist() == [False] * 4 + [True] * 3
    assert (after.ticket, after.row) == (7, 7)


def test_an_answer_has_the_weight_of_the_one_that_it_replaces() -> None:
    before = row(7, [0, 1, 0, 0, 1, 1, 0])
    before = replace(before, loss_weights=np.array([0, 3, 0, 0, 0.5, 0.5, 0], np.float32))
    drawn = np.array([5, 6, 2], np.int32)
    answer = Completion(7, 0, 0, drawn, np.zeros(3, np.float32), "stop", ((0, 3),), "")
    after = with_answer(before, before.token_ids[:4], answer)
    assert after.loss_weights is not None
    assert after.loss_weights.tolist() == [0, 0, 0, 0, 0.5, 0.5, 0.5]


def test_answers_that_did_not_end_by_themselves_are_truncated() -> None:
    def answer(tokens: int, reason: FinishReason) -> Completion:
        ids = np.zeros(tokens, np.int32)
        return Completion(0, 0, 0, ids, np.zeros(tokens, np.float32), reason, ((0, tokens),), "")

    answers = [answer(3, "stop"), answer(6, "length"), answer(2, "dead_end"), answer(1, "stop")]
    assert answer_metrics(answers) == {
        "on_policy/samples": 4.0,
        "on_policy/mean_tokens": 3.0,
        "on_policy/truncated": 0.5,
    }


@given(st.floats(0.0, 1.0), st.integers(0, 9), st.lists(st.integers(0, 10**6), unique=True))
def test_which_rows_are_answered_depends_on_seed_and_ticket_alone(
    share: float, seed: int, tickets: list[int]
) -> None:
    own_answers = OwnAnswers(share, SamplingSettings(max_new_tokens=4), 6, seed)
    together = own_answers.requests([row(ticket, [0, 0, 0, 1]) for ticket in tickets])
    alone = [r for ticket in tickets for r in own_answers.requests([row(ticket, [0, 0, 0, 1])])]
    assert [r.ticket for r in together] == [r.ticket for r in alone]
    assert [r.ticket for r in together] == [
        ticket for ticket in tickets if uniform(seed, "on_policy", ticket) < share
    ]
    assert all(r.token_ids.tolist() == [100, 101, 102] for r in together)
    assert all(r.sampling.max_new_tokens == 3 for r in together)  # 6 tokens, 3 of them asked


def test_a_row_without_a_question_is_an_error_that_names_it() -> None:
    own_answers = OwnAnswers(1.0, SamplingSettings(max_new_tokens=4), 6, 0)
    with pytest.raises(UsageError, match="row 3: nothing precedes its answer"):
        own_answers.requests([row(3, [1, 1])])


@pytest.fixture
def make_student(make_recipe: MakeRecipe, models: Models) -> Callable[..., Recipe]:
    """make_student("run", share, teacher=2, **changes): it learns from a model with other weights,
    or with the student's own: 1.
    """

    def make(run: str, share: float, teacher: int = 2, top_k: int | None = None, **changes: Any):
        algorithm = {"type": "distillation", "divergence": "reverse_kl", "on_policy": share}
        return make_recipe(
            "sft",
            run,
            **{
                "model": {"path": models(1), "init": None},
                "teacher": {"model": {"path": models(teacher)}, "top_k": top_k},
                "algorithm": algorithm,
                "rollout": {"max_new_tokens": 6},
                "checkpoint": {"save_steps": 1, "max_ckpt_num": 2},
                **changes,
            },
        )

    return make


def logged(recipe: Recipe) -> list[dict[str, Any]]:
    return lines(Path(recipe.run_dir) / "metrics.jsonl")


def test_all_rows_are_answered_by_the_student_and_trained_on(
    make_student: Callable[..., Recipe], console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[tuple[Conversation, Conversation]] = []
    answered = SFTJob.with_own_answers

    def kept(job: SFTJob, drawn: list[Conversation]) -> Any:
        rows, metrics = answered(job, drawn)
        trained.extend(zip(drawn, rows, strict=True))
        return rows, metrics

    monkeypatch.setattr(SFTJob, "with_own_answers", kept)
    recipe = make_student("run", 1.0, steps=2)
    train(recipe, console)
    assert len(trained) == 16
    for before, after in trained:
        place = last_answer(before.loss_mask)
        assert (after.token_ids[:place] == before.token_ids[:place]).all()
        assert 1 <= len(after.token_ids) - place <= 6
        assert after.loss_mask.tolist() == [False] * place + [True] * (len(after.token_ids) - place)
    for number, step in enumerate(logged(recipe)):
        rows = [after for _, after in trained[8 * number : 8 * number + 8]]
        assert step["on_policy/samples"] == 8.0
        assert step["loss_tokens"] == sum(int(after.loss_mask.sum()) for after in rows)
        assert step["on_policy/mean_tokens"] == step["loss_tokens"] / 8
        assert step["sample_seconds"] > 0.0
        assert step[DIFFERENCE] < 1e-4


def test_a_teacher_like_the_student_has_nothing_to_say_of_its_own_answers(
    make_student: Callable[..., Recipe], console: Console
) -> None:
    recipe = make_student("run", 1.0, teacher=1, steps=1, eval={"at_start": False, "at_end": False})
    train(recipe, console)
    (step,) = logged(recipe)
    assert step["policy/divergence"] == pytest.approx(0.0, abs=1e-6)
    assert step["policy/grad_norm"] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.slow
def test_a_share_of_none_is_the_run_without(
    make_student: Callable[..., Recipe], console: Console
) -> None:
    plain = {"type": "distillation", "divergence": "reverse_kl"}
    of_share_none, plain_run = (
        make_student("none", 0.0),
        make_student("plain", 0.5, algorithm=plain),
    )
    train(of_share_none, console)
    train(plain_run, console)
    first, second = tensors(of_share_none.run_dir, 3), tensors(plain_run.run_dir, 3)
    assert all(first[name].equal(second[name]) for name in first)
    assert "on_policy/samples" not in logged(of_share_none)[0]


@pytest.mark.slow
def test_a_resumed_run_answers_the_same_rows_with_the_same_tokens(
    make_student: Callable[..., Recipe], console: Console
) -> None:
    uninterrupted, halves = make_student("whole", 0.5), make_student("halves", 0.5, steps=2)
    train(uninterrupted, console)
    train(halves, console)
    train(make_student("halves", 0.5), console)
    full_tensors, resumed_tensors = tensors(uninterrupted.run_dir, 3), tensors(halves.run_dir, 3)
    assert full_tensors.keys() == resumed_tensors.keys()
    assert all(full_tensors[name].equal(resumed_tensors[name]) for name in full_tensors)
    logs = [Path(recipe.run_dir) / "metrics.jsonl" for recipe in (uninterrupted, halves)]
    assert timeless(logs[0]) == timeless(logs[1])
    steps = logged(uninterrupted)
    counts = [step["on_policy/samples"] for step in steps]
    chosen = uniform(uninterrupted.seed, "on_policy", np.arange(24)) < 0.5
    assert counts == chosen.reshape(3, 8).sum(1).tolist()
    assert 0 < sum(counts) < 24


@pytest.mark.slow
def test_a_student_comes_nearer_to_its_teacher_on_its_own_answers(
    make_student: Callable[..., Recipe], console: Console
) -> None:
    recipe = make_student("run", 1.0, steps=16, eval={"at_start": False, "at_end": False})
    train(recipe, console)
    values = [step["policy/divergence"] for step in logged(recipe)]
    assert sum(values[-4:]) < 0.8 * sum(values[:4])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"algorithm": {"type": "distillation", "on_policy": 0.5, "nll_coef": 0.1}},
            r"nll_coef = 0\.1 with on_policy = 0\.5 would raise",
        ),
        ({"rollout": {"max_new_tokens": 48}}, r"rollout\.max_new_tokens: 48 leaves no room"),
        (
            {"rollout": {"source": "replay", "replay_path": "runs/x"}},
            r'rollout\.source: "replay" has no answers of this student',
        ),
        (
            {"data": {"path": "rows.jsonl", "loss_turns": ["user", "assistant"]}},
            r"data\.loss_turns: the student answers alone",
        ),
        (
            {"data": {"path": "rows.jsonl", "loss_turns": "everything"}},
            r'data\.loss_turns: "everything" leaves no question to answer',
        ),
    ],
)
def test_what_does_not_go_with_own_answers_is_refused(
    changes: dict[str, Any], why: str, make_student: Callable[..., Recipe]
) -> None:
    with pytest.raises(UsageError, match=why):
        make_student("run", 0.5, **changes)


def test_stored_tokens_of_a_teacher_do_not_go_with_own_answers(
    make_student: Callable[..., Recipe],
) -> None:
    with pytest.raises(UsageError, match=r"teacher\.top_k: reads the rows before the first update"):
        make_student("run", 0.5, top_k=4)


def test_a_plan_has_the_seconds_of_the_answers(make_student: Callable[..., Recipe]) -> None:
    def step_of(share: float) -> dict[str, float]:
        recipe = make_student("run", share)
        return dict(make_plan(*facts_of(recipe, parse_hardware("1xH100"))).timing.step)

    none, half, every = (step_of(share) for share in (0.0, 0.5, 1.0))
    assert "sample" not in none
    assert 0.0 < half["sample"] <= every["sample"]
    assert half.keys() == none.keys() | {"sample", "publish"}
    assert half["update"] == pytest.approx(none["update"])
