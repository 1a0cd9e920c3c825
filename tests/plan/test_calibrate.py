"""A machine's own efficiencies: what a run measured is what the same recipe's plan then says."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgrad.cli.main import main
from postgrad.core.errors import UsageError
from postgrad.models.known_shapes import shape_of_model
from postgrad.observe.console import Console
from postgrad.plan.calibrate import calibrate, learned
from postgrad.plan.calibration import Machine, factors, machine_of, read, settled, write
from postgrad.plan.hardware import Hardware, full_name, parse_hardware, this_cpu, with_threads
from postgrad.plan.plan import Facts, make_plan
from postgrad.recipe.load import parse_recipe
from postgrad.recipe.recipe import Recipe

MODEL = {
    "init": {
        "type": "qwen2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "tokenizer": {"vocab_size": 512},
    }
}  # fmt: skip
COMMON: dict[str, Any] = {
    "run_dir": "run", "steps": 8, "model": MODEL, "learner": {"threads": 1},
    "data": {"path": "nowhere/rows.jsonl", "max_len": 128},
}  # fmt: skip
SFT: dict[str, Any] = {**COMMON, "job": "sft", "batch": {"train_batch_size": 8}}
RL: dict[str, Any] = {
    **COMMON, "job": "rl", "rollout": {"max_new_tokens": 64},
    "batch": {"rollout_batch_size": 4, "n_samples_per_prompt": 4},
    "algorithm": {"type": "grpo", "kl_coef": 0.1}, "rewards": [{"type": "gsm8k"}],
}  # fmt: skip


def hardware() -> Hardware:
    return with_threads(this_cpu(), 1)


def machine() -> Machine:
    return Machine(full_name(hardware().device), "float32", 1)


def facts(recipe: Recipe, *rows: Any) -> Facts:
    return Facts(shape_of_model, hardware(), calibration=rows)


def line(sample: float, score: float, update: float, tokens: float) -> dict[str, float]:
    return {
        "sample_seconds": sample, "train/columns_seconds": score, "train/update_seconds": update,
        "train_seconds": update, "policy/computed_tokens": tokens, "response_tokens": tokens / 2,
    }  # fmt: skip


seconds = st.floats(1e-4, 1e4)
steps = st.lists(st.builds(line, seconds, seconds, seconds, st.floats(1, 1e6)), min_size=1)


@pytest.mark.slow
@given(steps, st.sampled_from([SFT, RL]))
def test_the_plan_of_the_same_recipe_then_gives_the_runs_median(
    measured: list[dict[str, float]], table: dict[str, Any]
) -> None:
    recipe = parse_recipe(table)
    rows = list(learned(make_plan(recipe, facts(recipe)), measured, machine(), "runs/a"))
    run_plan = make_plan(recipe, facts(recipe, *rows))
    wanted = {"update": "train/update_seconds"}
    if table["job"] == "rl":
        wanted |= {"sample": "sample_seconds", "score": "train/columns_seconds"}
    for phase, key in wanted.items():
        middle = median(measurement[key] for measurement in measured)
        assert run_plan.timing.step[phase] == pytest.approx(middle, rel=1e-5)
    assert "runs/a" in (run_plan.calibrated or "")


def test_another_job_takes_what_a_token_costs_and_not_how_many_there_were() -> None:
    rl, sft = parse_recipe(RL), parse_recipe(SFT)
    plain = make_plan(rl, facts(rl))
    half = plain.geometry.samples_per_step  # few tokens: most groups had no gradient
    rows = list(learned(plain, [line(1.0, 1.0, 1.0, float(half))], machine(), "a"))
    update = next(row for row in rows if row.phase == "update")
    assert update.tokens < 1
    before, after = make_plan(sft, facts(sft)), make_plan(sft, facts(sft, *rows))
    ratio = after.timing.step["update"] / before.timing.step["update"]
    assert ratio == pytest.approx(update.times, rel=1e-6)
    sft_update = update.model_copy(update={"job": "sft", "times": 3.0, "tokens": 0.5})
    learned_factors = factors([*rows, sft_update], machine(), "sft")
    assert learned_factors is not None
    assert learned_factors.phases["update"] == 1.5


def test_other_hardware_dtype_or_threads_learn_nothing_of_it() -> None:
    recipe = parse_recipe(RL)
    rows = list(learned(make_plan(recipe, facts(recipe)), [line(1, 1, 1, 9)], machine(), "a"))
    assert factors(rows, machine(), "rl") is not None
    for other in (
        replace(machine(), device="H100"),
        replace(machine(), dtype="bfloat16"),
        replace(machine(), threads=2),
    ):
        assert factors(rows, other, "rl") is None
    h100 = Facts(shape_of_model, parse_hardware("H100"), calibration=rows)
    assert make_plan(recipe, h100).calibrated is None


def test_what_a_recipe_leaves_open_is_what_the_newest_run_here_chose() -> None:
    recipe = parse_recipe({**RL, "learner": {}})
    learned_row = next(
        learned(make_plan(recipe, facts(recipe)), [line(1, 1, 1, 9)], machine(), "a")
    )
    rows = [learned_row.model_copy(update={"dtype": "bfloat16", "threads": n}) for n in (5, 3)]
    settled_recipe = settled(recipe, hardware().device, rows)
    assert (settled_recipe.model.dtype, settled_recipe.learner.threads) == ("bfloat16", 3)
    assert machine_of(settled_recipe, hardware().device) == replace(
        machine(), dtype="bfloat16", threads=3
    )
    stated = parse_recipe({**RL, "learner": {"threads": 5}, "model": {**MODEL, "dtype": "float32"}})
    assert settled(stated, hardware().device, rows) == stated


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory of this machine, made by hand, and a calibration file of the test's own."""
    monkeypatch.setenv("POSTGRAD_CALIBRATION", str(tmp_path / "own" / "calibration.toml"))
    folder = tmp_path / "run"
    folder.mkdir()
    recipe = parse_recipe(RL).dump()
    (folder / "recipe.json").write_text(json.dumps({"recipe": recipe, "versions": {}}), "utf-8")
    plan = {"plans": [{"after_step": 2, "machine": machine().to_json()}]}
    (folder / "plan.json").write_text(json.dumps(plan), "utf-8")
    times = [8.0, 9.0, 5.0, 0.5, 0.25, 0.75, 0.5]  # two of an older recipe, one that warms up
    rows = [{"step": n, **line(t, t / 2, t / 4, 900.0)} for n, t in enumerate(times, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return folder


def test_calibrating_twice_changes_nothing_and_later_plans_name_the_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--calibrate", str(run), "--json"]) == 0
    calibration = json.loads(capsys.readouterr().out)
    file = Path(calibration["file"])
    first = file.read_text("utf-8")
    assert [measurement["phase"] for measurement in calibration["measured"]] == [
        "sample",
        "score",
        "update",
    ]
    assert main(["plan", "--calibrate", str(run)]) == 0
    assert file.read_text("utf-8") == first
    recipe = tmp_path / "recipe.json.toml"
    recipe.write_text(
        'job = "rl"\nrun_dir = "b"\nsteps = 3\n[model.init]\ntype = "qwen2"\nhidden_size = 64\n'
        "intermediate_size = 128\nnum_hidden_layers = 2\nnum_attention_heads = 2\n"
        "num_key_value_heads = 1\n[model.init.tokenizer]\nvocab_size = 512\n[data]\n"
        'path = "nowhere/rows.jsonl"\nmax_len = 128\n[rollout]\nmax_new_tokens = 64\n[batch]\n'
        "rollout_batch_size = 4\nn_samples_per_prompt = 4\n[algorithm]\n"
        'type = "grpo"\nkl_coef = 0.1\n[[rewards]]\ntype = "gsm8k"\n',
        "utf-8",
    )
    capsys.readouterr()
    assert main(["plan", str(recipe), "--json"]) == 0
    plan_page = json.loads(capsys.readouterr().out)
    measured = {"sample": 0.5, "score": 0.25, "update": 0.125}
    seconds = plan_page["time"]["step_seconds"]
    assert {phase: seconds[phase] for phase in measured} == pytest.approx(measured, rel=1e-4)
    assert plan_page["calibrated"].startswith(f"calibrated from {run} on ")
    assert f"times: {plan_page['calibrated']}" in plan_page["notes"]


def test_a_second_run_takes_the_place_of_its_own_phases_only(run: Path) -> None:
    console = Console("quiet")
    path = Path(calibrate(run, console)["file"])
    before = read(path)
    other = before[0].model_copy(update={"times": 7.0})
    foreign = before[0].model_copy(update={"device": "H100", "threads": 0})
    write(path, [other, foreign])
    assert read(path) == (*before[1:], other, foreign)


def test_what_cannot_teach_is_told(run: Path) -> None:
    console = Console("quiet")

    def refuses(message: str) -> None:
        with pytest.raises(UsageError, match=message):
            calibrate(run, console)

    metrics, plan = run / "metrics.jsonl", run / "plan.json"
    text = metrics.read_text("utf-8")
    metrics.write_text("".join(text.splitlines(keepends=True)[:5]), "utf-8")
    refuses("2 steps beyond those that warm up")
    metrics.unlink()
    refuses("0 steps beyond")
    metrics.write_text("[]\n", "utf-8")
    refuses("no JSON object")
    metrics.write_text(text, "utf-8")
    there = {**machine().to_json(), "device": "H100"}
    plan.write_text(json.dumps({"plans": [{"after_step": 0, "machine": there}]}), "utf-8")
    refuses("ran on H100")
    plan.write_text(json.dumps({"plans": [{"after_step": 0, "problem": "?"}]}), "utf-8")
    refuses("names no machine")
    plan.unlink()
    refuses("older version")
    (run / "recipe.json").unlink()
    refuses("not a run directory")


@pytest.mark.parametrize("text", ["measured = 3", "[[measured]]\ndevice = 'a'\n", "]["])
def test_a_file_that_is_no_calibration_is_told(run: Path, tmp_path: Path, text: str) -> None:
    path = tmp_path / "own" / "calibration.toml"
    path.parent.mkdir()
    path.write_text(text, "utf-8")
    with pytest.raises(UsageError, match=r"calibration\.toml"):
        calibrate(run, Console("quiet"))
    assert path.read_text("utf-8") == text


def test_answers_of_the_student_count_by_the_tokens_that_were_drawn() -> None:
    """Half of the 8 rows are answered, with half of the 64 tokens that each may have."""
    recipe = parse_recipe(
        {
            **SFT,
            "algorithm": {"type": "distillation", "on_policy": 0.5},
            "teacher": {"model": {"path": "Qwen/Qwen3-0.6B"}},
            "rollout": {"max_new_tokens": 64},
        }
    )
    planned = make_plan(recipe, facts(recipe))
    drawn = {"on_policy/samples": 4.0, "on_policy/mean_tokens": 32.0, "sample_seconds": 3.0}
    lines = [{"train_seconds": 1.0, "policy/computed_tokens": 100.0, **drawn}]
    (sampled,) = (row for row in learned(planned, lines, machine(), "run") if row.phase == "sample")
    assert sampled.tokens == pytest.approx(0.5)
    assert sampled.times == pytest.approx(3.0 / planned.timing.step["sample"] / 0.5, rel=1e-3)
