"""Token mixers that carry a state: every sequence has one of its own, in any pack."""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.model_types import make_model
from helpers.tiny_runs import MODEL
from postgrad.core.errors import UsageError
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.layout.layout import Layout, lay_out
from postgrad.layout.tree import NO_SHARING
from postgrad.learner.backbone import Backbone, MicroBatch
from postgrad.models.adapter_targets import target_layers
from postgrad.models.adapters import add_adapter
from postgrad.models.four_bits import FourBitLinear, twin
from postgrad.models.fresh import make_fresh
from postgrad.models.load import load_model, load_tokenizer
from postgrad.models.settings import LoraSettings, ModelInit
from postgrad.models.states import MixerState, SequenceMixing, TokenMixing
from postgrad.parallel.ranks import ALONE
from postgrad.rollout.engine import Request, generate
from postgrad.rollout.local.engine import LocalEngine
from postgrad.rollout.settings import SamplingSettings

CPU = torch.device("cpu")
DECAY = 0.5


def decaying_sum(hidden: Tensor, state: MixerState | None) -> Tensor:
    """s_t = s_(t - 1) / 2 + x_t over [B, L, 1]: a mixer as transformers' are."""
    before = None if state is None else state.get_recurrent_state(0)
    running = torch.zeros_like(hidden[:, 0]) if before is None else before
    sums: list[Tensor] = []
    for token in hidden.unbind(1):
        running = DECAY * running + token
        sums.append(running)
    if state is not None:
        state.update_recurrent_state(running, 0)
    return torch.stack(sums, 1)


def expected_sums(numbers: list[float]) -> list[float]:
    return [sum(DECAY ** (t - s) * numbers[s] for s in range(t + 1)) for t in range(len(numbers))]


def layout_of(rows: list[list[int]], min_shared: int = NO_SHARING) -> Layout:
    tokens = Ragged.of([np.array(row, np.int32) for row in rows], np.int32)
    mask = np.ones(len(tokens.values), np.bool_)
    mask[tokens.offsets[:-1]] = False
    sequences = Sequences(tokens, tokens.like(mask), np.zeros(len(rows), np.int64))
    return lay_out(sequences, np.arange(len(rows)), min_shared=min_shared)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=40), min_size=1, max_size=9),
    st.booleans(),
)
def test_every_sequence_begins_with_an_empty_state(rows: list[list[int]], keep: bool) -> None:
    layout = layout_of(rows)
    mixing = SequenceMixing(layout, CPU, keep=keep)
    hidden = torch.from_numpy(layout.token_ids).double()[:, None]
    out = mixing.mix(0, decaying_sum, hidden)[:, 0].tolist()
    starts = layout.segment_start.tolist()
    packed = [layout.token_ids[a:b].tolist() for a, b in pairwise(starts)]
    assert sorted(packed) == sorted(rows)
    alone = [expected_sums(row) for row in packed]
    assert out == pytest.approx([number for sums in alone for number in sums], rel=1e-12)
    if keep:
        behind = mixing.states[0]["recurrent 0"][:, 0].tolist()
        assert behind == pytest.approx([sums[-1] for sums in alone], rel=1e-12)


def test_a_layout_in_which_samples_share_a_prompt_is_refused() -> None:
    layout = layout_of([[1, 2, 3, 4], [1, 2, 3, 5]], min_shared=1)
    with pytest.raises(ValueError, match="would share the states"):
        SequenceMixing(layout, CPU)


def test_a_new_token_goes_on_from_the_state_of_its_row_and_leaves_the_others() -> None:
    stored = {"recurrent 0": torch.tensor([[2.0], [4.0], [8.0]])}
    mixing = TokenMixing(lambda _: stored, torch.tensor([True, False]))
    out = mixing.mix(0, decaying_sum, torch.tensor([[1.0], [1.0]]))
    assert out[:, 0].tolist() == [2.0, 3.0]
    assert stored["recurrent 0"][:, 0].tolist() == [2.0, 4.0, 8.0]


def test_a_convolution_sees_the_tokens_before_and_zeros_before_the_first() -> None:
    state = MixerState()
    first = state.update_conv_state(torch.tensor([[[1.0, 2.0]]]), 0, conv_kernel_size=3)
    assert first.tolist() == [[[0.0, 1.0, 2.0]]]
    assert state.update_conv_state(torch.tensor([[[3.0]]]), 0, conv_kernel_size=3).tolist() == [
        [[0.0, 1.0, 2.0, 3.0]]
    ]
    kept = state.get_conv_state(0)
    assert kept is not None
    assert kept.tolist() == [[[1.0, 2.0, 3.0]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """folder("lfm2"): a tiny model of a type, made once."""
    to = tmp_path_factory.mktemp("states")
    init = {**MODEL["init"], "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    make_fresh(ModelInit.model_validate(init), [], 0, to / "tokenizer")
    size = len(load_tokenizer(str(to / "tokenizer")))

    def make(kind: str) -> str:
        path: Path = to / kind
        return str(path if path.exists() else make_model(kind, to / "tokenizer", size, path))

    return make


def backbone_of(lm: Any, **more: Any) -> Backbone:
    backbone = Backbone(lm.requires_grad_(True), CPU, MicroBatch(64), **more)
    backbone.divide(ALONE, "none")
    return backbone


def gradients(backbone: Backbone, layouts: list[Layout], *, together: bool) -> list[Tensor]:
    """Of the logprobs of several layouts: a backward pass after each forward, or after all."""
    backbone.lm.zero_grad()
    sums: list[Tensor] = []
    for layout in layouts:
        sums.append(backbone.logprobs(layout, 1.0)[0].sum())
        if not together:
            sums.pop().backward()
    if together:
        torch.stack(sums).sum().backward()
    return [p.grad.clone() for p in backbone.lm.parameters() if p.grad is not None]


def test_layers_that_are_computed_again_have_the_context_of_their_own_forward(folder: Any) -> None:
    loaded = load_model(folder("lfm2"), dtype=torch.float32, gradient_checkpointing=True)
    backbone = backbone_of(loaded.lm)
    layouts = [layout_of([[5, 6, 7], [5, 6, 8, 9]]), layout_of([[9, 8, 7, 6, 5, 4]])]
    expected = gradients(backbone, layouts, together=False)
    found = gradients(backbone, layouts, together=True)
    torch.testing.assert_close(found, expected)


def test_a_twin_of_a_model_runs_its_own_mixers(folder: Any) -> None:
    lm: Any = load_model(folder("lfm2"), dtype=torch.float32).lm
    add_adapter(lm, LoraSettings(rank=2), seed=0)
    other: Any = twin(lm)
    layout = layout_of([[5, 6, 7], [5, 6, 8, 9]])
    logprobs = [backbone_of(each).logprobs(layout, 1.0)[0] for each in (lm, other)]
    assert torch.equal(*logprobs)
    assert set(other.state_carrier.mixers) <= set(other.modules())


def test_samples_do_not_depend_on_their_batch(folder: Any) -> None:
    """More samples than slots: rows end, move, and are filled again by other prompts."""
    loaded = load_model(folder("lfm2"), dtype=torch.float32)
    rng = np.random.default_rng(0)
    requests = [
        Request(
            ticket,
            (0, 1, 2),
            rng.integers(3, 90, 1 + 5 * ticket % 11).astype(np.int32),
            SamplingSettings(max_new_tokens=2 + 3 * ticket % 8),
            seed=4,
        )
        for ticket in range(5)
    ]

    def sampled(asked: list[Request], slots: int) -> dict[tuple[int, int], Any]:
        engine = LocalEngine(loaded.lm, loaded.tokenizer, slots=slots, cache_tokens=64 * slots)
        return {(done.ticket, done.sample): done for done in generate(engine, asked)}

    together = sampled(requests, 5)
    assert len(together) == 15
    for request in requests:
        for key, alone in sampled([request], 1).items():
            assert together[key].token_ids.tolist() == alone.token_ids.tolist()
            np.testing.assert_allclose(together[key].logprobs, alone.logprobs, atol=1e-5)


def test_adapters_stand_where_no_kernel_reads_the_weight_itself(folder: Any) -> None:
    lm = load_model(folder("mamba"), dtype=torch.float32).lm
    names = {name.rpartition(".")[2] for name in target_layers(lm, LoraSettings())}
    assert names == {"in_proj"}
    with pytest.raises(UsageError, match="'dt_proj' is no linear layer"):
        target_layers(lm, LoraSettings(targets=("dt_proj",)))


def test_in_four_bits_mixers_keep_the_weights_that_they_read_themselves(folder: Any) -> None:
    lm = load_model(folder("mamba"), dtype=torch.float32, quantize="4bit").lm
    packed = {name for name, module in lm.named_modules() if isinstance(module, FourBitLinear)}
    assert {name.rpartition(".")[2] for name in packed} == {"in_proj"}
    backbone = Backbone(lm, CPU, MicroBatch(64))
    backbone.divide(ALONE, "none")
    logprobs, _ = backbone.logprobs(layout_of([[5, 6, 7], [5, 6, 8, 9]]), 1.0)
    assert bool((logprobs < 0).all())


def test_what_cannot_be_done_with_states_is_refused(folder: Any) -> None:
    lm: Any = load_model(folder("lfm2"), dtype=torch.float32).lm
    with pytest.raises(UsageError, match=r"model\.lora\.dropout"):
        add_adapter(lm, LoraSettings(dropout=0.1), seed=0)
    with pytest.raises(UsageError, match=r"model\.compile"):
        Backbone(lm, CPU, MicroBatch(64), compiler="eager")
    sharing: Any = SimpleNamespace(grid=SimpleNamespace(sharers=2))
    with pytest.raises(UsageError, match=r"learner\.context_parallel = 1"):
        Backbone(lm, CPU, MicroBatch(64)).divide(sharing, "none")
