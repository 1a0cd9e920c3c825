"""On CUDA no job asks for what deterministic mode refuses: seen in the operations of a CPU run."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.dispatched import Call, Recorded
from helpers.jobs import JOBS, write_recipe
from helpers.refused import REFUSED, refused
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.layout.layout import lay_out
from postgrad.models.tree import FlexAttention
from postgrad.observe.console import Console
from postgrad.recipe.load import load_recipe
from postgrad.rollout.local import sampler
from postgrad.training.start import train

FILTERS = ["--rollout.top_k", "8", "--rollout.top_p", "0.9", "--rollout.min_p", "0.01"]
KEPT = ["--rollout.keep_sampling_mask", "true"]


@pytest.fixture(autouse=True)
def _as_on_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In a folder of its own, with the one thing that is chosen by device as CUDA has it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sampler, "running_sums", sampler.counted_sums)
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(deterministic)


def calls_of(recipe: Path, overrides: list[str]) -> list[Call]:
    with Recorded() as operations:
        train(load_recipe(recipe, ["--steps", "1", *overrides]), Console("quiet"))
    return operations.calls


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_a_step_of_a_job_asks_for_nothing_that_is_refused(name: str, tmp_path: Path) -> None:
    overrides = FILTERS if JOBS[name].job == "rl" else []
    if overrides and 'align = "text"' not in JOBS[name].sections:  # whose teacher reads no masks
        overrides = [*overrides, *KEPT]
    calls = calls_of(write_recipe(name, tmp_path), overrides)
    operations = {call.operation for call in calls}
    assert {
        "aten._fused_adamw_.default",
        "aten.silu_backward.default",
    } <= operations  # backward passes
    assert ("aten.searchsorted.Tensor" in operations) == (JOBS[name].job in ("rl", "sft"))
    assert refused(calls) == []


def test_the_block_mask_of_flex_attention_asks_for_nothing_that_is_refused() -> None:
    tokens, mask = np.arange(40, dtype=np.int32), np.arange(40) > 9
    sequences = Sequences(
        Ragged.of([tokens] * 3, np.int32), Ragged.of([mask] * 3, bool), np.zeros(3)
    )
    with Recorded() as operations:
        FlexAttention(lay_out(sequences, np.arange(3)), torch.device("cpu"))._mask(7)
    assert len(operations.calls) > 2  # copies: the mask itself is made by NumPy
    assert refused(operations.calls) == []


@pytest.mark.parametrize(
    ("rule", "sample"),
    [(rule, name) for rule in REFUSED for name in rule.samples],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_refused_is_seen_in_a_cpu_run(rule, sample: str) -> None:
    torch.use_deterministic_algorithms(False)  # it refuses put_ on CPUs too
    with Recorded() as operations:
        rule.samples[sample](torch.device("cpu"))
    assert refused(operations.calls) != []


def test_what_deterministic_mode_knows_another_way_for_is_not_called_refused() -> None:
    with Recorded() as operations:
        rows, places = torch.zeros(9, 4), torch.zeros(5, dtype=torch.int64)
        rows.index_add_(0, places, torch.ones(5, 4))
        rows.index_copy_(0, places, torch.ones(5, 4))
        rows[places] = 1.0
        rows.scatter_(0, places[:, None], torch.ones(5, 4))
        rows.scatter_add_(0, places[:, None], torch.ones(5, 4))
        places.cumsum(0), places.bincount(), rows.median(), rows.topk(2)
    assert len(operations.calls) > 8
    assert refused(operations.calls) == []
