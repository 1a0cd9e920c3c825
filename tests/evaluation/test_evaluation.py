"""Evaluation: right answers counted without bias, failures in no mean, the same every time."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from postgrad.core.errors import UsageError
from postgrad.core.records import Failure, Prompt, Rollout, ScoredGroup, Turn
from postgrad.evaluation import answers as evaluation
from postgrad.evaluation.answers import Evaluator, sample_metrics
from postgrad.models.fresh import make_fresh
from postgrad.models.tokenizer import load_tokenizer
from postgrad.observe.console import Console
from postgrad.ops.intervals import mean_interval
from postgrad.rollout.settings import SamplingSettings
from postgrad.training.start import train


class Scores:
    """A scorer that is only asked for its names and its bracket."""

    names = ("first", "second")
    comparing = ("second",)

    def step(self) -> Any:
        from contextlib import nullcontext

        return nullcontext()


def group(ticket: int, *scores: float, level: str = "") -> ScoredGroup:
    turn = Turn("policy", np.zeros(2 + ticket, np.int32), np.zeros(2 + ticket, np.float32))
    n = len(scores)
    rollouts = tuple(Rollout(ticket, i, (turn,), "stop", ((0, 2),), "") for i in range(n))
    metadata = {"level": level}
    prompt = Prompt(ticket, np.zeros(3, np.int32), "q", "a", "set", ticket, metadata)
    values = np.array(scores)
    kept = ~np.isnan(values)
    return ScoredGroup(prompt, rollouts, {"first": values, "second": -values}, values, kept)


@pytest.fixture
def evaluator(make_recipe: Any, tmp_path: Path) -> Evaluator:
    recipe = make_recipe(
        "rl",
        eval={"n_samples": 4, "pass_at": [1, 2, 4], "correct_at": 0.75, "greedy": True},
    )
    make_fresh(recipe.model.init, [], 0, tmp_path / "model")
    return Evaluator(recipe, load_tokenizer(str(tmp_path / "model")), Scores())  # pyright: ignore[reportArgumentType]


def test_accuracy_and_pass_at_k_count_scores_that_reach_the_mark(
    evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two problems: 2 of 4 right; 1 of 3, where the fourth could not be scored."""
    groups = [group(0, 1.0, 0.8, 0.7, 0.0), group(1, math.nan, 0.75, 0.0, 0.0)]
    greedy = [group(0, 1.0), group(1, math.nan)]
    answers = iter([groups, greedy])
    monkeypatch.setattr(evaluation, "sample_groups", lambda *args: next(answers))
    engine: Any = None
    result = evaluator(engine, lambda n: None)[0]
    assert result.metrics["accuracy"] == pytest.approx((2 / 4 + 1 / 3) / 2)
    assert result.metrics["pass@2"] == pytest.approx(((1 - 1 / 6) + (1 - 1 / 3)) / 2)
    assert result.metrics["pass@4"] == 1.0  # only the first problem has four scored samples
    assert {k: result.metrics[f"left_out@{k}"] for k in (1, 2, 4)} == {1: 0, 2: 0, 4: 1}
    assert "pass@4 1.000" in next(text for text in result.texts() if "(1 of 8 problems" in text)
    assert result.metrics["greedy_accuracy"] == 1.0
    assert result.failed == 2
    assert result.rows == 8


def test_answers_are_voted_on_where_majorities_are_asked_for(
    evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 of 4 is right, and the others agree or differ."""
    evaluator.settings = evaluator.settings.model_copy(
        update={"maj_at": (3, 4), "greedy": False, "component": "first"}
    )
    agreeing = ({"answer": "1"}, {"answer": "2"}, {"answer": "2.0"}, {"answer": "2"})
    differing = ({"answer": "1"}, {"answer": "2"}, {"answer": None}, {"answer": None})
    groups = [
        dataclasses.replace(group(place, 1.0, 0.0, 0.0, 0.0), details={"first": details})
        for place, details in enumerate((agreeing, differing))
    ]
    monkeypatch.setattr(evaluation, "sample_groups", lambda *args: groups)
    engine: Any = None
    result = evaluator(engine, lambda n: None)[0]
    assert result.metrics["maj@4"] == (0.0 + 0.5) / 2
    # of 4 choices of 3: the first problem loses all; the second ties in 2, wins 1 and loses 1
    assert result.metrics["maj@3"] == pytest.approx((0.0 + (2 * 0.5 + 1) / 4) / 2)
    assert result.intervals["maj@3"].low < 0.25 < result.intervals["maj@3"].high
    assert result.metrics["left_out@3"] == 0.0

    silent = [dataclasses.replace(scored, details={}) for scored in groups]
    monkeypatch.setattr(evaluation, "sample_groups", lambda *args: silent)
    with pytest.raises(UsageError, match="maj_at: 'first' did not say of any sample which answer"):
        evaluator(engine, lambda n: None)


def test_the_mean_of_a_score_that_compares_samples_is_left_out_where_there_is_one_of_each_prompt(
    evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is 0 whatever the model writes."""
    named: list[set[str]] = []
    for n, groups in ((1, [group(0, 1.0)]), (4, [group(0, 1.0, 0.0, 0.0, 1.0)])):
        evaluator.settings = evaluator.settings.model_copy(
            update={"n_samples": n, "pass_at": (1,), "greedy": False}
        )
        monkeypatch.setattr(evaluation, "sample_groups", lambda *args, groups=groups: groups)
        engine: Any = None
        metrics = evaluator(engine, lambda n: None)[0].metrics
        named.append({name for name in metrics if name.startswith("reward/")})
    assert named == [{"reward/first"}, {"reward/first", "reward/second"}]


def test_an_episode_is_as_long_as_its_own_set_allows(
    make_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So what a set measures does not depend on the sets beside it."""
    path = tmp_path / "held_out.jsonl"
    path.write_text('{"question": "1 + 1?", "answer": "2"}', "utf-8")
    sets = [
        {"name": "short", "path": str(path), "max_len": 40},
        {"name": "long", "path": str(path), "max_len": 60},
    ]
    recipe = make_recipe("rl", eval={"path": None, "sets": sets, "greedy": True, "n_samples": 2})
    make_fresh(recipe.model.init, [], 0, tmp_path / "model")
    evaluator = Evaluator(recipe, load_tokenizer(str(tmp_path / "model")), Scores())  # pyright: ignore[reportArgumentType]
    drawn: list[tuple[int, float, int | None]] = []

    def sampled(_: Any, __: Any, prompts: Any, spec: Any, *more: Any) -> list[ScoredGroup]:
        drawn.append((spec.samples, spec.sampling.temperature, spec.max_len))
        return [group(0, *[1.0] * spec.samples)]

    monkeypatch.setattr(evaluation, "sample_groups", sampled)
    engine: Any = None
    evaluator(engine, lambda n: None)
    assert drawn == [(2, 1.0, 40), (1, 0.0, 40), (2, 1.0, 60), (1, 0.0, 60)]


def test_answers_are_drawn_with_the_filters_of_eval_and_not_with_those_of_rollout(
    make_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "held_out.jsonl"
    path.write_text('{"question": "1 + 1?", "answer": "2"}', "utf-8")
    recipe = make_recipe(
        "rl",
        eval={"path": str(path), "top_p": 0.9, "min_p": 0.1},
        rollout={"top_k": 5, "top_p": 0.5},
    )
    make_fresh(recipe.model.init, [], 0, tmp_path / "model")
    evaluator = Evaluator(recipe, load_tokenizer(str(tmp_path / "model")), Scores())  # pyright: ignore[reportArgumentType]
    drawn: list[SamplingSettings] = []

    def sampled(_: Any, __: Any, prompts: Any, spec: Any, *more: Any) -> list[ScoredGroup]:
        drawn.append(spec.sampling)
        return [group(0, *[1.0] * spec.samples)]

    monkeypatch.setattr(evaluation, "sample_groups", sampled)
    engine: Any = None
    evaluator(engine, lambda n: None)
    assert {(s.top_p, s.top_k, s.min_p) for s in drawn} == {(0.9, 0, 0.1)}


def test_each_set_has_its_own_samples_and_rates(
    make_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two problems of three samples, then the same two with one sample each."""
    path = tmp_path / "held_out.jsonl"
    row = '{"question": "1 + 1?", "answer": "2"}'
    path.write_text(f"{row}\n{row.replace('1 +', '2 +')}\n", "utf-8")
    sets = [
        {"name": "aime", "path": str(path), "n_samples": 3, "temperature": 0.6, "top_k": 7},
        {"name": "math", "path": str(path), "n_samples": 1, "max_new_tokens": 5},
    ]
    keys = {"n_samples": 2, "pass_at": [1, 2, 3], "top_p": 0.9, "max_new_tokens": 6}
    recipe = make_recipe("rl", eval={"path": None, "sets": sets, "greedy": True, **keys})
    make_fresh(recipe.model.init, [], 0, tmp_path / "model")
    evaluator = Evaluator(recipe, load_tokenizer(str(tmp_path / "model")), Scores())  # pyright: ignore[reportArgumentType]
    drawn: list[Any] = []
    scores = {3: ((1.0, 0.0, 0.0), (1.0, 1.0, 0.0)), 1: ((1.0,), (0.0,))}

    def sampled(_: Any, __: Any, prompts: Any, spec: Any, *more: Any) -> list[ScoredGroup]:
        how = spec.sampling
        drawn.append((spec.samples, how.temperature, how.top_k, how.top_p, how.max_new_tokens))
        return [group(place, *of) for place, of in enumerate(scores[spec.samples])]

    monkeypatch.setattr(evaluation, "sample_groups", sampled)
    engine: Any = None
    aime, math_set = evaluator(engine, lambda n: None)
    assert drawn == [
        (3, 0.6, 7, 0.9, 6), (1, 0.0, 7, 0.9, 6), (1, 1.0, 0, 0.9, 5), (1, 0.0, 0, 0.9, 5)
    ]  # fmt: skip
    assert aime.metrics["accuracy"] == pytest.approx((1 / 3 + 2 / 3) / 2)
    assert aime.metrics["pass@2"] == pytest.approx(((1 - 1 / 3) + 1) / 2)
    assert aime.metrics["pass@3"] == 1.0
    assert math_set.metrics["accuracy"] == 0.5
    rates = ("pass@", "left_out@", "reward/")
    named = {name for name in math_set.metrics if name.startswith(rates)}
    assert named == {"left_out@1", "reward/first"}  # what needs more samples is not measured
    assert evaluator.total == 2 * (3 + 1) + 2 * (1 + 1)
    assert evaluator.sequences == 6


def test_each_row_is_judged_by_the_first_component_that_applies_to_it(
    evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A component that does not apply is no failure, and the row is in no mean of it."""
    scored, failing = group(0, 1.0, 1.0), group(1, 0.0, math.nan)
    failing = dataclasses.replace(failing, rewards={"second": np.array([1.0, math.nan])})
    monkeypatch.setattr(evaluation, "sample_groups", lambda *args: [scored, failing])
    engine: Any = None
    result = evaluator(engine, lambda n: None)[0]
    assert result.metrics["accuracy"] == (2 / 2 + 1 / 1) / 2
    assert result.failed == 2  # one among the samples, and again where it is asked greedily

    evaluator.settings = evaluator.settings.model_copy(update={"component": "first"})
    result = evaluator(engine, lambda n: None)[0]
    assert result.metrics["accuracy"] == 1.0
    assert result.failed == 0


def test_a_sample_has_failed_whichever_verifier_failed_on_it(
    evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Component "first" judges; "second" failed on samples 0 and 1, "first" on 1 alone."""
    failures = tuple(
        Failure(sample, name, "crash", "")
        for sample, name in [(0, "second"), (1, "second"), (1, "first")]
    )
    scored = group(0, 1.0, math.nan, 0.0)
    scored = dataclasses.replace(scored, failures=failures)
    answers = iter([[scored], [group(0, 1.0)]])
    monkeypatch.setattr(evaluation, "sample_groups", lambda *args: next(answers))
    engine: Any = None
    result = evaluator(engine, lambda n: None)[0]
    assert result.failed == 2
    assert result.metrics["accuracy"] == 1 / 2


def test_every_rate_has_an_interval_over_problems_and_every_component_a_mean(
    evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [group(0, 1.0, 0.8, 0.7, 0.0), group(1, math.nan, 0.75, 0.0, 0.0)]
    greedy = [group(0, 1.0), group(1, 0.0)]
    answers = iter([groups, greedy])
    monkeypatch.setattr(evaluation, "sample_groups", lambda *args: next(answers))
    engine: Any = None
    line = evaluator(engine, lambda n: None)[0].to_json()
    low, high = mean_interval([2 / 4, 1 / 3])
    assert (line["accuracy_low"], line["accuracy_high"]) == (low, high)
    assert (line["pass@2_low"], line["pass@2_high"]) == mean_interval([1 - 1 / 6, 1 - 1 / 3])
    assert (line["greedy_accuracy_low"], line["greedy_accuracy_high"]) == mean_interval([1.0, 0.0])
    assert line["reward/first"] == pytest.approx((2.5 + 0.75) / 7)
    assert line["reward/second"] == pytest.approx(-(2.5 + 0.75) / 7)


def test_rows_are_also_counted_by_the_values_of_a_column(
    make_recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [("1 + 1?", "easy"), ("12 * 7?", "hard"), ("2 + 2?", "easy"), ("9 * 8?", "hard")]
    path = tmp_path / "held_out.jsonl"
    lines = (json.dumps({"question": q, "answer": "0", "level": level}) for q, level in rows)
    path.write_text("\n".join(lines), "utf-8")
    settings = {"path": str(path), "by": "level", "n_samples": 2, "greedy": False}
    recipe = make_recipe("rl", eval=settings)
    make_fresh(recipe.model.init, [], 0, tmp_path / "model")
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    evaluator = Evaluator(recipe, tokenizer, Scores())  # pyright: ignore[reportArgumentType]
    groups = [
        group(0, 1.0, 1.0, level="easy"),
        group(1, 0.0, 0.0, level="hard"),
        group(2, 1.0, 0.0, level="easy"),
        group(3, 1.0, math.nan, level="hard"),
    ]
    monkeypatch.setattr(evaluation, "sample_groups", lambda *args: groups)
    engine: Any = None
    result = evaluator(engine, lambda n: None)[0]
    line = result.to_json()
    assert line["accuracy"] == (1 + 0 + 0.5 + 1) / 4
    assert (line["rows/easy"], line["accuracy/easy"], line["pass@2/easy"]) == (2, 0.75, 1.0)
    assert (line["rows/hard"], line["accuracy/hard"], line["pass@2/hard"]) == (2, 0.5, 0.0)
    assert (line["accuracy_low/easy"], line["accuracy_high/easy"]) == mean_interval([1.0, 0.5])
    assert result.by_metric()["eval/accuracy/hard"] == 0.5
    with pytest.raises(UsageError, match=r"eval.by = 'lvl': row 0 of held_out.jsonl .* has level"):
        Evaluator(
            make_recipe("rl", eval=settings | {"by": "lvl"}),
            tokenizer,
            Scores(),  # pyright: ignore[reportArgumentType]
        )


def test_means_are_over_kept_samples_and_lengths_over_all() -> None:
    metrics = sample_metrics([group(0, 1.0, math.nan), group(1, 0.5, 0.0)], None)
    assert metrics == {
        "reward": pytest.approx(0.5),
        "response_length": 2.5,
        "truncated_fraction": 0.0,
        "reward/first": pytest.approx(0.5),
        "reward/second": pytest.approx(-0.5),
    }


def test_what_an_environment_begins_with_is_no_part_of_a_response() -> None:
    (read,) = group(5, 1.0).rollouts[0].turns  # of 7 tokens
    read = dataclasses.replace(read, author="environment", opens=True)
    scored = group(0, 1.0)
    turns = scored.rollouts[0].turns * 2
    begun = dataclasses.replace(scored.rollouts[0], turns=(read, *turns))
    again = dataclasses.replace(scored.rollouts[0], turns=(read, turns[0], read, turns[1]))
    for rollout, length in ((begun, 4.0), (again, 11.0)):
        metrics = sample_metrics([dataclasses.replace(scored, rollouts=(rollout,))], None)
        assert metrics["response_length"] == length


@pytest.mark.slow
def test_evaluations_of_the_same_weights_agree_whenever_they_are_made(
    make_recipe: Any, console: Console, tmp_path: Path
) -> None:
    """The end of one run and the start of the next, from its exported model."""
    first = make_recipe("sft", "first", checkpoint={"save_hf": True})
    ended = train(first, console)
    second = make_recipe("rl", "second", model={"path": ended["model"]}, steps=1)
    began = train(second, console)
    assert began["accuracy_before"] == ended["accuracy_after"]
    assert began["greedy_accuracy_before"] == ended["greedy_accuracy_after"]


def test_dead_ends_are_truncated_and_counted_where_there_are_any() -> None:
    scored = group(0, 1.0, 0.0, 1.0, 0.0)
    assert "dead_end_fraction" not in sample_metrics([scored], None)
    ends = ("stop", "length", "dead_end", "stop")
    rollouts = zip(scored.rollouts, ends, strict=True)
    cut = [dataclasses.replace(rollout, finish_reason=end) for rollout, end in rollouts]
    metrics = sample_metrics([dataclasses.replace(scored, rollouts=tuple(cut))], None)
    assert metrics["truncated_fraction"] == 0.5
    assert metrics["dead_end_fraction"] == 0.25
