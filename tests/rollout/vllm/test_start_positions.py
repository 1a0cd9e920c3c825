"""How vLLM's engines are started."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from postgrad.core.errors import UsageError
from postgrad.rollout.vllm.model import Model
from postgrad.rollout.vllm.start import more_positions


def long_model(max_len: int, **settings: Any) -> Model:
    skeleton: Any = SimpleNamespace(config=Qwen3Config(max_position_embeddings=64, **settings))
    return Model(skeleton, None, (1,), torch.float32, max_len)


def test_positions_go_on_behind_those_that_a_model_was_trained_on() -> None:
    assert more_positions("m", long_model(64)) == {}
    assert more_positions("m", long_model(65)) == {"max_position_embeddings": 65}
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    longer = more_positions("m", long_model(65, rope_parameters=linear))
    assert longer == {"max_position_embeddings": 65}


def test_positions_of_yarn_end_with_its_factor() -> None:
    yarn = {
        "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4,
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    model = long_model(128, rope_parameters=yarn)
    assert more_positions("m", model) == {"max_position_embeddings": 128}
    with pytest.raises(UsageError, match=r"vLLM has 128 positions for m, and .* 129 tokens"):
        more_positions("m", replace(model, max_len=129))
