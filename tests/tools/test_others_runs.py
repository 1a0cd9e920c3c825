"""Run directories of others: one message with the file and the key, whatever is wrong in them."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.hostile_runs import DEEP, at_most, reseal
from helpers.made_run import made_run
from postgrad.cli.main import main
from postgrad.core.errors import PostgradError
from postgrad.tools.pages import Feed

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def run(trained: Callable[..., Any], tmp_path: Path) -> Path:
    """A genuine run with one checkpoint, to do harm to."""
    recipe = trained("sft")
    path = tmp_path / "copy"
    shutil.copytree(recipe.run_dir, path)
    return path


def newest(run: Path) -> Path:
    return max((run / "checkpoints").glob("step-*"))


def ends(capsys: Capture, *words: str, code: int = 1) -> str:
    """What a command says that ends with this code, in time and in one message."""
    with at_most(20):
        assert main(words) == code
    stderr = capsys.readouterr().err
    assert "report it" not in stderr
    return stderr


def change_state(run: Path, *place: Any, to: Any) -> None:
    path = newest(run) / "state.json"
    state = json.loads(path.read_text("utf-8"))
    node = state
    for part in place[:-1]:
        node = node[part]
    node[place[-1]] = to
    path.write_text(json.dumps(state), "utf-8")
    reseal(newest(run))


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("log_offsets", "eval.jsonl"), [], "log_offsets.eval.jsonl is a list of 0"),
        (("cursor", "frontier"), 10**15, "cursor: 1000000000000000 tickets are settled"),
        (("cursor", "beyond"), [None], "cursor.beyond.0 is None"),
        (("choices", "device"), 1.5, "choices.device is 1.5"),
        (("choices", "threads"), 10**12, "choices.threads is 1000000000000"),
        (("step",), "3", "step is '3'"),
        (("evaluations",), [1], "evaluations is a list of 1"),
    ],
)
def test_a_state_of_wrong_types_or_sizes_is_named_with_its_key(
    place: tuple[Any, ...], value: Any, message: str, run: Path, tmp_path: Path, capsys: Capture
) -> None:
    change_state(run, *place, to=value)
    for words in (
        ("verify", str(run)),
        ("export", str(run), "--to", str(tmp_path / "to")),
        ("chat", str(run)),
        ("resume", str(run), "--quiet"),
    ):
        assert f"state.json: state.json is not a run's state: {message}" in ends(capsys, *words)
    assert main(["checkpoints", str(run), "--json"]) == 0
    assert message in json.loads(capsys.readouterr().out)[-1]["problem"]


@pytest.mark.parametrize("step", ["Infinity", "NaN", "1e999", "-1", "9" * 5000, "9" * 400, DEEP])
def test_a_manifest_with_an_impossible_step_is_damaged(
    step: str, run: Path, capsys: Capture
) -> None:
    path = newest(run) / "manifest.json"
    manifest = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**manifest, "step": "?"}).replace('"?"', step), "utf-8")
    for command in ("verify", "resume"):
        assert "manifest.json" in ends(capsys, command, str(run))


@pytest.mark.parametrize("memory", [{"row": "x"}, {"row": -1}, {"other": 1}, {"first": 1}])
def test_what_a_sentinel_remembers_is_checked_before_it_looks(
    memory: dict[str, Any], run: Path, capsys: Capture
) -> None:
    change_state(run, "sentinels", "kl", to={"since": None, "memory": memory})
    stderr = ends(capsys, "resume", str(run), "--quiet")
    assert "sentinels.kl.memory" in stderr


COMMANDS = ("report", "checkpoints", "verify", "resume", "export", "chat")


def words_of(command: str, run: Path) -> tuple[str, ...]:
    more = ("--to", str(run.parent / "to")) if command == "export" else ()
    return command, str(run), *more


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("content", [DEEP, f'{{"recipe": {DEEP}}}', "[]", "{}", "\ufeff{}", ""])
def test_a_recipe_that_no_run_wrote_is_one_message(
    content: str, command: str, tmp_path: Path, capsys: Capture
) -> None:
    run = made_run(tmp_path / "run", steps=1)
    (run / "recipe.json").write_text(content, "utf-8")
    assert "recipe.json is not a recipe that a run wrote" in ends(
        capsys, *words_of(command, run), code=2
    )


KINDS: dict[str, Callable[[Path], None]] = {
    "a pipe": lambda path: os.mkfifo(path),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a directory": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["metrics.jsonl", "eval.jsonl", "samples.jsonl", "events.jsonl"])
def test_a_log_that_is_no_file_is_neither_waited_for_nor_read_for_ever(
    name: str, kind: str, tmp_path: Path, capsys: Capture
) -> None:
    run = made_run(tmp_path / "run", steps=1)
    (run / name).unlink()
    KINDS[kind](run / name)
    assert f"{name} is {kind}, where a file is expected" in ends(capsys, "report", str(run))
    with at_most(20), pytest.raises(OSError, match=f"is {kind}"):
        Feed(run).messages("", 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["recipe.json", "plan.json", "summary.json", "tokenizer.json"])
def test_a_file_that_is_none_is_told_or_left_out(
    name: str, kind: str, tmp_path: Path, capsys: Capture
) -> None:
    run = made_run(tmp_path / "run", steps=1)
    (run / name).unlink(missing_ok=True)
    KINDS[kind](run / name)
    code = 2 if name == "recipe.json" else 0
    stderr = ends(capsys, "report", str(run), code=code)
    assert not code or "recipe.json" in stderr


@pytest.mark.parametrize("name", ["summary.json", "plan.json", "tokenizer.json"])
@pytest.mark.parametrize("content", [DEEP, "9" * 5000, "\ufeff", "NaN"])
def test_a_page_goes_without_files_that_cannot_be_read(
    name: str, content: str, tmp_path: Path, capsys: Capture
) -> None:
    run = made_run(tmp_path / "run", steps=1)
    (run / name).write_text(content, "utf-8")
    ends(capsys, "report", str(run), code=0)
    feed = Feed(run)
    assert json.loads(feed.messages("", 0))["messages"]
    assert "bodies" in json.loads(feed.body(0, 0))


@pytest.mark.parametrize("name", ["metrics.jsonl", "eval.jsonl", "samples.jsonl", "events.jsonl"])
@pytest.mark.parametrize("line", [DEEP, f'{{"step": {DEEP}}}', "9" * 5000, "[]", '{"step": NaN}'])
def test_a_page_says_which_lines_it_could_not_read(
    name: str, line: str, tmp_path: Path, capsys: Capture
) -> None:
    run = made_run(tmp_path / "run", steps=1)
    with (run / name).open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    ends(capsys, "report", str(run), code=0)
    kinds = [message["kind"] for message in json.loads(Feed(run).messages("", 0))["messages"]]
    assert ("trouble" in kinds) == ("NaN" not in line or name == "samples.jsonl")


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("eval.jsonl", DEEP, "is no JSON object"),
        ("eval.jsonl", "{}", "lacks a step"),
        ("eval.jsonl", '{"step": "1"}', "step is '1', where a whole number"),
        ("eval.jsonl", '{"step": 1, "set": []}', "set is a list of 0, where a name is expected"),
        (
            "eval.jsonl",
            '{"step": 1, "accuracy": "x"}',
            "accuracy is 'x', where a number is expected",
        ),
        ("eval.jsonl", '{"step": 1, "accuracy": 1e999}', "accuracy is inf, where a number"),
        ("metrics.jsonl", '{"step": 1, "loss": true}', "loss is True, where a number is expected"),
    ],
)
def test_a_log_line_of_another_hand_is_named_with_line_and_key(
    name: str, line: str, message: str, run: Path, capsys: Capture
) -> None:
    path = run / name
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    size = path.stat().st_size if path.exists() else 0
    path.write_text(line.ljust(size, " ") + "\n" * (not lines) + "\n", "utf-8")
    change_state(run, "log_offsets", name, to=path.stat().st_size)
    assert message in ends(capsys, "resume", str(run), "--quiet")
    if name == "eval.jsonl":
        assert message in ends(capsys, "checkpoints", str(run))


def test_a_plan_that_no_run_wrote_is_named_with_its_key(run: Path, capsys: Capture) -> None:
    plan = {"plans": [{"after_step": "0"}]}
    (run / "plan.json").write_text(json.dumps(plan), "utf-8")
    for words in (("resume", str(run), "--quiet"), ("plan", "--calibrate", str(run))):
        assert "plans.0.after_step is '0'" in ends(capsys, *words, code=2)


def test_a_file_larger_than_its_disk_is_not_hashed(run: Path, capsys: Capture) -> None:
    """A file of holes: 10^17 bytes that take none, and a hash that takes years."""
    weights = newest(run) / "policy.weights.safetensors"
    size = shutil.disk_usage(run).total + 1
    try:
        with weights.open("wb") as file:
            file.truncate(size)
    except OSError:
        pytest.skip("this file system has no files of holes that large")
    path = newest(run) / "manifest.json"
    manifest = json.loads(path.read_text("utf-8"))
    manifest["files"][weights.name]["size"] = size
    path.write_text(json.dumps(manifest), "utf-8")
    assert "its whole disk has" in ends(capsys, "verify", str(run))


def test_a_replay_of_such_samples_is_refused_with_its_line(tmp_path: Path) -> None:
    from postgrad.rollout.replay import ReplaySource

    path = tmp_path / "samples.jsonl"
    for line in (DEEP, '{"step": true, "ticket": 0}', '{"step": 1, "ticket": -1}', "9" * 5000):
        path.write_text(line + "\n", "utf-8")
        with pytest.raises(PostgradError, match=r"samples\.jsonl:1"):
            ReplaySource(path)
    path.unlink()
    os.mkfifo(path)
    with at_most(20), pytest.raises(PostgradError, match="no file"):
        ReplaySource(path)
