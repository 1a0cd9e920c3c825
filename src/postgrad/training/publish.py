"""Weights to the rollout engine, and the proof that they arrived.

A publish that fails in silence leaves a run learning from another policy's samples (trl#5312,
SkyRL#1680; vLLM's reload keeps a tied output head), so learner and engine score the same tokens
after each one.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from postgrad.core.ragged import Ragged
from postgrad.core.records import (
    Logprobs,
    PlacedImage,
    Prompt,
    Sequences,
    column_of,
    images_between,
)
from postgrad.data.conversations import Conversation
from postgrad.learner.protocols import PolicyRole
from postgrad.observe.sentinels.publish import DIFFERENCE, MOVED
from postgrad.rollout.engine import Engine, Sent, WeightHandover
from postgrad.rollout.stats import distance

PROBES = 4  # sequences that are scored twice after each publish
PROBE_TOKENS = 128  # of each: enough to tell weights apart, little enough to cost nothing
# Whatever the run samples at: weights are compared, and a low one multiplies what rounding alone
# makes of the same weights.
PROBE_TEMPERATURE = 1.0


def unlogged(kind: str, message: str, **fields: object) -> None:
    """Stands for `Logs.event` where nobody reads events."""


class Publisher:
    """Sends the policy's weights to the engine and probes them.

    Both may work on one GPU, so each gives its memory back before the other takes its own: the
    learner, after its part of the probe, before the engine wakes for weights, again before it wakes
    for its cache, and after the engine's part; the engine when it sleeps.

    The probe's sequences are the samples of the step where it has any (`probe_with`), else prompts:
    a run that resumes has none of earlier steps. The engine scores them before the policy learns:
    weights that it borrows change with the update.
    """

    def __init__(
        self,
        policy: PolicyRole,
        engine: Engine,
        prompts: Sequence[Prompt | Conversation],
        free_memory: Callable[..., None],
        warn: Callable[[str], None] = lambda text: None,
        *,
        event: Callable[..., None] = unlogged,
        adapter: bool = False,
    ) -> None:
        """prompts: to probe with. free_memory: that of the Run. warn: for the console.
        event: `Logs.event`. adapter: it is sent alone, to an engine that has the policy's base.
        """
        self._adapter = adapter
        self._event = event
        self._logged: tuple[str, str, dict[str, str]] = ("", "", {})
        self._warn, self._warned = warn, False
        self._policy = policy
        self._engine = engine
        self._free_memory = free_memory
        tokens, images = zip(*((p.token_ids, p.images) for p in prompts), strict=True)
        self._probe = self._prompts = _probe(tokens, images, slice(PROBE_TOKENS))
        self._before = self._engines()

    def probe_with(self, sequences: Sequences) -> None:
        """The next publish is probed with these sequences of a step, or with prompts where it has
        none. To be called before an update.
        """
        probe = self._prompts
        if len(sequences):
            rows = range(min(PROBES, len(sequences)))
            tokens, images = zip(*map(sequences.last_conversation, rows), strict=True)
            probe = _probe(tokens, images, slice(-PROBE_TOKENS, None))
        if probe is not self._probe:
            self._probe = probe
            self._before = self._engines()

    def __call__(self, version: int) -> dict[str, float]:
        """Publishes the weights as `version`, the number of steps that made them. Returns the
        probe's metrics for the sentinel, and those of the way that the weights went.
        """
        policy = self._policy
        # while the engine takes nothing
        learner = policy.logprobs(self._probe, PROBE_TEMPERATURE).result()
        self._free_memory("weights")
        weights = policy.adapter_weights() if self._adapter else policy.hub_weights()
        # when all were handed over, what gathering them took is given back, and what only learns
        handover = WeightHandover(weights, partial(self._free_memory, "nothing"))
        sent = self._engine.load_weights(handover, version)
        before, self._before = self._before, self._engines()
        self._free_memory("nothing")  # also after an engine that reads the weights where they are
        return probed(before, self._before, list(learner)) | self._metrics_of(sent)

    def _metrics_of(self, sent: Sent | None) -> dict[str, float]:
        """The metrics of a publish. A way that is not that of the publish before is logged, and the
        first way that is not the fastest of these cards is warned of.
        """
        if sent is None:
            return {}
        route = (sent.way, sent.fallback, dict(sent.ways))
        if route != self._logged:
            self._logged = route
            reason = f": {sent.fallback}" if sent.fallback else ""
            message = f"weights go to the engine by {sent.way}{reason}"
            self._event(
                "publish_route", message, way=sent.way, ways=sent.ways, fallback=sent.fallback
            )
        if sent.fallback and not self._warned:
            self._warned = True
            self._warn(
                f"weights go to the engine through {sent.way}, which took {sent.seconds:.1f} s: "
                f"{sent.fallback}"
            )
        return sent.metrics

    def _engines(self) -> list[Logprobs]:
        tokens, images = list(self._probe.tokens), self._probe.images
        shown = (images,) if images else ()
        return self._engine.logprobs(tokens, PROBE_TEMPERATURE, *shown)


def _probe(
    sequences: Sequence[NDArray[np.int32]], images: Sequence[tuple[PlacedImage, ...]], part: slice
) -> Sequences:
    """A part of each of the first PROBES sequences, whose tokens all bear loss but for the first:
    prompts count too. Of one with images its last tokens, from the beginning of an image on.
    """
    parts = [
        _from_image(tokens, placed) if placed else (tokens[part], ())
        for tokens, placed in islice(zip(sequences, images, strict=True), PROBES)
    ]
    return Sequences(
        Ragged.of([tokens for tokens, _ in parts], np.int32),
        Ragged.of([np.arange(len(tokens)) > 0 for tokens, _ in parts], np.bool_),
        np.arange(len(parts), dtype=np.int64),
        images=column_of(placed for _, placed in parts),
    )


def _from_image(
    tokens: NDArray[np.int32], images: Sequence[PlacedImage]
) -> tuple[NDArray[np.int32], tuple[PlacedImage, ...]]:
    """PROBE_TOKENS from the end, or more, so that the last image is in them, and no half of one."""
    begin = min(max(0, len(tokens) - PROBE_TOKENS), int(images[-1].at[0]))
    for image in reversed(images):
        if image.at[-1] >= begin:
            begin = min(begin, int(image.at[0]))
    return tokens[begin:], images_between(images, begin, len(tokens))


def probed(
    before: Sequence[Logprobs], engine: Sequence[Logprobs], learner: Sequence[Logprobs]
) -> dict[str, float]:
    """The metrics of a publish: how far engine and learner differ, and how far the policy moved.

    before, engine: the probe's logprobs by the engine before and after the publish; learner: the
    learner's. Both metrics are means over all tokens of the probe, in nats.
    """
    return {DIFFERENCE: distance(engine, learner), MOVED: distance(before, learner)}
