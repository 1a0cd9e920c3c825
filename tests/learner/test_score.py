"""Critics and reward models: their numbers against plain transformers in float64, and an update
that no cut, sharing or order changes.
"""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForSequenceClassification

from postgrad.algorithms.bradley_terry import BradleyTerry
from postgrad.algorithms.ppo import PPO
from postgrad.core.ragged import Ragged
from postgrad.core.records import Experience, Sequences
from postgrad.learner import backbone
from postgrad.learner.backbone import Backbone, MicroBatch
from postgrad.learner.score import ScoreLearner
from postgrad.learner.settings import LearnerSettings
from postgrad.learner.update import Update
from postgrad.models.attention import ATTENTION_NAME

VOCABULARY = 41
PAD = VOCABULARY - 1
PAIRS = 6
CPU = torch.device("cpu")


def score_model() -> Any:
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
        num_labels=1,
        pad_token_id=PAD,
    )
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(config).eval()


def make(reads: Any = "at", micro: MicroBatch | None = None) -> ScoreLearner:
    lm, micro = score_model(), micro or MicroBatch(max_tokens=512)
    lm.set_attn_implementation(ATTENTION_NAME)
    name = "reward_model" if reads == "at" else "critic"
    learner = LearnerSettings(lr=1e-2)
    return ScoreLearner(name, Backbone(lm, CPU, micro), reads, learner, 10)


@pytest.fixture(scope="module")
def pairs() -> tuple[list[list[int]], np.ndarray]:
    """Chosen and rejected by turns, each pair with a common opening; margins."""
    rng = np.random.default_rng(1)
    rows: list[list[int]] = []
    for number in range(PAIRS):
        opening = rng.integers(0, PAD, 4 + 3 * number).tolist()
        answers = (rng.integers(0, PAD, rng.integers(1, 9)).tolist() for _ in range(2))
        rows.extend([*opening, *answer] for answer in answers)
    return rows, rng.uniform(0, 1, PAIRS)


def experience_of(
    rows: list[list[int]], margins: np.ndarray, algorithm: BradleyTerry
) -> Experience:
    tokens = Ragged.of(rows, np.int32)
    nothing = tokens.like(np.zeros(len(tokens.values), bool))
    return algorithm.experience(
        Sequences(tokens, nothing, np.repeat(np.arange(len(margins)), 2)), margins
    )


def step_of(learner: Any, update: Update, algorithm: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """The gradient that the optimizer finds, by name, and what the update reports."""
    gradients: dict[str, torch.Tensor] = {}

    def keep(rate: float) -> float:
        for name, parameter in learner.optimizer.master.items():
            gradients[name] = parameter.grad.double()
        return 0.0

    learner.optimizer.step = keep
    return gradients, learner.update(update, algorithm).result()


def assert_close(
    first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], most: float
) -> None:
    assert first.keys() == second.keys()
    flat = [torch.cat([each[name].flatten() for name in first]) for each in (first, second)]
    assert (flat[0] - flat[1]).norm() <= most * flat[1].norm()
    assert flat[1].norm() > 1e-3


def padded_scores(lm: Any, rows: list[list[int]]) -> torch.Tensor:
    """[S] what transformers says in float64 of a right-padded batch."""
    longest = max(map(len, rows))
    ids = torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])
    seen = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    return lm(ids, attention_mask=seen).logits[:, 0]


@pytest.mark.parametrize(
    "knobs", [{}, {"margin": True}, {"loss": "log_exp"}, {"centre_coef": 0.1}], ids=str
)
def test_loss_and_gradient_are_those_of_plain_transformers_in_float64(pairs, knobs):
    rows, margins = pairs
    algorithm = BradleyTerry(**knobs)
    plain = copy.deepcopy(score_model()).double()
    scores = padded_scores(plain, rows)
    chosen, rejected = scores[0::2], scores[1::2]
    margin = torch.from_numpy(margins) if knobs.get("margin") else 0.0
    loss = torch.log1p(torch.exp(-(chosen - rejected - margin))).mean()
    loss = loss + knobs.get("centre_coef", 0.0) * ((chosen + rejected) ** 2).mean()
    loss.backward()
    wanted = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}

    update = Update(experience_of(rows, margins, algorithm), np.arange(2 * PAIRS))
    gradients, result = step_of(make(), update, algorithm)
    assert result.metrics["reward_model/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert_close(gradients, wanted, 1e-5)
    outputs = result.outputs[~np.isnan(result.outputs)]
    np.testing.assert_allclose(outputs, scores.detach().numpy(), atol=1e-5)
    accuracy = (chosen > rejected).double().mean().item()
    assert result.metrics["reward_model/accuracy"] == pytest.approx(accuracy)
    std = scores.detach().numpy().std()
    assert result.metrics["reward_model/reward_std"] == pytest.approx(std, rel=1e-4)


@pytest.fixture(scope="module")
def undivided_gradients(pairs) -> dict[str, torch.Tensor]:
    algorithm = BradleyTerry()
    update = Update(experience_of(*pairs, algorithm), np.arange(2 * PAIRS))
    return step_of(make(), update, algorithm)[0]


@pytest.mark.parametrize(
    "micro", [*(MicroBatch(max_sequences=n) for n in (2, 3, 4)), MicroBatch(max_tokens=64)], ids=str
)
def test_the_update_does_not_depend_on_micro_batches(pairs, undivided_gradients, micro):
    algorithm = BradleyTerry()
    update = Update(experience_of(*pairs, algorithm), np.arange(2 * PAIRS))
    assert_close(step_of(make(micro=micro), update, algorithm)[0], undivided_gradients, 1e-5)


@pytest.mark.parametrize("least", [1, 5, 10_000])
def test_the_update_does_not_depend_on_sharing(pairs, undivided_gradients, least, monkeypatch):
    algorithm = BradleyTerry()
    monkeypatch.setattr(backbone, "min_shared_of", lambda _: least)
    update = Update(experience_of(*pairs, algorithm), np.arange(2 * PAIRS))
    gradients, result = step_of(make(), update, algorithm)
    assert_close(gradients, undivided_gradients, 1e-5)
    full = sum(len(row) for row in pairs[0])
    assert (result.metrics["reward_model/computed_tokens"] < full) == (least < 10_000)


@settings(max_examples=6, deadline=None)
@given(order=st.permutations(range(PAIRS)))
def test_the_update_does_not_depend_on_the_order_of_pairs(pairs, undivided_gradients, order):
    rows, margins = pairs
    moved = [row for pair in order for row in rows[2 * pair : 2 * pair + 2]]
    algorithm = BradleyTerry()
    update = Update(experience_of(moved, margins[list(order)], algorithm), np.arange(2 * PAIRS))
    assert_close(step_of(make(), update, algorithm)[0], undivided_gradients, 1e-5)


def test_a_pair_over_the_budget_is_named_and_not_split(pairs):
    algorithm = BradleyTerry()
    update = Update(experience_of(*pairs, algorithm), np.arange(2 * PAIRS))
    with pytest.raises(ValueError, match="needs"):
        make(micro=MicroBatch(max_tokens=12)).update(update, algorithm)


def test_learning_moves_chosen_above_rejected(pairs):
    algorithm, learner = BradleyTerry(), make()
    update = Update(experience_of(*pairs, algorithm), np.arange(2 * PAIRS))
    first = learner.update(update, algorithm).result().metrics
    for _ in range(20):
        last = learner.update(update, algorithm).result().metrics
    assert last["reward_model/accuracy"] == 1.0
    assert last["reward_model/loss"] < first["reward_model/loss"] / 2


def test_a_critic_reads_the_state_before_a_token_and_a_reward_model_the_token(pairs):
    rows, _ = pairs
    plain = copy.deepcopy(score_model()).double()
    tokens = Ragged.of(rows, np.int32)
    marked = Ragged.of([np.arange(len(row)) >= len(row) - 2 for row in rows], np.bool_)
    sequences = Sequences(tokens, marked, np.repeat(np.arange(PAIRS), 2))
    before = make("before").scores(sequences).result()
    at = make("at").scores(sequences).result()
    for number, row in enumerate(rows):
        with torch.no_grad():
            states = plain.model(torch.tensor([row])).last_hidden_state[0]
            scores = plain.score(states)[:, 0].numpy()
        np.testing.assert_allclose(before.row(number)[-2:], scores[-3:-1], atol=1e-5)
        np.testing.assert_allclose(at.row(number)[-2:], scores[-2:], atol=1e-5)
        assert not before.row(number)[:-2].any()


@pytest.mark.parametrize("micro", [MicroBatch(max_sequences=1), MicroBatch(max_tokens=512)])
def test_the_critics_loss_and_gradient_are_those_of_plain_transformers(pairs, micro):
    rows, _ = pairs
    rng = np.random.default_rng(2)
    tokens = Ragged.of(rows, np.int32)
    mask = Ragged.of([np.arange(len(row)) >= max(1, len(row) - 3) for row in rows], np.bool_)
    total = len(tokens.values)
    returns, values = rng.normal(size=total), rng.normal(size=total) * 0.1
    columns = {"returns": tokens.like(returns), "values": tokens.like(values)}
    sequences = Sequences(tokens, mask, np.repeat(np.arange(PAIRS), 2))
    update = Update(Experience(sequences, columns, np.ones(len(rows), bool)), np.arange(len(rows)))

    plain = copy.deepcopy(score_model()).double()
    loss = torch.zeros((), dtype=torch.float64)
    for number, row in enumerate(rows):
        scores = plain.score(plain.model(torch.tensor([row])).last_hidden_state[0])[:, 0]
        for place in np.flatnonzero(mask.row(number)):
            v, start = scores[place - 1], int(tokens.offsets[number])
            old, target = values[start + place], returns[start + place]
            clipped = old + (v - old).clamp(-0.2, 0.2)
            loss = loss + 0.5 * torch.maximum((v - target) ** 2, (clipped - target) ** 2)
    loss = loss / int(mask.values.sum())
    loss.backward()
    wanted = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}

    gradients, result = step_of(make("before", micro), update, PPO())
    assert result.metrics["critic/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert_close(gradients, wanted, 1e-5)


def test_state_comes_back_under_the_roles_own_name(pairs):
    algorithm, learner = BradleyTerry(), make()
    update = Update(experience_of(*pairs, algorithm), np.arange(2 * PAIRS))
    learner.update(update, algorithm)
    state = learner.tensors()
    assert set(state) == {"reward_model.weights", "reward_model.optimizer"}
    kept = {stem: {n: t.clone() for n, t in tensors.items()} for stem, tensors in state.items()}
    again = make()
    again.load(kept.__getitem__)
    for each in (learner, again):
        each.update(update, algorithm)
    saved, loaded = learner.weights(), again.weights()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)


def test_an_update_of_half_the_pairs_weighs_each_by_its_own_number(pairs):
    """The denominator is the update's pairs, not the experience's."""
    algorithm = BradleyTerry()
    experience = experience_of(*pairs, algorithm)
    half = Update(experience, np.arange(PAIRS))
    rows, margins = pairs
    alone = experience_of(rows[:PAIRS], margins[: PAIRS // 2], algorithm)
    half_gradients, _ = step_of(make(), half, algorithm)
    two, _ = step_of(make(), Update(alone, np.arange(PAIRS)), algorithm)
    assert_close(half_gradients, two, 1e-5)
