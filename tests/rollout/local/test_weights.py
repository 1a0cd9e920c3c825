"""Taking over weights."""

import pytest
import torch

from postgrad.core.errors import RunError
from postgrad.rollout.local.weights import copy_weights


def test_every_weight_is_copied_and_converted(model):
    own, other = model("qwen3").to(torch.bfloat16), model("qwen3", seed=1)
    copy_weights(own, other.named_parameters())
    for name, parameter in own.named_parameters():
        torch.testing.assert_close(parameter, other.get_parameter(name).bfloat16())


@pytest.mark.parametrize("dropped", ["lm_head.weight", "model.embed_tokens.weight"])
def test_a_tied_weight_may_come_under_either_name(model, dropped):
    own, other = model("gemma"), model("gemma", seed=1)
    weights = dict(other.named_parameters(remove_duplicate=False))
    assert len(weights) == len(list(other.parameters())) + 1
    del weights[dropped]
    copy_weights(own, weights.items())
    torch.testing.assert_close(own.lm_head.weight, other.lm_head.weight)
    torch.testing.assert_close(own.model.embed_tokens.weight, other.lm_head.weight)


def test_missing_unknown_and_misshapen_weights_are_named(model):
    own = model("qwen3")
    weights = dict(own.named_parameters())
    norm = weights.pop("model.norm.weight")
    with pytest.raises(RunError, match=r"1 did not come, such as model.norm.weight"):
        copy_weights(own, weights.items())
    with pytest.raises(RunError, match=r"has no 'model.norm.wait'"):
        copy_weights(own, [("model.norm.wait", norm)])
    with pytest.raises(RunError, match=r"model.norm.weight is \[3\], the model's is \[32\]"):
        copy_weights(own, [("model.norm.weight", torch.zeros(3))])
