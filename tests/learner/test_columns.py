"""An update's columns: what of them lies at the entries of a layout."""

import dataclasses

import numpy as np
import pytest
import torch

from postgrad.layout.layout import lay_out
from postgrad.learner.update import FlatColumns, Update
from postgrad.ops.losses import entry_weights

ALL = np.arange(9)
CPU = torch.device("cpu")


@pytest.mark.parametrize("rows", [[0], [4, 2], [8, 0, 5]])
def test_an_entry_has_the_values_of_its_own_token(experience, rows):
    weights = entry_weights(experience.sequences.loss_mask, ALL, "sequence")
    flat = FlatColumns(Update(experience, ALL), weights, CPU)
    layout = lay_out(experience.sequences, np.array(rows))
    columns = flat.at(layout)
    mask, advantages = experience.sequences.loss_mask, experience.columns["advantages"]
    expected = np.concatenate([advantages.row(row)[mask.row(row)] for row in rows])
    got = columns["columns"]["advantages"].numpy()
    order = np.argsort(layout.sequence, kind="stable")
    np.testing.assert_array_equal(got[order], expected)
    counts = np.bincount(columns["sequence"].numpy(), weights=columns["weight"].numpy())
    np.testing.assert_allclose(counts, 1 / 9, rtol=1e-6)  # a sequence's share of the update
    assert columns["n_sequences"] == len(rows)


def test_the_weight_of_a_token_in_a_metric_counts_computed_tokens_only(experience):
    """Skipped samples do not dilute means."""
    weights = entry_weights(experience.sequences.loss_mask, ALL, "token")
    lengths = experience.sequences.loss_mask.sums()
    computed = lengths[experience.has_gradient].sum()
    layout = lay_out(experience.sequences, np.array([0, 1]))
    columns = FlatColumns(Update(experience, ALL), weights, CPU).at(layout)
    np.testing.assert_allclose(columns["token_weight"].numpy(), 1 / computed, rtol=1e-6)
    np.testing.assert_allclose(columns["weight"].numpy(), 1 / lengths.sum(), rtol=1e-6)


def test_columns_in_float64_arrive_as_float32(experience):
    column = experience.columns["advantages"]
    wide = dataclasses.replace(
        experience, columns={"returns": column.like(column.values.astype(np.float64) / 3)}
    )
    weights = entry_weights(experience.sequences.loss_mask, ALL, "token")
    layout = lay_out(experience.sequences, ALL)
    returned = FlatColumns(Update(wide, ALL), weights, CPU).at(layout)["columns"]["returns"]
    assert returned.dtype == torch.float32
    expected = (column.values.astype(np.float64) / 3).astype(np.float32)[layout.column]
    np.testing.assert_array_equal(returned.numpy(), expected)


def test_an_update_without_computed_samples_divides_by_no_zero(experience):
    none = dataclasses.replace(experience, has_gradient=np.zeros(9, bool))
    weights = entry_weights(experience.sequences.loss_mask, ALL, "token")
    layout = lay_out(experience.sequences, np.array([0]))
    columns = FlatColumns(Update(none, ALL), weights, CPU).at(layout)
    assert torch.isfinite(columns["token_weight"]).all()
