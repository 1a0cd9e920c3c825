import numpy as np
import pytest
import torch

from postgrad.learner.backbone import MicroBatch


def test_temperature_divides_the_logits(make_learner, experience):
    learner = make_learner()
    learner.temperature = 2.0
    row = experience.sequences.tokens.row(0)
    got = learner.logprobs(experience.sequences).result().row(0)[-1]
    lm = learner.backbone.lm
    lm.set_attn_implementation("eager")
    with torch.no_grad():
        logits = lm(torch.from_numpy(row.astype(np.int64))[None]).logits[0, -2]
    assert got == pytest.approx(torch.log_softmax(logits / 2.0, -1)[row[-1]].item(), abs=1e-5)


def test_entropies_are_those_of_the_distribution_at_the_sampling_temperature(
    make_learner, experience
):
    learner = make_learner(MicroBatch(max_sequences=2))
    learner.temperature = 2.0
    column = learner.entropies(experience.sequences).result()
    mask, row = experience.sequences.loss_mask, experience.sequences.tokens.row(0)
    lm = learner.backbone.lm
    lm.set_attn_implementation("eager")
    with torch.no_grad():
        logits = lm(torch.from_numpy(row.astype(np.int64))[None]).logits[0].double() / 2.0
    logp = torch.log_softmax(logits, -1)
    wanted = -(logp.exp() * logp).sum(-1).numpy()
    places = np.flatnonzero(mask.row(0))
    np.testing.assert_allclose(column.row(0)[places], wanted[places - 1], atol=1e-5)
    assert not column.values[~mask.values].any()
