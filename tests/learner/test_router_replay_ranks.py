"""Router replay on several ranks: the weights of one process, whoever has which tokens."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.rank_cases import Case, algorithm, distance, experience, gathered, learner
from helpers.ranks import run_ranks
from postgrad.algorithms.grpo import GRPO
from postgrad.core.records import Experience
from postgrad.learner.policy import PolicyLearner
from postgrad.learner.update import Update, chosen_experts
from postgrad.parallel.ranks import UNDIVIDED, Grid, Ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

UPDATES = 4
CASES = [
    Case("none", type="qwen3_moe"),
    Case("zero2", type="qwen3_moe", checkpointing=True),
    Case("zero3", type="qwen3_moe", checkpointing=True),
    Case("zero1", type="qwen3_moe", groups=1),  # of four ranks three have nothing to do
]
IN_CONTEXT = [CASES[0], CASES[2]]


def recorded(case: Case, number: int) -> Experience:
    """Samples of 4 experts, 2 a token, that were drawn by lot for each position and layer. The last
    token of a sample has none, as engines record it.
    """
    drawn = experience(case, number)
    tokens = drawn.sequences.tokens
    rng = np.random.default_rng(1000 + number)
    longest = int(np.diff(tokens.offsets).max())
    lots = rng.permuted(np.tile(np.arange(4), (longest, 2, 1)), axis=2)[..., :2]
    rows = [lots[: len(row)].astype(np.int16) for row in tokens]
    for row in rows:
        row[-1] = -1
    experts = tokens.like(np.concatenate(rows))
    return replace(drawn, sequences=replace(drawn.sequences, experts=experts))


def train(ranks: Ranks, folder: Path, cases: list[Case], replays: bool = True) -> None:
    """Trains every case with recorded experts, and writes weights and outputs from rank 0."""
    for case in cases:
        policy, how = learner(case, ranks), algorithm(case)
        assert isinstance(policy, PolicyLearner)
        assert isinstance(how, GRPO)
        routers = policy.backbone.routers
        assert routers is not None
        routers.replays = replays
        numbers: dict[str, torch.Tensor] = {}
        if ranks.grid.context == 1:
            chosen = chosen_experts(policy.backbone, experience(case, 0).sequences)
            numbers["chosen"] = torch.from_numpy(chosen.values.copy())
        for number in range(UPDATES):
            drawn = recorded(case, number)
            result = policy.update(Update(drawn, np.arange(len(drawn))), how).result()
            numbers[f"output.{number}"] = torch.from_numpy(result.outputs.copy())
            for name in ("router_balance", "router_z", "router_max_load", "router_unused"):
                value = result.metrics[f"policy/{name}"]
                numbers[f"metric.{number}.{name}"] = torch.tensor(value)
        logprobs = policy.logprobs(recorded(case, 99).sequences).result()
        numbers["logprobs"] = torch.from_numpy(logprobs.values.copy())
        weights = gathered(policy)
        if ranks.rank == 0:
            save_file({**weights, **numbers}, folder / f"{case.name}.safetensors")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    train(Ranks(), folder, CASES)
    return folder


@pytest.mark.parametrize(
    ("size", "grid", "cases"),
    [(2, UNDIVIDED, CASES), (4, UNDIVIDED, CASES[2:]), (2, Grid(context=2), IN_CONTEXT)],
)
def test_ranks_that_replay_have_the_weights_of_one_process(
    size: int, grid: Grid, cases: list[Case], alone: Path, tmp_path: Path
) -> None:
    """ "sampled", and what "old" chooses before a step, where ranks have whole sequences."""
    run_ranks(size, train, tmp_path, cases, grid=grid)
    for case in cases:
        file = f"{case.name}.safetensors"
        single, several = load_file(alone / file), load_file(tmp_path / file)
        if grid.context == 1:
            assert torch.equal(several["chosen"], single["chosen"])
        else:
            del single["chosen"]
        for name in ("model.", "ema.", "output.", "metric.", "logprobs"):
            assert distance(name, several, single) < 1e-4, (case.name, name)


def test_without_replay_the_weights_are_others(alone: Path, tmp_path: Path) -> None:
    """So the comparisons above would see a rank that lets its routers choose."""
    train(Ranks(), tmp_path, CASES[:1], replays=False)
    file = f"{CASES[0].name}.safetensors"
    chosen, replayed = load_file(tmp_path / file), load_file(alone / file)
    for name in ("model.", "output.", "logprobs"):
        assert distance(name, chosen, replayed) > 1e-2, name
