"""Whole runs in an environment: evaluation plays, rewards reach the update, resumes are exact."""

import json
import string
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.chat import HERMES, chat_tokenizer
from helpers.chat_server import Answer, chat_server
from helpers.runs import Killed, assert_same_run, kill_after, lines, train_until_killed
from postgrad.core.errors import UsageError
from postgrad.core.records import Prompt, Rollout, ScoredGroup, Turn
from postgrad.data.templates import template_call
from postgrad.evaluation.answers import Evaluator, environment_metrics
from postgrad.fleet.choices import choose
from postgrad.fleet.engines import build_engine
from postgrad.fleet.exported import roles_of
from postgrad.fleet.learned import scorer_of
from postgrad.models.fresh import make_fresh
from postgrad.models.settings import ModelInit
from postgrad.models.tokenizer import load_tokenizer
from postgrad.observe.console import Console
from postgrad.rollout.environments.chat import dialogue
from postgrad.rollout.environments.guess_number import GuessNumber
from postgrad.rollout.environments.sets import as_played
from postgrad.tools.asking import ask
from postgrad.tools.evaluate import evaluate
from postgrad.tools.export import export
from postgrad.training.rl import RLJob
from postgrad.training.start import train

ROWS = "postgrad.rollout.environments.guess_number:rows"
TASK = {"lowest": 1, "highest": 9, "least": 4, "most": 6}
GAME: dict[str, Any] = {
    "model": {
        "init": {
            "type": "qwen3",
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 160,
            "tokenizer": {"kind": "characters", "phrases": ["Find my number from ", "invalid"]},
        }
    },
    "data": {"path": ROWS, "task": TASK, "size": 40, "max_len": 120},
    "eval": {"path": ROWS, "task": TASK, "size": 3, "seed": 2, "max_len": 120, "max_new_tokens": 2},
    "environment": {"type": "guess_number", "max_turns": 3, "miss_reward": -0.25},
    "rewards": [],
    "rollout": {"max_new_tokens": 2, "stop": ["1", "2", "3", "4"]},
}


@pytest.fixture
def game(make_recipe: Any) -> Any:
    """game(run_dir, **changes): an RL recipe of guess_number."""

    def make(run_dir: str = "run", job: str = "rl", **changes: Any) -> Any:
        merged = dict(GAME)
        for name, value in changes.items():
            theirs = name == "environment" and ("sets" in value or ":" in value.get("type", ""))
            if theirs:  # other environments, with keys of their own
                merged[name] = value
                continue
            merged[name] = {**GAME.get(name, {}), **value} if isinstance(value, dict) else value
        return make_recipe(job, run_dir, **merged)

    return make


def test_a_run_trains_on_what_the_environment_gave(game: Any, console: Console) -> None:
    recipe = game()
    summary = train(recipe, console)
    assert "accuracy_after" in summary
    samples = lines(Path(recipe.run_dir) / "samples.jsonl")
    several = [line for line in samples if len(line["turns"]) > 1]
    assert several
    for line in samples:
        authors = [turn["author"] for turn in line["turns"]]
        assert authors == (["policy", "environment"] * 3)[: len(authors)]
        earned = np.array(line["columns"]["turn_rewards"]) if "columns" in line else np.zeros(1)
        assert line["rewards"] == {"environment": pytest.approx(earned.sum())}
        assert line["total"] == pytest.approx(earned.sum())
        mask = np.concatenate(
            [[t["author"] == "policy"] * len(t["token_ids"]) for t in line["turns"]]
        )
        assert line["mask"] == mask.astype(int).tolist()
        assert "columns" not in line or not earned[~mask].any()
    metrics = lines(Path(recipe.run_dir) / "metrics.jsonl")[-1]
    assert metrics["environment/turns"] > 1.0
    assert {"environment/hits", "environment/malformed", "reward/environment"} <= set(metrics)


@pytest.mark.slow
def test_two_runs_of_a_game_give_the_same_bits(game: Any, console: Console) -> None:
    first_run, second_run = game("one"), game("two")
    train(first_run, console)
    train(second_run, console)
    assert_same_run(first_run, second_run, 3)


def test_sft_learns_from_a_games_conversations_and_is_evaluated_by_playing(
    game: Any, console: Console
) -> None:
    data = {"messages": "messages", "on_too_long": "truncate"}
    evaluation = {"prompt": "question", "at_start": False}
    recipe = game(job="sft", data=data, eval=evaluation)
    train(recipe, console)
    run = Path(recipe.run_dir)
    report = evaluate(recipe, str(export(run, "latest", run / "exported")), console)
    assert report["rows"] == 3
    assert report["sets"][0]["environment/turns"] >= 1.0


@pytest.mark.parametrize(("turns", "length"), [(1, 0.0), (3, 70.0)])
def test_a_server_that_says_nothing_gets_the_rewards_of_its_turns(
    game: Any, console: Console, tmp_path: Path, turns: int, length: float
) -> None:
    """Its answers have no tokens at which a reward could stand; replies of the game may have."""
    nothing = json.dumps({"choices": [{"text": "", "finish_reason": "stop"}]}).encode()
    path = tmp_path / "model"
    make_fresh(ModelInit.model_validate(GAME["model"]["init"]), [], 0, path)
    with chat_server(lambda prompt, times: Answer(raw=nothing)) as server:
        options = {"base_url": server.url, "model": "theirs", "endpoint": "completions"}
        rollout = {"type": "openai", "openai": options}
        asked = game(environment={"max_turns": turns}, rollout=rollout)
        (report,) = evaluate(asked, str(path), console)["sets"]
    assert report["reward/environment"] == report["reward"] == -0.25 * turns
    assert (report["response_length"], report["failed"]) == (length, 0)


@pytest.mark.slow
def test_plain_transformers_is_asked_in_the_game_and_plays_as_our_engine_does(
    game: Any, console: Console
) -> None:
    recipe = game(
        eval={"greedy": True, "size": 6, "at_start": False},
        rollout={"stop": list(string.printable.strip())},  # else this model would never stop
        steps=1,
    )
    train(recipe, console)
    run = Path(recipe.run_dir)
    model = str(export(run, "latest", run / "exported"))
    answers = ask(model, recipe, 6)
    tokenizer = load_tokenizer(model)
    with scorer_of(recipe, tokenizer) as scorer, ExitStack() as stack:
        evaluator = Evaluator(recipe, tokenizer, scorer)
        engine, _ = build_engine(
            recipe.rollout, model, choose(recipe, {}), stack, sequences=6, max_len=evaluator.max_len
        )
        (result,) = evaluator(engine, lambda _: None)
    assert [answer.question for answer in answers] == [
        problem.question for problem in result.problems
    ]
    for answer, problem in zip(answers, result.problems, strict=True):
        assert [author for author, _ in answer.turns] == (["policy", "environment"] * 3)[
            : len(answer.turns)
        ]
        transcript = "".join(text for _, text in answer.turns)
        assert "".join(transcript.split()) == "".join(problem.text.split())
        assert problem.greedy == (1, int(answer.answer == answer.reference))
    several = [answer for answer in answers if len(answer.turns) > 1]
    assert several
    shown = several[0].to_json()
    assert shown["answer"] == shown["turns"][-1]["text"] == several[0].written[-1]
    assert shown["turns"][1]["author"] == "environment"


def test_an_environment_that_fails_under_the_last_questions_loses_no_summary(
    game: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = game(rollout={"stop": list(string.printable.strip())}, steps=1)
    train(recipe, console)
    model = str(export(Path(recipe.run_dir), "latest", Path(recipe.run_dir) / "exported"))
    monkeypatch.setattr(GuessNumber, "start", lambda self, prompt, sample: None)
    (answer,) = ask(model, recipe, 1)
    (_, written), (author, why) = answer.turns
    assert (answer.answer, author) == (written, "environment")
    assert why == "(no reply: start returned a NoneType, which has no method `step`)"


def test_rows_that_cannot_be_played_are_told_before_a_weight_is_read(
    game: Any, console: Console, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "Find 7.", "answer": "7"}', "utf-8")
    with pytest.raises(UsageError, match=r"1 of 1 rows cannot be played.*column 'low'"):
        train(game(data={"path": str(path), "task": {}}), console)


def test_what_an_environment_raises_of_a_row_is_the_reason_why_it_cannot_be_played(
    game: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: GuessNumber, prompt: Prompt) -> str | None:
        return prompt.metadata["level"]

    monkeypatch.setattr(GuessNumber, "check", broken)
    with pytest.raises(UsageError, match=r"cannot be played.*KeyError: 'level' \(test_environ"):
        train(game(), console)


def test_tools_stand_in_every_prompt(make_recipe: Any) -> None:
    recipe = make_recipe("rl", environment={"type": "tools", "tools": ["calculator"]})
    kwargs = as_played(recipe.environment, recipe.data).chat_template_kwargs
    assert [tool["function"]["name"] for tool in kwargs["tools"]] == ["calculator"]
    taken = make_recipe(
        "rl",
        environment={"type": "tools", "tools": ["calculator"]},
        data={"chat_template_kwargs": {"tools": []}},
    )
    with pytest.raises(UsageError, match="'tools' comes from"):
        as_played(taken.environment, taken.data)


def test_an_environment_answers_through_the_template_of_the_data(make_recipe: Any) -> None:
    tokenizer = chat_tokenizer(HERMES)
    recipe = make_recipe(
        "rl",
        environment={"type": "guess_number"},
        data={"chat_template": "chatml", "system": None},
    )
    world = dialogue(recipe.environment.sets[0], tokenizer, template_call(recipe.data))
    seen = world.template.after([{"role": "user", "content": "0"}], closed=False)
    assert tokenizer.decode(seen.tolist()) == (
        "<|im_end|>\n<|im_start|>user\n0<|im_end|>\n<|im_start|>assistant\n"
    )
    assert roles_of(recipe, "base")["policy"].template == "chatml"


def test_counts_are_means_over_the_samples_that_an_environment_played(make_recipe: Any) -> None:
    def group(environment: str | None, *counts: dict[str, float]) -> ScoredGroup:
        turn = Turn("policy", np.zeros(1, np.int32), np.zeros(1, np.float32))
        rollouts = [Rollout(0, 0, (turn,), "stop", ((0, 1),), "", counts=each) for each in counts]
        prompt = Prompt(0, np.zeros(1, np.int32), "", None, "", 0, environment=environment)
        return ScoredGroup(prompt, tuple(rollouts), {}, np.zeros(0), np.zeros(0, np.bool_))

    asked, game = group(None, {}), group("game", {"turns": 3.0, "calls": 1.0}, {"turns": 2.0})
    other = group("other", {"turns": 8.0})
    means = environment_metrics([asked, game], None)
    assert means == {"environment/calls": 0.5, "environment/turns": 2.5}
    assert environment_metrics([asked], None) == {}
    both = make_recipe("rl", **several()).environment
    assert environment_metrics([asked, other, game], both) == {
        "environment/game/calls": 0.5,
        "environment/game/turns": 2.5,
        "environment/other/turns": 8.0,
    }


def test_without_an_environment_nothing_changes(make_recipe: Any) -> None:
    recipe = make_recipe("rl")
    assert as_played(recipe.environment, recipe.data) is recipe.data


TALKS = list(string.printable.strip())  # every turn stops by itself, and is replied to


def late(kind: str, **options: Any) -> dict[str, Any]:
    """The change of a game to an environment of helpers/courses.py."""
    environment = {"type": f"helpers.courses:{kind}", "max_turns": 3, **options}
    return {"environment": environment}


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_replies_that_take_another_time_in_each_run_change_no_bit(
    staleness: int, game: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {"algorithm": {"correction": "tis"}} if staleness else {}
    changes["rollout"] = {"stop": TALKS, "max_staleness": staleness, "slots": 5}
    first_run, second_run = (
        game(name, **late("Late", concurrent=3), **changes) for name in ("one", "two")
    )
    train(first_run, console)
    with monkeypatch.context() as killing:
        kill_after(killing, RLJob, 1)
        with pytest.raises(Killed):
            train(second_run, console)
    train(second_run, console)
    assert_same_run(first_run, second_run, 3)
    turns = [len(line["turns"]) for line in lines(Path(first_run.run_dir) / "samples.jsonl")]
    assert max(turns) == 5
    events = lines(Path(first_run.run_dir) / "events.jsonl")
    assert not [event for event in events if event["event"] == "not_exact"]


@pytest.mark.slow
def test_a_run_that_cannot_be_exact_says_so_and_records_failures(
    game: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = game(
        **late("Moody"),
        scoring={"max_failed_fraction": 1.0, "workers": 1},
        rollout={"stop": TALKS, "max_staleness": 2, "slots": 5},
        algorithm={"correction": "tis"},
    )
    with monkeypatch.context() as killing:
        kill_after(killing, RLJob, 1)
        with pytest.raises(Killed):
            train(recipe, console)
    train(recipe, console)
    run = Path(recipe.run_dir)
    events = lines(run / "events.jsonl")
    causes = [event["cause"] for event in events if event["event"] == "not_exact"]
    assert causes == ["environment"] * 2  # the run, and its resume
    redrawn = [line["ahead/redrawn_samples"] for line in lines(run / "metrics.jsonl")]
    assert redrawn[0] == redrawn[2] == 0.0
    failed = [event for event in events if event["event"] == "environment_failed"]
    samples = lines(run / "samples.jsonl")
    broken = [line for line in samples if line["failures"]]
    assert broken
    places = {(event["step"], event["ticket"], event["sample"]) for event in failed}
    assert places >= {(line["step"], line["ticket"], line["sample"]) for line in broken}
    for line in broken:
        assert line["total"] is None
        assert not line["kept"]
        assert line["failures"][0]["component"] == "environment"
        assert "not today" in line["failures"][0]["message"]


def several() -> dict[str, Any]:
    """The change of a game to rows of the game, of an environment whose replies come late, and of
    questions with one answer.
    """
    sets = ({"environment": "guess_number"}, {"environment": "late", "seed": 50})
    played = [
        {"type": "guess_number", "max_turns": 3},
        {"type": "helpers.courses:Late", "name": "late", "max_turns": 2},
    ]
    return {
        "data": {"sets": [*sets, {"environment": "none", "seed": 90}], "size": 12},
        "eval": {"sets": [{"environment": "none", "name": "asked"},
                          {"environment": "guess_number", "name": "played"}]},
        "environment": {"sets": played},
        "rewards": [{"type": "exact_match", "weight": 0.5}],
        "batch": {"rollout_batch_size": 6},
    }  # fmt: skip


def test_each_dataset_is_played_by_its_own_environment(game: Any, console: Console) -> None:
    recipe = game(rollout={"stop": TALKS}, **several())
    train(recipe, console)
    run = Path(recipe.run_dir)
    samples, metrics = lines(run / "samples.jsonl"), lines(run / "metrics.jsonl")
    by_turns: dict[str | None, set[int]] = {}
    for line in samples:
        environment = line.get("environment")
        environment_names = [] if environment is None else ["environment"]
        assert list(line["rewards"]) == ["exact_match", *environment_names]
        assert ("malformed" in line.get("counts", {})) == (environment == "guess_number")
        by_turns.setdefault(environment, set()).add(len(line["turns"]))
    assert by_turns[None] == {1}
    assert max(by_turns["late"]) == 3
    assert max(by_turns["guess_number"]) > 3
    names = {name for line in metrics for name in line if name.startswith("environment/")}
    assert {"environment/guess_number/turns", "environment/late/hits"} <= names
    assert not [name for name in names if name.count("/") == 1]
    by_set = {line["set"]: line for line in lines(run / "eval.jsonl")}
    assert by_set["played"]["environment/guess_number/turns"] >= 1.0
    assert not [name for name in by_set["asked"] if name.startswith("environment")]


@pytest.mark.slow
def test_a_killed_run_of_several_environments_goes_on_with_each_as_it_can(
    game: Any, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = {"stop": TALKS, "max_staleness": 2, "slots": 5}
    changes = several() | {"rollout": rollout, "algorithm": {"correction": "tis"}}
    recipes = [game(name, **changes) for name in ("whole", "killed")]
    train(recipes[0], console)
    train_until_killed(monkeypatch, RLJob, 1, recipes[1], console)
    train(recipes[1], console)
    assert_same_run(*recipes, 3)
