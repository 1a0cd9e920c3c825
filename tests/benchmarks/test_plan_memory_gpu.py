"""What stands in for postgrad's own functions where memory is measured is called as they are."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import plan_memory_gpu_child as child
from postgrad.models import load
from postgrad.rollout.local.engine import LocalEngine
from postgrad.training import prepare


@pytest.mark.parametrize(
    ("ours", "replaced"),
    [
        (child.fleet, prepare._fleet),
        (child.unlike(LocalEngine.completed), LocalEngine.completed),
        (child.on_device, load.read_weights),
    ],
)
def test_a_replacement_takes_the_arguments_of_what_it_replaces(
    ours: Callable[..., Any], replaced: Callable[..., Any]
) -> None:
    def taken(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
        parameters = inspect.signature(function).parameters.values()
        return [(each.name, each.kind, each.default) for each in parameters]

    assert taken(ours) == taken(replaced)
