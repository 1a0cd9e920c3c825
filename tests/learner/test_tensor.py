"""Which models' matrices can be cut, and what is said of the others."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from helpers.image_models import IMAGE_MODELS, fresh
from helpers.rank_cases import Case, model
from postgrad.core.errors import UsageError
from postgrad.learner.context import require_heads
from postgrad.learner.settings import LearnerSettings
from postgrad.learner.tensor import cut_matrices, require_divisible, require_matrices
from postgrad.models.adapter_dropout import CounterDropout, RowMasks
from postgrad.models.adapters import add_adapter
from postgrad.models.images import image_part
from postgrad.models.settings import LoraSettings
from postgrad.parallel.ranks import Grid
from postgrad.parallel.sharding import cut_dim

DENSE = ("qwen2", "qwen3", "llama", "mistral", "gemma", "gemma2", "gemma3_text")


def config(kind: str, **changes: int | bool):
    sizes = {
        "hidden_size": 48, "intermediate_size": 72, "num_attention_heads": 12,
        "num_key_value_heads": 6, "num_hidden_layers": 2, "head_dim": 4, "vocab_size": 37,
    }  # fmt: skip
    return AutoConfig.for_model(kind, **{**sizes, **changes})


@pytest.mark.parametrize("kind", DENSE)
def test_a_dense_decoder_can_be_cut_into_what_divides_its_heads_and_features(kind: str) -> None:
    for size in (1, 2, 3, 6):
        require_matrices(config(kind), size)
    message = "4: 6 key heads of this .* cannot be cut into 4 equal parts; what works: 1, 2, 3, 6"
    with pytest.raises(UsageError, match=f"learner.tensor_parallel = {message}"):
        require_matrices(config(kind), 4)


def test_features_that_do_not_divide_are_named() -> None:
    with pytest.raises(UsageError, match=r"71 inner features \(intermediate_size\)"):
        require_matrices(config("llama", intermediate_size=71), 2)


@pytest.mark.parametrize("kind", ["olmoe", "gpt_oss", "deepseek_v3", "gemma3n_text", "gpt2"])
def test_a_model_with_other_matrices_is_refused(kind: str) -> None:
    with pytest.raises(UsageError, match=f"a {kind} model has no plan for it, or one with other"):
        require_matrices(AutoConfig.for_model(kind), 2)


@pytest.mark.parametrize(("kind", "inner"), [("qwen3_moe", True), ("mixtral", False)])
def test_of_a_mixture_attention_is_cut_and_an_mlp_where_it_may_have_one(
    kind: str, inner: bool
) -> None:
    require_matrices(config(kind), 3)
    odd = config(kind, intermediate_size=71)
    if inner:
        with pytest.raises(UsageError, match=r"71 inner features \(intermediate_size\)"):
            require_matrices(odd, 2)
    else:
        require_matrices(odd, 2)
    with pytest.raises(UsageError, match=r"6 key heads .* what works: 1, 2, 3, 6"):
        require_matrices(config(kind), 4)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_rows_and_matrices_of_layers_that_carry_a_state_are_not_shared(
    kind: str, tmp_path: Path
) -> None:
    IMAGE_MODELS[kind].config().save_pretrained(tmp_path)
    for key in ("tensor_parallel", "context_parallel"):
        learner = LearnerSettings.model_validate({"ranks": 2, key: 2})
        with pytest.raises(UsageError, match=f"a {kind} model carries a state along each sequence"):
            require_divisible(learner, str(tmp_path))
    require_divisible(LearnerSettings(ranks=2, sharding="zero3"), str(tmp_path))


@pytest.mark.parametrize("kind", [k for k in IMAGE_MODELS if not k.startswith("qwen3_5")])
def test_of_a_model_that_reads_images_the_decoder_alone_is_cut(kind: str, tmp_path: Path) -> None:
    lm = fresh(kind)
    lm.config.save_pretrained(tmp_path)
    require_divisible(LearnerSettings(ranks=2, tensor_parallel=2), str(tmp_path))
    names = {name for name, _ in lm.named_parameters() if cut_dim(name) is not None}
    assert names
    assert not [name for name in names if image_part(name) is not None]


@pytest.mark.parametrize("key", ["attention_bias", "mlp_bias"])
def test_a_bias_that_every_rank_would_add_is_refused(key: str) -> None:
    with pytest.raises(UsageError, match="bias after attention or MLP"):
        require_matrices(config("llama", **{key: True}), 2)


def test_context_parallel_deals_the_heads_that_tensor_parallel_leaves() -> None:
    require_heads(config("llama"), 2, 6)
    message = "2: 3 attention heads with 1 key heads that tensor_parallel = 4 leaves each rank"
    with pytest.raises(UsageError, match=f"context_parallel = {message}"):
        require_heads(config("llama", num_key_value_heads=4), 2, 4)


def test_every_matrix_of_a_layer_has_a_cut_and_nothing_else_has() -> None:
    names = [name for name, _ in model(Case("none")).named_parameters()]
    cut = {re.sub(r"\d+", "N", name) for name in names if cut_dim(name) is not None}
    assert len(cut) == 7
    assert all(name.endswith("_proj.weight") for name in cut)


def test_a_part_of_an_adapters_inputs_drops_what_the_whole_would_there() -> None:
    masks, rows = RowMasks(3, 0.5), torch.arange(5)
    x = torch.ones(5, 16)
    with masks.of(rows, 0):
        full_output = CounterDropout(masks, "o_proj", 16, x.device)(x)
        second = CounterDropout(masks, "o_proj", 16, x.device)
        second.cut(1, 2)
        assert torch.equal(second(x[:, 8:]), full_output[:, 8:])
    with pytest.raises(UsageError, match=r"14 inputs that tensor_parallel cuts in 2.*dropout = 0"):
        CounterDropout(masks, "o_proj", 14, x.device).cut(0, 2)


def test_dropout_of_adapters_on_what_is_not_cut_is_refused() -> None:
    """Its masks have keys of the rows of all ranks, and a shared expert reads those of one."""
    ranks: Any = SimpleNamespace(
        grid=Grid(tensor=2), tensor_rank=0, groups=SimpleNamespace(tensor=None)
    )
    for targets, refused_target in (
        (("q_proj",), None),
        (("q_proj", "up_proj"), "shared_expert.up_proj"),
    ):
        lm = model(Case("none", type="qwen2_moe"))
        add_adapter(lm, LoraSettings(rank=2, alpha=2, dropout=0.5, targets=targets), seed=1)
        if refused_target is None:
            cut_matrices(lm, ranks)
        else:
            with pytest.raises(
                UsageError, match=rf"model\.lora\.dropout on .*{refused_target}.* use 0"
            ):
                cut_matrices(lm, ranks)


def test_an_adapted_layer_has_the_features_that_it_is_left() -> None:
    """Compiled layers split the product of several by them."""
    lm = model(Case("none", compiled=True))
    adapter = add_adapter(lm, LoraSettings(rank=2, alpha=2), seed=1)
    ranks: Any = SimpleNamespace(
        grid=Grid(tensor=2), tensor_rank=0, groups=SimpleNamespace(tensor=None)
    )
    cut_matrices(lm, ranks)
    modules: dict[str, Any] = dict(lm.named_modules())
    adapted = {name: each for name, each in modules.items() if hasattr(each, "base_layer")}
    assert len(adapted) == 7 * lm.config.num_hidden_layers
    for name, layer in adapted.items():
        sizes = layer.out_features, layer.in_features
        assert sizes == tuple(layer.base_layer.weight.shape), name
        a, b = layer.lora_A[adapter.name].weight, layer.lora_B[adapter.name].weight
        assert sizes == (len(b), a.shape[1])
