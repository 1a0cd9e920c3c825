"""`postgrad generate` on a bad machine: repeated after any fault, it ends with the same bytes."""

import shutil
from pathlib import Path

import pytest

from helpers.faults import FOREVER, Ended, Fault, Kind, Machine
from helpers.jobs import write_recipe
from helpers.tiny_runs import MODEL
from postgrad.models.fresh import make_fresh
from postgrad.models.settings import ModelInit

pytestmark = pytest.mark.slow


def generate(machine: Machine, recipe: Path, model: str, to: Path, fault: Fault) -> Ended:
    extent = ["--samples", "2", "--rows", "6", "--shard", "2", "--select", "all"]
    words = ["generate", str(recipe), "--model", model, "--to", str(to), *extent, "--quiet"]
    return machine.call("postgrad.cli.main:main", [words], to, fault)


def contents(to: Path) -> dict[str, bytes]:
    """Every file by its path; a temporary name that was left would be one of them."""
    return {str(p.relative_to(to)): p.read_bytes() for p in to.rglob("*") if p.is_file()}


def test_after_a_kill_or_a_bad_disk_the_repeated_command_ends_with_the_same_bytes(
    machine: Machine, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    points = int(request.config.getoption("--fault-points"))
    recipe, model, to = (
        write_recipe("grpo with kl", tmp_path),
        str(tmp_path / "model"),
        tmp_path / "to",
    )
    make_fresh(ModelInit.model_validate(MODEL["init"]), [], 0, Path(model))
    unharmed = generate(machine, recipe, model, to, Fault())
    assert (unharmed.status, unharmed.message) == (0, "")
    wanted, calls = contents(to), len(unharmed.names)
    assert {"generate.json", "all.jsonl", "shards/00002.jsonl"} <= wanted.keys()
    places = sorted({1 + i * calls // points for i in range(points)})
    bad_disks = [Fault(Kind.IO_ERROR, calls // 2, calls // 2), Fault(Kind.FULL, 2, FOREVER)]
    for fault in (*(Fault(Kind.KILL, number, number) for number in places), *bad_disks):
        shutil.rmtree(to)
        ended = generate(machine, recipe, model, to, fault)
        if fault.kind == Kind.KILL:
            assert ended.status == -9
        elif ended.status:
            assert ended.status in (1, 2)
            assert "postgrad: " in ended.message
            assert "Traceback" not in ended.message
        for name, content in contents(to).items():  # what has its name is whole
            if name.startswith("shards/0"):
                assert content == wanted[name]
        again = generate(machine, recipe, model, to, Fault())
        assert (again.status, again.message) == (0, ""), (fault, ended)
        assert contents(to) == wanted, (fault, ended)
