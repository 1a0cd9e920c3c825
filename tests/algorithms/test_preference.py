"""Preference losses against float64 loops written from their papers, on random ragged pairs.

The loops go answer by answer and token by token, and use nothing of ops/ or algorithms/.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from helpers.layouts import has_corner, slope, split, total, undivided
from postgrad.algorithms.base import Needs
from postgrad.algorithms.registry import algorithm_class
from postgrad.core.errors import UsageError
from postgrad.core.ragged import Ragged
from postgrad.core.records import Experience, Sequences
from postgrad.ops.preferences import divergence_score

KNOBS = [
    ("dpo", {}),
    ("dpo", {"beta": 0.5, "label_smoothing": 0.2, "nll_coef": 0.3}),
    ("ipo", {"nll_coef": 0.3}),
    ("ipo", {"length_normalised": False}),
    ("simpo", {}),
    ("simpo", {"label_smoothing": 0.2}),
    ("simpo", {"beta": 1.5, "gamma": 0.2, "nll_coef": 0.3}),
    ("orpo", {}),
    ("orpo", {"odds_coef": 0.7, "nll_coef": 0.3}),
    ("dpo", {"loss": "hinge", "beta": 0.5}),
    ("dpo", {"loss": "robust", "label_smoothing": 0.2}),
    ("dpo", {"loss": "exo", "label_smoothing": 0.01}),
    ("dpo", {"loss": "discopop", "beta": 0.5, "discopop_tau": 0.7}),
    ("dpo", {"loss": "nca", "beta": 0.5}),
    ("dpo", {"loss": "bco", "beta": 0.5}),
    ("dpo", {"loss": "sppo", "beta": 0.5}),
    ("dpo", {"loss": "apo_zero", "beta": 0.5}),
    ("dpo", {"loss": "apo_down", "beta": 0.5}),
    ("dpo", {"loss": {"sigmoid": 0.8, "bco": 0.2}, "nll_coef": 1.0}),
    ("dpo", {"divergence": "forward_kl"}),
    ("dpo", {"divergence": "js", "beta": 0.5}),
    ("dpo", {"divergence": "alpha", "divergence_alpha": 0.3, "loss": "hinge"}),
    ("dpo", {"length_normalised": True, "beta": 5.0}),
    ("cpo", {}),
    ("cpo", {"beta": 0.5, "label_smoothing": 0.2, "nll_coef": 0.3}),
    ("kto", {}),
    ("kto", {"loss": "apo_zero", "beta": 0.5, "desirable_weight": 2.0}),
    ("kto", {"beta": 0.5, "desirable_weight": 2.0, "undesirable_weight": 0.25}),
]
MASKS = st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=5)


def sequences_of(masks: list[list[bool]], pairs: bool) -> Sequences:
    """Two sequences of each mask where `pairs`, the second longer; a prompt of one token."""
    rows = [[False, *mask, *extra] for mask in masks for extra in ([], [True, False])[: 1 + pairs]]
    mask = Ragged.of(rows, np.bool_)
    tokens = mask.like(np.arange(len(mask.values), dtype=np.int32))
    return Sequences(tokens, mask, np.repeat(np.arange(len(masks)), 1 + pairs))


def prepare(
    name: str, knobs: dict[str, Any], masks: list[list[bool]], seed: int, spread: float
) -> Any:
    """An algorithm, an experience of random numbers, logprobs [N], mismatched [S], labels [S]."""
    algorithm: Any = algorithm_class(name)(**knobs)
    sequences = sequences_of(masks, name != "kto")
    rng = np.random.default_rng(seed)
    n, s = len(sequences.tokens.values), len(sequences)
    logprobs = -rng.exponential(1.0, n) - 0.01
    ref = sequences.tokens.like((logprobs + rng.normal(0, spread, n)).astype(np.float32))
    labels = rng.random(s) < 0.5 if name == "kto" else np.arange(s) % 2 == 0
    mismatched = rng.normal(0.2, 1.0, s) if name == "kto" else None
    needs = algorithm.needs().reference
    experience = algorithm.experience(sequences, labels, ref if needs else None, mismatched)
    return algorithm, experience, logprobs, mismatched, labels


def answer(experience: Experience, i: int, logprobs: np.ndarray) -> tuple[float, float, int]:
    """Sum of logprobs, sum of logp - logp_ref, tokens of answer i."""
    ref = experience.columns.get("ref_logprobs")
    start = int(experience.sequences.tokens.offsets[i])
    summed, ratio, n = 0.0, 0.0, 0
    for t, bears_loss in enumerate(experience.sequences.loss_mask.row(i)):
        if bears_loss:
            summed += float(logprobs[start + t])
            ratio += float(logprobs[start + t]) - (float(ref.row(i)[t]) if ref else 0.0)
            n += 1
    return summed, ratio, n


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def of_rewards(kind: str, k: Any, c: float, r: float) -> float:
    """DPO's losses of the rewards of a chosen and a rejected answer, as the papers write them."""
    x, e = c - r, k.label_smoothing
    clean, flipped = -log_sigmoid(x), -log_sigmoid(-x)
    policy, labels = (log_sigmoid(x), log_sigmoid(-x)), (1 - e, e)
    share = sigmoid(x / k.discopop_tau)
    good, bad = c / k.beta, r / k.beta  # log-ratios
    return {
        "sigmoid": lambda: (1 - e) * clean + e * flipped,
        "hinge": lambda: max(0.0, 1 - x),
        "robust": lambda: ((1 - e) * clean - e * flipped) / (1 - 2 * e),
        "exo": lambda: math.fsum(
            math.exp(p) * (p - math.log(q)) for p, q in zip(policy, labels, strict=True)
        ),
        "discopop": lambda: (1 - share) * clean + share * math.exp(min(20.0, -x)),
        "nca": lambda: -log_sigmoid(c) - 0.5 * (log_sigmoid(-c) + log_sigmoid(-r)),
        "bco": lambda: -log_sigmoid(c) - log_sigmoid(-r),
        "sppo": lambda: (good - 0.5 / k.beta) ** 2 + (bad + 0.5 / k.beta) ** 2,
        "apo_zero": lambda: 1 - sigmoid(c) + sigmoid(r),
        "apo_down": lambda: sigmoid(c) + 1 - sigmoid(c - r),
    }[kind]()


def of_divergence(k: Any, log_ratio: float) -> float:
    """f'(u), with constants left out that cancel in a difference."""
    u = math.exp(max(-20.0, log_ratio))
    return {
        "reverse_kl": lambda: math.log(u) + 1,
        "forward_kl": lambda: -1 / u,
        "js": lambda: math.log(2 * u / (1 + u)),
        "alpha": lambda: (1 - u**-k.divergence_alpha) / k.divergence_alpha,
    }[k.divergence]()


def of_pair(name: str, k: Any, chosen: Any, rejected: Any) -> float:
    """As the papers write them."""
    (pc, hc, nc), (pr, hr, nr) = chosen, rejected
    if name == "dpo":
        if k.length_normalised:
            hc, hr = hc / nc, hr / nr
        if k.divergence != "reverse_kl":
            hc, hr = of_divergence(k, hc), of_divergence(k, hr)
        weights = k.loss if isinstance(k.loss, dict) else {k.loss: 1.0}
        mixed_loss = math.fsum(
            weight * of_rewards(kind, k, k.beta * hc, k.beta * hr)
            for kind, weight in weights.items()
        )
    elif name == "cpo":
        x, e = k.beta * (pc - pr), k.label_smoothing
        mixed_loss = -(1 - e) * math.log(sigmoid(x)) - e * math.log(sigmoid(-x))
    elif name == "ipo":
        h = hc / nc - hr / nr if k.length_normalised else hc - hr
        mixed_loss = (h - 1 / (2 * k.beta)) ** 2
    elif name == "simpo":
        x, e = k.beta / nc * pc - k.beta / nr * pr - k.gamma, k.label_smoothing
        mixed_loss = -(1 - e) * math.log(sigmoid(x)) - e * math.log(sigmoid(-x))
    else:
        odds = [math.exp(p / n) / (1 - math.exp(p / n)) for p, n in ((pc, nc), (pr, nr))]
        mixed_loss = -k.odds_coef * math.log(sigmoid(math.log(odds[0] / odds[1])))
    return mixed_loss + k.nll_coef * -pc / nc


def expected(
    name: str, k: Any, experience: Experience, logprobs: np.ndarray, mismatched: Any, labels: Any
) -> float:
    """The loss of the whole update."""
    every = [answer(experience, i, logprobs) for i in range(len(labels))]
    if name != "kto":
        losses = [
            of_pair(name, k, every[i], every[i + 1])
            for i in range(0, len(every), 2)
            if every[i][2] and every[i + 1][2]
        ]
    else:
        z = max(0.0, math.fsum(mismatched) / len(mismatched)) if k.loss == "kto" else 0.0
        losses = [
            k.desirable_weight * (1 - sigmoid(k.beta * (h - z)))
            if good
            else k.undesirable_weight * (1 - sigmoid(k.beta * (z - h)))
            for (_, h, n), good in zip(every, labels, strict=True)
            if n
        ]
    return math.fsum(losses) / max(1, len(losses))


@pytest.mark.parametrize(("name", "knobs"), KNOBS)
@settings(max_examples=12, deadline=None)
@given(masks=MASKS, seed=st.integers(0, 10**6), spread=st.sampled_from([0.0, 0.1, 3.0]))
def test_loss_and_gradient_are_the_paper_s_however_the_update_is_split(
    name: str, knobs: dict[str, Any], masks: list[list[bool]], seed: int, spread: float
) -> None:
    algorithm, experience, logprobs, mismatched, labels = prepare(name, knobs, masks, seed, spread)

    def wanted(at: np.ndarray) -> float:
        return expected(name, algorithm, experience, at, mismatched, labels)

    loss, gradient, metrics = total(algorithm, experience, undivided(experience), logprobs)
    assert loss == pytest.approx(wanted(logprobs), rel=1e-6, abs=1e-9)  # weights are float32
    step = 1e-5
    rounding = np.finfo(np.float64).eps * abs(loss) / step  # of the differences of two losses
    if knobs.get("loss") == "hinge":
        assume(not has_corner(wanted, logprobs, step, max(1e-8, rounding)))
    slopes = slope(wanted, logprobs, step)
    np.testing.assert_allclose(gradient, slopes, rtol=1e-5, atol=max(1e-7, rounding))
    parts = split(experience, seed, of=1 if name == "kto" else 2)
    again, same_gradient, same_metrics = total(algorithm, experience, parts, logprobs)
    assert again == pytest.approx(loss, rel=1e-12, abs=1e-15)
    np.testing.assert_allclose(same_gradient, gradient, rtol=1e-12, atol=1e-15)
    assert same_metrics == pytest.approx(metrics, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(("name", "knobs"), KNOBS)
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_extreme_ratios_leave_loss_and_gradient_finite(
    name: str, knobs: dict[str, Any], sign: float
) -> None:
    algorithm, experience, logprobs, _, labels = prepare(name, knobs, [[True] * 3] * 2, 0, 0.0)
    better = np.repeat(np.where(labels, sign, -sign), experience.sequences.tokens.lengths)
    logprobs = np.where(better > 0, -1e-12, -1e4)  # certain, or as good as impossible
    loss, gradient, metrics = total(algorithm, experience, undivided(experience), logprobs)
    assert math.isfinite(loss)
    assert np.isfinite(gradient).all()
    assert all(math.isfinite(value) for value in metrics.values())


def test_a_policy_that_is_its_reference_pays_log_two_and_is_pushed_apart() -> None:
    algorithm, experience, logprobs, _, _ = prepare("dpo", {}, [[True, True]], 0, 0.0)
    experience.columns["ref_logprobs"].values[:] = logprobs
    logprobs = experience.columns["ref_logprobs"].values.astype(np.float64)
    loss, gradient, metrics = total(algorithm, experience, undivided(experience), logprobs)
    assert loss == pytest.approx(math.log(2))
    assert gradient.tolist() == pytest.approx([0, -0.05, -0.05, 0, 0.05, 0.05, 0.05, 0])
    assert metrics["policy/reward_margin"] == 0
    assert metrics["policy/kl"] == 0


def test_metrics_are_means_over_pairs_and_tokens_worked_by_hand() -> None:
    algorithm: Any = algorithm_class("dpo")(beta=0.5)
    mask = Ragged.of([[0, 1], [0, 1, 1], [0, 1], [0, 1]], np.bool_)
    sequences = Sequences(mask.like(np.zeros(9, np.int32)), mask, np.array([0, 0, 1, 1]))
    ref = mask.like(np.array([0, -1, 0, -1, -1, 0, -1, 0, -1], np.float32))
    experience = algorithm.experience(sequences, np.array([1, 0, 1, 0], np.bool_), ref, None)
    logprobs = np.array([0, -0.5, 0, -2, -2, 0, -3, 0, -1.0])
    _, _, metrics = total(algorithm, experience, undivided(experience), logprobs)
    ratios = [0.5, -1, -1, -2, 0]  # of the tokens
    assert algorithm.report(metrics) == pytest.approx(
        {
            "policy/reward_chosen": (0.25 - 1.0) / 2,
            "policy/reward_rejected": (-1.0 + 0) / 2,
            "policy/reward_margin": (1.25 - 1.0) / 2,
            "policy/accuracy": 0.5,
            "policy/logprob_chosen": -3.5 / 2,
            "policy/logprob_rejected": -5.0 / 2,
            "policy/nll": 3.5 / 2,
            "policy/kl": math.fsum(math.exp(-d) - 1 + d for d in ratios) / 5,
            "policy/bounded_exponents": 0,
        },
        rel=1e-6,
    )


def kto_metrics(labels: list[bool], *, ratio: float = 0.25) -> dict[str, float]:
    """Of answers of one token each, with log-ratios of `ratio`, 2 ratio, ..."""
    algorithm: Any = algorithm_class("kto")(beta=0.5)
    mask = Ragged.of([[0, 1]] * len(labels), np.bool_)
    sequences = Sequences(
        mask.like(np.zeros(len(mask.values), np.int32)), mask, np.arange(len(mask))
    )
    ref = mask.like(np.full(len(mask.values), -1.0, np.float32))
    mismatched = np.array([0.5, -0.25, 0.5])
    experience = algorithm.experience(sequences, np.array(labels), ref, mismatched)
    logprobs = np.repeat(-1.0 + ratio * np.arange(1, 1 + len(labels)), 2)
    _, _, metrics = total(algorithm, experience, [[0], [1, 2]], logprobs)
    return algorithm.report(metrics)


def test_kto_s_metrics_are_means_over_the_answers_of_each_label() -> None:
    metrics = kto_metrics([True, False, True])
    assert metrics["policy/z"] == pytest.approx(0.25)
    assert metrics["policy/reward_desirable"] == pytest.approx(0.5 * (0.25 + 0.75) / 2)
    assert metrics["policy/reward_undesirable"] == pytest.approx(0.5 * 0.5)
    assert metrics["policy/reward_margin"] == pytest.approx(0.0)
    assert metrics["policy/logprob_undesirable"] == pytest.approx(-0.5)
    assert metrics["policy/desirable"] == pytest.approx(2 / 3)


def test_the_rewards_of_a_label_that_no_answer_has_are_left_out_not_zero() -> None:
    metrics = kto_metrics([True, True, True])
    assert metrics["policy/reward_desirable"] == pytest.approx(0.25)
    assert not {"policy/reward_undesirable", "policy/reward_margin"} & metrics.keys()
    assert metrics["policy/undesirable"] == 0


def test_the_reference_point_is_never_below_zero() -> None:
    algorithm: Any = algorithm_class("kto")()
    sequences = sequences_of([[True]], pairs=False)
    ref = sequences.tokens.like(np.zeros(2, np.float32))
    for mismatched, z in ((-3.0, 0.0), (3.0, 3.0)):
        experience = algorithm.experience(sequences, np.array([True]), ref, np.array([mismatched]))
        assert experience.columns["z"].values.tolist() == [z, z]


def test_what_each_loss_needs() -> None:
    needs = {name: algorithm_class(name)().needs() for name, _ in KNOBS}
    pair = Needs(reference=True)
    assert needs == {
        "dpo": pair, "ipo": pair, "simpo": Needs(), "orpo": Needs(), "cpo": Needs(),
        "kto": Needs(reference=True, mismatched=True),
    }  # fmt: skip
    kto: Any = algorithm_class("kto")
    assert kto(loss="apo_zero").needs() == pair
    levels = {name: algorithm_class(name).level for name in needs}
    assert levels == {n: "sequence" if n == "kto" else "pair" for n in needs}


def test_experiences_that_are_no_pairs_are_refused() -> None:
    dpo: Any = algorithm_class("dpo")()
    sequences = sequences_of([[True], [True]], pairs=True)
    ref = sequences.tokens.like(np.zeros(len(sequences.tokens.values), np.float32))
    order = np.array([True, False] * 2)
    with pytest.raises(ValueError, match="preferred answer of a pair comes first"):
        dpo.experience(sequences, ~order, ref, None)
    with pytest.raises(ValueError, match="needs the reference's logprobs"):
        dpo.experience(sequences, order, None, None)
    with pytest.raises(ValueError, match="not over these sequences"):
        dpo.experience(sequences, order, ref.take([0, 1, 2]), None)
    with pytest.raises(ValueError, match="not finite"):
        dpo.experience(sequences, order, ref.like(ref.values * np.nan), None)
    apart = Sequences(sequences.tokens, sequences.loss_mask, np.arange(4))
    with pytest.raises(ValueError, match="in one group"):
        dpo.experience(apart, order, ref, None)
    kto: Any = algorithm_class("kto")()
    for mismatched in (None, np.zeros(3), np.full(4, np.nan)):
        with pytest.raises(ValueError, match="finite sum"):
            kto.experience(sequences, order, ref, mismatched)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"loss": "nca", "label_smoothing": 0.1}, "label_smoothing is read by sigmoid, robust"),
        ({"loss": "exo"}, "infinite without label_smoothing"),
        ({"loss": {}}, "give at least one loss"),
        ({"loss": {"sigmoid": 0.0}}, "weight above 0"),
        ({"discopop_tau": 0.1}, 'read by the loss "discopop" alone'),
        ({"divergence": "alpha"}, "set both"),
        ({"divergence_alpha": 0.5}, "set both"),
        ({"divergence": "js", "loss": {"sigmoid": 0.5, "bco": 0.5}}, "difference of two rewards"),
        ({"divergence": "js", "length_normalised": True}, '= "reverse_kl" alone'),
    ],
)
def test_settings_of_dpo_that_nothing_would_read_are_refused(
    knobs: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        algorithm_class("dpo")(**knobs)


def test_a_policy_that_is_its_reference_has_a_reward_of_zero_under_every_divergence() -> None:
    zero = torch.zeros(2, dtype=torch.float64)
    for kind in ("reverse_kl", "forward_kl", "js", "alpha"):
        assert divergence_score(zero, kind, 0.5).tolist() == pytest.approx([0, 0], abs=1e-15)
