"""Compiled layers of models that read images: outputs and gradients of plain ones, with images and
without, from few graphs. The tower is not compiled.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from helpers.image_models import IMAGE_MODELS, fresh, placed, placeholders
from postgrad.algorithms.sft import SFT
from postgrad.core.errors import UsageError
from postgrad.core.ragged import Ragged
from postgrad.core.records import Experience, Sequences
from postgrad.learner.backbone import Backbone, MicroBatch
from postgrad.learner.policy import PolicyLearner
from postgrad.learner.settings import LearnerSettings
from postgrad.learner.update import Update
from postgrad.models import linear, tree
from postgrad.models.adapters import add_adapter
from postgrad.models.compiled import head_kernels
from postgrad.models.images import ImageTower, Pixels
from postgrad.models.recompute import recompute_activations
from postgrad.models.settings import LoraSettings

CPU = torch.device("cpu")
EAGER = "aot_eager"  # graphs are made as for CUDA, and their operations run one by one
TYPES = ("qwen2_5_vl", "qwen3_vl", "smolvlm", "mistral3", "internvl", "llava_onevision")
LATER = [pytest.param(kind, marks=pytest.mark.long) for kind in TYPES[1:]]


@pytest.fixture(autouse=True)
def _no_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tree, "NARROWEST", 1)  # the heads here have 8 numbers
    # torch has no kernel of flex attention's backward for CPUs; its operations one by one work
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    monkeypatch.setattr(linear, "has_fast_products", lambda: False)  # asked on a CPU only
    torch._dynamo.reset()
    head_kernels.cache_clear()
    counters.clear()
    yield
    torch._dynamo.reset()


class Album:
    """Pictures of several sizes, and sequences that show some of them."""

    def __init__(self, kind: str) -> None:
        self.model = model = IMAGE_MODELS[kind]
        generator = np.random.default_rng(3)
        self.sizes = [(2, 3), (3, 1), (4, 4)] if model.grid else [model.size] * 3
        self.digests = [hashlib.sha256(bytes([n])).hexdigest() for n in range(3)]
        self.pixels: dict[str, Pixels] = {
            digest: model.pixels(generator, *size)
            for digest, size in zip(self.digests, self.sizes, strict=True)
        }

    def sequences(self, seed: int) -> Sequences:
        """Some prompts with three answers each. Every third seed shows no image, and the prompts of
        others up to two.
        """
        rng = np.random.default_rng(seed)
        tokens, masks, group, images = [], [], [], []
        for number in range(1 + seed % 4):
            count = 0 if seed % 3 == 0 else int(rng.integers(0 if number else 1, 3))
            shown = rng.integers(0, 3, count).tolist()
            parts = [rng.integers(3, 80, rng.integers(9, 30))]
            for each in shown:
                rows, columns = self.sizes[each]
                parts += [placeholders(rows * columns), rng.integers(3, 80, 3)]
            prompt = np.concatenate(parts)
            for _ in range(3):
                answer = rng.integers(3, 80, rng.integers(20, 60))
                tokens.append(np.concatenate([prompt, answer]))
                masks.append(np.arange(len(tokens[-1])) >= len(prompt))
                group.append(number)
                digests, sizes = ([of[each] for each in shown] for of in (self.digests, self.sizes))
                images.append(placed(tokens[-1], digests, sizes, self.model))
        return Sequences(
            Ragged.of(tokens, np.int32),
            Ragged.of(masks, bool),
            np.array(group),
            images=tuple(images),
        )

    def backbone(self, kind: str, compiler: str | None = EAGER, **how: Any) -> Backbone:
        """The model, on flex attention where it is compiled. how: checkpointed, adapted."""
        lm = fresh(kind)
        if how.get("checkpointed"):
            recompute_activations(lm, True)
            lm.train()
        backbone = Backbone(
            lm, CPU, MicroBatch(), "sdpa" if compiler is None else "flex", compiler=compiler
        )
        if how.get("adapted"):
            backbone.adapter = add_adapter(lm, LoraSettings(rank=2), seed=0)
            for name, parameter in backbone.adapter.parameters().items():
                if "lora_B" in name:
                    torch.nn.init.constant_(parameter, 0.01)
        backbone.tower = ImageTower(lm, self.pixels.__getitem__)
        return backbone


def outcome(backbone: Backbone, sequences: Sequences) -> tuple[Tensor, dict[str, Tensor]]:
    """Logprobs, and the gradients of a sum of them by weight."""
    (layout,) = backbone.micro_batches(sequences, np.arange(len(sequences)))
    logprobs, _ = backbone.logprobs(layout, 1.0)
    (logprobs * torch.linspace(-1.0, 1.0, len(logprobs))).sum().backward()
    named = backbone.lm.named_parameters()
    gradients = {name: p.grad for name, p in named if p.grad is not None}
    backbone.lm.zero_grad()
    return logprobs.detach(), gradients


def require_same(backbone: Backbone, plain: Backbone, album: Album, seeds: range) -> None:
    for seed in seeds:
        sequences = album.sequences(seed)
        logprobs, gradients = outcome(backbone, sequences)
        expected, expected_gradients = outcome(plain, sequences)
        torch.testing.assert_close(logprobs, expected, atol=3e-5, rtol=1e-5)
        assert gradients.keys() == expected_gradients.keys()
        joined, others = (
            torch.cat([g.flatten() for g in each.values()])
            for each in (gradients, expected_gradients)
        )
        assert (joined - others).norm() <= 3e-5 * others.norm(), seed


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [TYPES[0], *LATER])
def test_layouts_with_images_and_without_need_one_graph(kind: str) -> None:
    album = Album(kind)
    backbone, plain = album.backbone(kind), album.backbone(kind, None)
    require_same(backbone, plain, album, range(3))
    graphs_before, sizes = graphs(), set[tuple[int, int]]()
    for seed in range(3, 40):
        sequences = album.sequences(seed)
        (layout,) = backbone.micro_batches(sequences, np.arange(len(sequences)))
        backbone.logprobs(layout, 1.0)
        sizes.add((layout.n_tokens, len(layout.images)))
    assert len(sizes) > 30
    assert {images for _, images in sizes} >= {0, 1, 2}
    # Two of layers, for layouts in one square of scores and for longer ones, and two of the head.
    assert (graphs_before, graphs()) <= (4, 4)
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        {"checkpointed": True, "adapted": True},
        pytest.param({"checkpointed": True}, marks=pytest.mark.long),
        pytest.param({"adapted": True}, marks=pytest.mark.long),
    ],
    ids="-".join,
)
def test_checkpointing_and_adapters_are_compiled_with_images(how: dict[str, bool]) -> None:
    """The adapter stands on the decoder, and the tower is frozen beside it."""
    album = Album("qwen3_vl")
    backbone = album.backbone("qwen3_vl", **how)
    require_same(backbone, album.backbone("qwen3_vl", None, **how), album, range(3))
    assert graphs() <= 6  # layers that get a gradient from below, and the first, which gets none
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, pytest.param(True, marks=pytest.mark.long)])
def test_images_that_are_seen_whole_are_attended_to_between_graphs(checkpointed: bool) -> None:
    """Gemma 3: text alone goes through flex attention, in the graph of its layers."""
    album = Album("gemma3")
    backbone = album.backbone("gemma3", checkpointed=checkpointed)
    require_same(backbone, album.backbone("gemma3", None), album, range(2))
    graphs_before = graphs()
    for seed in range(2, 12):
        sequences = album.sequences(seed)
        (layout,) = backbone.micro_batches(sequences, np.arange(len(sequences)))
        backbone.logprobs(layout, 1.0)
    assert graphs() == graphs_before


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3"])
def test_graphs_are_made_for_the_same_sizes_whatever_comes_first(kind: str) -> None:
    """So a run that goes on from a checkpoint gets the same kernels."""

    def sizes_in(seeds: tuple[int, ...]) -> list[Any]:
        seen: list[Any] = []

        def backend(graph: Any, inputs: list[Any]) -> Any:
            tensors = [each for each in inputs if isinstance(each, Tensor)]
            seen.append([[hint(size) for size in tensor.shape] for tensor in tensors])
            return graph.forward

        torch._dynamo.reset()
        head_kernels.cache_clear()
        album = Album(kind)
        backbone = album.backbone(kind, backend)  # pyright: ignore[reportArgumentType]
        for seed in seeds:
            outcome(backbone, album.sequences(seed))
        return sorted(seen)

    assert sizes_in((1, 3)) == sizes_in((3, 2))  # an image first, and text alone first


def hint(size: Any) -> int:
    """What a symbol was when its graph was made; reading it as a number would fix it."""
    return size.node.hint if isinstance(size, torch.SymInt) else size


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_layers_that_carry_a_state_are_refused(kind: str) -> None:
    with pytest.raises(UsageError, match=r"model\.compile: .* carry a state .* leave it out"):
        Album(kind).backbone(kind)


@pytest.mark.slow
def test_the_gradients_of_decoder_and_tower_are_those_of_every_micro_batch() -> None:
    """Some micro-batches show no image."""
    norms = []
    for compiler, tokens in ((None, None), (EAGER, 120)):
        album = Album("llava")  # whose tower has layers of the same name as the decoder
        backbone = album.backbone("llava", compiler)
        backbone.micro = MicroBatch(max_tokens=tokens)
        parts = [album.sequences(seed) for seed in (0, 1)]
        sequences = joined(parts)
        learner = PolicyLearner(backbone, LearnerSettings(), 10)
        experience = Experience(sequences, {}, np.ones(len(sequences), bool))
        update = Update(experience, np.arange(len(sequences)))
        norms.append(learner.update(update, SFT()).result().metrics["policy/grad_norm"])
    assert norms[0] > 0.1
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def joined(parts: list[Sequences]) -> Sequences:
    rows = [(n, part, row) for n, part in enumerate(parts) for row in range(len(part))]
    return Sequences(
        Ragged.of([part.tokens.row(row) for _, part, row in rows], np.int32),
        Ragged.of([part.loss_mask.row(row) for _, part, row in rows], bool),
        np.array([10 * n + part.group[row] for n, part, row in rows]),
        images=tuple(part.images_of(row) for _, part, row in rows),
    )
