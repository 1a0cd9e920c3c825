"""Ranks that share experts give the weights of one: README.md of tests/invariants."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers.rank_cases import Case, distance, train
from helpers.ranks import run_ranks
from postgrad.parallel.ranks import Grid, Ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

PAIRS, ALL = Grid(expert=2), Grid(expert=4)  # of four ranks
CASES = [  # with both losses of routers
    Case("none", type="qwen3_moe", grid=PAIRS),
    Case("none", type="qwen3_moe", grid=ALL, checkpointing=True),
    Case("zero2", type="qwen3_moe", grid=ALL),
    Case("zero3", type="qwen3_moe", grid=PAIRS, checkpointing=True),
    Case("zero3", type="qwen3_moe", grid=PAIRS, groups=1),  # three ranks have no tokens
    Case("zero1", type="qwen3_moe", grid=ALL, groups=1, checkpointing=True),
    Case("zero3", type="qwen3_moe", grid=Grid(expert=2, groups=2)),
    Case("zero3", type="qwen3_moe", grid=Grid(expert=4, context=2), checkpointing=True),
    Case("zero2", type="gpt_oss", grid=PAIRS),  # experts with biases, transposed
    Case("zero2", type="qwen3_moe", grid=PAIRS, lora=True, checkpointing=True),
    Case("none", type="qwen3_moe", grid=ALL, lora=True),
    Case("zero3", type="qwen3_moe", grid=PAIRS, kind="reward"),
    Case("zero3", type="qwen3_moe", grid=ALL, dtype="bfloat16"),
    Case("none", type="qwen3_moe", grid=PAIRS, dtype="bfloat16"),
    Case("zero3", type="qwen3_moe", grid=PAIRS, optimizer="muon", beside=True),
]


def undivided(case: Case) -> Case:
    """The case as one process trains it."""
    return case._replace(grid=None, stage="none", checkpointing=False)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    train(Ranks(), folder, list(dict.fromkeys(undivided(case) for case in CASES)))
    torch.use_deterministic_algorithms(before)
    return folder


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    run_ranks(4, train, folder, CASES)
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ranks_that_share_experts_give_the_weights_of_one(
    case: Case, alone: Path, shared: Path
) -> None:
    single = load_file(alone / f"{undivided(case).name}.safetensors")
    several = load_file(shared / f"{case.name}.safetensors")
    limit = 1e-4 if case.dtype == "float32" else 1e-1
    weights = "base_model." if case.lora else "model."
    for start in (weights, "ema.", "whole.", "output." if limit < 0.1 else "output.0"):
        assert distance(start, single, several) < limit, start
    metrics = [{n: t for n, t in of.items() if "tokens" not in n} for of in (single, several)]
    assert distance("metric.", *metrics) < 10 * limit
