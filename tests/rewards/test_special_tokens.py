"""What verifiers read of a sample whose tokens are not all text."""

import numpy as np
import pytest

from postgrad.core.errors import UsageError
from postgrad.core.records import Rollout, Turn
from postgrad.rewards.scorer import Scorer
from postgrad.rewards.settings import RewardSettings, ScoringSettings

WORDS = ["<think>", "</think>", "<|end|>", "hm", "4", "2", "ask", "told"]


def decode(ids):
    return "".join(WORDS[i] for i in ids)


def turn(author, *words):
    ids = np.array([WORDS.index(word) for word in words], np.int32)
    return Turn(author, ids, np.zeros(len(ids), np.float32))


def single(sample, *words):
    plain = "".join(word for word in words if not word.startswith("<"))
    turns = (turn("policy", *words),)
    return Rollout(0, sample, turns, "stop", ((0, len(words)),), plain)


def several(sample):
    turns = (
        turn("policy", "<think>", "hm", "</think>", "ask", "<|end|>"),
        turn("environment", "told"),
        turn("policy", "<think>", "4", "</think>", "2", "<|end|>"),
    )
    return Rollout(0, sample, turns, "stop", ((0, 10),), "hmasktold42", answer="42")


@pytest.fixture
def read(own_modules, make_prompt):
    """read(name=reward settings, ...): by name, what each verifier reads of each of the samples."""

    def run(**rewards):
        settings = [
            RewardSettings(**{"type": "grouping:text", "name": name, **more})
            for name, more in rewards.items()
        ]
        rollouts = [single(0, "<think>", "hm", "</think>", "4", "2", "<|end|>"), several(1)]
        with Scorer(settings, ScoringSettings(workers=1), decode=decode) as scorer:
            (group,) = scorer.score([(make_prompt(), [*rollouts, single(2, "4", "2")])])
        assert group.failures == ()
        return {name: list(details) for name, details in group.details.items()}

    return run


def test_special_tokens_are_in_the_text_as_sampled_where_a_component_asks_for_them(read):
    sampled_texts = "<think>hm</think>42<|end|>", "<think>4</think>2<|end|>", "42"
    every = read(plain={}, whole={"special_tokens": True})
    assert every == {"plain": ["hm42", "42", "42"], "whole": [*sampled_texts]}


def test_what_comes_after_a_special_token_is_read_alone(read):
    behind = {"special_tokens": True, "after": "</think>"}
    every = read(behind=behind, lost={"after": "</think>"})
    assert every == {"behind": ["42<|end|>", "2<|end|>", ""], "lost": ["", "", ""]}


def test_a_verifier_of_groups_reads_them_too(read):
    every = read(group={"type": "grouping:texts", "special_tokens": True})
    assert every["group"][1:] == ["<think>4</think>2<|end|>", "42"]


def test_a_scorer_without_a_tokenizer_refuses_them():
    reward = RewardSettings(type="gsm8k", special_tokens=True)
    with pytest.raises(UsageError, match="'gsm8k' has special_tokens = true, and this scorer has"):
        Scorer([reward], ScoringSettings())
