"""Which models' experts ranks can share, and what is said of the others."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from helpers.model_types import config_of
from helpers.rank_cases import Case, backbone_of, model
from postgrad.core.errors import UsageError
from postgrad.learner.experts import cut_experts, require_experts, require_mixture
from postgrad.learner.settings import LearnerSettings
from postgrad.learner.tensor import grid_of
from postgrad.parallel.ranks import Grid, Ranks
from postgrad.parallel.sharding import is_of_experts

SECOND: Any = SimpleNamespace(  # of two ranks that share experts
    grid=Grid(expert=2), expert_rank=1, groups=SimpleNamespace(expert=None)
)


def on_meta(kind: str) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_of(kind, 64))


def test_settings_arrange_ranks_with_groups_of_experts() -> None:
    learner = LearnerSettings(ranks=8, context_parallel=2, shard_groups=2, expert_parallel=4)
    assert grid_of(learner) == Grid(context=2, tensor=1, groups=2, expert=4)
    assert grid_of(learner.on_ranks(2)) == Grid()


def test_only_numbers_that_divide_the_experts_share_them() -> None:
    config = AutoConfig.for_model("qwen3_moe", num_experts=12)
    for size in (1, 2, 3, 4, 6, 12):
        require_experts(config, size)
    message = (
        "5: 12 experts of this qwen3_moe model cannot .* 5 equal parts; what works: 1, 2, 3, 4"
    )
    with pytest.raises(UsageError, match=f"learner.expert_parallel = {message}"):
        require_experts(config, 5)
    require_experts(AutoConfig.for_model("llama"), 5)  # a dense critic beside such a policy


def test_a_policy_without_experts_is_refused() -> None:
    require_mixture(AutoConfig.for_model("llama"), 1)
    require_mixture(AutoConfig.for_model("mixtral"), 4)
    with pytest.raises(UsageError, match="expert_parallel = 2: this llama model has no experts"):
        require_mixture(AutoConfig.for_model("llama"), 2)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_a_rank_keeps_its_experts_and_all_of_routers_and_shared_experts(kind: str) -> None:
    full_model, lm = on_meta(kind), on_meta(kind)
    before, modules = dict(full_model.named_parameters()), cut_experts(lm, SECOND)
    assert {module.num_experts for module in modules} == {2}
    for name, parameter in lm.named_parameters():
        rows = len(before[name]) // 2 if is_of_experts(name) else len(before[name])
        assert parameter.shape == (rows, *before[name].shape[1:]), name


def test_the_second_of_two_ranks_has_the_later_experts() -> None:
    lm = model(Case("none", type="qwen3_moe"))
    all_experts = lm.model.layers[1].mlp.experts.down_proj.detach().clone()
    cut_experts(lm, SECOND)
    assert torch.equal(lm.model.layers[1].mlp.experts.down_proj, all_experts[2:])


def test_ranks_that_share_no_experts_leave_a_model_as_it_is() -> None:
    lm = model(Case("none", type="qwen3_moe"))
    assert cut_experts(lm, Ranks()) == []
    backbone_of(Case("none"), lm).divide(Ranks(), "none")
    assert "forward" not in vars(lm.model.layers[0].mlp.experts)


def test_experts_of_another_interface_are_refused() -> None:
    message = "this jetmoe model has no experts that ranks can share: .* a way of its own"
    with pytest.raises(UsageError, match=f"learner.expert_parallel = 2: {message}"):
        cut_experts(on_meta("jetmoe"), SECOND)


def test_a_weight_that_all_experts_have_in_common_is_refused_by_name() -> None:
    lm = on_meta("qwen3_moe")
    lm.model.layers[0].mlp.experts.scale = nn.Parameter(torch.empty(3, device="meta"))
    message = (
        r"layers\.0\.mlp\.experts\.scale of this qwen3_moe model is not divided by its 4 experts"
    )
    with pytest.raises(UsageError, match=message):
        cut_experts(lm, SECOND)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.3.mlp.experts.gate_up_proj", True),
        ("model.language_model.layers.0.mlp.experts.down_proj", True),
        ("layers.0.feed_forward.experts.down_proj_bias", True),
        ("model.layers.3.mlp.shared_experts.gate_proj.weight", False),
        ("model.layers.3.mlp.experts.0.gate_proj.weight", False),
        ("model.layers.3.mlp.gate.weight", False),
        ("model.layers.3.mlp.experts.gate_up_proj.exp_avg", False),
    ],
)
def test_weights_of_all_experts_are_known_by_name(name: str, expected: bool) -> None:
    assert is_of_experts(name) is expected
