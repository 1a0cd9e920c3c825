"""docs/gpus.md: its recipes place what it says, its proofs exist, its variables are set."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from helpers.placed import RL
from postgrad.cluster.placing import Node, assign
from postgrad.fleet.session import wants_of
from postgrad.parallel import ranks
from postgrad.parallel.device import ALLOCATOR
from postgrad.parallel.ranks import Grid
from postgrad.recipe.load import parse_recipe
from postgrad.rollout.transport.broadcast import BLOCKING
from postgrad.rollout.vllm import process

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "gpus.md").read_text("utf-8")
SHOWN: list[dict[str, Any]] = [
    tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", PAGE, re.S)
]
PLACED = [shown for shown in SHOWN if "cluster" in shown]


def placed(shown: dict[str, Any], nodes: int) -> dict[str, list[str]]:
    """The machine of each process, on machines of eight cards."""
    wants = wants_of(parse_recipe({**RL, **shown, "batch": {"rollout_batch_size": 96}}), "cuda")
    return assign(wants, [Node(f"10.0.0.{number}", 8, 64) for number in range(nodes)])


def test_every_row_names_a_test_that_exists_or_says_that_it_has_not_run() -> None:
    proved = 0
    for table in re.findall(r"(?:^\|.*\n)+", PAGE, re.M):
        head, _, *rows = (line.strip("|").split("|") for line in table.splitlines())
        if head[-1].strip() != "proof":
            continue
        for row in rows:
            files = re.findall(r"`(tests/[\w/]+\.py)`", row[-1])
            assert files or "not run" in row[-1] or not row[-1].strip(), row
            assert all((ROOT / file).exists() for file in files), row
            proved += bool(files)
    assert proved > 20


@pytest.mark.parametrize(("number", "nodes"), [(0, 1), (1, 1), (2, 4)])
def test_the_clusters_of_the_page_fit_their_machines(number: int, nodes: int) -> None:
    placement = placed(PLACED[number], nodes)
    count = PLACED[number]["learner"]["ranks"]
    assert len(placement["policy"]) == count
    shared = "colocate" in PLACED[number]["cluster"].get("policy", {})
    assert len(placement["rollout"]) == (count if shared else 2)
    assert {placement["policy"].count(node) for node in placement["policy"]} == {count // nodes}


def test_the_ranks_that_gather_one_weight_are_of_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the recipe with shard_groups: a row of the mesh is a copy of the state."""
    meshes: list[Any] = []

    class Mesh:
        ndim = 0  # no groups, whose limits would be set

        def __init__(self, device: str, places: Any, **names: Any) -> None:
            meshes.append(places)

        def __getitem__(self, names: tuple[str, ...]) -> "Mesh":
            return self

    monkeypatch.setattr(ranks, "DeviceMesh", Mesh)
    monkeypatch.setattr(ranks.dist, "new_group", lambda members, timeout: members)
    shown = PLACED[-1]["learner"]
    grid = Grid(tensor=shown["tensor_parallel"], groups=shown["shard_groups"])
    ranks.Groups(0, shown["ranks"], grid, "cuda").mesh  # noqa: B018  # it is made at the first call
    nodes = placed(PLACED[-1], 4)["policy"]
    for mesh in meshes:
        copies = [{nodes[rank] for rank in copy.flatten().tolist()} for copy in mesh]
        assert [len(copy) for copy in copies] == [1] * 4
        assert len(set.union(*copies)) == 4


def test_no_variable_of_nccl_is_set() -> None:
    sources = (ROOT / "src").rglob("*.py")
    named = {
        name for path in sources for name in re.findall(r"\w*NCCL_\w+", path.read_text("utf-8"))
    }
    assert named == {BLOCKING}  # of torch, where a group of weights is made


def test_the_variables_of_the_page_are_those_that_are_set() -> None:
    section = PAGE.partition("## Environment variables")[2].partition("\n## ")[0]
    for variable in (*process._ENVIRONMENT, *ALLOCATOR, process.VARIABLE):
        assert f"`{variable}`" in (PAGE if variable == process.VARIABLE else section), variable
