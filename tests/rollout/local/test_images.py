"""The built-in engine samples behind images: the tokens of transformers' generate, and the
learner's logprobs.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from helpers.image_models import KINDS, PLACEHOLDER, SIZES, Scene, fresh, placed, placeholders
from helpers.rollouts import Chosen, Words
from postgrad.core.errors import UsageError
from postgrad.core.ragged import Ragged
from postgrad.core.records import PlacedImage, Prompt, Sequences
from postgrad.core.rollout_batch import RolloutBatch
from postgrad.learner.backbone import Backbone, MicroBatch
from postgrad.models.images import ImageTower, Pixels
from postgrad.rollout.engine import Completion, Request, generate
from postgrad.rollout.environment import Environments, Observation, SamplingSpec, Step, at_once
from postgrad.rollout.local.engine import LocalEngine
from postgrad.rollout.local.prompts import batches_of, without_images
from postgrad.rollout.sampling import sample_groups
from postgrad.rollout.settings import SamplingSettings

NEW = 8
SEED = 5  # with which no sample writes a placeholder
GREEDY = SamplingSettings(max_new_tokens=NEW, temperature=0.0)


def engine_of(kind: str, pixels: Any) -> LocalEngine:
    lm = fresh(kind)
    lm.generation_config.eos_token_id = 95
    tower = ImageTower(lm, pixels)
    return LocalEngine(lm, Words(), slots=4, cache_tokens=2048, tower=tower)


def requests_of(scene: Scene, sampling: SamplingSettings) -> list[Request]:
    """A prompt of two samples with two images, one with one image, one with none."""
    return [
        Request(
            ticket,
            samples,
            scene.sequences.tokens.row(row)[:-4],
            sampling,
            images=scene.sequences.images_of(row),
        )
        for ticket, (row, samples) in enumerate([(0, (0, 1)), (2, (0,)), (3, (0,))])
    ]


def transformers_tokens(lm: Any, scene: Scene, request: Request) -> list[int]:
    ids = torch.from_numpy(request.token_ids.astype(np.int64))[None]
    named = scene.arguments(ids, request.images)
    lm.model.rope_deltas = None
    out = lm.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW,
        eos_token_id=95, pad_token_id=0, **named,
    )  # fmt: skip
    return out[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_samples_are_those_of_transformers_and_logprobs_the_learners(kind: str) -> None:
    scene = Scene(kind)
    asked: list[str] = []

    def pixels(digest: str) -> Pixels:
        asked.append(digest)
        return scene.pixels[digest]

    engine, plain_model = engine_of(kind, pixels), fresh(kind, "eager")
    requests = requests_of(scene, GREEDY)
    done = generate(engine, requests)
    assert sorted(asked) == sorted(scene.pixels)  # once, also where it is in two prompts
    for completion in done:
        expected = transformers_tokens(plain_model, scene, requests[completion.ticket])
        assert completion.token_ids.tolist() == expected[: len(completion.token_ids)]
        assert len(completion.token_ids) == len(expected)
    tokens = [
        np.concatenate([requests[c.ticket].token_ids, c.token_ids]).astype(np.int32) for c in done
    ]
    responses = [
        np.arange(len(t)) >= len(t) - len(c.token_ids) for t, c in zip(tokens, done, strict=True)
    ]
    sequences = Sequences(
        Ragged.of(tokens, np.int32),
        Ragged.of(responses, np.bool_),
        np.array([c.ticket for c in done]),
        images=tuple(requests[c.ticket].images for c in done),
    )
    backbone = Backbone(fresh(kind), torch.device("cpu"), MicroBatch())
    backbone.tower = ImageTower(backbone.lm, scene.pixels.__getitem__)
    column = backbone.column(sequences, lambda layout: backbone.logprobs(layout, 1.0)[0])
    for row, completion in enumerate(done):
        learned = column.row(row)[responses[row]]
        np.testing.assert_allclose(
            completion.logprobs, learned, rtol=1e-5, atol=2 * scene.model.rounding
        )


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_of_drawn_samples_are_those_of_transformers(kind: str) -> None:
    scene = Scene(kind)
    drawn = SamplingSettings(max_new_tokens=NEW, temperature=1.0)
    requests = [replace(request, seed=SEED) for request in requests_of(scene, drawn)]
    engine, plain_model = engine_of(kind, scene.pixels.__getitem__), fresh(kind, "eager")
    done = generate(engine, requests)
    assert len(done) == 4
    assert not any(PLACEHOLDER in c.token_ids for c in done)  # transformers would want an image
    wholes: list[Any] = []
    expected: list[Any] = []
    for completion in done:
        request = requests[completion.ticket]
        sequence = np.concatenate([request.token_ids, completion.token_ids]).astype(np.int32)
        ids = torch.from_numpy(sequence.astype(np.int64))[None]
        plain_model.model.rope_deltas = None
        with torch.no_grad():
            logits = plain_model(
                ids, **scene.arguments(ids, request.images), use_cache=False
            ).logits[0]
        table = logits.float().log_softmax(-1)[:-1]
        wholes.append(sequence)
        expected.append(table.gather(1, ids[0, 1:, None])[:, 0].numpy())
        new = expected[-1][len(request.token_ids) - 1 :]
        np.testing.assert_allclose(completion.logprobs, new, rtol=0, atol=scene.model.rounding)
    scored = engine.logprobs(wholes, 1.0, [requests[c.ticket].images for c in done])
    for row, logprobs in zip(scored, expected, strict=True):
        assert row[0] == 0
        np.testing.assert_allclose(row[1:], logprobs, rtol=0, atol=scene.model.rounding)


def test_a_placeholder_needs_no_embedding_of_its_own() -> None:
    ids = np.array([5, 900, 900, 7], np.int32)
    image = PlacedImage("ab" * 32, np.array([1, 2]))
    assert without_images(ids, (image,)).tolist() == [5, 7]
    assert without_images(ids, ()) is ids


def test_batches_end_with_the_sequence_that_fills_them() -> None:
    assert list(batches_of([3, 4, 9, 1], 7)) == [slice(0, 2), slice(2, 3), slice(3, 4)]
    assert list(batches_of([], 7)) == []


def test_a_turn_that_was_cut_goes_on_behind_its_images() -> None:
    scene = Scene("qwen2_5_vl")
    requests = requests_of(scene, GREEDY)
    uninterrupted = generate(engine_of("qwen2_5_vl", scene.pixels.__getitem__), requests)
    engine = engine_of("qwen2_5_vl", scene.pixels.__getitem__)
    for request in requests:
        engine.submit(request)
    for _ in range(3):
        assert engine.advance() == []
    left = engine.cut()
    assert all(request.position for request in left)
    again = generate(engine, left)
    assert [c.token_ids.tolist() for c in again] == [c.token_ids.tolist() for c in uninterrupted]


def test_equal_tokens_with_other_images_are_two_prompts() -> None:
    scene = Scene("qwen2_5_vl")
    first, *_ = requests_of(scene, GREEDY)
    digest = "ab" * 32
    scene.pixels[digest] = {
        name: array + 1 if name == "pixel_values" else array
        for name, array in scene.pixels[first.images[0].digest].items()
    }
    other = replace(first.images[0], digest=digest)
    second = replace(first, ticket=1, images=(other, first.images[1]))
    done = generate(engine_of("qwen2_5_vl", scene.pixels.__getitem__), [first, second])
    alone = generate(engine_of("qwen2_5_vl", scene.pixels.__getitem__), [second])
    assert [c.token_ids.tolist() for c in done[2:]] == [c.token_ids.tolist() for c in alone]
    assert not np.array_equal(done[0].logprobs, done[2].logprobs)


class Pictures:
    """Shows another image after each of two turns: which, depends on the sample."""

    deterministic, concurrent = True, 0
    turn_tokens: Sequence[int] = (3, 5)
    begins = False

    def __init__(self, scene: Scene) -> None:
        sizes = SIZES if scene.model.grid else (scene.model.size, scene.model.size)
        self.shown = list(zip(scene.pixels, sizes, strict=True))
        self.model = scene.model

    def reset(self, prompt: Prompt, sample: int) -> "Pictures":
        return self

    def resume(self, prompt: Prompt, sample: int, *recorded: Any) -> "Pictures":
        return self

    def step(self, response: Completion) -> Step:
        digest, size = self.shown[(response.sample + response.turn) % 2]
        ids = np.concatenate([[7], placeholders(size[0] * size[1]), [8, 9]]).astype(np.int32)
        images = placed(ids, [digest], [size], self.model)
        return at_once(Observation(ids, response.turn == 2, images=images))

    def close(self) -> None:
        """Keeps nothing of an episode."""


@pytest.mark.parametrize("kind", KINDS)
def test_turns_behind_images_of_replies_have_the_logprobs_of_transformers(kind: str) -> None:
    """Sampler, learner, with a shared prompt and packed, and transformers on each sample alone."""
    scene, samples = Scene(kind), 8
    rounding = scene.model.rounding
    first, *_ = requests_of(scene, GREEDY)
    prompt = Prompt(0, first.token_ids, "?", None, "rows", 0, images=first.images)
    spec = SamplingSpec(
        samples,
        SamplingSettings(max_new_tokens=NEW),
        SEED,
        Environments({None: Pictures(scene)}),
    )
    engine, plain_model = engine_of(kind, scene.pixels.__getitem__), fresh(kind, "eager")
    groups = sample_groups(engine, Chosen(lambda t, s: float(s)), [prompt], spec, Words())
    batch = RolloutBatch.of(groups)
    assert [len(images) for images in batch.sequences.images] == [4] * samples
    backbone = Backbone(fresh(kind), torch.device("cpu"), MicroBatch())
    backbone.tower = ImageTower(backbone.lm, scene.pixels.__getitem__)
    column = backbone.column(batch.sequences, lambda layout: backbone.logprobs(layout, 1.0)[0])
    compared = 0
    for row in range(samples):
        ids, mask = batch.sequences.tokens.row(row), batch.sequences.loss_mask.row(row)
        sampled = batch.sampled_logprobs.row(row)[mask]
        np.testing.assert_allclose(column.row(row)[mask], sampled, rtol=1e-5, atol=2 * rounding)
        if (mask & (ids == PLACEHOLDER)).any():  # written by the policy: a token like others
            continue
        compared += 1
        sequence_ids = torch.from_numpy(ids.astype(np.int64))[None]
        plain_model.model.rope_deltas = None
        with torch.no_grad():
            named = scene.arguments(sequence_ids, batch.sequences.images_of(row))
            logits = plain_model(sequence_ids, **named, use_cache=False).logits[0]
        table = logits.float().log_softmax(-1)[:-1]
        expected = table.gather(1, sequence_ids[0, 1:, None])[:, 0].numpy()[mask[1:]]
        np.testing.assert_allclose(sampled, expected, rtol=1e-5, atol=rounding)
    assert compared > 1


def test_an_engine_without_a_tower_refuses_images() -> None:
    scene = Scene("gemma3")
    engine = LocalEngine(fresh("gemma3"), Words(), slots=2, cache_tokens=512)
    with pytest.raises(UsageError, match="ticket 0 has an image, which this engine cannot read"):
        engine.submit(requests_of(scene, GREEDY)[0])
