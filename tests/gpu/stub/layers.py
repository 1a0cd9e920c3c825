"""What compiled layers, attention kernels and block masks ask of the stub. Prints JSON by case.

layers.py types          every tested model type, one forward and backward through compiled layers,
                         with and without checkpointing
layers.py heads          flex attention alone, for heads of several widths
layers.py micro-batches  Qwen3-0.6B: launches, waits and copies of micro-batches, graphs of 50
layers.py shared         the same of one of two ranks that share rows or matrices of 4 layers
layers.py kept           bytes a token that a compiled layer keeps, beside the plan's
layers.py recomputed     Qwen3-0.6B: bytes that are kept and the peak, launches and copies, where
                         activations are kept, or computed again, all of them or the cheap ones
layers.py updates        the same of a micro-batch within an update: head, loss, sum of gradients;
                         copies of a fresh adapter
"""

import json
import sys
from copy import deepcopy
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import AutoConfig, AutoModelForCausalLM
from update import experience

from benchmarks.plan_memory_gpu_child import OneOfRanks
from helpers.stub_device import counts, reset
from postgrad.algorithms.grpo import GRPO
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.layout.layout import Layout
from postgrad.learner.backbone import Backbone, MicroBatch
from postgrad.learner.policy import PolicyLearner
from postgrad.learner.settings import LearnerSettings
from postgrad.learner.update import Update
from postgrad.models import compiled
from postgrad.models.adapters import add_adapter
from postgrad.models.attention import ATTENTION_NAME
from postgrad.models.load import Loading, place
from postgrad.models.settings import LoraSettings, Recompute
from postgrad.models.shapes import shape_of
from postgrad.models.tree import FlexAttention
from postgrad.parallel.device import Placement, apply
from postgrad.parallel.ranks import Grid
from postgrad.plan.activations import Blocks, kept_by_layer

CUDA = torch.device("cuda")
WINDOW = {"sliding_window": 200}
TYPES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 128},
    "llama": {"head_dim": 64},
    "mistral": {"head_dim": 128, **WINDOW},
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256, **WINDOW},
    "gemma3_text": {
        "head_dim": 256,
        **WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
QWEN3: dict[str, Any] = {  # Qwen3-0.6B
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "tie_word_embeddings": True,
}  # fmt: skip
HEADS = (16, 32, 64, 96, 128, 192, 256)
LENGTH = 1024  # tokens of each of the four samples of a micro-batch in an update
LAUNCHES = ("launches", "to_device", "from_device", "on_device", "pageable", "waits")


def model_of(name: str, **sizes: Any) -> Any:
    """A model on the stub, whose memory is never touched."""
    with CUDA:
        lm = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(name, **sizes), dtype=torch.bfloat16
        )
    lm.set_attn_implementation(ATTENTION_NAME)
    return lm.eval()


def layout_of(backbone: Backbone, seed: int) -> Layout:
    """Answers to prompts that they share, of other lengths for every seed."""
    rng = np.random.default_rng(seed)
    tokens, masks, group = [], [], []
    for number in range(1 + seed % 5):
        prompt = rng.integers(0, 99, rng.integers(90, 300))
        for _ in range(3):
            response = rng.integers(0, 99, rng.integers(90, 400))
            tokens.append(np.concatenate([prompt, response]))
            masks.append(np.arange(len(tokens[-1])) >= len(prompt))
            group.append(number)
    sequences = Sequences(Ragged.of(tokens, np.int32), Ragged.of(masks, bool), np.array(group))
    (layout,) = backbone.micro_batches(sequences, np.arange(len(tokens)))
    return layout


def asked(call: Any) -> dict[str, int]:
    """What a call asked of the device."""
    reset()
    call()
    return {name: counts()[name] for name in LAUNCHES}


def graphs_of(call: Any) -> dict[str, Any]:
    """How many graphs a call made, or its error."""
    torch._dynamo.reset()
    counters.clear()
    try:
        call()
    except Exception as error:  # noqa: BLE001  # the test reports every case, with the error of each
        return {"error": f"{type(error).__name__}: {error}"[-1500:]}
    return {"error": None, "graphs": counters["stats"]["unique_graphs"]}


def compiled_type(name: str, *, checkpointed: bool) -> None:
    sizes = {
        "vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, **TYPES[name],
    }  # fmt: skip
    lm = model_of(name, **sizes)
    place(lm, "a model", Loading(torch.bfloat16, CUDA), gradient_checkpointing=checkpointed)
    backbone = Backbone(lm, CUDA, MicroBatch(), compiler="inductor")
    backbone.logprobs(layout_of(backbone, 1), 1.0)[0].sum().backward()


def head(width: int, dtype: torch.dtype) -> None:
    backbone = Backbone(
        model_of("qwen3", vocab_size=128, num_hidden_layers=1, hidden_size=64), CUDA, MicroBatch()
    )
    layout = layout_of(backbone, 1)
    query, key, value = (
        torch.zeros(heads, layout.n_tokens, width, device=CUDA, dtype=dtype, requires_grad=True)
        for heads in (4, 2, 2)
    )
    attended: Tensor = FlexAttention(layout, CUDA).attend(
        0, query, key, value, scale=0.1, window=None, softcap=50.0 if width == 256 else None
    )
    attended.sum().backward()


def micro_batches() -> dict[str, Any]:
    lm = model_of("qwen3", **QWEN3)
    reports: dict[str, Any] = {}
    for name, compiler in (("plain", None), ("compiled", "inductor")):
        backbone = Backbone(lm, CUDA, MicroBatch(), compiler=compiler)
        layouts = [layout_of(backbone, seed) for seed in range(50)]

        def step(layout: Layout, backbone: Backbone = backbone) -> None:
            hidden = backbone._run(layout, None, lambda _, states: states)
            hidden.sum().backward()

        for layout in layouts[:3]:  # each graph, once: Triton tries kernels as they first run
            step(layout)
        reports[name] = asked(lambda layout=layouts[2], step=step: step(layout))

        def with_head(layout: Layout = layouts[2], backbone: Backbone = backbone) -> None:
            backbone.logprobs(layout, 1.0)[0].sum().backward()

        with_head()
        reports[f"{name}, with the head"] = asked(with_head)
    reports["masks"] = asked(lambda: FlexAttention(layouts[3], CUDA, (None, 200)))
    counters.clear()
    torch._dynamo.reset()
    for layout in layouts:
        step(layout)
    reports["graphs"] = counters["stats"]["unique_graphs"]
    return reports


def shared() -> dict[str, Any]:
    """Of one of two ranks that share rows or matrices; the other is not there."""
    reports: dict[str, Any] = {}
    layers = 4
    lm = model_of("qwen3", **QWEN3 | {"vocab_size": 512, "num_hidden_layers": layers})
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    for name, grid in {"rows": Grid(context=2), "matrices": Grid(tensor=2)}.items():
        for way, compiler in (("plain", None), ("compiled", "inductor")):
            torch._dynamo.reset()
            backbone = Backbone(deepcopy(lm), CUDA, MicroBatch(), compiler=compiler)
            backbone.divide(OneOfRanks(0, 2, "cuda", dist.HashStore(), grid), "none")
            layouts = [layout_of(backbone, seed) for seed in range(8)]

            def step(layout: Layout, backbone: Backbone = backbone) -> None:
                rows = backbone.rows_of_rank(layout)
                backbone._run(layout, rows, lambda _, states: states).sum().backward()

            counters.clear()
            for layout in layouts:
                step(layout)
            graphs = counters["stats"]["unique_graphs"]
            of_one = asked(lambda step=step, layouts=layouts: step(layouts[2]))
            reports[f"{name}, {way}"] = {**of_one, "graphs": graphs, "layers": layers}
    dist.destroy_process_group()
    return reports


def learner(*, checkpointed: bool, lora: bool) -> PolicyLearner:
    lm = model_of("qwen3", **QWEN3)
    place(lm, "a model", Loading(torch.bfloat16, CUDA), gradient_checkpointing=checkpointed)
    adapter = add_adapter(lm, LoraSettings(), seed=0) if lora else None
    backbone = Backbone(lm, CUDA, MicroBatch(4 * LENGTH), adapter=adapter, compiler="inductor")
    return PolicyLearner(backbone, LearnerSettings(), 10)


def updates() -> dict[str, dict[str, int]]:
    """What a micro-batch adds to an update: one of three asks that much more than one of two."""
    lm, adapter = model_of("qwen3", **QWEN3), LoraSettings()
    reports = {"a fresh adapter": asked(lambda: add_adapter(lm, adapter, seed=0))}
    for checkpointed in (False, True):
        for lora in (False, True):
            role = learner(checkpointed=checkpointed, lora=lora)

            def step(count: int, role: PolicyLearner = role) -> None:
                samples = 4 * count
                role.update(Update(experience(samples, LENGTH), np.arange(samples)), GRPO())  # pyright: ignore[reportCallIssue]

            step(2)
            two, three = (asked(lambda count=count, step=step: step(count)) for count in (2, 3))
            name = ("checkpointed" if checkpointed else "whole") + (", LoRA" if lora else "")
            reports[name] = {count: three[count] - two[count] for count in LAUNCHES}
            del role, step
    return reports


def keeps_products(_: Any, operation: Any, *args: Any, **named: Any) -> CheckpointPolicy:
    """The cheap operations of a layer are computed again: norms, rotations, activations."""
    dear = ("aten.mm.", "flex_attention")
    keeps = any(name in str(operation) for name in dear)
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


def passed(way: Recompute | str, compiler: str | None) -> dict[str, Any]:
    """Bytes beside weights and gradients after a forward pass and at most, and what it asked of the
    device with its backward pass. way: as in a recipe; "selective": torch's policy for operations.
    """
    torch._dynamo.reset()
    lm = model_of("qwen3", **QWEN3)
    how: Recompute = True if way == "selective" else way  # type: ignore[assignment]
    place(lm, "a model", Loading(torch.bfloat16, CUDA), gradient_checkpointing=how)
    selecting: dict[str, Any] = {}
    if way == "selective":
        contexts = partial(create_selective_checkpoint_contexts, keeps_products)
        selecting = {"context_fn": contexts, "preserve_rng_state": False, "use_reentrant": False}
        for module in lm.modules():
            if hasattr(module, "_gradient_checkpointing_func"):
                module._gradient_checkpointing_func = partial(checkpoint, **selecting)
    backbone = Backbone(lm, CUDA, MicroBatch(8 * LENGTH), compiler=compiler)
    rows = Ragged.of([np.arange(LENGTH) % 90 + row for row in range(8)], np.int32)
    mask = rows.like(np.tile(np.arange(LENGTH) > 0, 8))
    sequences = Sequences(rows, mask, np.arange(8))
    (layout,) = backbone.micro_batches(sequences, np.arange(8))
    memory: dict[str, Any] = {}
    with patch.object(compiled, "checkpoint", partial(checkpoint, **selecting)):
        for _ in range(3):  # gradients are there from the first on, graphs too
            before, _ = torch.cuda.memory_allocated(), torch.cuda.reset_peak_memory_stats()
            reset()
            hidden = backbone._run(layout, None, lambda _, states: states)
            memory["kept"] = torch.cuda.memory_allocated() - before
            hidden.sum().backward()
            del hidden
            memory |= {name: counts()[name] for name in LAUNCHES}
            memory["peak"] = torch.cuda.max_memory_allocated() - before
    return memory


def recomputed() -> dict[str, Any]:
    ways: dict[str, Recompute | str] = {
        "kept": False, "computed again": True, "inputs on the host": "offload",
        "products kept": "selective",
    }  # fmt: skip
    return {
        f"{name}{', compiled' * (compiler is not None)}": passed(way, compiler)
        for compiler in (None, "inductor")
        for name, way in ways.items()
    }


def kept_bytes(name: str, layers: int, *, lora: bool) -> tuple[float, int]:
    """Bytes a token that compiled layers keep for a backward pass, and those of one as planned."""
    sizes: dict[str, Any] = {**QWEN3, "vocab_size": 512, "num_hidden_layers": layers, **TYPES[name]}
    if "layer_types" in sizes:
        sizes["layer_types"] = sizes["layer_types"] * (layers // 2)
    lm = model_of(name, **sizes)
    adapter, settings = None, LoraSettings() if lora else None
    if settings is not None:
        place(lm, "a model", Loading(torch.bfloat16, CUDA), gradient_checkpointing=False)
        adapter = add_adapter(lm, settings, seed=0)
    backbone = Backbone(lm, CUDA, MicroBatch(4 * LENGTH), adapter=adapter, compiler="inductor")
    layout = layout_of(backbone, 3)
    for _ in range(2):  # the second time nothing is compiled any more
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            if tensor.is_cuda and layout.n_tokens in tensor.shape:
                storage = tensor.untyped_storage()
                kept[storage.data_ptr()] = storage.nbytes()  # noqa: B023
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            hidden = backbone._run(layout, None, lambda _, states: states)
        hidden.sum().backward()
    shape = shape_of(lm.config.to_dict(), name)
    planned = kept_by_layer(shape, 2, settings, Blocks(), cpu=False, compiled=True)
    return sum(kept.values()) / layout.n_tokens, planned


def kept() -> dict[str, dict[str, float]]:
    """Of one layer: four of them keep that much more than two."""
    kept_by_case: dict[str, dict[str, float]] = {}
    for name in TYPES:
        for lora in (False, True):
            torch._dynamo.reset()
            (of_two, planned), (of_four, _) = (
                kept_bytes(name, count, lora=lora) for count in (2, 4)
            )
            kept_by_case[f"{name}{', LoRA' * lora}"] = {
                "kept": (of_four - of_two) / 2,
                "planned": planned,
            }
    return kept_by_case


def told_of(kind: str) -> dict[str, Any]:
    if kind == "kept":
        return kept()
    if kind == "types":
        return {
            name + ", checkpointing" * again: graphs_of(
                lambda name=name, again=again: compiled_type(name, checkpointed=again)
            )
            for name in TYPES
            for again in (False, True)
        }
    if kind == "heads":
        return {
            f"{width}, {str(dtype).removeprefix('torch.')}": graphs_of(
                lambda width=width, dtype=dtype: head(width, dtype)
            )
            for width in HEADS
            for dtype in (torch.bfloat16, torch.float32)
        }
    kinds = {
        "updates": updates, "recomputed": recomputed, "micro-batches": micro_batches,
        "shared": shared,
    }  # fmt: skip
    return kinds[kind]()


if __name__ == "__main__":
    apply(Placement("cuda", 1, True))
    print(json.dumps(told_of(sys.argv[1])))
