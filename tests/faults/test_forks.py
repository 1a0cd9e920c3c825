"""A fork that dies, or meets a bad disk, at every call that changes a file.

In CI every call meets one of the three kinds of faults, with links or copies; `make test-faults`
has each meet all.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from helpers.faults import FOREVER, Ended, Fault, Kind, Machine
from helpers.saved_run import SavedRun
from helpers.tiny_runs import recipe_in
from postgrad.api.run import Run

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path: Path) -> SavedRun:
    """Loggers follow it, so that a fork has files of its own beside hard links."""
    saved = SavedRun.create(tmp_path / "run", recipe_in(tmp_path, "rl", "run", {}), steps=3)
    saved.step(4, loggers={"id": "0a1b2c3d"})
    return saved


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def timeless(folder: Path) -> dict[str, Any]:
    """Its contents, without the times of events."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_bytes().splitlines()]
    return {**contents(folder), "events.jsonl": [{**event, "time": ""} for event in events]}


def forked(machine: Machine, run: SavedRun, root: Path, how: str, fault: Fault) -> Ended:
    """Forks in another process, with hard links or copies."""
    arguments = [str(run.path), str(root / "fork"), how == "links"]
    return machine.call("helpers.saved_run:fork_it", arguments, root, fault)


KINDS = (Kind.KILL, Kind.IO_ERROR, Kind.FULL)


@pytest.mark.parametrize("how", ["links", "copies"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name.lower())
def test_at_any_call_there_is_no_run_or_a_whole_fork(
    kind: Kind,
    how: str,
    run: SavedRun,
    machine: Machine,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    root = tmp_path / "forks"
    root.mkdir()
    before = contents(run.path)
    unharmed = forked(machine, run, root, how, Fault())
    assert unharmed.status == 0, unharmed.message
    wanted = timeless(root / "fork")
    assert set("OWSRM") <= set(unharmed.names)
    assert (unharmed.names.count("L") > 8) == (how == "links")
    calls = range(1, len(unharmed.names) + 1)
    if len(calls) > int(str(request.config.getoption("--fault-points"))):
        calls = calls[KINDS.index(kind) + 3 * (how == "copies") :: 6]
    complete = 0
    for number in calls:
        shutil.rmtree(root / "fork", ignore_errors=True)
        last = FOREVER if kind == Kind.FULL else number
        ended = forked(machine, run, root, how, Fault(kind, number, last))
        if (root / "fork").exists():
            complete += 1
            assert timeless(root / "fork") == wanted
        if kind == Kind.KILL:
            assert ended.status == -9
        else:
            assert ended.status in (0, 1), ended
            assert (ended.status == 1) == ("postgrad: " in ended.message)
            assert "please report" not in ended.message
            assert ended.status == 1 or (root / "fork").exists()
        assert contents(run.path) == before
        if not (root / "fork").exists():
            again = forked(machine, run, root, how, Fault())
            assert again.status == 0, again.message
        assert [path.name for path in root.iterdir()] == ["fork"]
        assert [info.step for info in Run(root / "fork").checkpoints if info.complete] == [2, 4]
    assert complete < len(calls)
