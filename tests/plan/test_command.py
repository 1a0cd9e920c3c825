"""`postgrad plan` as a person and a program meet it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from postgrad.cli.main import main
from postgrad.recipe.load import load_recipe

RECIPE = """# a policy too large for one card
job = "rl"
run_dir = "runs/a"
steps = 100

[model]
path = "Qwen/Qwen2.5-7B"

[data]
path = "nowhere/rows.jsonl"
max_len = 2048

[[rewards]]
type = "gsm8k"

[algorithm]
type = "grpo"
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE, "utf-8")
    return path


def test_json_has_what_programs_read(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(recipe), "--hardware", "A100-80G", "--json"]) == 0
    page = json.loads(capsys.readouterr().out)
    assert page["fits"] is False
    assert page["devices"] == 1
    assert page["hours"] > 0
    assert page["batch"]["samples_per_step"] == 512
    memory = page["memory"]
    assert memory["peak_bytes"] == memory["phases"][memory["peak_phase"]] > 84e9
    for phase, phase_bytes in memory["phases"].items():
        parts = (each.get(phase, 0) for role in memory["roles"].values() for each in role.values())
        assert sum(parts) == phase_bytes
    assert all(set(offer) == {"change", "effect"} for offer in page["advice"])


def test_the_recipe_as_advised_is_written_and_fits(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "fit.toml"
    assert main(["plan", str(recipe), "--hardware", "A100-80G", "--fit", str(to)]) == 0
    assert to.read_text("utf-8").startswith("# a policy too large for one card\n")
    assert load_recipe(to) != load_recipe(recipe)
    capsys.readouterr()
    assert main(["plan", str(to), "--hardware", "A100-80G", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is True


@pytest.mark.slow
def test_a_search_names_hardware_on_which_the_recipe_fits(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--hardware", "RTX-4090", "--model.gradient_checkpointing", "true", "--search"]
    assert main(["plan", str(recipe), *flags, "--json"]) == 0
    offers = json.loads(capsys.readouterr().out)["search"]
    hours = [offer["device_hours"] for offer in offers]
    assert hours == sorted(hours)
    by_name = {offer["device"]: offer["count"] for offer in offers}
    assert by_name["H200"] <= by_name["A100-80G"] <= by_name.get("A100-40G", 64)


def test_hardware_that_nobody_knows_is_told_in_one_line(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(recipe), "--hardware", "8xA100-90G"]) == 2
    stderr = capsys.readouterr().err
    assert "A100-80G" in stderr
    assert "Traceback" not in stderr


@pytest.mark.slow
def test_a_plan_loads_neither_torch_nor_transformers(recipe: Path) -> None:
    code = (
        "import sys; from postgrad.cli.main import main; "
        f"assert main(['plan', {str(recipe)!r}, '--hardware', 'H100']) == 0; "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr


def test_a_ratio_that_is_not_whole_names_the_nearest_values_that_work(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--batch.rollout_batch_size", "64", "--batch.n_samples_per_prompt", "8"]
    flags += ["--batch.train_batch_size", "120", "--hardware", "H100"]
    assert main(["plan", str(recipe), *flags]) == 2
    assert "nearest train_batch_size that works: 64 or 128" in capsys.readouterr().err


@pytest.mark.slow
def test_the_page_fits_eighty_columns(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    flags = ["--model.gradient_checkpointing", "true", "--hardware", "2xA100-40G", "--search"]
    assert main(["plan", str(recipe), *flags]) == 0
    page = capsys.readouterr().out
    tables = [line for line in page.splitlines() if line.startswith("  ")]
    assert tables
    assert max(map(len, tables)) <= 80
    offers = page[page.index("hardware on which the recipe fits") :]
    assert "H200" in offers
    assert all(len(line.split()) > 3 for line in offers.splitlines() if " x " in line)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """SFT of a small fresh model, then RL from its model."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "one two", "answer": "three"}\n' * 9, "utf-8")
    data = f"[data]\npath = {json.dumps(str(rows))}\nmax_len = 64\n"
    init = "[model.init]\nhidden_size = 96\nmax_position_embeddings = 128\n"
    init += '[model.init.tokenizer]\nkind = "characters"\n'
    sft = f'job = "sft"\nrun_dir = "a"\nsteps = 3\n{data}{init}'
    rl = f'job = "rl"\nrun_dir = "a"\nsteps = 9\n[model]\npath = "@sft"\n{data}'
    rl += '[[rewards]]\ntype = "gsm8k"\n[algorithm]\ntype = "grpo"\n'
    rl += "[rollout]\nmax_new_tokens = 20\n"
    stages = 'recipes = ["sft.toml", "rl.toml"]\nrun_dir = "runs/p"\n'
    for name, text in {"sft": sft, "rl": rl, "pipeline": stages}.items():
        (tmp_path / f"{name}.toml").write_text(text, "utf-8")
    return tmp_path


def test_of_a_pipeline_every_recipe_is_planned_with_the_model_that_it_starts_from(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(folder), "--hardware", "H100", "--rl.steps", "7", "--json"]) == 0
    page = json.loads(capsys.readouterr().out)
    sft, rl = page["stages"]["sft"], page["stages"]["rl"]
    assert page["fits"] is sft["fits"] is rl["fits"] is True
    assert page["hours"] == pytest.approx(sft["hours"] + rl["hours"])
    assert page["devices"] == 1
    assert (sft["batch"]["steps"], rl["batch"]["steps"]) == (3, 7)
    weights = [stage["memory"]["roles"]["policy"]["weights"]["update"] for stage in (sft, rl)]
    assert 0 < weights[0] == weights[1] < 1e8
    assert all("counted in characters" in stage["notes"][0] for stage in (sft, rl))


def test_a_page_of_a_pipeline_has_a_part_for_each_recipe_and_says_which_does_not_fit(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = ["--rl.learner.ranks", "4", "--rl.cluster.type", "ray"]
    assert main(["plan", str(folder), "--hardware", "H100", *ranks]) == 0
    page = capsys.readouterr().out
    assert page.index("sft: ") < page.index("fits: ") < page.index("rl: ")
    assert f"{folder.name}: rl will not fit" in page


def test_a_stage_that_generates_is_not_planned_and_its_rows_are_counted_once_they_are_there(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    best = (folder / "sft.toml").read_text("utf-8").replace("steps = 3", "epochs = 2")
    best = best.replace(json.dumps(str(folder / "rows.jsonl")), '"@rl"') + "[batch]\n"
    (folder / "best.toml").write_text(f"{best}train_batch_size = 4\n", "utf-8")
    stages = 'recipes = ["sft.toml", "rl.toml", "best.toml"]\nrun_dir = "p"\n[generate.rl]\n'
    (folder / "pipeline.toml").write_text(stages, "utf-8")
    words = ["plan", str(folder), "--hardware", "H100", "--json"]
    assert main(words) == 0
    before = json.loads(capsys.readouterr().out)
    assert (before["fits"], before["hours"], before["stages"]["rl"]["fits"]) == (True, None, None)
    assert before["stages"]["best"]["batch"]["steps"] is None
    (folder / "p" / "rl").mkdir(parents=True)
    rows = (folder / "rows.jsonl").read_text("utf-8")
    (folder / "p" / "rl" / "all.jsonl").write_text(rows[: 8 * len(rows) // 9], "utf-8")
    assert main(words) == 0
    best_plan = json.loads(capsys.readouterr().out)["stages"]["best"]
    assert best_plan["batch"]["steps"] == 4  # two epochs of 8 rows


def test_a_recipe_that_starts_from_a_stage_is_planned_with_its_folder(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(folder / "rl.toml")]) == 2
    assert "model.path = '@sft' is the model of an earlier recipe" in capsys.readouterr().err
    assert main(["plan", str(folder), "--fit", str(folder / "out.toml")]) == 2
    assert "--fit writes one recipe" in capsys.readouterr().err


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["plan", *words, "--hardware", "8xA100-80G", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_epochs_of_data_elsewhere_have_no_hours_and_the_plan_says_why(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe.write_text(RECIPE.replace("steps = 100", "epochs = 2"), "utf-8")
    page = planned(capsys, str(recipe))
    assert page["hours"] is None
    problem = page["hours_problem"]
    for part in ("epochs = 2", "nowhere/rows.jsonl", "State steps", "--rows N"):
        assert part in problem
    assert problem in page["notes"]
    assert main(["plan", str(recipe), "--hardware", "8xA100-80G"]) == 0
    assert "hours unknown" in capsys.readouterr().out.splitlines()[0]


def test_the_rows_of_an_epoch_may_be_said(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """6 400 rows twice, 64 prompts a step: 200 steps, twice the hours of 100."""
    hundred = planned(capsys, str(recipe))["hours"]
    recipe.write_text(RECIPE.replace("steps = 100", "epochs = 2"), "utf-8")
    page = planned(capsys, str(recipe), "--rows", "6400")
    assert page["batch"]["steps"] == 200
    assert page["hours"] == pytest.approx(2 * hundred)
    assert page["hours_problem"] is None


def test_rows_that_a_recipe_makes_itself_are_counted(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generated_data = 'path = "reasoning-gym:spell_backward"\nsize = 3200\nlimit = 640'
    text = RECIPE.replace("steps = 100", "epochs = 3").replace(
        'path = "nowhere/rows.jsonl"', generated_data
    )
    recipe.write_text(text.replace('type = "gsm8k"', 'type = "reasoning_gym"'), "utf-8")
    assert planned(capsys, str(recipe))["batch"]["steps"] == 30


@pytest.mark.parametrize("words", [["--rows", "0"], ["--rows", "-3"], ["--rows", str(10**20)]])
def test_a_number_of_rows_that_is_none_is_refused(
    words: list[str], recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(recipe), *words]) == 2
    assert "--rows" in capsys.readouterr().err
