"""What ranks say to each other, and what is said of one that does not come."""

import json
import math
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.ranks import meeting, run_ranks
from postgrad.core.errors import RunError
from postgrad.parallel import ranks
from postgrad.parallel.ranks import Grid, Ranks

several = [pytest.mark.ranks, pytest.mark.slow]


def test_alone_every_collective_gives_back_what_it_got() -> None:
    alone, held = Ranks(), torch.tensor([1.5])
    alone.sum_([held])
    assert (float(held), alone.sum(2.5), alone.most(3)) == (1.5, 2.5, 3)
    assert alone.sums({"a": 1.0}) == {"a": 1.0}
    assert alone.gathered(["x"]) == [["x"]]
    values, present = np.array([1.0, 2.0], np.float32), np.array([True, False])
    assert alone.merged(values, present)[0] is values
    alone.require_same("anything", "x")


def test_a_port_that_is_taken_is_an_error_that_says_so() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        address = f"127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(RunError, match=f"rank 0 of 2 could not join the others at {address}"):
            Ranks.join(0, 2, address, start_seconds=1.0)


@pytest.mark.parametrize(("device", "asked"), [("cuda", "cpu:gloo,cuda:nccl"), ("cpu", "gloo")])
def test_tensors_on_cards_go_through_nccl_and_those_on_the_host_through_gloo(
    device: str, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backends: list[str] = []
    monkeypatch.setattr(
        ranks.dist, "init_process_group", lambda backend, **more: backends.append(backend)
    )
    with meeting() as address:
        Ranks.join(0, 1, address, device=device)
    assert backends == [asked]


def test_ranks_wait_as_long_for_the_first_collective_of_a_group_as_for_others() -> None:
    """NCCL connects a group then: ranks wait in the store for what the group's first one writes."""
    with meeting() as address:
        ranks = Ranks.join(0, 1, address, limit_seconds=77.0, start_seconds=5.0)
    try:
        assert ranks._store.timeout.total_seconds() == 77.0
    finally:
        ranks.leave()


@pytest.mark.slow
def test_a_rank_that_waits_alone_gives_up() -> None:
    late = pytest.raises(RunError, match=r"rank 1 of 2 could not join .* within 1 seconds")
    with meeting() as address, late:
        Ranks.join(1, 2, address, start_seconds=1.0)


def talk(ranks: Ranks, folder: Path) -> None:
    with ranks.doing("talking"):
        held = torch.full((2,), float(ranks.rank + 1))
        ranks.sum_([held])
        is_known = np.arange(4) // 2 == ranks.rank
        values = np.where(is_known, np.arange(4, dtype=np.float32), np.float32(math.nan))
        merged, everywhere = ranks.merged(values, is_known)
        results = {
            "sum_": held.tolist(),
            "sum": ranks.sum(0.1),
            "most": ranks.most(5 - ranks.rank),
            "merged": merged.tolist(),
            "everywhere": everywhere.tolist(),
            "sums": ranks.sums({"both": 1.0, f"of {ranks.rank}": 2.0}),
            "gathered": ranks.gathered("x" * ranks.rank),
        }
    (folder / f"{ranks.rank}.json").write_text(json.dumps(results))


def disagree(ranks: Ranks, folder: Path) -> None:
    with pytest.raises(RunError, match="rank 1 and rank 0 disagree on the recipe: b and a"):
        ranks.require_same("the recipe", "ab"[ranks.rank])


def wait(ranks: Ranks, folder: Path) -> None:
    if ranks.rank == 1:
        with ranks.doing("resting"):
            time.sleep(8.0)
        return
    with pytest.raises(RunError) as caught, ranks.doing("working"):
        ranks.sum(1.0)
    (folder / "told").write_text(str(caught.value))


def limits(ranks: Ranks, folder: Path) -> None:
    arranged = [ranks.groups, ranks.arranged(Grid(groups=2)).groups]
    arranged.append(ranks.arranged(Grid(expert=2)).groups)
    limits_by_group = {
        f"{name} {number}": float(seconds_of(group))
        for number, groups in enumerate(arranged)
        for name, group in [
            *((name, getattr(groups, name)) for name in NAMES),
            *((name, getattr(groups, name).get_group("shard")) for name in MESHES),
        ]
        if group is not None
    }
    limits_by_group["between groups"] = float(seconds_of(arranged[1].mesh.get_group("group")))
    (folder / f"{ranks.rank}.json").write_text(json.dumps(limits_by_group))


NAMES = ("context", "tensor", "replica", "data", "expert", "expert_data")
MESHES = ("mesh", "data_mesh", "expert_mesh")


def seconds_of(group: Any) -> float:
    """The limit of a collective in a group."""
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


@pytest.mark.ranks
@pytest.mark.slow
def test_the_limit_of_a_collective_holds_in_every_group(tmp_path: Path) -> None:
    run_ranks(4, limits, tmp_path, limit_seconds=77.0, grid=Grid(context=2, tensor=2))
    for rank in range(4):
        limits_by_group = json.loads((tmp_path / f"{rank}.json").read_text())
        assert {name.split()[0] for name in limits_by_group} == {*NAMES, *MESHES, "between"}
        assert set(limits_by_group.values()) == {77.0}, limits_by_group


class TestTwoRanks:
    pytestmark = several

    def test_all_know_the_same_afterwards(self, tmp_path: Path) -> None:
        run_ranks(2, talk, tmp_path)
        first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
        assert first == second
        assert first == {
            "sum_": [3.0, 3.0],
            "sum": 0.2,
            "most": 5,
            "merged": [0.0, 1.0, 2.0, 3.0],
            "everywhere": [True] * 4,
            "sums": {"both": 2.0, "of 0": 2.0, "of 1": 2.0},
            "gathered": ["", "x"],
        }

    def test_a_disagreement_names_the_rank(self, tmp_path: Path) -> None:
        run_ranks(2, disagree, tmp_path)

    def test_one_that_does_not_come_is_named_with_what_it_does(self, tmp_path: Path) -> None:
        run_ranks(2, wait, tmp_path, limit_seconds=2.0)
        stderr = (tmp_path / "told").read_text()
        assert "rank 0 of 2 waited in vain in 'working' (number 1)" in stderr
        assert "missing: rank 1 (1 resting)" in stderr
