"""The list of metrics has every field that runs of every job write."""

import json
import re
from pathlib import Path

import pytest

from helpers.jobs import JOBS, write_recipe
from helpers.pages import ROOT
from postgrad.cli.main import main

PAGE = (ROOT / "docs" / "metrics.md").read_text("utf-8")
LISTED = {
    name
    for row in re.findall(r"(?m)^\| (`[^|]*`) \|", PAGE)
    for name in re.findall(r"`([^`]+)`", row)
}
# NAME: of a reward, a count; N: a bin; K: of pass@k.
PATTERNS = [re.compile(re.sub(r"NAME|VALUE|RATE|\bK\b|N$", "[\\\\w.]+", name)) for name in LISTED]
INTERVAL = re.compile(r"_(low|high)$")  # said once for all rates


def is_listed(name: str) -> bool:
    return any(pattern.fullmatch(name) for pattern in PATTERNS)


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_what_a_run_writes_is_on_the_page(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(write_recipe(job, tmp_path)), "--quiet"]) == 0
    for log in ("metrics.jsonl", "eval.jsonl"):
        lines = (tmp_path / "run" / log).read_text("utf-8").splitlines()
        names = {
            INTERVAL.sub("", name) if log[0] == "e" else name
            for n in lines
            for name in json.loads(n)
        }
        assert {name for name in names if not is_listed(name)} == set()
