"""Everything that divides a learner's work, with everything else, against one process.

Four ranks train each case of a table in which every two choices meet, for a few updates, and give
the weights, outputs and metrics of one process.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from helpers.pairwise import pairs_of, pairwise
from helpers.rank_cases import Case, distance, train
from helpers.ranks import run_ranks
from postgrad.parallel.ranks import Grid, Ranks

RANKS = 4
FACTORS = {
    "sharding": ("none", "zero1", "zero2", "zero3"),
    "tensor": (1, 2),
    "context": (1, 2),
    "shard_groups": (1, 2),
    "offload": (False, True),
    "lora": (False, True),
    "checkpointing": (False, True),
    "kind": ("grpo", "sft", "reward"),
    "beside": (False, True),
    "large": (False, True),
    "groups": (3, 1),  # with one, some ranks have nothing to do
}


def allowed(row: dict[str, Any]) -> bool:
    replicas = RANKS // (row["tensor"] * row["context"])
    if row["sharding"] == "none" and (row["offload"] or row["shard_groups"] > 1):
        return False
    return replicas % row["shard_groups"] == 0


def case_of(row: dict[str, Any]) -> Case:
    return Case(
        row["sharding"],
        kind=row["kind"],
        lora=row["lora"],
        checkpointing=row["checkpointing"],
        groups=row["groups"],
        offload=row["offload"],
        beside=row["beside"],
        large=row["large"],
        grid=Grid(row["context"], row["tensor"], row["shard_groups"]),
    )


TABLE, WANTED = pairwise(FACTORS, allowed)
CASES = [case_of(row) for row in TABLE]


def test_every_two_choices_that_go_together_meet_in_the_table() -> None:
    assert set().union(*(pairs_of(row) for row in TABLE)) == WANTED
    assert ("tensor", 2, "context", 2) in WANTED
    assert ("sharding", "none", "offload", True) not in WANTED
    assert len(TABLE) < 25


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    train(Ranks(), folder, CASES)
    torch.use_deterministic_algorithms(before)
    return folder


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("four")
    run_ranks(RANKS, train, folder, CASES)
    return folder


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_four_ranks_give_what_one_gives(case: Case, alone: Path, four_ranks: Path) -> None:
    single, many = (
        load_file(folder / f"{case.name}.safetensors") for folder in (alone, four_ranks)
    )
    for prefix in ("base_model." if case.lora else "model.", "ema.", "output.", "whole."):
        assert distance(prefix, single, many) < 1e-4, prefix
    if case.beside:
        assert distance("beside", single, many) < 1e-4
    for of in (
        single,
        many,
    ):  # a prompt whose answers are dealt to several ranks is computed on each
        for name in [name for name in of if name.endswith("/computed_tokens")]:
            del of[name]
    assert distance("metric.", single, many) < 1e-3
