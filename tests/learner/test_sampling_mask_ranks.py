"""Sampling masks on several ranks: the weights of one process, whoever has which tokens."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.rank_cases import VOCABULARY, Case, algorithm, distance, experience, gathered, learner
from helpers.ranks import run_ranks
from postgrad.algorithms.grpo import GRPO
from postgrad.core.ragged import Ragged
from postgrad.core.records import Experience
from postgrad.learner.policy import PolicyLearner
from postgrad.learner.update import Update
from postgrad.parallel.ranks import UNDIVIDED, Grid, Ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

CASES = [
    Case("none"),
    Case("zero3", checkpointing=True),
    Case("zero2", lora=True, groups=1),  # some ranks have nothing to do
]


def filtered(case: Case, number: int) -> Experience:
    """Samples whose filters left up to nine tokens by lot, at every third token all of them."""
    drawn = experience(case, number)
    rng = np.random.default_rng(1000 + number)
    rows: list[np.ndarray] = []
    mask = drawn.sequences.loss_mask.values
    for place, token in enumerate(drawn.sequences.tokens.values):
        others = rng.integers(0, VOCABULARY, 8)
        acts = mask[place] and place % 3
        rows.append(np.unique(np.append(others, token)) if acts else np.zeros(0))
    masks = Ragged.of(rows, np.int32)
    return replace(drawn, sequences=replace(drawn.sequences, sampling_mask=masks))


def train(ranks: Ranks, folder: Path, cases: list[Case], masked: bool = True) -> None:
    """Trains every case, and writes weights and outputs from rank 0."""
    samples = filtered if masked else experience
    for case in cases:
        policy, how = learner(case, ranks), algorithm(case)
        assert isinstance(policy, PolicyLearner)
        assert isinstance(how, GRPO)
        numbers: dict[str, torch.Tensor] = {}
        for number in range(3):
            drawn = samples(case, number)
            result = policy.update(Update(drawn, np.arange(len(drawn))), how).result()
            numbers[f"output.{number}"] = torch.from_numpy(result.outputs.copy())
        sequences = samples(case, 99).sequences
        for name in ("logprobs", "entropies"):
            read = getattr(policy, name)(sequences).result()
            numbers[name] = torch.from_numpy(read.values.copy())
        weights = gathered(policy)
        if ranks.rank == 0:
            save_file({**weights, **numbers}, folder / f"{case.name}.safetensors")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    train(Ranks(), folder, CASES)
    return folder


@pytest.mark.parametrize("grid", [UNDIVIDED, Grid(context=2), Grid(tensor=2)])
def test_ranks_learn_over_what_the_filters_left_as_one_process_does(
    grid: Grid, alone: Path, tmp_path: Path
) -> None:
    cases = CASES if grid is UNDIVIDED else CASES[:2]
    run_ranks(2, train, tmp_path, cases, grid=grid)
    for case in cases:
        file = f"{case.name}.safetensors"
        single, several = load_file(alone / file), load_file(tmp_path / file)
        weights = "base_model." if case.lora else "model."
        for name in (weights, "output.", "logprobs", "entropies"):
            assert distance(name, several, single) < 1e-4, (case.name, name)


def test_without_the_masks_the_weights_are_others(alone: Path, tmp_path: Path) -> None:
    train(Ranks(), tmp_path, CASES[:1], masked=False)
    file = f"{CASES[0].name}.safetensors"
    plain, masked = load_file(tmp_path / file), load_file(alone / file)
    for name in ("model.", "output.", "logprobs", "entropies"):
        assert distance(name, plain, masked) > 1e-2, name
