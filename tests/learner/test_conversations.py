"""Samples of several conversations: logprobs and gradients are those of the conversations read
apart, and a sample counts once whatever their number.
"""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from helpers.gradients import gradient_of
from postgrad.algorithms.grpo import GRPO
from postgrad.algorithms.gspo import GSPO
from postgrad.core.ragged import Ragged
from postgrad.core.records import Experience, Sequences
from postgrad.learner.backbone import MicroBatch
from postgrad.learner.update import Update

VOCABULARY = 37


@pytest.fixture(scope="module")
def branched() -> Experience:
    """Two prompts with three samples: of one, two and three conversations, of which some begin with
    what stood in the one before, and some with nothing of it.
    """
    rng = np.random.default_rng(7)
    tokens, masks, openings, advantages = [], [], [], []
    for number in range(2):
        prompt = rng.integers(0, VOCABULARY, 12 + number)
        for conversations in (1, 2, 3):
            ids, mask, opened, before = [], [], [], prompt
            for place in range(conversations):
                written = rng.integers(0, VOCABULARY, rng.integers(2, 7))
                opened.append(sum(map(len, ids)))
                ids += [before, written]
                mask += [np.zeros(len(before), bool), np.ones(len(written), bool)]
                last_message = rng.integers(0, VOCABULARY, 4)
                goes_on = (
                    [before, written, last_message] if place else [last_message, last_message[::-1]]
                )
                before = np.concatenate(goes_on)
            tokens.append(np.concatenate(ids))
            masks.append(np.concatenate(mask))
            openings.append(tuple(opened[1:]))
            advantages.append(masks[-1] * np.float32(rng.normal()))
    group = np.repeat(np.arange(2), 3)
    sequences = Sequences(
        Ragged.of(tokens, np.int32), Ragged.of(masks, bool), group, openings=tuple(openings)
    )
    columns = {"advantages": Ragged.of(advantages, np.float32)}
    return Experience(sequences, columns, np.ones(6, bool))


def plain_logprobs(lm, sequences: Sequences) -> list[torch.Tensor]:
    """By transformers alone, in float64, one conversation after the other: the logprobs of each
    sequence's loss tokens.
    """
    rows = []
    for row in range(len(sequences)):
        ids, mask = sequences.tokens.row(row), sequences.loss_mask.row(row)
        parts = []
        for begin, end in sequences.conversations(row):
            read = torch.from_numpy(ids[begin:end].astype(np.int64))
            logits = torch.log_softmax(lm(read[None]).logits[0, :-1], -1)
            each = logits.gather(1, read[1:, None])[:, 0]
            parts.append(each[torch.from_numpy(mask[begin + 1 : end])])
        rows.append(torch.cat(parts))
    return rows


def reference_model(make_learner):
    lm = make_learner().backbone.lm.double()
    lm.set_attn_implementation("eager")
    return lm


@pytest.mark.parametrize("micro", [MicroBatch(max_sequences=1), MicroBatch(max_tokens=512)])
def test_logprobs_are_those_of_each_conversation_by_itself(make_learner, branched, micro):
    sequences = branched.sequences
    column = make_learner(micro).logprobs(sequences).result()
    wanted = plain_logprobs(reference_model(make_learner), sequences)
    for row in range(len(sequences)):
        written = column.row(row)[sequences.loss_mask.row(row)]
        np.testing.assert_allclose(written, wanted[row].detach().numpy(), atol=2e-5)


def by_token(logprobs: list[torch.Tensor], advantages: NDArray[np.float64]) -> torch.Tensor:
    tokens = sum(map(len, logprobs))
    return -sum(a * each.sum() for a, each in zip(advantages, logprobs, strict=True)) / tokens


def by_sequence(logprobs: list[torch.Tensor], advantages: NDArray[np.float64]) -> torch.Tensor:
    pairs = zip(advantages, logprobs, strict=True)
    return -sum(a * each.mean() for a, each in pairs) / len(logprobs)


@pytest.mark.parametrize(
    ("algorithm", "loss"),
    [
        (GRPO(aggregation="token"), by_token),
        (GRPO(aggregation="sequence"), by_sequence),
        (GSPO(), by_sequence),  # on the policy's own samples its gradient is that of the mean
    ],
)
@pytest.mark.parametrize("micro", [MicroBatch(max_sequences=1), MicroBatch(max_tokens=512)])
def test_the_gradient_is_that_of_all_conversations_of_a_sample(
    make_learner, branched, algorithm, loss, micro
):
    learner = make_learner(micro)
    old = learner.logprobs(branched.sequences).result()
    columns = {**branched.columns, "old_logprobs": old, "sampled_logprobs": old}
    experience = Experience(branched.sequences, columns, branched.has_gradient)
    computed = gradient_of(learner, Update(experience, np.arange(len(experience))), algorithm)
    lm = reference_model(make_learner)
    pairs = zip(branched.columns["advantages"], branched.sequences.loss_mask, strict=True)
    advantages = np.array([float(each[mask][0]) for each, mask in pairs])
    loss(plain_logprobs(lm, branched.sequences), advantages).backward()
    by_name = dict(lm.named_parameters())
    wanted = torch.cat([by_name[name].grad.flatten() for name in learner.optimizer.master])
    assert (computed - wanted).norm() <= 1e-4 * wanted.norm()
