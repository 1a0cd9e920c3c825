"""What a plan says that a forward pass keeps, against what autograd keeps of a real one."""

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.layout import blocks
from postgrad.learner.backbone import Backbone, MicroBatch
from postgrad.models import head
from postgrad.models.adapters import add_adapter
from postgrad.models.attention import ATTENTION_NAME
from postgrad.models.known_shapes import any_shape, shape_of_model
from postgrad.models.load import Loading, place
from postgrad.models.routers import mixtures_of
from postgrad.models.settings import LoraSettings, ModelSettings
from postgrad.models.shapes import ModelShape, shape_of
from postgrad.plan import activations, passes
from postgrad.plan.activations import Blocks, forward_only, kept, kept_by_layer
from postgrad.plan.lengths import RowLengths
from postgrad.rollout.local import sampler

SIZES = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "tie_word_embeddings": True,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 4}
LORA = LoraSettings(rank=8, alpha=8)
DORA = LORA.model_copy(update={"dora": True})
CPU = torch.device("cpu")


def adapted_backbone(
    kind: str,
    dtype: torch.dtype,
    lora: LoraSettings | None,
    checkpointing: bool,
    sizes: Mapping[str, Any] = SIZES,
) -> Backbone:
    torch.manual_seed(0)
    ends = {"eos_token_id": 1, "pad_token_id": 0}  # of some types the defaults are too large
    config: Any = AutoConfig.for_model(kind, **sizes, **ends)
    lm = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)
    place(lm, "this model", Loading(dtype, CPU), gradient_checkpointing=checkpointing)
    adapter = None if lora is None else add_adapter(lm, lora, seed=0)
    return Backbone(lm, CPU, MicroBatch(), adapter=adapter)


def sequences(count: int, length: int) -> Sequences:
    tokens = [np.full(length, 3 + row, np.int32) for row in range(count)]
    masks = [np.arange(length) >= 1] * count
    return Sequences(Ragged.of(tokens, np.int32), Ragged.of(masks, np.bool_), np.arange(count))


def bytes_kept(backbone: Backbone, of: Sequences) -> int:
    """Of all storages that autograd saves in a forward pass, weights and logits left out."""
    weights = {p.untyped_storage().data_ptr() for p in backbone.lm.parameters()}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        logits = tensor.shape[-1:] == (SIZES["vocab_size"],)
        if not logits and tensor.untyped_storage().data_ptr() not in weights:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    (layout,) = backbone.micro_batches(of, np.arange(len(of)))
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        logprobs, _ = backbone.logprobs(layout, 1.0)
    logprobs.sum().backward()
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("lora", [None, LORA, DORA])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [pytest.param("qwen2", marks=pytest.mark.slow), "qwen3"])
def test_what_is_estimated_is_what_autograd_keeps(
    kind: str, dtype: torch.dtype, lora: LoraSettings | None, checkpointing: bool
) -> None:
    count, length = 2, 600  # three runs of queries
    measured = bytes_kept(
        adapted_backbone(kind, dtype, lora, checkpointing), sequences(count, length)
    )
    shape: ModelShape = shape_of({"model_type": kind, **SIZES})
    geometry = Blocks.of(RowLengths(length / 2, length / 2, 1.0, "here"), 1)
    if checkpointing:  # attention's masks are kept by the context: autograd does not see them
        geometry = replace(geometry, scores=0.0)
    estimated = kept(shape, dtype.itemsize, lora, geometry, checkpointing=checkpointing, cpu=True)
    assert estimated * count * length == pytest.approx(measured, rel=0.05)


def test_sizes_that_a_plan_repeats_are_those_of_the_program() -> None:
    assert (head.CHUNK_BYTES, head.CHUNK_ROWS) == (passes.CHUNK_BYTES, passes.CHUNK_ROWS)
    assert blocks.QUERY_RUN == activations.QUERY_RUN
    assert sampler.CHUNK_VALUES == passes.SAMPLED_TOGETHER


def test_what_a_compiled_layer_keeps_is_worked_by_hand() -> None:
    """Of Qwen3-0.6B, in bfloat16: four times 1 024 (the inputs of norms and of q/k/v, gate/up),
    3 072 three times (gate, up, and down's input), queries and keys of 2 048 and 1 024 before and
    after their norms, values and attention's result; in float32 two scales of norms, those of 24
    heads, and 16 log sums. An adapter of rank 64 on all seven reads the same, and keeps its rows.
    """
    shape = shape_of_model(ModelSettings(path="Qwen/Qwen3-0.6B"))
    numbers = 4 * 1024 + 3 * 3072 + 2 * (2048 + 1024) + 1024 + 2048
    by_hand = 2 * numbers + 4 * (2 + 24 + 16)
    how: Any = {"cpu": False, "compiled": True}
    assert kept_by_layer(shape, 2, None, Blocks(), **how) == by_hand == 45_224
    lora = LoraSettings(rank=64, alpha=64)
    assert kept_by_layer(shape, 2, lora, Blocks(), **how) == by_hand + 2 * 7 * 64


def test_a_mixture_between_compiled_parts_keeps_all_that_it_keeps_alone() -> None:
    """Its block runs as it is. For each of 4 experts of a token: the row that they read and that of
    their output, of 64 numbers each, and gate, up, the activated gate and their product, of 48; of
    a token its input, probabilities of 8 experts in float32, and indices. A frozen block keeps
    neither what the experts read nor the product, nor the token.
    """
    mixture = any_shape(
        {"model_type": "qwen3_moe", **SIZES, **EXPERTS, "moe_intermediate_size": 48}, "a mixture"
    )
    assert mixture.counted is not None
    trained, frozen = (
        next(row for row in mixture.counted.kept if (row.width, row.trains) == (2, trains))
        for trains in (True, False)
    )
    layers = SIZES["num_hidden_layers"]
    rows = 4 * (2 * 64 + 4 * 48) + 64
    assert trained.mixtures / layers == pytest.approx(2 * rows + 4 * 8, rel=0.08)
    left_out = 4 * (64 + 48) + 64
    assert trained.mixtures - frozen.mixtures == pytest.approx(2 * left_out * layers, rel=0.02)
    how: Any = {"cpu": False, "compiled": True}
    dense = replace(mixture, counted=None, intermediate_size=0)
    compiled, outside = (kept_by_layer(s, 2, None, Blocks(), **how) for s in (mixture, dense))
    assert compiled - outside == trained.mixtures // layers


class Live(TorchDispatchMode):
    """The most bytes of storages that are there at a time, of all that begin inside."""

    def __init__(self, before: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.most = 0
        self._holders = Counter(tensor.untyped_storage()._cdata for tensor in before)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._hold(tensor)
        return out

    def _hold(self, tensor: Tensor) -> None:
        storage, size = tensor.untyped_storage()._cdata, tensor.untyped_storage().nbytes()
        if not self._holders[storage]:
            self.now += size
            self.most = max(self.most, self.now)
        self._holders[storage] += 1
        weakref.finalize(tensor, self._let_go, storage, size)

    def _let_go(self, storage: int, size: int) -> None:
        self._holders[storage] -= 1
        if not self._holders[storage]:
            self.now -= size


@pytest.mark.parametrize("inner", [64, 2048], ids=["narrow experts", "wide experts"])
@torch.no_grad()
def test_a_forward_pass_that_keeps_nothing_has_the_rows_of_experts(inner: int) -> None:
    """Of one block of 4 experts a token, narrow and wide beside the residual stream of 512."""
    tokens = 512
    sizes = {**SIZES, **EXPERTS, "num_hidden_layers": 1, "moe_intermediate_size": inner}
    sizes["hidden_size"] = 512
    backbone = adapted_backbone("qwen3_moe", torch.bfloat16, None, False, sizes)
    (block,) = mixtures_of(backbone.lm)
    hidden = torch.randn(1, tokens, 512, dtype=torch.bfloat16)
    with Live((hidden, *block.parameters())) as live:
        block(hidden)
    shape = any_shape(backbone.lm.config.to_dict(), "a mixture")  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    stream = 4 * 512 * 2  # the plan has it beside the block
    estimated = forward_only(shape, 2, Blocks(), cpu=False) - stream
    assert estimated * tokens == pytest.approx(live.most, rel=0.05)


COUNTED = {
    "olmoe": {**EXPERTS, "intermediate_size": 48},
    "qwen3_moe": {**EXPERTS, "moe_intermediate_size": 48},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 4, "intermediate_size": 48},
    "glm4_moe": {
        "n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1,
        "moe_intermediate_size": 48, "first_k_dense_replace": 1, "n_shared_experts": 1,
    },
    "qwen2_moe": {**EXPERTS, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 96},
    "olmo2": {}, "glm4": {}, "apertus": {}, "starcoder2": {}, "granite_swa": {},
    "gemma": {}, "gemma2": {"query_pre_attn_scalar": 16}, "gemma3_text": {},
}  # fmt: skip
FAST = ("olmoe", "gemma3_text")
WITH_SCORES = ("gpt_oss", "granite_swa", "gemma2")  # an estimate: padding of runs is counted twice


@pytest.mark.parametrize("lora", [None, LORA])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[] if k in FAST else pytest.mark.slow) for k in COUNTED]
)
def test_what_is_estimated_of_other_types_is_what_autograd_keeps(
    kind: str, dtype: torch.dtype, lora: LoraSettings | None
) -> None:
    count, length = 2, 600
    sizes = {**SIZES, **COUNTED[kind]}
    backbone = adapted_backbone(kind, dtype, lora, False, sizes)
    actual = bytes_kept(backbone, sequences(count, length))
    config: Any = backbone.lm.config
    shape = any_shape(config.to_dict(), kind)
    geometry = Blocks.of(RowLengths(length / 2, length / 2, 1.0, "here"), 1)
    estimated = kept(shape, dtype.itemsize, lora, geometry, checkpointing=False, cpu=True)
    within = 0.1 if kind in WITH_SCORES else 0.05
    assert estimated * count * length == pytest.approx(actual, rel=within)
