"""What stands in for postgrad's own functions, where GPUs are measured or a stub of one runs, is
called as they are: what a test on such a device would find too late.
"""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks import plan_memory_gpu_child as child
from benchmarks.gpu import decode
from gpu.stub import handover
from postgrad.cluster.workers import Workers
from postgrad.fleet.engines import EngineWorker
from postgrad.fleet.remote import RankCalls
from postgrad.models import load
from postgrad.rollout.local.engine import LocalEngine
from postgrad.rollout.local.step import Stepper
from postgrad.training import prepare
from postgrad.training.run import Clock


def taken(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    parameters = inspect.signature(function).parameters.values()
    return [(each.name, each.kind, each.default) for each in parameters]


CALLS = ("call", "aside")
PUBLIC = (*CALLS, "description", "close")
BLOCKS = {"eager": Stepper._run, "watching": Clock.timed}


@pytest.mark.parametrize(
    ("ours", "replaced"),
    [
        (child.fleet, prepare._fleet),
        (child.unlike(LocalEngine.completed), LocalEngine.completed),
        (child.on_device, load.read_weights),
        *((getattr(handover.OnlyRank, name), getattr(RankCalls, name)) for name in CALLS),
        *((getattr(handover.PipedWorker, name), getattr(Workers, name)) for name in PUBLIC),
        (handover.Accounted.sleep, EngineWorker.sleep),
    ],
)
def test_a_replacement_takes_the_arguments_of_what_it_replaces(
    ours: Callable[..., Any], replaced: Callable[..., Any]
) -> None:
    assert taken(ours) == taken(replaced)


def test_what_is_put_in_place_within_a_block_takes_the_same_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("reset_peak_memory_stats", "max_memory_allocated", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    kept = {kind: taken(function) for kind, function in BLOCKS.items()}
    with decode.eager():
        assert taken(Stepper._run) == kept["eager"]
    with child.watching({}):
        assert taken(Clock.timed) == kept["watching"]
