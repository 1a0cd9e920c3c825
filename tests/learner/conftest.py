"""A small model with its learner, and rollouts to train it on."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from postgrad.core.ragged import Ragged
from postgrad.core.records import Experience, Sequences
from postgrad.learner.backbone import Backbone, MicroBatch
from postgrad.learner.policy import PolicyLearner
from postgrad.learner.settings import LearnerSettings
from postgrad.models.attention import ATTENTION_NAME

VOCABULARY = 37


@pytest.fixture(scope="session")
def experience() -> Experience:
    """Three prompts with three responses each; one group without advantage."""
    rng = np.random.default_rng(0)
    tokens, masks, group, advantages = [], [], [], []
    for number in range(3):
        prompt = rng.integers(0, VOCABULARY, 10 + number)
        for _ in range(3):
            response = rng.integers(0, VOCABULARY, rng.integers(2, 9))
            mask = np.array([False] * len(prompt) + [True] * len(response))
            advantage = 0.0 if number == 1 else rng.normal()
            tokens.append(np.concatenate([prompt, response]))
            masks.append(mask)
            group.append(number)
            advantages.append(mask * np.float32(advantage))
    sequences = Sequences(Ragged.of(tokens, np.int32), Ragged.of(masks, bool), np.array(group))
    return Experience(
        sequences,
        {"advantages": Ragged.of(advantages, np.float32)},
        np.array(group) != 1,
    )


@pytest.fixture
def make_learner() -> Callable[..., PolicyLearner]:
    """Learners on fresh, equal models: the seed is fixed."""

    def make(
        micro: MicroBatch | None = None, dtype: torch.dtype = torch.float32, **settings: object
    ) -> PolicyLearner:
        config = AutoConfig.for_model(
            "qwen3",
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            initializer_range=0.1,
        )
        torch.manual_seed(0)
        lm = AutoModelForCausalLM.from_config(config).to(dtype)
        lm.set_attn_implementation(ATTENTION_NAME)
        backbone = Backbone(lm, torch.device("cpu"), micro or MicroBatch(max_tokens=512))
        return PolicyLearner(backbone, LearnerSettings(**{"lr": 1e-2, **settings}), 10)

    return make
