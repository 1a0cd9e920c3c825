"""benchmarks/peer_objectives on pairs, labels and rows of SFT, against NumPy."""

import numpy as np
import pytest

from benchmarks.peer_objectives.comparing import Case, Lost, compared
from benchmarks.peer_objectives.ours_texts import (
    preference_outcome,
    reward_outcome,
    sft_outcome,
)
from benchmarks.peer_objectives.texts import Texts, alike, written

DPO = ("dpo", "--model_name_or_path", "m", "--dataset_name", "d")


def logprobs(logits: np.ndarray, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Of an answer's tokens, each from the logits at the token before it."""
    places = np.flatnonzero(mask)
    rows = logits[places - 1]
    logprobs_by_token = rows - np.log(np.exp(rows).sum(-1, keepdims=True))
    return logprobs_by_token[np.arange(len(places)), tokens[places]]


def sums(texts: Texts) -> np.ndarray:
    """[S] log(policy / reference) of each answer."""
    return np.array([
        (logprobs(policy, tokens, mask) - logprobs(ref, tokens, mask)).sum()
        for policy, ref, tokens, mask in zip(
            texts.logits, texts.ref, texts.tokens, texts.mask, strict=True)
    ])  # fmt: skip


@pytest.mark.parametrize("seed", [0, 1])
def test_a_preference_loss_is_that_of_the_logits(seed: int) -> None:
    texts = written(seed)
    ratio = sums(texts)
    x = 0.3 * (ratio[0::2] - ratio[1::2])
    outcome = preference_outcome({"type": "dpo", "beta": 0.3}, texts)
    assert outcome.loss == pytest.approx(np.log1p(np.exp(-x)).mean(), rel=1e-6)


def test_the_gradient_is_that_of_the_logits() -> None:
    texts, table = written(2), {"type": "simpo", "beta": 2.0, "gamma": 0.5}
    gradient = preference_outcome(table, texts).gradients["logits"][3]
    place, step = int(np.argmax(np.abs(gradient))), 1e-5
    around = []
    for by in (step, -step):
        moved = written(2)
        moved.logits[3].flat[place] += by
        around.append(preference_outcome(table, moved).loss)
    assert gradient[place] == pytest.approx((around[0] - around[1]) / (2 * step), rel=1e-4)


def test_sft_is_a_mean_over_tokens() -> None:
    texts = written(3)
    rows = zip(texts.logits, texts.tokens, texts.mask, strict=True)
    every = np.concatenate([logprobs(*row) for row in rows])
    assert sft_outcome({"type": "sft"}, texts).loss == pytest.approx(-every.mean(), rel=1e-6)


def test_a_reward_model_s_loss_is_that_of_differences() -> None:
    texts = written(4)
    apart = texts.scores[0::2] - texts.scores[1::2] - texts.margins
    outcome = reward_outcome({"type": "bradley_terry", "margin": True}, texts)
    assert outcome.loss == pytest.approx(np.log1p(np.exp(-apart)).mean(), rel=1e-6)


def test_texts_of_equal_lengths_have_them() -> None:
    assert {(len(mask), mask.sum()) for mask in alike(0).mask} == {(6, 5)}


def test_a_lost_objective_is_named_by_its_recipe_or_refused() -> None:
    named = Lost("part of the length", [*DPO, "--ld_alpha", "0.5"], "ld_alpha")
    refused = Lost("bco", ["bco", *DPO[1:]], "not here")
    for case in (named, refused):
        row = compared("trl", case, draws=1)
        assert (row.verdict, row.gradient) == ("lost", None)
        assert row.to_json().keys() == {"objective", "settings", "verdict", "why"}


def test_an_objective_that_is_lost_without_a_word_differs() -> None:
    silent = Lost("beta", [*DPO, "--beta", "0.5"], "beta")
    otherwise = Lost("gkd", ["gkd", *DPO[1:]], "a word that the message does not have")
    for case in (silent, otherwise):
        assert compared("trl", case, draws=1).verdict == "differs"


def test_a_recipe_without_an_algorithm_is_an_error() -> None:
    words = ["trl", "cpo", "--model_name_or_path", "m", "--dataset_name", "d", "--beta", "-1"]
    case = Case("cpo", words[1:], lambda texts: preference_outcome({"type": "cpo"}, texts), written,
                ours=preference_outcome)  # fmt: skip
    with pytest.raises(RuntimeError, match=r"the recipe is none: .*beta"):
        compared("trl", case, draws=1)
