import copy
import dataclasses

import numpy as np
import pytest
import torch

from helpers.gradients import gradient_of
from postgrad.algorithms.grpo import GRPO
from postgrad.algorithms.sft import SFT
from postgrad.core import seeds
from postgrad.core.errors import RunError
from postgrad.core.process import done
from postgrad.core.ragged import Ragged
from postgrad.core.records import Experience
from postgrad.learner.backbone import MicroBatch
from postgrad.learner.update import Update
from postgrad.models.embedding_noise import EmbeddingNoise
from postgrad.models.row_hashes import row_bits

ALL = np.arange(9)


def alone(experience: Experience) -> Experience:
    """The same sequences, none of which may share its prompt."""
    sequences = dataclasses.replace(experience.sequences, group=np.arange(len(experience)))
    return dataclasses.replace(experience, sequences=sequences)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("micro", [MicroBatch(max_sequences=n) for n in (1, 2, 4)])
def test_the_gradient_does_not_depend_on_the_cut(make_learner, experience, micro, aggregation):
    algorithm = GRPO(aggregation=aggregation, constant_length=16)
    undivided = gradient_of(make_learner(), Update(experience, ALL), algorithm)
    cut = gradient_of(make_learner(micro), Update(experience, ALL), algorithm)
    assert (cut - undivided).norm() <= 1e-5 * undivided.norm()


@pytest.mark.parametrize("micro", [MicroBatch(max_sequences=n) for n in (1, 2)])
def test_what_is_rejected_does_not_depend_on_the_cut(make_learner, experience, micro):
    """Some responses are rejected whole, of others some tokens."""
    mask = experience.sequences.loss_mask
    away = np.sin(np.arange(len(mask.values))) * (0.1 + 0.1 * mask.rows) * mask.values
    old = np.where(mask.values, np.float32(-3.6), np.float32(0.0))
    more = {"old_logprobs": old, "sampled_logprobs": (old + away).astype(np.float32)}
    columns = {**experience.columns, **{name: mask.like(row) for name, row in more.items()}}
    apart = dataclasses.replace(experience, columns=columns)
    algorithm = GRPO(correction="tis", rejection={"token": (0.8, 1.3), "mean_k3": 0.02})
    undivided, cut = (
        gradient_of(learner, Update(apart, ALL), algorithm)
        for learner in (make_learner(), make_learner(micro))
    )
    assert (cut - undivided).norm() <= 1e-5 * undivided.norm()
    unrejected = gradient_of(make_learner(), Update(apart, ALL), GRPO(correction="tis"))
    assert (unrejected - undivided).norm() > 0.01 * undivided.norm() > 0.0


def test_the_gradient_does_not_depend_on_prompt_sharing(make_learner, experience):
    shared = gradient_of(make_learner(), Update(experience, ALL), GRPO())
    unshared = gradient_of(make_learner(), Update(alone(experience), ALL), GRPO())
    assert (unshared - shared).norm() <= 1e-5 * shared.norm()


def test_the_gradient_does_not_depend_on_gradient_checkpointing(make_learner, experience):
    plain = gradient_of(make_learner(), Update(experience, ALL), GRPO())
    learner = make_learner()
    learner.backbone.lm.train()
    learner.backbone.lm.gradient_checkpointing_enable({"use_reentrant": False})
    again = gradient_of(learner, Update(experience, ALL), GRPO())
    assert (again - plain).norm() <= 1e-5 * plain.norm()


def noisy(learner, alpha: float = 5.0):
    """A learner with noise on its embeddings in updates."""
    learner.backbone.noise = EmbeddingNoise(learner.backbone.lm, alpha, seed=3)
    return learner


def test_the_gradient_with_noise_depends_on_neither_cut_nor_checkpointing(make_learner, experience):
    update = Update(alone(experience), ALL)
    undivided = gradient_of(noisy(make_learner()), update, SFT())
    checkpointed = noisy(make_learner(MicroBatch(max_sequences=2)))
    checkpointed.backbone.lm.train()
    checkpointed.backbone.lm.gradient_checkpointing_enable({"use_reentrant": False})
    for learner in (noisy(make_learner(MicroBatch(max_sequences=1))), checkpointed):
        cut = gradient_of(learner, update, SFT())
        assert (cut - undivided).norm() <= 1e-5 * undivided.norm()
    plain = gradient_of(make_learner(), update, SFT())
    assert (plain - undivided).norm() > 0.1 * undivided.norm() > 0.0


def test_an_update_has_the_noise_of_its_number_and_reading_has_none(make_learner, experience):
    """Logprobs in float64 by transformers alone, from embeddings with this noise and without."""
    rows = dataclasses.replace(alone(experience), has_gradient=np.ones(9, bool))
    learner, plain = noisy(make_learner()), make_learner()
    lm = make_learner().backbone.lm.double()
    lm.set_attn_implementation("eager")
    tokens, mask = rows.sequences.tokens, rows.sequences.loss_mask
    learner.optimizer.updates = 6
    outputs = learner.update(Update(rows, ALL), SFT()).result().outputs
    read = plain.logprobs(rows.sequences).result()
    for row, length in enumerate(tokens.lengths.tolist()):
        noise = seeds.bits(3, "embedding noise", 6, row, np.arange(length))
        lanes = seeds.bits(3, "embedding noise feature", np.arange(8))
        bits = row_bits(*(torch.from_numpy(x.view(np.int64)) for x in (noise, lanes)), 32)
        ids = torch.from_numpy(tokens.row(row).astype(np.int64))
        embedded = lm.get_input_embeddings()(ids)
        of_update = embedded + (bits + 0.5) / 2**15 * 5.0 / (length * 32) ** 0.5
        begin, end = tokens.offsets[row : row + 2]
        for inputs, values in [(of_update, outputs[begin:end]), (embedded, read.row(row))]:
            logprobs = lm(inputs_embeds=inputs[None]).logits[0, :-1].log_softmax(-1)
            expected = logprobs.gather(1, ids[1:, None])[:, 0].detach().numpy()
            at = mask.row(row)[1:]
            np.testing.assert_allclose(values[1:][at], expected[at], rtol=1e-4, atol=1e-5)


def test_skipped_samples_stay_in_the_denominator(make_learner, experience):
    skipping = gradient_of(make_learner(), Update(experience, ALL), GRPO())
    computing = dataclasses.replace(experience, has_gradient=np.ones(9, bool))
    full = gradient_of(make_learner(), Update(computing, ALL), GRPO())
    assert (skipping - full).norm() <= 1e-5 * full.norm()


def test_skipped_samples_are_not_computed(make_learner, experience):
    result = make_learner().update(Update(experience, ALL), GRPO()).result()
    assert result.metrics["policy/skipped_samples"] == 3
    mask = experience.sequences.loss_mask
    computed = mask.like(~np.isnan(result.outputs)).sums()
    assert computed.tolist() == [n if i // 3 != 1 else 0 for i, n in enumerate(mask.sums())]


def test_the_loss_of_an_update_is_the_mean_over_its_tokens(make_learner, experience):
    learner = make_learner()
    sft = SFT()
    expected = learner.logprobs(experience.sequences).result()
    mask = experience.sequences.loss_mask.values
    update = Update(sft.experience(experience.sequences), ALL)
    metrics = learner.update(update, sft).result().metrics
    assert metrics["policy/loss"] == pytest.approx(-expected.values[mask].mean(), rel=1e-5)


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize("micro", [MicroBatch(max_tokens=512), MicroBatch(max_sequences=1)])
def test_tokens_pull_by_their_weights_however_an_update_is_cut(
    make_learner, experience, micro, aggregation
):
    """Against transformers' logits and autograd in float64, and sum_t w_t (-log p_t) / sum_t w_t as
    it is written. The nll of the metrics is the mean without weights.
    """
    algorithm, mask = SFT(aggregation=aggregation), experience.sequences.loss_mask
    counts = mask.like((mask.values * (0.25 + np.arange(len(mask.values)) % 4)).astype(np.float32))
    weighted = dataclasses.replace(experience.sequences, loss_weights=counts)
    learner = make_learner(micro)
    lm = copy.deepcopy(learner.backbone.lm).double()
    lm.set_attn_implementation("eager")
    parts = []
    for tokens, count in zip(weighted.tokens, counts, strict=True):
        ids, w = (torch.from_numpy(column.astype(np.float64)) for column in (tokens, count))
        table = lm(ids.long()[None]).logits[0, :-1].log_softmax(-1)
        missed = -table.gather(-1, ids[1:].long()[:, None])[:, 0]
        parts.append((w[1:] @ missed, w.sum(), missed.detach()[w[1:] > 0]))
    if aggregation == "token":
        loss = sum(part for part, *_ in parts) / sum(count for _, count, _ in parts)
    else:
        loss = sum(part / count for part, count, _ in parts) / len(parts)
    loss.backward()
    wanted = {name: parameter.grad.flatten() for name, parameter in lm.named_parameters()}
    update = Update(algorithm.experience(weighted), ALL)
    gradient = gradient_of(learner, update, algorithm)
    expected = torch.cat([wanted[name] for name in learner.optimizer.master])
    assert (gradient - expected).norm() <= 2e-5 * expected.norm()
    metrics = make_learner(micro).update(update, algorithm).result().metrics
    assert metrics["policy/loss"] == pytest.approx(loss.item(), rel=1e-5)
    plain = torch.cat([missed for *_, missed in parts]).mean().item()
    assert metrics["policy/nll"] == pytest.approx(plain, rel=1e-5)


def test_an_update_reports_the_logprobs_from_before_its_step(make_learner, experience):
    learner = make_learner()
    before = learner.logprobs(experience.sequences).result()
    got = learner.update(Update(experience, ALL), GRPO()).result().outputs
    computed = ~np.isnan(got)
    np.testing.assert_allclose(got[computed], before.values[computed], atol=1e-5)


def test_an_update_moves_the_chosen_tokens_up(make_learner, experience):
    learner = make_learner()
    before = learner.logprobs(experience.sequences).result()
    learner.update(Update(experience, ALL), GRPO()).result()
    after = learner.logprobs(experience.sequences).result()
    advantages = experience.columns["advantages"].values
    assert ((after.values - before.values) * advantages).sum() > 0


def test_bfloat16_weights_follow_float32_masters(make_learner, experience):
    learner = make_learner(dtype=torch.bfloat16, lr=1e-5)
    working = dict(learner.backbone.lm.named_parameters())
    before = {name: p.clone() for name, p in learner.weights().items()}
    for _ in range(3):
        learner.update(Update(experience, ALL), GRPO()).result()
    after = learner.weights()
    name = "model.layers.0.mlp.up_proj.weight"
    assert after[name].dtype == torch.float32
    moved = (after[name] - before[name]).abs()
    assert 1e-5 < moved.max() < 1e-4  # steps that bfloat16 would mostly lose are kept
    assert torch.equal(working[name], after[name].bfloat16())


def test_a_gradient_that_is_not_finite_stops_the_run_and_changes_nothing(make_learner, experience):
    learner = make_learner()
    before = {name: p.clone() for name, p in learner.weights().items()}
    broken = np.where(experience.columns["advantages"].values != 0, np.inf, 0.0)
    columns = {"advantages": experience.columns["advantages"].like(broken.astype(np.float32))}
    update = Update(dataclasses.replace(experience, columns=columns), ALL)
    with pytest.raises(RunError, match="gradient of update 1 is not finite"):
        learner.update(update, GRPO())
    assert all(torch.equal(before[name], p) for name, p in learner.weights().items())


def with_replies(experience: Experience, coefficient: float) -> Experience:
    """The second half of each response is an environment's reply; none has no gradient."""
    sequences, replies, masks = experience.sequences, [], []
    for mask in sequences.loss_mask:
        places = np.flatnonzero(mask)
        read = np.isin(np.arange(len(mask)), places[(len(places) + 1) // 2 :])
        masks.append(mask & ~read)
        replies.append(coefficient * read.astype(np.float32))
    mask = Ragged.of(masks, np.bool_)
    return dataclasses.replace(
        experience,
        sequences=dataclasses.replace(sequences, loss_mask=mask),
        columns={"advantages": mask.like(experience.columns["advantages"].values * mask.values)},
        has_gradient=np.ones(len(experience), np.bool_),
        replies=Ragged.of(replies, np.float32),
    )


@pytest.mark.parametrize("micro", [MicroBatch(max_tokens=512), MicroBatch(max_sequences=1)])
def test_replies_add_their_mean_cross_entropy_to_the_loss_of_the_policys_tokens(
    make_learner, experience, micro
):
    """Against transformers' logits and autograd in float64, however the update is cut. Of a policy
    that is as it was, the clipped loss is -w A, and its gradient that of -w A log p.
    """
    algorithm, observed = GRPO(entropy_coef=0.1), with_replies(experience, 0.3)
    learner, update = make_learner(micro), Update(observed, ALL)
    lm = copy.deepcopy(learner.backbone.lm).double()
    lm.set_attn_implementation("eager")
    weights = algorithm.entry_weights(observed.sequences, ALL)
    count = np.count_nonzero(observed.replies.values)
    policy, missed = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    reported = -float((weights.values * observed.columns["advantages"].values).sum())
    for row, tokens in enumerate(observed.sequences.tokens):
        logits = lm(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0, :-1]
        table = logits.log_softmax(-1)
        logp = table.gather(-1, torch.from_numpy(tokens[1:].astype(np.int64))[:, None])[:, 0]
        entropy = -(table.exp() * table).sum(-1)
        advantage, weight, reply = (
            torch.from_numpy(column.row(row)[1:].astype(np.float64))
            for column in (observed.columns["advantages"], weights, observed.replies)
        )
        policy = policy - (weight * (advantage * logp + 0.1 * entropy)).sum()
        reported -= 0.1 * float((weight * entropy.detach()).sum())
        missed = missed - (logp * (reply > 0)).sum() / count
    (policy + 0.3 * missed).backward()
    wanted = {name: parameter.grad.flatten() for name, parameter in lm.named_parameters()}

    metrics = {}
    step = learner.update

    def keeping(*arguments):
        metrics.update(step(*arguments).result().metrics)
        return done(None)

    learner.update = keeping
    gradient = gradient_of(learner, update, algorithm)
    expected = torch.cat([wanted[name] for name in learner.optimizer.master])
    assert (gradient - expected).norm() <= 2e-5 * expected.norm()
    assert metrics["policy/observation_loss"] == pytest.approx(missed.item(), rel=1e-5)
    assert metrics["policy/loss"] == pytest.approx(reported + 0.3 * missed.item(), rel=1e-5)


def test_samples_without_an_advantage_are_computed_for_their_replies(make_learner, experience):
    observed = with_replies(experience, 0.3)
    equal = dataclasses.replace(
        observed,
        columns={"advantages": observed.replies.like(np.zeros_like(observed.replies.values))},
    )
    learner = make_learner()
    assert gradient_of(learner, Update(equal, ALL), GRPO()).norm() > 0
