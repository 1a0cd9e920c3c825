"""Compiled layers with experts: their mixtures run between two graphs, watched and replayed."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from helpers.rank_cases import Case, backbone_of, distance, experience, model, train
from postgrad.models.routers import mixtures_of, replayable
from postgrad.parallel.ranks import Ranks

pytestmark = pytest.mark.slow
ADAPTED = {"lora": True, "targets": "q_proj+experts+router"}


@pytest.mark.parametrize("how", [{}, {"checkpointing": True}, ADAPTED])
def test_updates_with_both_losses_of_routers_are_those_of_plain_layers(
    how: dict[str, bool | str], tmp_path: Path
) -> None:
    """Weights, their average, outputs, and metrics, those of routers among them."""
    plain = Case("none", type="qwen3_moe", **how)  # type: ignore[arg-type]
    compiled = plain._replace(compiled=True)
    train(Ranks(), tmp_path, [plain, compiled])
    plain_tensors, other = (
        load_file(tmp_path / f"{each.name}.safetensors") for each in (plain, compiled)
    )
    assert [name for name in plain_tensors if name.startswith("metric.0.policy/router")]
    for name in ("base_model." if how is ADAPTED else "model.", "ema.", "output."):
        assert distance(name, plain_tensors, other) < 1e-4
    assert distance("metric.", plain_tensors, other) < 1e-3


def test_choices_are_replayed_in_compiled_layers() -> None:
    case = Case("none", type="qwen3_moe", compiled=True)
    sequences = experience(case, 0).sequences
    outcomes: list[torch.Tensor] = []
    for each in (case._replace(compiled=False), case):
        backbone = backbone_of(each, model(each))
        routers = backbone.routers = replayable(backbone.lm)
        (layout,) = backbone.micro_batches(sequences, np.arange(4))
        everywhere = np.random.default_rng(0).permuted(
            np.tile(np.arange(4), (layout.n_tokens, 2, 1)), axis=-1
        )
        experts = torch.from_numpy(everywhere[..., :2].copy())
        with routers.replaying(experts), routers.recording() as recorded:
            logprobs, _ = backbone.logprobs(layout, 1.0)
        assert all(torch.equal(routed.chosen, experts[:, routed.layer]) for routed in recorded)
        assert len(recorded) == len(mixtures_of(backbone.lm)) == 2
        outcomes.append(logprobs.detach())
    torch.testing.assert_close(outcomes[1], outcomes[0], atol=3e-5, rtol=1e-5)


def test_a_dense_model_has_no_mixtures() -> None:
    assert mixtures_of(model(Case("none"))) == []
