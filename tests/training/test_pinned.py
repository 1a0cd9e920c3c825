"""Models and data by what they are: a run goes on with the same ones, or says what has changed."""

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.hub import A, B, OfflineHub
from helpers.runs import assert_same_run, lines
from postgrad.core.errors import RunError, UsageError
from postgrad.observe.console import Console
from postgrad.recipe.hub_sources import sources
from postgrad.recipe.load import parse_recipe, with_overrides
from postgrad.recipe.recipe import Recipe
from postgrad.tools.checkpoints import verify
from postgrad.tools.dry_run.dry_run import dry_run
from postgrad.tools.evaluate import evaluate
from postgrad.tools.export import export
from postgrad.training.start import resume, train

ROWS = [{"question": f"spell {word}", "answer": word[::-1]} for word in ("sun", "top", "gnat")] * 4


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models: Any) -> OfflineHub:
    hub = OfflineHub(tmp_path / "cache", monkeypatch)
    hub.model("org/tiny", A, models(1))
    hub.dataset("org/rows", A, ROWS, when=1)
    return hub


def rows_of(path: Path, rows: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return str(path)


def recipe_of(tmp_path: Path, **changes: Any) -> Recipe:
    raw: dict[str, Any] = {
        "job": "sft",
        "run_dir": str(tmp_path / "run"),
        "steps": 2,
        "model": {"path": "org/tiny"},
        "data": {"path": "org/rows", "max_len": 48},
        "batch": {"train_batch_size": 4},
        "learner": {"lr": 1e-2, "threads": 1},
        "checkpoint": {"save_steps": 1},
    }
    return parse_recipe({**raw, **changes})


@pytest.mark.slow
def test_a_run_records_the_commits_and_keeps_to_them_when_main_moves(
    hub: OfflineHub, tmp_path: Path, models: Any, console: Console
) -> None:
    recipe = recipe_of(tmp_path)
    uninterrupted = recipe_of(tmp_path, run_dir=str(tmp_path / "whole"), steps=3)
    train(recipe, console)
    train(uninterrupted, console)
    written = json.loads((tmp_path / "run" / "recipe.json").read_text("utf-8"))
    assert written["recipe"]["model"]["revision"] == written["recipe"]["data"]["revision"] == A
    assert [
        (source["key"], source["revision"], source["commit"]) for source in written["sources"]
    ] == [
        ("model", None, A),
        ("data", None, A),
    ]
    [started] = [event for event in lines(tmp_path / "run" / "events.jsonl") if "sources" in event]
    assert started["sources"] == {"model": f"org/tiny@{A}", "data": f"org/rows@{A}"}
    hub.model("org/tiny", B, models(2))
    hub.dataset("org/rows", B, ROWS[::-1], when=2)
    resume(tmp_path / "run", ["--steps", "3"], [], console)
    assert_same_run(uninterrupted, recipe, 3)
    train(with_overrides(recipe, ["--steps", "4"]), console)  # of the unpinned recipe, as well
    again = json.loads((tmp_path / "run" / "recipe.json").read_text("utf-8"))
    assert again["sources"] == written["sources"]


def test_another_revision_is_another_run_unless_it_is_the_same_commit_or_allowed(
    hub: OfflineHub, tmp_path: Path, models: Any, console: Console
) -> None:
    recipe = recipe_of(tmp_path)
    train(recipe, console)
    hub.model("org/tiny", B, models(1), branch="v2")
    hub.point("models", "org/tiny", "v1", A)
    for same in ("v1", A):
        train(with_overrides(recipe, ["--model.revision", same]), console)
    other = with_overrides(recipe, ["--model.revision", "v2", "--steps", "3"])
    with pytest.raises(UsageError, match=rf"model\.revision: '{A}' there, '{B}' here") as refused:
        train(other, console)
    assert "--allow-change model.revision" in str(refused.value)
    train(other, console, allow_change=["model.revision"])
    with pytest.raises(UsageError, match=rf"'{B}' there, '{A}' here"):
        resume(tmp_path / "run", ["--model.revision", "v1"], [], console)


def test_a_commit_that_is_gone_stops_the_resume_and_names_the_way_on(
    hub: OfflineHub, tmp_path: Path, models: Any, console: Console
) -> None:
    train(recipe_of(tmp_path), console)
    hub.model("org/tiny", B, models(1))
    hub.forget("org/tiny", A)
    with pytest.raises(UsageError) as refused:
        resume(tmp_path / "run", ["--steps", "3"], [], console)
    assert f"started with org/tiny@{A} (model), which cannot be found any more" in str(
        refused.value
    )
    way = ["--model.revision", "main", "--steps", "3"]
    assert " ".join(way[:2]) in str(refused.value)
    resume(tmp_path / "run", way, ["model.revision"], console)
    written = json.loads((tmp_path / "run" / "recipe.json").read_text("utf-8"))
    assert written["recipe"]["model"]["revision"] == B


def test_changed_rows_of_a_file_stop_the_resume(
    hub: OfflineHub, tmp_path: Path, console: Console
) -> None:
    file = tmp_path / "rows.jsonl"
    recipe = recipe_of(tmp_path, data={"path": rows_of(file, ROWS), "max_len": 48})
    train(recipe, console)
    rows_of(file, [*ROWS[:-1], {"question": "spell mop", "answer": "pom"}])
    with pytest.raises(UsageError, match=r"data\.path: .*rows\.jsonl has changed since the run"):
        resume(tmp_path / "run", ["--steps", "3"], [], console)
    resume(tmp_path / "run", ["--steps", "3"], ["data.path"], console)
    resume(tmp_path / "run", ["--steps", "4"], [], console)  # the new rows are the run's now
    rows_of(file, ROWS)
    with pytest.raises(UsageError, match=r"data\.path: .*restore it, start"):
        resume(tmp_path / "run", ["--steps", "5"], [], console)


def test_a_changed_chat_template_file_stops_the_resume(
    hub: OfflineHub, tmp_path: Path, console: Console
) -> None:
    template = tmp_path / "chat.jinja"
    plain = (hub.models / "models--org--tiny" / "snapshots" / A / "chat_template.jinja").read_text()
    template.write_text(plain, "utf-8")
    data = {"path": "org/rows", "max_len": 48, "chat_template": str(template)}
    train(recipe_of(tmp_path, data=data), console)
    template.write_text("{# new #}" + plain, "utf-8")
    with pytest.raises(UsageError, match=r"data\.chat_template: .*chat\.jinja has changed since"):
        resume(tmp_path / "run", ["--steps", "3"], [], console)
    resume(tmp_path / "run", ["--steps", "3"], ["data.chat_template"], console)


def test_a_changed_tokenizer_of_a_model_directory_stops_the_resume(
    hub: OfflineHub, tmp_path: Path, console: Console
) -> None:
    """Weights of the start are in checkpoints; how text becomes tokens is not."""
    model_folder = hub.model("org/own", A, hub.models / "models--org--tiny" / "snapshots" / A)
    recipe = recipe_of(tmp_path, model={"path": str(model_folder)})
    train(recipe, console)
    (model_folder / "model.safetensors").touch()
    resume(tmp_path / "run", ["--steps", "3"], [], console)
    config = model_folder / "tokenizer_config.json"
    config.write_text(config.read_text("utf-8") + "\n", "utf-8")
    with pytest.raises(UsageError, match=r"model\.path: .* it was sha256:.*, now sha256:"):
        resume(tmp_path / "run", ["--steps", "4"], [], console)


def test_what_is_made_of_a_run_uses_its_commit(
    hub: OfflineHub, tmp_path: Path, models: Any, console: Console
) -> None:
    """With an adapter: the base is read again."""
    recipe = recipe_of(tmp_path, model={"path": "org/tiny", "lora": {"rank": 2, "alpha": 2}})
    train(recipe, console)
    broken = tmp_path / "broken"
    broken.mkdir()
    hub.model("org/tiny", B, broken)  # main has nothing in it now
    run = tmp_path / "run"
    adapter = export(run, "latest", tmp_path / "adapter", adapter=True)
    config = json.loads((adapter / "adapter_config.json").read_text("utf-8"))
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/tiny", A)
    export(run, "latest", tmp_path / "model")
    assert verify(run, console)[0]["good"]


def test_an_evaluation_says_which_commits_it_read(
    hub: OfflineHub, tmp_path: Path, console: Console
) -> None:
    sections = {
        "eval": {"path": "org/rows", "max_new_tokens": 4},
        "rewards": [{"type": "exact_match"}],
    }
    report = evaluate(recipe_of(tmp_path, scoring={"workers": 1}, **sections), "org/tiny", console)
    assert [(source["key"], source["commit"]) for source in report["sources"]] == [
        ("eval.sets.0", A),
        ("--model", A),
    ]


def test_an_adapter_on_a_moved_hub_id_is_refused_by_its_frozen_base(
    hub: OfflineHub, tmp_path: Path, models: Any, console: Console
) -> None:
    lora = {"path": "org/tiny", "lora": {"rank": 2, "alpha": 2}}
    train(recipe_of(tmp_path, model=lora), console)
    hub.model("org/tiny", B, models(2))
    change = ["--model.revision", "main", "--steps", "3"]
    with pytest.raises(RunError, match=rf"org/tiny@{B}"):
        resume(tmp_path / "run", change, ["model.revision"], console)


def test_roles_take_the_revision_with_the_path() -> None:
    rows = {"path": "org/rows", "revision": "v3"}
    raw: dict[str, Any] = {
        "job": "rl",
        "run_dir": "runs/a",
        "steps": 1,
        "model": {"path": "org/tiny", "revision": "v1"},
        "reference": {"model": {"path": "org/other"}},
        "reward_model": {"model": {"path": "org/judge", "revision": "v2"}},
        "data": {**rows, "max_len": 48, "sets": [{}, {"path": "org/more"}]},
        "eval": {"sets": [{"name": "a"}, {"name": "b", "path": "org/test"}]},
        "algorithm": {"type": "ppo", "kl_coef": 0.1},
        "rewards": [{"type": "reward_model"}],
        "batch": {"rollout_batch_size": 2, "n_samples_per_prompt": 1},
        "rollout": {"max_new_tokens": 4},
    }
    names_by_key = {source.key: source.name for source in sources(parse_recipe(raw))}
    assert names_by_key == {
        "model": "org/tiny@v1",
        "reference.model": "org/other",
        "critic.model": "org/judge@v2",  # which the reward model shares
        "data.sets.0": "org/rows@v3",
        "data.sets.1": "org/more",
        "eval.sets.0": "org/rows@v3",
        "eval.sets.1": "org/test",
    }


@pytest.mark.parametrize(
    ("section", "table"),
    [
        ("model", {"path": "./here", "revision": "v1"}),
        ("model", {"init": {}, "revision": "v1"}),
        ("data", {"path": "rows.jsonl", "revision": "v1", "max_len": 48}),
        ("data", {"path": "reasoning-gym:dice", "revision": "v1", "max_len": 48}),
    ],
)
def test_a_revision_of_what_is_not_on_the_hub_is_refused(
    section: str, table: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=rf"{section}\.revision: is of an id on the hub"):
        recipe_of(tmp_path, **{section: table})


@pytest.mark.slow
def test_a_dry_run_tries_the_revision_that_the_recipe_names(
    hub: OfflineHub, tmp_path: Path, models: Any, console: Console
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    hub.model("org/tiny", B, empty)  # main has nothing in it
    hub.model("org/tiny", A, models(1), branch="v1")
    hub.point("models", "org/tiny", "main", B)
    revised = {"path": "org/tiny", "revision": "v1"}
    report = dry_run(recipe_of(tmp_path, model=revised), console)
    assert report.exit_code == 0
    assert dry_run(recipe_of(tmp_path), console).exit_code == 2
