"""Log files: only added to, cut back to what a checkpoint knew."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from postgrad.core.errors import RunError
from postgrad.observe.sinks import Logs, to_json


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_lines_are_added_in_order_with_keys_as_given(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    logs.metric({"step": 1, "loss": 0.1, "a": 1})
    logs.metric({"step": 2})
    assert (tmp_path / "metrics.jsonl").read_text("utf-8") == (
        '{"step": 1, "loss": 0.1, "a": 1}\n{"step": 2}\n'
    )
    logs.evaluation({"set": None})
    logs.event("sentinel", "look", step=3)
    assert lines(tmp_path / "eval.jsonl") == [{"set": None}]
    event = lines(tmp_path / "events.jsonl")[0]
    assert (event["event"], event["message"], event["step"]) == ("sentinel", "look", 3)
    logs.close()


def test_what_json_cannot_say_is_null() -> None:
    line = {"loss": math.nan, "inner": {"list": [math.inf, 1.0]}, "text": "ß"}
    assert to_json(line) == '{"loss": null, "inner": {"list": [null, 1.0]}, "text": "ß"}'


def test_a_rewind_leaves_no_step_twice_and_none_missing(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    logs.metric({"step": 1})
    logs.samples([{"ticket": 0}, {"ticket": 1}])
    offsets = logs.sync()
    assert offsets == {"metrics.jsonl": 12, "samples.jsonl": 28}
    logs.metric({"step": 2})
    logs.samples([{"ticket": 2}])
    logs.event("killed", "here")
    logs.close()
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 3, "lo')  # a line that was being written
    again = Logs(tmp_path)
    again.rewind(offsets)
    again.metric({"step": 2})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2}]
    assert lines(tmp_path / "samples.jsonl") == [{"ticket": 0}, {"ticket": 1}]
    assert [line["event"] for line in lines(tmp_path / "events.jsonl")] == ["killed"]
    again.close()


def test_a_run_that_begins_again_begins_with_empty_files(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    logs.metric({"step": 1})
    logs.rewind({})
    logs.metric({"step": 1})
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1}]
    logs.close()


def test_a_file_that_lost_lines_is_named(tmp_path: Path) -> None:
    logs = Logs(tmp_path)
    with pytest.raises(RunError, match=r"samples\.jsonl has 0 bytes and had 7"):
        logs.rewind({"samples.jsonl": 7})
