"""Images on two ranks: the weights of one process, whoever has the sequences with images."""

from dataclasses import astuple
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.image_models import Scene, fresh
from helpers.rank_cases import distance
from helpers.ranks import run_ranks
from postgrad.algorithms.sft import SFT
from postgrad.core.settings import ShardingStage
from postgrad.learner.backbone import Backbone, MicroBatch
from postgrad.learner.policy import PolicyLearner
from postgrad.learner.settings import LearnerSettings
from postgrad.learner.update import Update
from postgrad.models.frozen_parts import freeze_parts
from postgrad.models.images import ImageTower
from postgrad.models.settings import ModelSettings
from postgrad.parallel.ranks import Grid, Ranks
from postgrad.parallel.sharding import whole_tensor

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


class Case(NamedTuple):
    kind: str
    stage: ShardingStage
    grid: Grid = Grid()

    @property
    def name(self) -> str:
        return "-".join(map(str, (self.kind, self.stage, *astuple(self.grid))))


EXPERTS, MATRICES, ROWS = Grid(expert=2), Grid(tensor=2), Grid(context=2)
CASES = [
    Case("gemma3", "none"),
    Case("llava_next", "zero1"),
    Case("qwen2_5_vl", "zero2"),
    Case("qwen3_vl", "zero3"),
    Case("qwen3_vl_moe", "zero3"),
    Case("qwen3_5", "zero3"),
    Case("qwen3_vl_moe", "none", EXPERTS),
    Case("qwen3_5_moe", "zero3", EXPERTS),
    Case("qwen2_5_vl", "none", MATRICES),
    Case("gemma3", "zero3", MATRICES),
    Case("llava", "zero1", MATRICES),
    Case("qwen3_vl", "zero2", MATRICES),
    Case("qwen3_vl_moe", "zero3", Grid(tensor=2, expert=2)),
    Case("qwen3_vl", "none", ROWS),
    Case("gemma3", "zero3", ROWS),
    Case("mistral3", "zero2", ROWS),
]
UPDATES = (np.arange(4), np.array([2, 3]), np.array([3]), np.arange(4))


def train(ranks: Ranks, folder: Path, cases: list[Case]) -> None:
    """One sequence a micro-batch: the second update has images on one rank, the third on none."""
    for case in cases:
        if ranks.size > 1:
            ranks = ranks.arranged(case.grid)
        scene, lm = Scene(case.kind), fresh(case.kind)
        if case.stage == "zero2":
            freeze_parts(lm, ModelSettings(freeze=("projector",)))
        backbone = Backbone(lm, torch.device("cpu"), MicroBatch(max_sequences=1))
        backbone.tower = ImageTower(lm, scene.pixels.__getitem__)
        backbone.divide(ranks, case.stage)
        settings = LearnerSettings(lr=1e-2, eps=1e-6, weight_decay=0.1)
        policy, algorithm = PolicyLearner(backbone, settings, 10), SFT()
        numbers: dict[str, Any] = {}
        for number, rows in enumerate(UPDATES):
            experience = algorithm.experience(scene.sequences.take(rows))
            result = policy.update(Update(experience, np.arange(len(rows))), algorithm).result()
            numbers[f"loss.{number}"] = torch.tensor(result.metrics["policy/loss"])
        logprobs = policy.logprobs(scene.sequences).result()
        numbers["logprobs"] = torch.from_numpy(logprobs.values.copy())
        pieces = policy.optimizer.pieces
        tensors = {n: whole_tensor(t, pieces[n]).clone() for n, t in policy.weights().items()}
        if ranks.rank == 0:
            save_file({**tensors, **numbers}, folder / f"{case.name}.safetensors")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """What one process has written, and what two ranks have."""
    alone, both = tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("both")
    train(Ranks(), alone, CASES)
    run_ranks(2, train, both, CASES)
    return alone, both


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_ranks_have_the_weights_of_one(case: Case, folders: tuple[Path, Path]) -> None:
    alone, both = (load_file(folder / f"{case.name}.safetensors") for folder in folders)
    for name in ("model.", "loss.", "logprobs"):
        assert distance(name, both, alone) < 1e-4, name
