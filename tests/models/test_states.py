"""Token mixers that carry a state: in any pack each sequence has its own, also behind a prompt that
several share.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM

from helpers.model_types import make_model, steady_norms
from helpers.tiny_runs import MODEL
from postgrad.algorithms.grpo import GRPO
from postgrad.core.errors import UsageError
from postgrad.core.ragged import Ragged
from postgrad.core.records import Experience, Sequences
from postgrad.layout.layout import Layout, lay_out
from postgrad.layout.tree import NO_SHARING
from postgrad.learner.backbone import Backbone, MicroBatch
from postgrad.learner.policy import PolicyLearner
from postgrad.learner.settings import LearnerSettings
from postgrad.learner.update import Update
from postgrad.models.adapter_targets import target_layers
from postgrad.models.adapters import add_adapter
from postgrad.models.four_bits import FourBitLinear, twin
from postgrad.models.fresh import make_fresh
from postgrad.models.known_shapes import find_shape
from postgrad.models.load import load_model
from postgrad.models.settings import LoraSettings, ModelInit
from postgrad.models.states import MixerState
from postgrad.models.tokenizer import load_tokenizer
from postgrad.parallel.ranks import ALONE
from postgrad.rollout.engine import Request, generate
from postgrad.rollout.local.engine import LocalEngine
from postgrad.rollout.settings import SamplingSettings

CPU = torch.device("cpu")


def layout_of(rows: list[list[int]], min_shared: int = NO_SHARING) -> Layout:
    tokens = Ragged.of([np.array(row, np.int32) for row in rows], np.int32)
    mask = np.ones(len(tokens.values), np.bool_)
    mask[tokens.offsets[:-1]] = False
    sequences = Sequences(tokens, tokens.like(mask), np.zeros(len(rows), np.int64))
    return lay_out(sequences, np.arange(len(rows)), min_shared=min_shared)


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
    actual = gradients(backbone, layouts, together=True)
    torch.testing.assert_close(actual, expected)


def drawn(rng: np.random.Generator, *lengths: int) -> list[NDArray[np.int64]]:
    """Token ids of answers that differ from their first token on."""
    firsts = rng.permutation(np.arange(3, 90))[: len(lengths)]
    rest = (rng.integers(3, 90, length - 1) for length in lengths)
    return [np.append(first, more) for first, more in zip(firsts, rest, strict=True)]


def behind_prompts() -> Sequences:
    """Answers behind prompts of a chunk of the delta rule (of 8 chunks of Mamba2's here), of fewer
    tokens than a convolution reads, of one token, and of none in common; answers of one token, over
    the border of a chunk, with a beginning in common, and one that is such a beginning.
    """
    rng = np.random.default_rng(0)
    groups: list[list[NDArray[np.int64]]] = []
    for length, answers in ((64, (1, 5, 9, 17)), (2, (3, 1, 66)), (1, (7, 10)), (0, (6, 9))):
        (prompt,) = drawn(rng, length) if length else (np.zeros(0, np.int64),)
        groups.append([np.append(prompt, answer) for answer in drawn(rng, *answers)])
    branching, *_ = groups[0][3:]
    groups[0] += [branching[:70], np.append(branching[:70], drawn(rng, 4))]
    rows = [row for group in groups for row in group]
    tokens = Ragged.of(rows, np.int32)
    mask = np.ones(len(tokens.values), np.bool_)
    mask[tokens.offsets[:-1]] = False
    numbers = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    return Sequences(tokens, tokens.like(mask), numbers)


# Of each way to go on from a state; tests/contracts has all types. transformers' norms and scans
# round to float32 in any dtype: what is exact in float64 is in test_mixing.py.
@pytest.mark.parametrize("again", [False, True], ids=["kept", "computed again"])
@pytest.mark.parametrize(
    "kind",
    ["lfm2", "qwen3_next", "mamba2", pytest.param("kimi_linear", marks=pytest.mark.slow)],
)
def test_behind_a_shared_prompt_logprobs_and_gradients_are_those_of_each_sequence_alone(
    folder: Any, kind: str, again: bool
) -> None:
    lm = load_model(folder(kind), dtype=torch.float32, gradient_checkpointing=again).lm
    sequences = behind_prompts()
    layout = lay_out(sequences, np.arange(len(sequences)), min_shared=1)
    assert layout.n_tokens < len(sequences.tokens.values) - 4 * 64
    steady_norms(lm)
    logprobs, _ = backbone_of(lm).logprobs(layout, 1.0)
    logprobs.sum().backward()
    named = {n: p.grad for n, p in lm.named_parameters() if p.grad is not None}
    plain: Any = AutoModelForCausalLM.from_pretrained(folder(kind), attn_implementation="eager")
    plain.eval()
    steady_norms(plain)
    alone: list[Tensor] = []
    for row in sequences.tokens:
        ids = torch.from_numpy(row.astype(np.int64))[None]
        table = plain(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        alone.append(table.gather(1, ids[0, 1:, None])[:, 0])
    expected = torch.cat(alone)
    expected.sum().backward()
    order = np.argsort(layout.column, kind="stable")
    torch.testing.assert_close(logprobs[order], expected, atol=3e-5, rtol=0)
    of_plain = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    assert named.keys() == of_plain.keys()
    apart = sum(float((named[n] - of_plain[n]).square().sum()) for n in named) ** 0.5
    assert apart < 1e-5 * sum(float(g.square().sum()) for g in of_plain.values()) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "lora"), [("qwen3_next", False), ("mamba2", True)], ids=["whole", "adapter"]
)
def test_an_update_is_the_same_with_shared_prompts_and_with_copies(
    folder: Any, kind: str, lora: bool
) -> None:
    """In micro-batches of several groups; with fewer tokens."""
    sequences = behind_prompts()
    rng = np.random.default_rng(1)
    mask = sequences.loss_mask.like(sequences.loss_mask.values.copy())
    noise = (mask.values * rng.normal(size=len(mask.values))).astype(np.float32)
    experience = Experience(
        sequences, {"advantages": mask.like(noise)}, np.ones(len(sequences), np.bool_)
    )
    weights: list[Tensor] = []
    tokens: list[float] = []
    for shortest in (2, NO_SHARING):
        lm: Any = load_model(folder(kind), dtype=torch.float32).lm
        adapter = add_adapter(lm, LoraSettings(rank=2), seed=0) if lora else None
        backbone = Backbone(lm, CPU, MicroBatch(256), adapter=adapter)
        if adapter is None:
            lm.requires_grad_(True)
        backbone.divide(ALONE, "none")
        backbone.min_shared = shortest
        before = torch.cat([p.detach().flatten() for p in lm.parameters()])
        learner = PolicyLearner(backbone, LearnerSettings(lr=1e-2, eps=1e-6), 100)
        for _ in range(2):
            done = learner.update(Update(experience, np.arange(len(sequences))), GRPO()).result()
        weights.append(torch.cat([p.detach().flatten() for p in lm.parameters()]) - before)
        tokens.append(done.metrics["policy/computed_tokens"])
    assert tokens[0] < 0.7 * tokens[1] == 0.7 * len(sequences.tokens.values)
    shared, copied = weights
    assert float((shared - copied).norm()) < 1e-4 * float(copied.norm())


def test_a_mixer_that_does_not_go_on_refuses_a_shared_prompt(folder: Any) -> None:
    backbone = backbone_of(load_model(folder("mamba"), dtype=torch.float32).lm)
    assert backbone.min_shared == NO_SHARING
    with pytest.raises(ValueError, match="mixers do not go on from a state"):
        backbone.logprobs(layout_of([[1, 2, 3, 4], [1, 2, 3, 5]], min_shared=1), 1.0)


def test_a_twin_of_a_model_runs_its_own_mixers(folder: Any) -> None:
    lm: Any = load_model(folder("lfm2"), dtype=torch.float32).lm
    add_adapter(lm, LoraSettings(rank=2), seed=0)
    other: Any = twin(lm)
    layout = layout_of([[5, 6, 7], [5, 6, 8, 9]])
    logprobs = [backbone_of(each).logprobs(layout, 1.0)[0] for each in (lm, other)]
    assert torch.equal(*logprobs)
    assert set(other.state_carrier.mixers) <= set(other.modules())


@pytest.mark.slow
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
    """Plans count them so too."""
    lm = load_model(folder("mamba"), dtype=torch.float32, quantize="4bit").lm
    packed = {name: m for name, m in lm.named_modules() if isinstance(m, FourBitLinear)}
    assert {name.rpartition(".")[2] for name in packed} == {"in_proj"}
    weights = sum(module.in_features * module.out_features for module in packed.values())
    assert find_shape(folder("mamba")).packed_parameters == weights
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
