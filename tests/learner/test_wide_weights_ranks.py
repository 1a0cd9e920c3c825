"""Weights that transformers keeps in float32 in a narrow model, where ranks divide the others."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from helpers.model_types import make_model
from helpers.ranks import run_ranks
from helpers.tiny_runs import MODEL
from learner.test_router_dtype_ranks import UPDATES, gathered, rows
from postgrad.algorithms.sft import SFT
from postgrad.core.settings import ShardingStage
from postgrad.learner.backbone import Backbone, MicroBatch
from postgrad.learner.policy import PolicyLearner
from postgrad.learner.settings import LearnerSettings
from postgrad.learner.update import Update
from postgrad.models.fresh import make_fresh
from postgrad.models.load import load_model
from postgrad.models.settings import ModelInit
from postgrad.models.tokenizer import load_tokenizer
from postgrad.parallel.ranks import Ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

KINDS = {  # beside routers, by the ends of their names
    "afmoe": ("expert_bias",),
    "bailing_hybrid": ("A_log", "dt_bias", "conv1d.weight"),
    "flint": ("sinks",),
    "kimi_linear": ("dt_bias",),
}


def train(
    ranks: Ranks, folder: Path, model: str, stage: ShardingStage, offload: bool = False
) -> None:
    """In bfloat16, with the dtype that each such weight has as its module computes."""
    lm: Any = load_model(model, dtype=torch.bfloat16).lm.requires_grad_(True)
    wide = {name for name, weight in lm.named_parameters() if weight.dtype == torch.float32}
    assert wide
    backbone = Backbone(lm, torch.device("cpu"), MicroBatch())
    backbone.divide(ranks, stage, offload=offload)
    settings = LearnerSettings(lr=0.1, eps=1.0, warmup_ratio=0.0)  # a step is about 0.1 * gradient
    policy = PolicyLearner(backbone, settings, 100)
    before = gathered(policy)
    computed: dict[str, torch.dtype] = {}

    def note(module: nn.Module, inputs: Any) -> None:
        for name in wide:
            owner, _, leaf = name.rpartition(".")
            if lm.get_submodule(owner) is module:
                computed[name] = getattr(module, leaf).dtype

    for module in lm.modules():
        module.register_forward_pre_hook(note)
    sequences = rows()
    for _ in range(UPDATES):
        policy.update(Update(SFT().experience(sequences), torch.arange(6).numpy()), SFT()).result()
    assert set(computed.values()) == {torch.float32}
    moved = {name: weight - before[name] for name, weight in gathered(policy).items()}
    if ranks.rank == 0:
        save_file(moved, folder / "moved.safetensors")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A tiny model of each type."""
    to = tmp_path_factory.mktemp("wide")
    make_fresh(ModelInit.model_validate(MODEL["init"]), [], 0, to / "tokenizer")
    size = len(load_tokenizer(str(to / "tokenizer")))
    return {kind: str(make_model(kind, to / "tokenizer", size, to / kind)) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_held_in_the_hosts_memory_they_are_the_same_bits(
    kind: str, models: dict[str, str], tmp_path: Path
) -> None:
    moved: list[dict[str, torch.Tensor]] = []
    for offload in (False, True):
        folder = tmp_path / str(offload)
        folder.mkdir()
        run_ranks(2, train, folder, models[kind], "zero3", offload)
        moved.append(load_file(folder / "moved.safetensors"))
    plain, offloaded = moved
    assert plain.keys() == offloaded.keys()
    assert [name for name in plain if not torch.equal(plain[name], offloaded[name])] == []


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
@pytest.mark.parametrize("kind", KINDS)
def test_they_compute_in_float32_and_learn_as_in_one_process(
    kind: str, stage: ShardingStage, models: dict[str, str], tmp_path: Path
) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    for folder in (alone, together):
        folder.mkdir()
    train(Ranks(), alone, models[kind], "none")
    run_ranks(2, train, together, models[kind], stage)
    single, several = (load_file(folder / "moved.safetensors") for folder in (alone, together))
    assert single.keys() == several.keys()
    kept = [name for name in single if name.endswith(KINDS[kind])]
    assert kept
    for name in kept:
        assert several[name].dtype == torch.float32
        assert (float(single[name].norm()) > 0) is (
            kind != "afmoe"
        )  # its bias only chooses experts
        difference = float((single[name] - several[name]).norm())
        assert difference <= 0.05 * float(single[name].norm())  # of bfloat16
