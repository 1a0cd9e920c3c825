"""Routers in float32 on several ranks: the same logits wherever weights, experts or rows lie."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from helpers.model_types import config_of
from helpers.rank_cases import VOCABULARY
from helpers.ranks import run_ranks
from postgrad.algorithms.sft import SFT
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.core.settings import ShardingStage
from postgrad.learner.backbone import Backbone, MicroBatch
from postgrad.learner.policy import PolicyLearner
from postgrad.learner.settings import LearnerSettings
from postgrad.learner.update import Update
from postgrad.models.attention import ATTENTION_NAME
from postgrad.models.routers import _routers, give_dtype, routers_of
from postgrad.models.settings import ModelSettings
from postgrad.parallel.ranks import UNDIVIDED, Grid, Ranks
from postgrad.parallel.sharding import whole_tensor

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

UPDATES = 2
ROWS = 48  # of 6 a few tokens that rounding sends to other experts decide the mean: 0.052 with AMX


def rows() -> Sequences:
    rng = np.random.default_rng(0)
    tokens = Ragged.of([rng.integers(3, 36, 11 + n % 6) for n in range(ROWS)], np.int32)
    mask = np.ones(len(tokens.values), bool)
    mask[tokens.offsets[:-1]] = False
    return Sequences(tokens, tokens.like(mask), np.arange(ROWS))


def gathered(policy: PolicyLearner) -> dict[str, torch.Tensor]:
    pieces = policy.optimizer.pieces
    return {n: whole_tensor(t, pieces[n]).clone() for n, t in policy.weights().items()}


def train(ranks: Ranks, folder: Path, model: str, stage: ShardingStage) -> None:
    """In bfloat16, with the errors of all logits of routers: from float64 products with the weights
    that this rank's master weights say, rounded where the model's are.
    """
    lm: Any = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME
    )
    settings = ModelSettings(path=model, router_aux_loss_coef=0.0)
    if lm.config.model_type == "qwen3_moe":
        give_dtype(lm, "float32")
    backbone = Backbone(lm, torch.device("cpu"), MicroBatch())
    backbone.routers = routers_of(lm, settings)
    names = {router: name for name, router in lm.named_modules()}
    kept = next(router for router, _ in _routers(lm)).weight.dtype
    backbone.divide(ranks, stage)
    policy = PolicyLearner(backbone, LearnerSettings(lr=1e-2, warmup_ratio=0.0), 100)
    weights: dict[str, torch.Tensor] = {}
    seen: list[float] = []

    def compare(router: Any, inputs: Any, outputs: Any) -> None:
        weight = weights[f"{names[router]}.weight"].to(kept).double()
        exact = inputs[0].detach().flatten(0, -2).double() @ weight.T
        seen.append(float((outputs[0].detach().double() - exact).abs().max() / exact.abs().max()))

    for router, _ in _routers(lm):
        router.register_forward_hook(compare)
    sequences = rows()
    for _ in range(UPDATES):
        weights |= gathered(policy)
        policy.logprobs(sequences).result()
        policy.update(Update(SFT().experience(sequences), np.arange(ROWS)), SFT()).result()
    assert len(seen) >= UPDATES
    numbers = {"errors": torch.tensor(seen).max()}
    logprobs = policy.logprobs(sequences).result()
    everywhere = gathered(policy)
    if ranks.rank == 0:
        numbers["logprobs"] = torch.from_numpy(logprobs.values.copy())
        save_file({**everywhere, **numbers}, folder / "said.safetensors")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of a type that transformers computes in bfloat16, and of one that it keeps in float32."""
    places: dict[str, str] = {}
    for kind in ("qwen3_moe", "deepseek_v3"):
        torch.manual_seed(0)
        folder = tmp_path_factory.mktemp(kind)
        AutoModelForCausalLM.from_config(config_of(kind, VOCABULARY)).save_pretrained(folder)
        places[kind] = str(folder)
    return places


@pytest.mark.parametrize(
    ("kind", "stage", "grid"),
    [
        ("qwen3_moe", "zero1", UNDIVIDED),
        ("qwen3_moe", "zero3", UNDIVIDED),
        ("qwen3_moe", "none", Grid(tensor=2)),
        ("qwen3_moe", "zero2", Grid(expert=2)),
        ("deepseek_v3", "none", UNDIVIDED),
        ("deepseek_v3", "zero1", UNDIVIDED),
        ("deepseek_v3", "zero3", UNDIVIDED),
        ("deepseek_v3", "zero3", Grid(expert=2)),
    ],
)
def test_logits_are_exact_and_updates_are_those_of_one_process(
    kind: str, stage: ShardingStage, grid: Grid, models: dict[str, str], tmp_path: Path
) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    for folder in (alone, together):
        folder.mkdir()
    train(Ranks(), alone, models[kind], "none")
    run_ranks(2, train, together, models[kind], stage, grid=grid)
    single, several = (load_file(folder / "said.safetensors") for folder in (alone, together))
    assert single.pop("errors") < 1e-6
    assert several.pop("errors") < 1e-6
    assert single.keys() == several.keys()
    assert float((single["logprobs"] - several["logprobs"]).abs().mean()) < 0.05  # of bfloat16
    for name in single:
        if "gate.weight" in name:
            assert float((single[name] - several[name]).norm()) < 0.1 * float(single[name].norm())
