"""A second witness for shapes too large to run: torch's fake tensors, which have shapes alone."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModelForCausalLM

from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.learner.backbone import Backbone, MicroBatch
from postgrad.models.attention import ATTENTION_NAME
from postgrad.models.linear import fuse_norms, speed_up
from postgrad.models.shapes import shape_of
from postgrad.plan.activations import Blocks, kept
from postgrad.plan.lengths import RowLengths

pytestmark = pytest.mark.slow
LAYERS = 2
QWEN_7B = {
    "vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944,
    "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_70B = {
    "vocab_size": 128_256, "hidden_size": 8192, "intermediate_size": 28_672,
    "num_attention_heads": 64, "num_key_value_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(("kind", "sizes"), [("qwen2", QWEN_7B), ("llama", LLAMA_70B)])
def test_what_layers_of_large_models_keep_is_what_fake_tensors_say(
    kind: str, sizes: dict[str, int]
) -> None:
    count, length = 4, 2048
    shape = shape_of({"model_type": kind, "num_hidden_layers": LAYERS, **sizes})
    tokens = [np.full(length, 3 + row, np.int32) for row in range(count)]
    masks = [np.arange(length) == length - 1] * count  # few logits: the layers are what counts
    of = Sequences(Ragged.of(tokens, np.int32), Ragged.of(masks, np.bool_), np.arange(count))
    saved: dict[int, int] = {}
    cpu = torch.device("cpu")
    with FakeTensorMode(allow_non_fake_inputs=True):
        config = AutoConfig.for_model(kind, num_hidden_layers=LAYERS, **sizes)
        lm = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME
        )
        speed_up(lm, cpu)
        fuse_norms(lm, cpu)
        weights = {p.untyped_storage()._cdata for p in lm.parameters()}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in weights:
                saved[storage._cdata] = storage.nbytes()
                alive.append(tensor)
            return tensor

        alive: list[Tensor] = []  # so that no storage's place is taken by another
        backbone = Backbone(lm.eval(), cpu, MicroBatch(count * length))
        (layout,) = backbone.micro_batches(of, np.arange(count))
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            backbone.logprobs(layout, 1.0)
    geometry = Blocks.of(RowLengths(length / 2, length / 2, 1.0, "here"), 1)
    each = kept(shape, 2, None, geometry, checkpointing=False, cpu=True)
    assert each * count * length == pytest.approx(sum(saved.values()), rel=0.05)
