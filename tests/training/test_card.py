"""Exported models have a card that the hub reads, and go there if they are told to."""

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, constants
from huggingface_hub.repocard_data import ModelCardData

from helpers.hub import A, OfflineHub
from helpers.hub_server import COMMIT, Pushed, hub_server
from helpers.runs import lines
from postgrad.cli.main import main
from postgrad.core.errors import UsageError
from postgrad.observe.console import Console
from postgrad.recipe.load import parse_recipe
from postgrad.tools.export import export
from postgrad.training import card as cards
from postgrad.training.start import train

ROWS = [{"question": f"spell {word}", "answer": word[::-1]} for word in ("sun", "top", "gnat")] * 4
BASE_CARD = "---\nlicense: apache-2.0\nlanguage: [en]\n---\n# Tiny\n"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models: Any) -> OfflineHub:
    hub = OfflineHub(tmp_path / "cache", monkeypatch)
    (hub.model("org/tiny", A, models(1)) / "README.md").write_text(BASE_CARD, "utf-8")
    hub.dataset("org/rows", A, ROWS, when=1)
    hub.dataset("org/test", A, [{"question": "spell pit", "answer": "tip"}], when=1)
    return hub


MODEL = {"path": "org/tiny", "lora": {"rank": 2, "alpha": 2}}


def run_of(tmp_path: Path, **changes: Any) -> Path:
    raw: dict[str, Any] = {
        "job": "sft",
        "run_dir": str(tmp_path / "run"),
        "steps": 1,
        "model": MODEL,
        "data": {"path": "org/rows", "max_len": 48},
        "eval": {"path": "org/test", "max_new_tokens": 4},
        "rewards": [{"type": "exact_match"}],
        "scoring": {"workers": 1},
        "batch": {"train_batch_size": 4},
        "learner": {"lr": 1e-2, "threads": 1},
    }
    train(parse_recipe({**raw, **changes}), Console("quiet"))
    return tmp_path / "run"


def test_ends_of_intervals_of_a_part_of_the_rows_are_no_results_of_their_own() -> None:
    rates = {"accuracy": 0.5, "accuracy_low": 0.1, "accuracy_high": 0.9}
    part = {"accuracy/a": 1.0, "accuracy_low/a": 0.3, "accuracy_high/a": 1.0}
    scores = {"reward/too_low": 0.25, "evaluate_seconds": 3.0}
    assert list(cards._rows([{"step": 1, "set": "s", "rows": 4, **rates, **part, **scores}])) == [
        ("s", "accuracy", "0.5 (0.1 to 0.9)", "4"),
        ("s", "accuracy/a", "1 (0.3 to 1)", "4"),
        ("s", "reward/too_low", "0.25", "4"),
    ]


@pytest.mark.slow
def test_every_export_has_a_card_that_the_hub_can_read(hub: OfflineHub, tmp_path: Path) -> None:
    run = run_of(tmp_path, checkpoint={"save_hf": True})
    export(run, "latest", tmp_path / "to")
    export(run, "latest", tmp_path / "adapter", adapter=True)
    card = ModelCard.load(tmp_path / "to" / "README.md")
    adapter = ModelCard.load(tmp_path / "adapter" / "README.md")
    assert isinstance(card.data, ModelCardData)
    card_data = card.data.to_dict()
    assert card_data["base_model"] == "org/tiny"
    assert (card_data["license"], card_data["language"]) == ("apache-2.0", ["en"])  # the base's own
    assert (card_data["library_name"], card_data["pipeline_tag"]) == (
        "transformers",
        "text-generation",
    )
    assert (card_data["datasets"], card_data["tags"]) == (["org/rows"], ["postgrad", "sft"])
    assert adapter.data.to_dict()["library_name"] == "peft"
    assert adapter.data.to_dict()["base_model_relation"] == "adapter"
    [line] = lines(run / "eval.jsonl")
    results = {eval_result.metric_type: eval_result for eval_result in card.data.eval_results or ()}
    assert results["accuracy"].metric_value == line["accuracy"]
    assert results["accuracy"].dataset_revision == A
    for text in (f"org/tiny, revision {A}", f"| org/rows |  | train | {A} |", "| accuracy | 0 ("):
        assert text in card.text
    assert (run / "model" / "README.md").read_text("utf-8").startswith("---\n")


def test_the_recipe_of_a_card_is_the_run_s_without_its_secrets(
    hub: OfflineHub, tmp_path: Path
) -> None:
    data = {
        "path": "org/rows",
        "max_len": 48,
        "chat_template_kwargs": {"api_key": "sk-1", "url": "https://me:pass@host/x", "a": "```"},
    }
    run = run_of(tmp_path, model=MODEL | {"eos_token": "<|im_start|>"}, data=data, eval={})
    text = (export(run, "latest", tmp_path / "to") / "README.md").read_text("utf-8")
    assert "sk-1" not in text
    assert "me:pass" not in text
    block = text.split("````toml\n")[1].split("````")[0]
    written = tomllib.loads(block)
    template_settings = written["data"]["chat_template_kwargs"]
    assert template_settings == {
        "api_key": "(redacted)",
        "url": "https://(redacted)@host/x",
        "a": "```",
    }
    assert written["model"]["eos_token"] == ["<|im_start|>"]
    again = parse_recipe(written).dump()
    recorded = json.loads((run / "recipe.json").read_text("utf-8"))["recipe"]
    recorded["data"]["chat_template_kwargs"] = template_settings
    assert again == recorded


def test_a_model_of_files_names_their_hash_and_no_hub(
    hub: OfflineHub, tmp_path: Path, models: Any
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS), "utf-8")
    run = run_of(
        tmp_path, model={"path": models(1)}, data={"path": str(rows), "max_len": 48}, eval={}
    )
    card = ModelCard.load(export(run, "latest", tmp_path / "to") / "README.md")
    card_data = card.data.to_dict()
    assert not {"base_model", "datasets", "license", "model-index"} & card_data.keys()
    assert f"| {rows} |  | train | sha256:" in card.text


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch, hub: OfflineHub) -> Iterator[Pushed]:
    with hub_server(monkeypatch) as pushed:
        yield pushed


def test_an_export_is_pushed_with_all_its_files(
    pushed: Pushed, tmp_path: Path, models: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS), "utf-8")
    sections = {
        "model": {"path": models(1)},
        "data": {"path": str(rows), "max_len": 48},
        "eval": {},
    }
    run, to = run_of(tmp_path, **sections), tmp_path / "to"
    words = ["export", str(run), "--to", str(to), "--push-to-hub", "org/new", "--private"]
    assert main([*words, "--json"]) == 0
    push_report = json.loads(capsys.readouterr().out)["pushed"]
    assert (push_report["repository"], push_report["commit"]) == ("org/new", COMMIT)
    assert pushed.repositories == {"org/new": True}
    files = {file.name: file.read_bytes() for file in to.iterdir()}
    assert pushed.files == files
    assert "README.md" in files
    assert pushed.message == "latest checkpoint of run"


def test_a_push_that_fails_keeps_the_folder_and_names_the_command(
    hub: OfflineHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Offline, as everywhere in this file but for `pushed`."""
    run, to = run_of(tmp_path, eval={}), tmp_path / "to"
    assert constants.HF_HUB_OFFLINE
    assert main(["export", str(run), "--to", str(to), "--push-to-hub", "org/new"]) == 1
    stderr = " ".join(capsys.readouterr().err.split())
    assert "org/new was not pushed: " in stderr
    assert f"hf upload org/new {to}" in stderr
    assert (to / "model.safetensors").is_file()


@pytest.mark.parametrize("words", [["--push-to-hub", "a/b/c"], ["--private"]])
def test_what_cannot_be_a_repository_is_refused_before_anything_is_written(
    words: list[str], hub: OfflineHub, tmp_path: Path
) -> None:
    run, to = run_of(tmp_path, eval={}), tmp_path / "to"
    assert main(["export", str(run), "--to", str(to), *words]) == 2
    assert not to.exists()


def test_a_run_pushes_its_model_at_the_end(pushed: Pushed, tmp_path: Path, models: Any) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS), "utf-8")
    sections = {
        "model": {"path": models(1)},
        "data": {"path": str(rows), "max_len": 48},
        "eval": {},
    }
    settings = {"save_hf": True, "push_to_hub": "org/mine"}
    run = run_of(tmp_path, checkpoint=settings, **sections)
    assert pushed.repositories == {"org/mine": False}
    assert pushed.files.keys() == {file.name for file in (run / "model").iterdir()}
    [event] = [event for event in lines(run / "events.jsonl") if event["event"] == "pushed"]
    assert event["commit"] == COMMIT


def test_a_run_whose_push_fails_is_done_and_says_how_to_push(
    hub: OfflineHub, tmp_path: Path
) -> None:
    run = run_of(tmp_path, checkpoint={"save_hf": True, "push_to_hub": "org/mine"}, eval={})
    [event] = [event for event in lines(run / "events.jsonl") if event["event"] == "push_failed"]
    assert "hf upload org/mine" in json.dumps(event)
    assert (run / "summary.json").is_file()


def test_a_push_without_a_model_to_push_is_refused() -> None:
    raw = {"job": "sft", "run_dir": "runs/a", "steps": 1, "checkpoint": {"push_to_hub": "org/a"}}
    with pytest.raises(UsageError, match="push_to_hub pushes run_dir/model: say save_hf = true"):
        parse_recipe({**raw, "data": {"path": "rows.jsonl"}, "model": {"path": "./here"}})


def test_paths_in_a_card_do_not_name_who_ran_it(
    hub: OfflineHub, tmp_path: Path, models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS), "utf-8")
    sections = {
        "model": {"path": models(1)},
        "data": {"path": str(rows), "max_len": 48},
        "eval": {},
    }
    run = run_of(tmp_path, **sections)
    monkeypatch.setenv("HOME", str(tmp_path))
    text = (export(run, "latest", tmp_path / "to") / "README.md").read_text("utf-8")
    assert "| ~/rows.jsonl |" in text
    assert 'run_dir = "~/run"' in text
    assert str(tmp_path) not in text
