"""What a run keeps where verifiers give too few scores, or an evaluation cannot be used."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from postgrad.core.errors import Diverged, ScoresMissing, UsageError
from postgrad.evaluation.answers import Evaluator
from postgrad.training.start import resume, train

AT_THE_END = {"save_steps": 0, "max_ckpt_num": 2}


def saved(run_dir: str) -> list[str]:
    return sorted(path.name for path in (Path(run_dir) / "checkpoints").glob("step-*"))


def lines(run_dir: str, name: str) -> list[dict[str, Any]]:
    text = (Path(run_dir) / name).read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def fail_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """fail_from(n): the recipe's table of a verifier that raises from its n-th sample on."""

    def rewards(n: int) -> list[dict[str, str]]:
        (tmp_path / "fading.py").write_text(
            "calls = 0\n"
            "def fading(prompt, rollout):\n"
            "    global calls\n"
            "    calls += 1\n"
            f"    if calls > {n}:\n"
            "        raise ConnectionError('the server is gone')\n"
            "    return rollout.text.count('a') + len(rollout.text) / 100\n"
        )
        paths = [str(tmp_path), os.environ.get("PYTHONPATH")]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        return [{"type": "fading:fading"}]

    return rewards


def test_a_verifier_that_breaks_costs_its_step_and_not_the_steps_before(
    make_recipe: Any, console: Any, fail_from: Any
) -> None:
    """Two steps of 16 samples get their scores, the third does not."""
    rewards, never = fail_from(40), {"at_start": False, "at_end": False}
    recipe = make_recipe("rl", rewards=rewards, eval=never, checkpoint=AT_THE_END)
    kept = "the checkpoint of step 2 is kept; continue with postgrad resume"
    with pytest.raises(ScoresMissing, match=kept):
        train(recipe, console)
    assert saved(recipe.run_dir) == ["step-000002"]
    failed = [e for e in lines(recipe.run_dir, "events.jsonl") if e["event"] == "verifier_failed"]
    assert {event["step"] for event in failed} == {3}
    # The causes of the step that ended the run are recorded as well: those of the first group of
    # four that failed, or of both where they ended together.
    assert len(failed) in (4, 8)
    assert resume(Path(recipe.run_dir), [], [], console)["steps"] == 3
    assert [line["step"] for line in lines(recipe.run_dir, "metrics.jsonl")] == [1, 2, 3]


def test_a_verifier_that_hangs_does_not_hang_on_every_sample_of_a_step(
    make_recipe: Any, console: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Eight pairs of samples, one worker, two tries of each: the first pair decides."""
    (tmp_path / "deaf.py").write_text(
        "import time\ndef deaf(prompt, rollout):\n    time.sleep(60)\n"
    )
    paths = [str(tmp_path), os.environ.get("PYTHONPATH")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    recipe = make_recipe(
        "rl",
        rewards=[{"type": "deaf:deaf", "wall_seconds": 0.3}],
        scoring={"workers": 1},
        eval={"at_start": False, "at_end": False},
        batch={"rollout_batch_size": 8, "n_samples_per_prompt": 2, "train_batch_size": 16},
    )
    with pytest.raises(
        ScoresMissing, match=r"failed on 2 of 2 scored samples .*deaf: wall_clock x2"
    ):
        train(recipe, console)
    failed = [e for e in lines(recipe.run_dir, "events.jsonl") if e["event"] == "verifier_failed"]
    assert [(event["ticket"], event["sample"]) for event in failed] == [(0, 0), (0, 1)]


def test_an_evaluation_that_fails_costs_no_step_that_was_trained(
    make_recipe: Any, console: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe("rl", eval={"at_start": False}, checkpoint=AT_THE_END)

    def broken(self: Any, *arguments: Any) -> Any:
        raise ScoresMissing("the judge is down")

    monkeypatch.setattr(Evaluator, "__call__", broken)
    with pytest.raises(ScoresMissing, match="checkpoint of step 3 is kept, without this evaluat"):
        train(recipe, console)
    assert saved(recipe.run_dir) == ["step-000003"]


def test_a_best_metric_of_rows_that_are_not_there_does_not_cost_the_run(
    make_recipe: Any, console: Any
) -> None:
    """The first evaluation is the last thing that this run does, after all of its steps."""
    wrong = {**AT_THE_END, "best_metric": "eval/accuracy/x"}
    recipe = make_recipe("sft", eval={"at_start": False}, checkpoint=wrong)
    with pytest.raises(UsageError, match=r"eval/accuracy/x.*eval/accuracy.*step 3 is kept"):
        train(recipe, console)
    assert saved(recipe.run_dir) == ["step-000003"]
    flags = ["--checkpoint.best_metric", "eval/accuracy"]
    assert resume(Path(recipe.run_dir), flags, [], console)["steps"] == 3


def test_a_verifier_that_never_works_is_named_without_talk_of_what_is_kept(
    make_recipe: Any, console: Any, fail_from: Any
) -> None:
    never = {"at_start": False, "at_end": False}
    recipe = make_recipe("rl", rewards=fail_from(0), eval=never, checkpoint=AT_THE_END)
    with pytest.raises(ScoresMissing, match=r"the server is gone \(fading.py:6\)$"):
        train(recipe, console)
    assert saved(recipe.run_dir) == []


@pytest.mark.parametrize(
    ("save_steps", "standing"),
    [
        (
            1,
            r"the checkpoint of step 1 is kept; postgrad fork .* makes a run of this or an earlier "
            "one, and postgrad resume DIR --learner.lr RATE --allow-change learner.lr goes on with",
        ),
        (0, "no checkpoint was saved yet, the run starts over$"),
    ],
)
def test_a_run_that_diverged_says_how_to_go_back_and_saves_nothing_of_it(
    save_steps: int, standing: str, make_recipe: Any, console: Any
) -> None:
    checkpoint = {**AT_THE_END, "save_steps": save_steps}
    recipe = make_recipe("sft", learner={"lr": 1e30}, eval={"at_start": False, "at_end": False},
                         checkpoint=checkpoint)  # fmt: skip
    with pytest.raises(Diverged, match=rf"gradient of update 2 is not finite .*; {standing}"):
        train(recipe, console)
    assert saved(recipe.run_dir) == ["step-000001"] * save_steps


def test_the_command_that_continues_a_run_is_one_that_a_shell_reads(
    make_recipe: Any, console: Any, fail_from: Any
) -> None:
    never = {"at_start": False, "at_end": False}
    recipe = make_recipe("rl", "my run", rewards=fail_from(20), eval=never, checkpoint=AT_THE_END)
    with pytest.raises(ScoresMissing, match=r"continue with postgrad resume '/.*/my run'$"):
        train(recipe, console)
