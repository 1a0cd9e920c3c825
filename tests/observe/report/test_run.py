"""What a page is told of a run, at once or while it is written."""

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.made_run import GROUP, add_step, made_run, sample
from postgrad.core.members import member
from postgrad.observe.report.run import (
    MOST_PICTURE,
    SCALE,
    PageMessage,
    RunReader,
    expected_steps,
)
from postgrad.observe.report.selection import Cap
from postgrad.observe.sinks import Logs


def read(path: Path, **more: Any) -> RunReader:
    return RunReader(path, 0, Cap(), **more)


def of(messages: list[PageMessage], kind: str) -> list[PageMessage]:
    return [message for message in messages if message["kind"] == kind]


def rows(messages: list[PageMessage]) -> list[dict[str, Any]]:
    groups = [group for message in of(messages, "groups") for group in message["groups"]]
    return [row for group in groups for row in group["samples"]]


def test_all_of_a_run_is_told_once(tmp_path: Path) -> None:
    reader = read(made_run(tmp_path / "run", steps=6, groups=2))
    messages = reader.poll()
    (run,) = of(messages, "run")
    assert (run["name"], run["run"], run["recipe"]["job"]) == ("run", 0, "rl")
    assert run["summary"] is None  # it has not ended
    assert run["plan"]["after_step"] == 2  # the newest
    assert [line["step"] for line in of(messages, "metrics")[0]["lines"]] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in of(messages, "evaluations")[0]["lines"]] == [0, 6]
    assert [line["event"] for line in of(messages, "events")[0]["lines"]] == ["started", "sentinel"]
    assert [row["id"] for row in rows(messages)] == list(range(6 * 2 * GROUP))
    counts = {"samples": 48, "shown": 48, "pieces": True}
    assert of(messages, "counts") == [{"kind": "counts", "run": 0, **counts}]
    assert of(messages, "trouble") == []
    assert reader.poll() == []


def test_a_picture_of_more_devices_is_told_as_an_image_unless_it_is_too_large(
    tmp_path: Path,
) -> None:
    path = made_run(tmp_path / "run", steps=1)
    reader = read(path)
    (run,) = of(reader.poll(), "run")
    assert run["scale"] is None
    (path / SCALE).write_bytes(b"<svg/>")
    (run,) = of(reader.poll(), "run")
    assert run["scale"] == "data:image/svg+xml;base64,PHN2Zy8+"
    (path / SCALE).write_bytes(b" " * (MOST_PICTURE + 1))
    (run,) = of(reader.poll(), "run")
    assert run["scale"] is None


def test_only_what_is_new_is_told_afterwards(tmp_path: Path) -> None:
    path = made_run(tmp_path / "run", steps=2)
    reader = read(path)
    reader.poll()
    logs = Logs(path)
    add_step(logs, 3, 2)
    logs.close()
    (path / "summary.json").write_text('{"steps": 3}')
    messages = reader.poll()
    assert [line["step"] for line in of(messages, "metrics")[0]["lines"]] == [3]
    assert {group["step"] for group in of(messages, "groups")[0]["groups"]} == {3}
    assert of(messages, "run")[0]["summary"] == {"steps": 3}
    assert len(of(messages, "events")) == 0


def test_a_line_that_is_being_written_waits(tmp_path: Path) -> None:
    path = made_run(tmp_path / "run", steps=1)
    reader = read(path)
    reader.poll()
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
        file.flush()
        assert reader.poll() == []
        file.write('ss": 1.0}\n')
    assert of(reader.poll(), "metrics")[0]["lines"] == [{"step": 2, "loss": 1.0}]


def test_a_resumed_run_is_told_anew(tmp_path: Path) -> None:
    path = made_run(tmp_path / "run", steps=4)
    reader = read(path)
    reader.poll()
    logs = Logs(path)
    lines = (path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    kept = {"metrics.jsonl": len(b"".join(lines[:2]))}
    logs.rewind({name: kept.get(name, 0) for name in ("metrics.jsonl", "eval.jsonl")})
    add_step(logs, 3, 2)
    logs.close()
    messages = reader.poll()
    assert messages[0] == {"kind": "reset", "run": 0}
    assert [line["step"] for line in of(messages, "metrics")[0]["lines"]] == [1, 2, 3]
    assert [row["id"] for row in rows(messages)] == list(range(2 * GROUP))
    assert len(of(messages, "events")[0]["lines"]) == 2


def test_what_cannot_be_read_is_told_and_hides_nothing_else(tmp_path: Path) -> None:
    path = made_run(tmp_path / "run", steps=2)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('garbage\n{"step": 3}\n')
    with (path / "samples.jsonl").open("a") as file:
        head = json.dumps(sample(9, 99, 0, "x"))[:200]
        file.write(f"{head}\n[]\n")
    (path / "recipe.json").write_text("{")
    messages = read(path).poll()
    assert [line["step"] for line in of(messages, "metrics")[0]["lines"]] == [1, 2, 3]
    assert len(rows(messages)) == 2 * 2 * GROUP
    troubles = [message["message"] for message in of(messages, "trouble")]
    assert [text.split(":")[0] for text in troubles] == [
        "recipe.json",
        "metrics.jsonl",
        "samples.jsonl",
    ]
    assert "2, the first at byte" in troubles[2]


def test_a_run_that_has_written_nothing_yet_is_told_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text('{"recipe": {"job": "sft"}, "versions": {}}')
    messages = read(tmp_path).poll()
    assert [message["kind"] for message in messages] == ["run"]


def test_numbers_that_are_not_finite_stay_readable(tmp_path: Path) -> None:
    path = made_run(tmp_path / "run", steps=1)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "loss": NaN, "reward": 1e999, "big": 123456789.123}\n')
    line = of(read(path).poll(), "metrics")[0]["lines"][1]
    assert line["big"] == 123456800.0
    assert str(line["loss"]) == "nan"


def test_bodies_are_read_by_number(tmp_path: Path) -> None:
    reader = read(made_run(tmp_path / "run", steps=2, groups=1))
    reader.poll()
    reply = reader.bodies([1, 7, 8, -1])
    assert set(reply["bodies"]) == {1, 7}
    words, body = reply["vocab"], reply["bodies"][7]
    text = "".join(words[token] for token in body["turns"][0]["ids"])
    assert text == "Twice 1 is 2, says sample 3 of step 2."


def test_looking_changes_nothing(tmp_path: Path) -> None:
    path = made_run(tmp_path / "run", steps=2)

    def state() -> dict[str, tuple[int, bytes]]:
        files = [file for file in path.rglob("*") if file.is_file()]
        return {str(file): (file.stat().st_mtime_ns, file.read_bytes()) for file in files}

    before = state()
    reader = read(path)
    reader.poll()
    reader.bodies(range(reader.samples))
    assert state() == before


@pytest.mark.parametrize(("recipe", "steps"), [({"steps": 7}, 7), ({"steps": None}, 0), ({}, 0)])
def test_a_recipe_that_does_not_say_steps_expects_none(recipe: dict[str, Any], steps: int) -> None:
    assert expected_steps(recipe) == steps


def test_answers_of_evaluations_stand_beside_those_of_training(tmp_path: Path) -> None:
    path = made_run(tmp_path / "run", steps=2, groups=1)
    logs = Logs(path)
    logs.evaluation_samples(
        {**sample(2, 0, n, f"answer {n}"), "set": "held", "correct": n == 1} for n in range(2)
    )
    logs.close()
    reader = read(path)
    messages = reader.poll()
    groups = [group for message in of(messages, "groups") for group in message["groups"]]
    (evaluated,) = [group for group in groups if group.get("evaluated")]
    assert (evaluated["step"], evaluated["set"]) == (2, "held")
    numbers = [row["id"] for row in evaluated["samples"]]
    assert numbers == [2 * GROUP, 2 * GROUP + 1]
    assert [row["correct"] for row in evaluated["samples"]] == [False, True]
    assert of(messages, "counts")[-1]["samples"] == 2 * GROUP + 2
    shown = reader.bodies([0, *numbers])["bodies"]
    assert sorted(shown) == [0, *numbers]
    assert reader.poll() == []


def test_a_compressed_run_is_read_as_a_plain_one(tmp_path: Path) -> None:
    plain, packed = made_run(tmp_path / "plain"), made_run(tmp_path / "packed")
    content = (packed / "samples.jsonl").read_bytes().splitlines(keepends=True)
    members = [member(b"".join(content[start : start + 8])) for start in range(0, 48, 8)]
    (packed / "samples.jsonl.gz").write_bytes(b"".join(members[:2]))
    (packed / "samples.jsonl").unlink()
    reader = read(packed)
    first = rows(reader.poll())
    (packed / "samples.jsonl.gz").write_bytes(b"".join(members))
    assert first + rows(reader.poll()) == rows(read(plain).poll())
