"""What layers keep for their backward pass is counted on the meta device, for any type."""

import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from helpers.model_types import config_of
from postgrad.models import kept
from postgrad.models.kept import kept_by_layers
from postgrad.models.load import skeleton
from postgrad.models.shapes import KeptByLayers
from postgrad.models.supported import causal_class

DOCS = Path(__file__).parent.parent.parent / "docs" / "models.md"
LOOK_AT_NUMBERS = {"dbrx", "gpt-sw3", "gpt2", "jetmoe"}  # in their forward


def of(kind: str, **settings: Any) -> tuple[KeptByLayers, ...]:
    config = config_of(kind, 90)
    config.update(settings)
    return kept_by_layers(skeleton(config, causal_class(config), kind))


def test_a_layer_keeps_what_the_gradients_of_its_weights_and_of_its_input_need() -> None:
    """Of Llama with a width of 32 and 48, in float32, by hand: trained, two norms keep their input
    and the numbers that they scale, and their deviation; linear layers what they read, of which o
    reads attention's; rotary positions nothing of their own; gate, up, the activated gate, and
    their product. Frozen, what the norms read, and gate, up, and the activated gate.
    """
    rows = {(row.width, row.trains): row for row in of("llama")}
    layers, hidden, inner = 2, 32, 48
    norms = 2 * (2 * hidden + 1)
    trained = norms + 2 * hidden + 4 * inner
    assert rows[4, True].all == 4 * layers * trained
    assert rows[4, True].attended == 4 * layers * hidden
    assert rows[4, True].largest == 4 * trained
    frozen = 2 * (hidden + 1) + 3 * inner
    assert rows[4, False].all == 4 * layers * frozen
    assert rows[4, False].attended == rows[4, False].mixtures == 0


@pytest.mark.parametrize("kind", ["qwen3_5_text", "olmoe"])
def test_layers_that_are_alike_keep_the_same(kind: str) -> None:
    """One of a hybrid of two kinds of layers, and of a mixture: all of them run."""
    more = {"num_hidden_layers": 4}
    if kind == "qwen3_5_text":
        more["layer_types"] = ["linear_attention", "full_attention"] * 2  # pyright: ignore[reportArgumentType]
    counted = of(kind, **more)
    with patch.object(kept, "_alike", lambda layers: list(range(len(layers)))):
        assert of(kind, **more) == counted


def test_a_type_that_looks_at_numbers_is_not_counted() -> None:
    assert of("gpt2") == ()


@pytest.mark.slow
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.long)])
def test_all_other_types_are_counted(every: int) -> None:
    works = re.search(r"\*\*works\*\* \(\d+\) \| (.*?) \|", DOCS.read_text("utf-8"))
    assert works is not None
    kinds = set(re.findall(r"`([\w-]+)`", works[1]))
    assert len(kinds) > 100
    tried = LOOK_AT_NUMBERS | {*sorted(kinds)[::every]}
    assert {kind for kind in tried if not of(kind)} == LOOK_AT_NUMBERS
