"""Losses on pairs with images: scores, loss and gradients are those of transformers' own padded
forward in float64, on rows as TRL's vision trainers read them.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from shutil import copyfile
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForImageTextToText, AutoModelForSequenceClassification

from helpers.image_directories import models, vision_pair
from helpers.image_models import IMAGE_MODELS, but_for_a_few, looped
from postgrad.algorithms.bradley_terry import BradleyTerry
from postgrad.algorithms.dpo import DPO
from postgrad.core.media import images_kept_in
from postgrad.data.pairs import load_pairs
from postgrad.data.settings import PairSettings
from postgrad.evaluation.pairs import sequences_of
from postgrad.layout.layout import lay_out
from postgrad.learner.backbone import Backbone, MicroBatch
from postgrad.learner.policy import PolicyLearner
from postgrad.learner.score import ScoreLearner
from postgrad.learner.settings import LearnerSettings
from postgrad.learner.update import Update
from postgrad.models.config import load_config
from postgrad.models.image_reader import ImageReader, tower_of
from postgrad.models.images import image_part
from postgrad.models.load import load_model
from postgrad.models.score import load_score_model
from postgrad.models.tokenizer import load_tokenizer

__all__ = ["models"]

CPU = torch.device("cpu")
TEXT = {"prompt": "Ready?", "chosen": "yes", "rejected": "no"}


def joined(arrays: Sequence[Any]) -> Tensor:
    """The pixels of several images; those with fewer tiles [1, tiles, ...], or of fewer pixels,
    end with zeros.
    """
    if arrays[0].shape[0] == 1 and arrays[0].ndim > 2:
        most = np.max([array.shape[1:] for array in arrays], 0)
        wanted = [[(0, 0), *((0, more) for more in most - a.shape[1:])] for a in arrays]
        arrays = [np.pad(a, widths) for a, widths in zip(arrays, wanted, strict=True)]
    return torch.from_numpy(np.concatenate(arrays))


class Task:
    """A model with weights of a size at which images matter, pairs, and their pixels."""

    def __init__(self, kind: str, source: str, folder: Path) -> None:
        self.types = IMAGE_MODELS[kind].types
        self.path = str(folder / "model")
        lm: Any = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(5)
            for parameter in lm.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0.0, parameter[0].numel() ** -0.5)
        lm.save_pretrained(self.path)
        tokenizer = load_tokenizer(source)
        tokenizer.save_pretrained(self.path)
        copyfile(f"{source}/preprocessor_config.json", f"{self.path}/preprocessor_config.json")
        rows = folder / "rows.jsonl"
        rows.write_text("".join(f"{json.dumps(r)}\n" for r in [*map(vision_pair, (1, 2)), TEXT]))
        self.reader = ImageReader(self.path, load_config(self.path), tokenizer)
        settings = PairSettings(path=str(rows), max_len=200)
        self.sequences = sequences_of(load_pairs(settings, tokenizer, reader=self.reader).all())
        self.pad: int = tokenizer.pad_token_id

    def padded(self) -> tuple[Tensor, dict[str, Any]]:
        """Token ids [S, T] and the other arguments of a forward of transformers."""
        rows = [row.astype(np.int64) for row in self.sequences.tokens]
        longest = max(map(len, rows))
        ids = torch.full((len(rows), longest), self.pad)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = torch.from_numpy(row)
        seen = torch.tensor([[1] * len(r) + [0] * (longest - len(r)) for r in rows])
        shown = [i for row in range(len(rows)) for i in self.sequences.images_of(row)]
        pixels = [self.reader.pixels(image.digest) for image in shown]
        named: dict[str, Any] = {name: joined([p[name] for p in pixels]) for name in pixels[0]}
        if self.types is not None:
            named[self.types] = (ids == self.reader.token_id).int()
        named = {n: t.double() if t.is_floating_point() else t for n, t in named.items()}
        return ids, {"attention_mask": seen, **named}

    def backbone(self, loaded: Any) -> Backbone:
        backbone = Backbone(loaded.lm, CPU, MicroBatch())
        backbone.tower = tower_of(loaded)
        return backbone


@pytest.fixture
def task(tmp_path: Path, models: Callable[[str], str]) -> Iterator[Callable[[str], Task]]:
    with images_kept_in(tmp_path / "images"):
        yield lambda kind: Task(kind, models(kind), tmp_path)


def gradients(learner: Any, update: Update, algorithm: Any) -> tuple[dict[str, Tensor], Any]:
    """The gradient that the optimizer finds, by name, and what the update reports."""
    kept: dict[str, Tensor] = {}

    def keep(rate: float) -> float:
        gradients_by_name = {n: p.grad for n, p in learner.optimizer.master.items()}
        kept.update({n: grad.double() for n, grad in gradients_by_name.items() if grad is not None})
        return 0.0

    learner.optimizer.step = keep
    return kept, learner.update(update, algorithm).result()


def assert_same(ours: dict[str, Tensor], lm: Any) -> None:
    """Gradients agree in the whole model, and in its tower and projector alone."""
    theirs = {n: p.grad for n, p in lm.named_parameters() if p.grad is not None}
    for parts in ((), ("vision",), ("projector",)):
        names = [n for n in theirs if not parts or image_part(f".{n}") in parts]
        flat = [torch.cat([each[n].flatten() for n in names]) for each in (ours, theirs)]
        assert flat[1].norm() > 1e-3, parts
        assert (flat[0] - flat[1]).norm() <= 1e-4 * flat[1].norm(), parts


def sums(lm: Any, ids: Tensor, named: dict[str, Any], mask: Sequence[Any]) -> Tensor:
    """[S] the sum over each answer of transformers' logprobs."""
    logprobs = lm(input_ids=ids, use_cache=False, **named).logits[:, :-1].log_softmax(-1)
    chosen = logprobs.gather(-1, ids[:, 1:, None])[..., 0]
    rows = (torch.from_numpy(np.flatnonzero(each[1:])) for each in mask)
    return torch.stack([chosen[number, at].sum() for number, at in enumerate(rows)])


@pytest.mark.parametrize("kind", but_for_a_few(IMAGE_MODELS))
def test_dpo_is_that_of_transformers_padded_forward(kind: str, task: Callable[[str], Task]) -> None:
    image_task = task(kind)
    sequences, (ids, named) = image_task.sequences, image_task.padded()
    plain: Any = AutoModelForImageTextToText.from_pretrained(image_task.path, dtype=torch.float64)
    looped(plain.eval())
    policy = sums(plain, ids, named, list(sequences.loss_mask))
    ref = sequences.tokens.like(np.linspace(-3, 0, len(sequences.tokens.values), dtype=np.float32))
    ref = ref.like(np.where(sequences.loss_mask.values, ref.values, 0))
    ratio = policy - torch.from_numpy(ref.sums().astype(np.float64))
    loss = -logsigmoid(0.3 * (ratio[0::2] - ratio[1::2])).mean()
    loss.backward()

    loaded = load_model(image_task.path, dtype=torch.float32, images=True)
    learner = PolicyLearner(image_task.backbone(loaded), LearnerSettings(max_grad_norm=0.0), 1)
    algorithm = DPO.model_validate({"beta": 0.3})
    experience = algorithm.experience(sequences, np.tile([True, False], 3), ref, None)
    ours, result = gradients(learner, Update(experience, np.arange(6)), algorithm)
    assert result.metrics["policy/loss"] == pytest.approx(loss.item(), rel=1e-5)
    np.testing.assert_allclose(
        learner.logprobs(sequences).result().sums(), policy.detach(), rtol=1e-5
    )
    assert_same(ours, plain)


@pytest.mark.parametrize("kind", but_for_a_few(IMAGE_MODELS))
def test_a_reward_model_is_that_of_transformers_padded_forward(
    kind: str, task: Callable[[str], Task]
) -> None:
    image_task = task(kind)
    loaded: Any = load_score_model(image_task.path, dtype=torch.float32, images=True)
    plain: Any = AutoModelForSequenceClassification.from_pretrained(
        image_task.path, num_labels=1, dtype=torch.float64
    )
    looped(plain.eval())
    plain.score.weight.data.copy_(loaded.lm.score.weight)
    plain.config.get_text_config().pad_token_id = image_task.pad
    ids, named = image_task.padded()
    scores = plain(input_ids=ids, **named).logits[:, 0]
    loss = -logsigmoid(scores[0::2] - scores[1::2]).mean()
    loss.backward()

    settings, algorithm = LearnerSettings(max_grad_norm=0.0), BradleyTerry.model_validate({})
    learner = ScoreLearner("reward_model", image_task.backbone(loaded), "at", settings, 1)
    experience = algorithm.experience(image_task.sequences, np.zeros(3))
    ours, result = gradients(learner, Update(experience, np.arange(6)), algorithm)
    assert result.metrics["reward_model/loss"] == pytest.approx(loss.item(), rel=1e-5)
    outputs = result.outputs[~np.isnan(result.outputs)]
    np.testing.assert_allclose(outputs, scores.detach(), rtol=1e-4, atol=1e-5)
    assert_same(ours, plain)


def test_both_answers_share_one_picture(task: Callable[[str], Task]) -> None:
    sequences = task("qwen2_5_vl").sequences
    layout = lay_out(sequences, np.arange(len(sequences)))
    assert [len(sequences.images_of(row)) for row in range(6)] == [1, 1, 1, 1, 0, 0]
    assert len(layout.images) == 2  # of four sequences
