"""Weights for rollout workers as arguments of calls: what arrives, and when it counts."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from contracts.conftest import small_model
from postgrad.core.errors import RunError
from postgrad.fleet import parcels
from postgrad.fleet.parcels import ArrivingWeights, HandedParcel, Handover
from postgrad.rollout.engine import take_over

Arguments = list[Any]


def weights() -> list[tuple[str, torch.Tensor]]:
    return [(name, w.detach() * 1.2345) for name, w in small_model().named_parameters()]


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> Arguments:
    """Of all calls of a publish in bfloat16, in parcels of 4 kB."""
    monkeypatch.setattr(parcels, "SENT_BYTES", 4096)
    return list(Handover(weights(), "bfloat16"))


def arriving(arguments: Arguments) -> ArrivingWeights:
    arrived = ArrivingWeights()
    for argument in arguments:
        arrived.put(argument)
    return arrived


def test_weights_arrive_in_the_engines_dtype_rounded_once(arguments: Arguments) -> None:
    arrived = list(arriving(arguments))
    assert len(arguments) > 3
    assert [name for name, _ in arrived] == [name for name, _ in weights()]
    for (name, sent), (_, came) in zip(weights(), arrived, strict=True):
        assert came.dtype == torch.bfloat16, name
        assert torch.equal(came, sent.bfloat16()), name


def test_an_account_has_the_bytes_of_the_engines_dtype() -> None:
    handover = Handover(weights(), "bfloat16")
    list(handover)
    exact = sum(2 * weight.numel() for _, weight in weights())
    assert exact <= handover.account().size <= exact + 64 * len(weights())
    assert handover.account().metrics["publish/by_ray"] == 1.0


def damaged(arguments: Arguments) -> Arguments:
    payload = np.array(arguments[1].payload)
    payload[7] ^= 1
    return [arguments[0], HandedParcel(arguments[1].parcel, payload), *arguments[2:]]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (damaged, "parcel 1 of .* is damaged"),
        (lambda sent: sent[:1] + sent[2:], r"were sent \(missing: \[1\]\)"),
        (lambda sent: [*sent[:2], sent[1], *sent[2:]], "parcel 1 came twice"),
        (lambda sent: [*sent[:-1], replace(sent[-1], digest="0")], "these weights are not used"),
        (lambda sent: [*sent[:-1], None], "broke off"),
    ],
    ids=["damaged", "missing", "doubled", "of_others", "broken_off"],
)
def test_what_arrived_otherwise_than_it_was_sent_is_never_whole(
    arguments: Arguments, change: Callable[[Arguments], Arguments], told: str
) -> None:
    with pytest.raises(RunError, match=told):
        take_over(small_model(), arriving(change(arguments)))


def test_the_publish_after_one_that_broke_off_counts(arguments: Arguments) -> None:
    arrived = arriving([*arguments[:2], None])
    with pytest.raises(RunError, match="broke off"):
        list(arrived)
    for argument in arguments:
        arrived.put(argument)
    assert len(list(arrived)) == len(weights())
