"""Compiled layers give the outputs and gradients of plain ones, from few graphs."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from transformers import AutoConfig, AutoModelForCausalLM

from postgrad.algorithms.sft import SFT
from postgrad.core.ragged import Ragged
from postgrad.core.records import Experience, Sequences
from postgrad.learner.backbone import COMPILED_TOKENS, Backbone, MicroBatch
from postgrad.learner.policy import PolicyLearner
from postgrad.learner.settings import LearnerSettings
from postgrad.learner.update import Update
from postgrad.models import linear, tree
from postgrad.models.adapter_layers import AdaptedLinear
from postgrad.models.adapters import add_adapter
from postgrad.models.attention import ATTENTION_NAME, layers_of, windows_of
from postgrad.models.compiled import LayerSums, head_kernels
from postgrad.models.embedding_noise import EmbeddingNoise
from postgrad.models.recompute import HOST_INPUTS, recompute_activations
from postgrad.models.settings import LoraSettings, Recompute
from postgrad.parallel.ranks import ALONE

CPU = torch.device("cpu")
EAGER = "aot_eager"  # graphs are made as for CUDA, and their operations run one by one
LAYERS = 3
PRODUCTS = (  # the last is in place, and not yet in a graph before it is lowered
    torch.ops.aten.mm.default,
    torch.ops.higher_order.auto_functionalized_v2,
)
TYPES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "gemma2": {"attn_logit_softcapping": 2.0, "sliding_window": 8},
}


@pytest.fixture(autouse=True)
def _no_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tree, "NARROWEST", 1)  # the heads here have 8 numbers
    # torch has no kernel of flex attention's backward for CPUs; its operations one by one work
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    torch._dynamo.reset()
    head_kernels.cache_clear()
    counters.clear()
    yield
    torch._dynamo.reset()


def model_of(name: str) -> Any:
    config = AutoConfig.for_model(
        name,
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.2,
        **TYPES[name],
    )
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config).eval()
    lm.set_attn_implementation(ATTENTION_NAME)
    return lm


def sequences_of(seed: int) -> Sequences:
    """Some prompts with three answers each, of other lengths for every seed."""
    rng = np.random.default_rng(seed)
    tokens, masks, group = [], [], []
    for number in range(1 + seed % 4):
        prompt = rng.integers(0, 61, rng.integers(9, 40))
        for _ in range(3):
            response = rng.integers(0, 61, rng.integers(20, 90))
            tokens.append(np.concatenate([prompt, response]))
            masks.append(np.arange(len(tokens[-1])) >= len(prompt))
            group.append(number)
    return Sequences(Ragged.of(tokens, np.int32), Ragged.of(masks, bool), np.array(group))


def outcome(backbone: Backbone, seed: int) -> tuple[Tensor, Tensor]:
    """Logprobs, and the gradient of a sum of them."""
    sequences = sequences_of(seed)
    (layout,) = backbone.micro_batches(sequences, np.arange(len(sequences)))
    logprobs, _ = backbone.logprobs(layout, 1.0)
    (logprobs * torch.linspace(-1.0, 1.0, len(logprobs))).sum().backward()
    gradients = [p.grad.flatten() for p in backbone.lm.parameters() if p.grad is not None]
    backbone.lm.zero_grad()
    return logprobs.detach(), torch.cat(gradients)


def require_same(backbone: Backbone, plain: Backbone, seeds: range) -> None:
    for seed in seeds:
        logprobs, gradient = outcome(backbone, seed)
        expected, expected_gradient = outcome(plain, seed)
        torch.testing.assert_close(logprobs, expected, atol=3e-5, rtol=1e-5)
        assert (gradient - expected_gradient).norm() <= 1e-5 * expected_gradient.norm()


def both(name: str, attention: str = "flex", compiler: str = EAGER) -> tuple[Backbone, Backbone]:
    """A model with compiled layers, and the same one without."""
    backbone = Backbone(model_of(name), CPU, MicroBatch(), attention, compiler=compiler)
    return backbone, Backbone(model_of(name), CPU, MicroBatch(), "sdpa")


def bytes_kept(backbone: Backbone, seed: int) -> int:
    """What a forward keeps for its backward, without parameters."""
    kept: dict[int, int] = {}
    parameters = {parameter.data_ptr() for parameter in backbone.lm.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in parameters:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    sequences = sequences_of(seed)
    (layout,) = backbone.micro_batches(sequences, np.arange(len(sequences)))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        backbone.logprobs(layout, 1.0)
    return sum(kept.values())


def hint(size: Any) -> int:
    """What a symbol was when its graph was made; reading it as a number would fix it."""
    return size.node.hint if isinstance(size, torch.SymInt) else size


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.slow
def test_fifty_layouts_of_different_sizes_need_one_graph() -> None:
    backbone, plain = both("qwen3")
    require_same(backbone, plain, range(3))
    sizes: set[int] = set()
    for seed in range(3, 50):
        sequences = sequences_of(seed)
        (layout,) = backbone.micro_batches(sequences, np.arange(len(sequences)))
        backbone.logprobs(layout, 1.0)
        sizes.add(layout.n_tokens)
    assert len(sizes) > 40
    # Two of layers, for layouts in one square of scores and for longer ones, and two of the head.
    assert graphs() <= 4
    assert not counters["graph_break"]


@pytest.mark.slow
def test_soft_caps_and_windows_are_compiled() -> None:
    backbone, plain = both("gemma2")
    assert windows_of(backbone.lm) == (None, 8)
    require_same(backbone, plain, range(3))
    assert not counters["graph_break"]


def checkpointed(
    attention: str = "flex", compiler: str | None = EAGER, how: Recompute = True
) -> Backbone:
    """A model in training whose layers compute their activations again."""
    lm = model_of("qwen3")
    recompute_activations(lm, how)
    lm.train()
    return Backbone(lm, CPU, MicroBatch(), attention, compiler=compiler)


@pytest.mark.slow
def test_checkpointed_layers_keep_their_inputs_alone() -> None:
    backbone, (compiled_backbone, plain) = checkpointed(), both("qwen3")
    assert bytes_kept(backbone, 1) < bytes_kept(compiled_backbone, 1) / 2
    require_same(backbone, plain, range(1, 3))
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize("adapted", [False, pytest.param(True, marks=pytest.mark.long)])
def test_inputs_in_the_hosts_memory_change_no_bit_and_add_no_graph(
    adapted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "has_fast_products", lambda: False)  # asked on a CPU only
    outcomes: list[tuple[Tensor, Tensor]] = []
    graph_counts: list[int] = []
    for how in (True, "offload"):
        torch._dynamo.reset()
        counters.clear()
        head_kernels.cache_clear()
        backbone = checkpointed(how=how)
        if adapted:
            give_adapters(backbone)
        outcomes.append(outcome(backbone, 1))
        graph_counts.append(graphs())
        assert not counters["graph_break"]
        on_host = [hasattr(layer, HOST_INPUTS) for layer in layers_of(backbone.lm)]
        assert on_host == [how == "offload"] * LAYERS
    assert all(torch.equal(*pair) for pair in zip(*outcomes, strict=True))
    assert graph_counts[0] == graph_counts[1]


@pytest.mark.slow
@pytest.mark.parametrize("adapted", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_backward_pass_computes_no_product_again_that_no_gradient_needs(
    adapted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the seven products of a layer six: nothing reads the results of the last. With adapters
    there are four groups of layers that read the same input: the forward pass takes three products
    for each, the backward pass five; of the last group it computes only x A^T again.
    """
    monkeypatch.setattr(linear, "has_fast_products", lambda: False)  # asked on a CPU only
    products: dict[str, list[int]] = {"forward": [], "backward": []}

    def noted(kind: str) -> Any:
        def compiler(graph: Any, _: list[Any]) -> Any:
            calls = [node.target for node in graph.graph.nodes]
            products[kind].append(sum(calls.count(operation) for operation in PRODUCTS))
            return make_boxed_func(graph.forward)

        return compiler

    partition = min_cut_rematerialization_partition
    backend: Any = aot_autograd(
        fw_compiler=noted("forward"), bw_compiler=noted("backward"), partition_fn=partition
    )
    backbone = checkpointed(compiler=backend)
    if adapted:
        give_adapters(backbone)
    outcome(backbone, 1)
    assert max(products["forward"]) == (4 * 3 if adapted else 7)
    assert max(products["backward"]) == (3 * 3 + 1 + 4 * 5 if adapted else 6 + 2 * 7)
    assert not counters["graph_break"]


@pytest.mark.slow
def test_checkpointed_layers_with_attention_in_blocks_are_checkpointed_around_it() -> None:
    backbone, plain = checkpointed("sdpa"), both("qwen3")[1]
    assert bytes_kept(backbone, 1) < bytes_kept(plain, 1) / 2
    require_same(backbone, plain, range(1, 3))


def give_adapters(*backbones: Backbone, dropout: float = 0.0) -> None:
    for backbone in backbones:
        settings = LoraSettings(rank=2, dropout=dropout)
        backbone.adapter = add_adapter(backbone.lm, settings, seed=0)
        for name, parameter in backbone.adapter.parameters().items():
            if "lora_B" in name:
                torch.nn.init.constant_(parameter, 0.01)  # more saturates the softmax


@pytest.mark.slow
@pytest.mark.long
def test_checkpointed_adapters_drop_the_same_inputs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "has_fast_products", lambda: False)  # asked on a CPU only
    backbone, plain = checkpointed(), both("qwen3")[1]
    give_adapters(backbone, plain, dropout=0.4)
    with_dropout = []
    for each in (backbone, plain):
        sequences = sequences_of(1)
        (layout,) = each.micro_batches(sequences, np.arange(len(sequences)))
        with each.dropping(layout, 1):
            with_dropout.append(outcome(each, 1))
    (logprobs, gradient), (expected, expected_gradient) = with_dropout
    torch.testing.assert_close(logprobs, expected, atol=3e-5, rtol=1e-5)
    assert (gradient - expected_gradient).norm() <= 1e-5 * expected_gradient.norm()
    assert (outcome(plain, 1)[1] - expected_gradient).norm() > 0.1 * expected_gradient.norm()
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.long
def test_adapters_are_compiled_and_switched_off() -> None:
    backbone, plain = both("qwen3")
    give_adapters(backbone, plain)
    backbone.divide(ALONE, "none")  # as every run does, also of one process
    require_same(backbone, plain, range(1, 3))
    adapted = [layer for layer in backbone.lm.modules() if isinstance(layer, AdaptedLinear)]
    joined = {layer.place for layer in adapted if layer.siblings._joined is not None}
    assert joined == {0, 1, 2}  # queries, keys and values are one product
    with torch.no_grad(), backbone.as_base(), plain.as_base():
        sequences = sequences_of(1)
        (layout,) = plain.micro_batches(sequences, np.arange(len(sequences)))
        without = backbone.logprobs(layout, 1.0)[0]
        torch.testing.assert_close(without, plain.logprobs(layout, 1.0)[0], atol=3e-5, rtol=1e-5)
    assert (without - outcome(backbone, 1)[0]).abs().max() > 1e-3


@pytest.mark.slow
def test_attention_in_blocks_stays_outside() -> None:
    backbone, plain = both("qwen3", "sdpa")
    require_same(backbone, plain, range(4))
    assert graphs() <= 10  # two of them of the head


@pytest.mark.slow
@pytest.mark.long
def test_graphs_are_made_for_the_same_sizes_whatever_comes_first() -> None:
    def sizes_in(seed: int) -> list[Any]:
        seen: list[Any] = []

        def backend(graph: Any, inputs: list[Any]) -> Any:
            tensors = [input_tensor for input_tensor in inputs if isinstance(input_tensor, Tensor)]
            seen.append([[hint(size) for size in tensor.shape] for tensor in tensors])
            return graph.forward

        torch._dynamo.reset()
        outcome(Backbone(model_of("qwen3"), CPU, MicroBatch(), "sdpa", compiler=backend), seed)  # pyright: ignore[reportArgumentType]
        return seen

    seen = sizes_in(1)
    assert any(COMPILED_TOKENS + 16 in shape for graph in seen for shape in graph)
    assert sizes_in(2) == seen


@pytest.mark.slow
def test_too_many_graphs_are_an_error_and_never_a_plain_layer() -> None:
    backbone, _ = both("qwen3")
    outcome(backbone, 1)
    sequences = sequences_of(1)
    (layout,) = backbone.micro_batches(sequences, np.arange(len(sequences)))
    limited = torch._dynamo.config.patch(recompile_limit=1)
    with limited, torch.no_grad(), pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        backbone.logprobs(layout, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_a_layer_are_added_together_to_the_same_bits(dtype: torch.dtype) -> None:
    names = [f"model.layers.{layer}.{kind}.weight" for layer in range(3) for kind in "abc"]
    names.append("model.norm.weight")
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.nn.Parameter(torch.zeros(5, dtype=dtype)) for name in names}
    masters = {name: torch.nn.Parameter(torch.zeros(5)) for name in names}
    sums = LayerSums(weights, EAGER)
    for missing in (None, None, "model.layers.1.b.weight", None):
        total, slopes = torch.zeros(()), torch.randn(len(names), 5, generator=generator)
        for slope, (name, weight) in zip(slopes, weights.items(), strict=True):
            if name != missing:
                total = total + (weight * slope.to(dtype)).sum()
                masters[name].grad = slope.to(dtype).float() + (
                    0.0 if masters[name].grad is None else masters[name].grad
                )
        total.backward()
    expected = {name: master.grad for name, master in masters.items()}
    sums.hand_over(masters)
    for name in names[:-1]:
        assert weights[name].grad is None
        torch.testing.assert_close(masters[name].grad, expected[name], rtol=0.0, atol=0.0)
        assert masters[name].grad is not expected[name]
    assert weights["model.norm.weight"].grad is not None  # the optimizer's own hooks take it
    assert graphs() == 1
    again = dict.fromkeys(names)
    for master in masters.values():
        master.grad = None
    sums.hand_over(masters)
    assert {name: master.grad for name, master in masters.items()} == again


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_learner_of_compiled_layers_has_the_gradients_of_every_micro_batch(
    dtype: torch.dtype,
) -> None:
    norms = []
    for tokens in (None, 120):
        lm = model_of("qwen3").to(dtype)
        backbone = Backbone(lm, CPU, MicroBatch(max_tokens=tokens), "flex", compiler="eager")
        sequences = sequences_of(1)
        experience = Experience(sequences, {}, np.ones(len(sequences), bool))
        learner = PolicyLearner(backbone, LearnerSettings(), 10)
        update = Update(experience, np.arange(len(sequences)))
        norms.append(learner.update(update, SFT()).result().metrics["policy/grad_norm"])
    assert norms[0] > 0.1
    assert norms[1] == pytest.approx(norms[0], rel=1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.slow
def test_noise_on_embeddings_is_not_compiled_and_stays_that_of_the_layout() -> None:
    """What layers are compiled with is a forward of its own, inside the update."""
    norms = []
    for compiler in (None, "eager"):
        lm = model_of("qwen3")
        backbone = Backbone(lm, CPU, MicroBatch(max_tokens=120), "sdpa", compiler=compiler)
        backbone.noise = EmbeddingNoise(lm, 50.0, seed=3)
        sequences = replace(sequences_of(1), group=np.arange(len(sequences_of(1))))
        experience = Experience(sequences, {}, np.ones(len(sequences), bool))
        learner = PolicyLearner(backbone, LearnerSettings(), 10)
        update = Update(experience, np.arange(len(sequences)))
        norms.append(learner.update(update, SFT()).result().metrics["policy/grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


@pytest.mark.slow
@pytest.mark.long
def test_generated_kernels_give_the_same_up_to_rounding() -> None:
    """torch computes flex attention on a CPU without gradients only, so that it lies outside."""
    backbone, plain = both("qwen3", "sdpa", "inductor")
    require_same(backbone, plain, range(3))
    assert graphs() > 0
