"""A run directory from Python."""

import builtins
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.made_run import made_run
from postgrad import (
    GRPO,
    RLRecipe,
    Run,
    RunError,
    RunsOfSweep,
    UsageError,
    evaluate,
    resume,
    sweep,
    train,
)
from postgrad.core.batch import RolloutBatchSettings
from postgrad.observe.sinks import Logs
from postgrad.recipe.load import parse_recipe, recipe_from_json


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(made_run(tmp_path / "run", steps=3))


def test_metrics_are_a_frame_with_a_row_a_step(run: Run) -> None:
    frame = run.metrics()
    assert frame["step"].tolist() == [1, 2, 3]
    assert frame["reward"].tolist() == [1.01, 1.02, 1.03]
    assert len(run.evaluations()) == len((run.path / "eval.jsonl").read_text().splitlines())


def test_samples_come_one_at_a_time_in_order(run: Run) -> None:
    every = list(run.samples())
    lines = (run.path / "samples.jsonl").read_text("utf-8").splitlines()
    assert every == [json.loads(line) for line in lines]
    assert list(run.samples(step=2)) == [sample for sample in every if sample["step"] == 2]
    assert next(run.samples(step=3))["step"] == 3


def test_a_line_that_is_being_written_waits(run: Run) -> None:
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4')
        file.flush()
        assert len(run.metrics()) == 3
        file.write("}\n")
    assert run.metrics()["step"].tolist()[-1] == 4


def test_a_line_that_is_broken_is_named(run: Run) -> None:
    with (run.path / "metrics.jsonl").open("a") as file:
        size = file.tell()
        file.write("{]\n")
    with pytest.raises(RunError, match=f"metrics.jsonl: the line at byte {size}"):
        run.metrics()


def test_a_run_without_any_step_has_empty_tables(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run", steps=1)
    for name in ("metrics.jsonl", "samples.jsonl"):
        (folder / name).unlink()
    assert Run(folder).metrics().empty
    assert list(Run(folder).samples()) == []


def test_events_have_their_kind_and_time(run: Run) -> None:
    logs = Logs(run.path)
    logs.event("sentinel", "entropy fell", sentinel="entropy")
    logs.close()
    last = run.events()[-1]
    assert (last["event"], last["sentinel"]) == ("sentinel", "entropy")


def test_a_run_that_has_not_ended_has_no_summary(run: Run) -> None:
    (run.path / "summary.json").unlink(missing_ok=True)
    with pytest.raises(UsageError, match="has not ended"):
        _ = run.summary
    (run.path / "summary.json").write_text('{"steps": 3}')
    assert run.summary == {"steps": 3}


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="it is not a run directory"):
        Run(tmp_path)


def test_without_pandas_a_frame_says_what_to_install(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name == "pandas":
            raise ImportError(name)
        return right(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match="pip install pandas"):
        run.metrics()
    assert list(run.samples())


RAW: dict[str, Any] = {
    "run_dir": "runs/x",
    "steps": 3,
    "model": {"path": "some/model"},
    "data": {"path": "reasoning-gym:spell_backward", "max_len": 64},
    "eval": {"size": 8},
    "rewards": [{"type": "reasoning_gym"}],
    "batch": {"rollout_batch_size": 4},
    "rollout": {"max_new_tokens": 8},
}


def test_a_recipe_in_python_is_the_one_of_a_file() -> None:
    file = parse_recipe({"job": "rl", "algorithm": {"type": "grpo", "clip_high": 0.3}, **RAW})
    recipe = RLRecipe(**RAW | {"run_dir": Path("runs/x")}, algorithm=GRPO(clip_high=0.3))
    assert recipe == file
    assert recipe_from_json(recipe.dump()) == file
    assert recipe.eval.sets[0].path == recipe.data.path  # completed as a file is


def test_numbers_of_numpy_are_plain_numbers_in_a_recipe() -> None:
    numbers = {"steps": np.int64(3), "learner": {"lr": np.float32(0.5)}}
    recipe = RLRecipe(**RAW | numbers, algorithm=GRPO())
    assert (recipe.steps, recipe.learner.lr) == (3, 0.5)
    with pytest.raises(UsageError, match=r"steps = 2\.5: input should be a valid integer"):
        RLRecipe(**RAW | {"steps": np.float64(2.5)}, algorithm=GRPO())


def test_a_section_may_be_its_settings_and_takes_over_only_what_they_state() -> None:
    batch = RolloutBatchSettings(rollout_batch_size=4)
    recipe = RLRecipe(**RAW | {"batch": batch}, algorithm=GRPO())
    assert recipe == RLRecipe(**RAW, algorithm=GRPO())


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"steps": "3"}, "RLRecipe: steps = '3'"),
        ({"batch": {"rollout_batchsize": 4}}, "did you mean 'batch.rollout_batch_size'"),
        ({"job": "sft"}, "RLRecipe: job = 'sft'"),
        ({"stepps": 3}, "unknown key 'stepps': did you mean 'steps'"),
        ({"algorithm": {"type": "gpro"}}, "did you mean 'grpo'"),
    ],
)
def test_a_wrong_recipe_in_python_is_told_as_one_of_a_file(
    changed: dict[str, Any], problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        RLRecipe(**{"algorithm": GRPO(), **RAW, **changed})


def test_a_resume_stays_in_its_directory(run: Run) -> None:
    with pytest.raises(UsageError, match=r"run_dir = 'elsewhere': a resume goes on in .*/run;"):
        resume(run.path, ["--run_dir", "elsewhere"])


@pytest.mark.parametrize("recipe", [None, {"run_dir": "runs/x"}])
def test_what_is_no_recipe_is_refused(recipe: Any) -> None:
    for ask in (
        lambda: train(recipe),
        lambda: evaluate(recipe, "model"),
        lambda: sweep(recipe, {"seed": [0]}),
    ):
        with pytest.raises(UsageError, match=r"this is a (dict|NoneType): SFTRecipe"):
            ask()


def test_errors_of_forks_and_exports_name_no_flag_of_the_command_line(
    run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    for ask, why in (
        (lambda: run.fork(tmp_path), "is not empty: choose another directory"),
        (lambda: run.fork(run.path / "fork"), "is in the run that is forked"),
        (lambda: run.fork(file), "is a file or a link"),
        (lambda: run.fork(tmp_path / "new", "newest"), "checkpoint 'newest': latest, best, or"),
        (lambda: run.fork(tmp_path / "new", 2.0), r"checkpoint '2\.0': latest, best, or"),  # pyright: ignore[reportArgumentType]
        (lambda: run.fork("a\0b"), "NUL character"),
        (lambda: run.export(tmp_path / "new", role="critic"), "role 'critic': this run has policy"),
        (lambda: run.export("a\0b"), "NUL character"),
    ):
        with pytest.raises(UsageError, match=why) as caught:
            ask()
        assert "--" not in str(caught.value)


def test_a_run_that_is_no_sweep_is_refused_as_one(run: Run, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is no sweep: .*it holds a single run: Run\('.*/run'\)"):
        RunsOfSweep(run.path)
    with pytest.raises(UsageError, match=r"is no sweep: it has no sweep\.json$"):
        RunsOfSweep(tmp_path / "none")
