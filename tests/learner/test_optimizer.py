import numpy as np
import pytest
import torch

from postgrad.algorithms.grpo import GRPO
from postgrad.core.errors import RunError
from postgrad.learner.optimizer import MasterOptimizer
from postgrad.learner.settings import LearnerSettings
from postgrad.learner.update import Update

ALL = np.arange(9)


def test_a_step_is_adamw_as_published():
    """Loshchilov and Hutter 2019, algorithm 2, in float64, two steps, with clipping."""
    layer = torch.nn.Linear(3, 2)
    settings = LearnerSettings(lr=0.1, weight_decay=0.5, betas=(0.8, 0.9), max_grad_norm=1.0)
    optimizer = MasterOptimizer(layer, settings)
    want = {name: p.detach().double().numpy() for name, p in layer.named_parameters()}
    m = {name: np.zeros_like(w) for name, w in want.items()}
    v = {name: np.zeros_like(w) for name, w in want.items()}
    rng = np.random.default_rng(0)
    for step, rate in ((1, 0.1), (2, 0.05)):
        gradient = {name: rng.normal(size=w.shape) for name, w in want.items()}
        norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
        for name, p in layer.named_parameters():
            p.grad = torch.from_numpy(gradient[name]).float()
        assert optimizer.step(rate) == pytest.approx(norm, rel=1e-6)
        for name in want:
            g = gradient[name] / max(1.0, norm)
            decay = 0.5 if want[name].ndim == 2 else 0.0
            m[name] = 0.8 * m[name] + 0.2 * g
            v[name] = 0.9 * v[name] + 0.1 * g**2
            hat = (m[name] / (1 - 0.8**step)) / (np.sqrt(v[name] / (1 - 0.9**step)) + 1e-8)
            want[name] = want[name] * (1 - rate * decay) - rate * hat
    for name, p in layer.named_parameters():
        np.testing.assert_allclose(p.detach().numpy(), want[name], rtol=2e-5, atol=1e-6)


def test_a_loaded_optimizer_goes_on_with_the_same_bits(make_learner, experience):
    straight = make_learner(weight_decay=0.1)
    for _ in range(4):
        straight.update(Update(experience, ALL), GRPO()).result()

    first = make_learner(weight_decay=0.1)
    for _ in range(2):
        first.update(Update(experience, ALL), GRPO()).result()
    second = make_learner(weight_decay=0.1)
    saved = {name: p.clone() for name, p in first.optimizer.state().items()}
    second.optimizer.load({n: p.clone() for n, p in first.weights().items()}, saved, 2)
    for _ in range(2):
        second.update(Update(experience, ALL), GRPO()).result()
    for name, p in straight.weights().items():
        assert torch.equal(p, second.weights()[name]), name
    for name, p in straight.optimizer.state().items():
        assert torch.equal(p, second.optimizer.state()[name]), name


def test_a_checkpoint_of_another_model_is_refused_by_name(make_learner):
    learner = make_learner()
    weights = dict(learner.weights())
    weights["model.extra.weight"] = weights.pop("model.norm.weight")
    with pytest.raises(RunError, match=r"missing \['model.norm.weight'\].*model.extra.weight"):
        learner.optimizer.load(weights, {}, 0)


def test_missing_moments_are_an_error_not_a_fresh_start(make_learner):
    learner = make_learner()
    with pytest.raises(RunError, match="optimizer state"):
        learner.optimizer.load(learner.weights(), {}, 3)


def test_weights_of_another_shape_are_refused(make_learner):
    learner = make_learner()
    weights = {**learner.weights(), "model.norm.weight": torch.ones(5)}
    with pytest.raises(RunError, match=r"'model.norm.weight'.*\(5,\).*\(32,\)"):
        learner.optimizer.load(weights, {}, 0)
