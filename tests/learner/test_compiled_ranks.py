"""Compiled layers whose rows, matrices or experts several ranks share: README.md of
tests/invariants.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from helpers.rank_cases import Case, experience, model
from helpers.ranks import run_ranks
from postgrad.learner.backbone import Backbone, MicroBatch
from postgrad.models import tree
from postgrad.parallel.ranks import Grid, Ranks

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

LAYERS = 4


def backbone_for(case: Case, ranks: Ranks) -> Backbone:
    lm = model(case, num_hidden_layers=LAYERS)
    compiler = "aot_eager" if case.compiled else None
    attention = "flex" if case.compiled else "sdpa"
    backbone = Backbone(lm, torch.device("cpu"), MicroBatch(), attention, compiler=compiler)
    backbone.divide(ranks, "none")
    return backbone


def outcome(backbone: Backbone, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs of a layout, and this rank's gradient of a sum of them."""
    case = Case("none", groups=1 + number % 4)
    sequences = experience(case, number).sequences
    (layout,) = backbone.micro_batches(sequences, np.arange(len(sequences)))
    logprobs, _ = backbone.logprobs(layout, 1.0)
    (logprobs * torch.linspace(-1.0, 1.0, len(logprobs))).sum().backward()
    weights = [p for p in backbone.lm.parameters() if p.grad is not None]
    gradient = torch.cat([weight.grad.flatten() for weight in weights])  # type: ignore[union-attr]
    backbone.lm.zero_grad()
    return logprobs.detach(), gradient


def compares(ranks: Ranks, folder: Path, case: Case, graphs: int) -> None:
    """Layouts of twelve sizes, compiled and not. Most get padding, which needs no other graph."""
    tree.NARROWEST = 1  # the heads here have 8 numbers
    # torch has no kernel of flex attention's backward for CPUs; its operations one by one work
    flex: Any = torch.nn.attention.flex_attention
    flex._validate_device = lambda *_: None
    plain = backbone_for(case._replace(compiled=False), ranks)
    backbone = backbone_for(case, ranks)
    counters.clear()
    for number in range(12):
        logprobs, gradient = outcome(backbone, number)
        expected, expected_gradient = outcome(plain, number)
        torch.testing.assert_close(logprobs, expected, atol=3e-5, rtol=1e-5)
        assert (gradient - expected_gradient).norm() <= 1e-5 * expected_gradient.norm()
    counted = counters["stats"]["unique_graphs"]
    assert counted == graphs, counted
    # Mixtures alone run between graphs, those of all layers between the same two.
    assert bool(counters["graph_break"]) == (ranks.grid.expert > 1)


@pytest.mark.parametrize(
    ("grid", "how", "graphs"),
    [
        (Grid(context=2), {}, 3),
        (Grid(tensor=2), {}, 3),
        (Grid(tensor=2), {"checkpointing": True}, 3),
        (Grid(expert=2), {"type": "qwen3_moe"}, 4),
    ],
)
def test_layers_that_ranks_share_need_one_graph_or_two_and_two_of_the_head(
    grid: Grid, how: dict[str, Any], graphs: int, tmp_path: Path
) -> None:
    run_ranks(2, compares, tmp_path, Case("none", compiled=True, **how), graphs, grid=grid)
