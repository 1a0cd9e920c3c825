import weakref

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from postgrad.algorithms.grpo import GRPO
from postgrad.checkpoint.parts import Reader
from postgrad.core.errors import RunError
from postgrad.learner import eight_bits
from postgrad.learner.optimizer import MasterOptimizer
from postgrad.learner.settings import LearnerSettings
from postgrad.learner.update import Update
from postgrad.models import stored

ALL = np.arange(9)
OPTIMIZERS = ("adamw", "muon")
MOMENTS = [{"optimizer": "adamw"}, {"optimizer": "muon"}, {"optimizer_state": "8bit"}]


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


def copied(tensors):
    return {name: tensor.clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize("settings", MOMENTS, ids=str)
def test_moments_that_are_made_before_the_first_step_are_all_and_change_no_bit(
    make_learner, experience, monkeypatch, settings
):
    """As on a GPU, where the first step would make them among what it frees."""
    monkeypatch.setattr(eight_bits, "SMALLEST", 1024)
    lazy, early = (make_learner(**settings) for _ in range(2))
    assert not lazy.optimizer.has_moments
    early.optimizer._make_moments()
    moments = sum(tensor.nbytes for tensor in early.optimizer.held() if tensor.ndim)
    masters = sum(weight.nbytes for weight in early.weights().values())
    assert moments == early.optimizer.state_bytes() - masters - torch.int64.itemsize
    for learner in (lazy, early):
        learner.update(Update(experience, ALL), GRPO()).result()
    states = [learner.optimizer.state() for learner in (lazy, early)]
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name
    for name, weight in lazy.weights().items():
        assert torch.equal(weight, early.weights()[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_loaded_optimizer_goes_on_with_the_same_bits(make_learner, experience, kind, dtype):
    settings = {"weight_decay": 0.1, "optimizer": kind, "dtype": dtype}
    straight = make_learner(**settings)
    for _ in range(4):
        straight.update(Update(experience, ALL), GRPO()).result()

    first = make_learner(**settings)
    for _ in range(2):
        first.update(Update(experience, ALL), GRPO()).result()
    second = make_learner(**settings)
    second.optimizer.load(copied(first.weights()), copied(first.optimizer.state()))
    assert second.optimizer.updates == 2
    for _ in range(2):
        second.update(Update(experience, ALL), GRPO()).result()
    for name, p in straight.weights().items():
        assert torch.equal(p, second.weights()[name]), name
    for name, p in straight.optimizer.state().items():
        assert torch.equal(p, second.optimizer.state()[name]), name
    for straight_parameter, other in zip(
        straight.backbone.lm.parameters(), second.backbone.lm.parameters(), strict=True
    ):
        assert torch.equal(straight_parameter, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_checkpoint_is_in_memory_one_tensor_at_a_time(
    make_learner, experience, kind, dtype, tmp_path, monkeypatch
):
    """axolotl#219: a resume that holds its state twice runs out of memory where a start did not."""
    first = make_learner(optimizer=kind, dtype=dtype, ema_decay=0.9)
    first.update(Update(experience, ALL), GRPO()).result()
    for stem, tensors in first.tensors().items():
        save_file(
            {name: t.contiguous() for name, t in tensors.items()}, tmp_path / f"{stem}.safetensors"
        )
    from_file, reads, most = stored._from_file, [], 0

    def tracked(*place):
        read = from_file(*place)

        def tracking(box):
            nonlocal most
            most = max(most, sum(ref() is not None for ref in reads))
            numbers = read(box)
            reads.append(weakref.ref(numbers))
            return numbers

        return tracking

    monkeypatch.setattr(stored, "_from_file", tracked)
    second = make_learner(optimizer=kind, dtype=dtype, ema_decay=0.9)
    second.load(Reader(tmp_path, frozenset(path.name for path in tmp_path.iterdir())))
    assert len(reads) > len(first.optimizer.master) > 8
    assert most <= 1
    second.update(Update(experience, ALL), GRPO()).result()
    first.update(Update(experience, ALL), GRPO()).result()
    assert all(torch.equal(w, second.weights()[name]) for name, w in first.weights().items())


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_role_resumes_at_its_own_number_of_updates(make_learner, experience, kind):
    """The schedule goes on from the state alone: roles may have had other numbers of updates."""
    first = make_learner(optimizer=kind, schedule="linear")
    for _ in range(3):
        first.update(Update(experience, ALL), GRPO()).result()
    files = {stem: copied(named) for stem, named in first.tensors().items()}
    assert files["policy.optimizer"]["updates"].dtype == torch.int64
    second = make_learner(optimizer=kind, schedule="linear")
    second.load(files.__getitem__)
    rates = [
        learner.update(Update(experience, ALL), GRPO()).result().metrics["policy/lr"]
        for learner in (first, second)
    ]
    assert rates == pytest.approx([1e-2 * (1 - 3 / 10)] * 2)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_nothing_is_loaded_of_a_run_that_has_not_begun_but_its_weights(make_learner, kind):
    first, second = make_learner(optimizer=kind), make_learner(optimizer=kind)
    assert set(first.optimizer.state()) == {"updates"}
    weights = {name: weight + 1.0 for name, weight in first.weights().items()}
    second.optimizer.load(weights, first.optimizer.state())
    assert second.optimizer.updates == 0
    assert all(torch.equal(weights[name], w) for name, w in second.weights().items())


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_narrow_weights_are_the_rounded_master_weights(make_learner, experience, kind):
    """Steps far below bfloat16's spacing add up in the master."""
    learner = make_learner(optimizer=kind, dtype=torch.bfloat16, lr=1e-5)
    before = copied(learner.weights())
    for _ in range(3):
        learner.update(Update(experience, ALL), GRPO()).result()
    named = dict(learner.backbone.lm.named_parameters())
    for name, master in learner.weights().items():
        assert master.dtype == torch.float32
        assert not torch.equal(master, before[name]), name
        assert torch.equal(named[name], master.to(torch.bfloat16)), name
    moments = learner.optimizer.state()
    assert all(m.dtype == torch.float32 for n, m in moments.items() if n != "updates")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_bytes_are_those_of_the_state(make_learner, experience, kind, dtype):
    for ema_decay in (0.0, 0.9):
        learner = make_learner(optimizer=kind, dtype=dtype, ema_decay=ema_decay)
        estimated = learner.state_bytes()
        learner.update(Update(experience, ALL), GRPO()).result()
        held = [t.nbytes for named in learner.tensors().values() for t in named.values()]
        assert estimated == sum(held) == learner.state_bytes()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_weight_without_gradient_does_not_move(make_learner, kind):
    learner = make_learner(optimizer=kind)
    before = copied(learner.weights())
    alone = "model.layers.0.mlp.up_proj.weight"
    learner.optimizer.master[alone].grad = torch.ones_like(before[alone])
    learner.optimizer.step(0.1)
    for name, weight in learner.weights().items():
        assert torch.equal(weight, before[name]) == (name != alone), name


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_gradient_that_is_not_finite_changes_nothing(make_learner, experience, kind, wrong):
    learner = make_learner(optimizer=kind, weight_decay=0.1)
    learner.update(Update(experience, ALL), GRPO()).result()
    weights, state = copied(learner.weights()), copied(learner.optimizer.state())
    for master in learner.optimizer.master.values():
        master.grad = torch.zeros_like(master)
    learner.optimizer.master["model.norm.weight"].grad[3] = wrong
    with pytest.raises(RunError, match="gradient of update 2 is not finite"):
        learner.optimizer.step(0.1)
    assert all(torch.equal(weights[name], w) for name, w in learner.weights().items())
    assert all(torch.equal(state[name], s) for name, s in learner.optimizer.state().items())


def test_a_checkpoint_of_another_model_is_refused_by_name(make_learner):
    learner = make_learner()
    weights = dict(learner.weights())
    weights["model.extra.weight"] = weights.pop("model.norm.weight")
    with pytest.raises(
        RunError, match=r"missing \['model.norm.weight'\].*model.extra.weight.*; go"
    ):
        learner.optimizer.load(weights, learner.optimizer.state())


def test_a_checkpoint_of_another_optimizer_is_refused(make_learner, experience):
    first, second = make_learner(optimizer="muon"), make_learner()
    first.update(Update(experience, ALL), GRPO()).result()
    with pytest.raises(RunError, match=r"another model or optimizer: missing.*exp_avg"):
        second.optimizer.load(first.weights(), first.optimizer.state())


def test_missing_moments_are_an_error_not_a_fresh_start(make_learner):
    learner = make_learner()
    with pytest.raises(RunError, match="optimizer state are of another model or optimizer"):
        learner.optimizer.load(learner.weights(), {"updates": torch.tensor(3)})


@pytest.mark.parametrize(
    "state",
    [{}, *({"updates": torch.tensor(bad)} for bad in ([3, 3], 3.0, -1))],
)
def test_a_state_without_a_number_of_updates_is_refused(make_learner, state):
    learner = make_learner()
    with pytest.raises(RunError, match="no number of 'updates'"):
        learner.optimizer.load(learner.weights(), state)


def test_weights_and_moments_of_another_shape_are_refused(make_learner, experience):
    learner = make_learner()
    weights = {**learner.weights(), "model.norm.weight": torch.ones(5)}
    with pytest.raises(RunError, match=r"'model.norm.weight'.*weights.*\(5,\).*\(32,\); go on"):
        learner.optimizer.load(weights, learner.optimizer.state())
    learner.update(Update(experience, ALL), GRPO()).result()
    state = {**learner.optimizer.state(), "model.norm.weight.exp_avg": torch.ones(1)}
    with pytest.raises(RunError, match=r"'model.norm.weight.exp_avg'.*state.*\(1,\).*\(32,\)"):
        learner.optimizer.load(learner.weights(), state)
