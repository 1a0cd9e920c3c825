"""Prefill: several prompts in one packed forward, each computed once for all its samples; and the
proof that what is sampled behind them is drawn from what transformers computes.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from postgrad.core.ragged import Ragged
from postgrad.core.records import Experts, PlacedImage, Sequences
from postgrad.layout.blocks import plan_blocks
from postgrad.layout.layout import Layout, lay_out
from postgrad.models.attention import AttentionContext, carries_states, to_device
from postgrad.models.decoder import Decoder, ModuleDecoder
from postgrad.models.head import target_logprobs
from postgrad.models.images import ImageTower
from postgrad.models.latent import Latents
from postgrad.models.probe import own_attention, probe_sequences, same, spread
from postgrad.models.routers import Routers, chosen_of
from postgrad.models.supported import unsupported
from postgrad.models.tree import TreeAttention, attention_over
from postgrad.rollout.engine import Completion, Engine, Request
from postgrad.rollout.local.cache import LayerShape, Stretches
from postgrad.rollout.local.kept import BehindKept, KeptPrefix, KeptPrefixes, lengths_of
from postgrad.rollout.settings import SamplingSettings

NEW = 5  # tokens of each sample that is compared with transformers
SAMPLES = (0, 1)  # of each prompt: they share it in the cache


class Recording:
    """Another context's attention that also keeps keys and values: [KV, T, D] for each layer; or
    latents, of layers that have them (models/latent.py), as keys whose beginnings are the values.
    """

    def __init__(
        self, inner: AttentionContext | BehindKept, latents: Latents | None = None
    ) -> None:
        self._inner, self._latents = inner, latents
        self._latent: list[bool] = []  # of each layer, whether latents are kept
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.states: list[dict[str, Tensor]] = []  # of mixers, see models.mixing.SegmentMixing
        self.experts: Experts | None = None  # [T, layers, k], where they are recorded

    @property
    def shapes(self) -> tuple[LayerShape, ...]:
        """The shape of what each layer stored for a token."""
        layers = zip(self.keys, self.values, self._latent, strict=True)
        return tuple(LayerShape(k.shape[0], k.shape[2], v.shape[2], of) for k, v, of in layers)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """The inner context's attention. It keeps copies: views would hold the whole projection,
        queries included.
        """
        latent = None if self._latents is None else self._latents.take()
        self._latent.append(latent is not None)
        if latent is None:
            self.keys.append(key.contiguous())
            self.values.append(value.contiguous())
        else:
            self.keys.append(latent.stored(key))
            self.values.append(self.keys[-1][..., : latent.rank])
        more: dict[str, Any] = {"latent": latent} if isinstance(self._inner, BehindKept) else {}
        return self._inner.attend(
            layer, query, key, value,
            scale=scale, window=window, softcap=softcap, sinks=sinks, **more,
        )  # fmt: skip


def lay_out_plain(
    sequences: list[NDArray[np.int32]], images: tuple[tuple[PlacedImage, ...], ...] = ()
) -> tuple[Layout, Ragged]:
    """A layout of unrelated sequences in which every token but the first is a loss entry. images:
    of each sequence.
    """
    tokens = Ragged.of(sequences, np.int32)
    loss_mask = np.ones(len(tokens.values), np.bool_)
    loss_mask[tokens.offsets[:-1]] = False
    columns = Sequences(tokens, tokens.like(loss_mask), np.arange(len(tokens)), images=images)
    return lay_out(columns, np.arange(len(tokens))), tokens


def batches_of(lengths: Sequence[int], room: int) -> Iterator[slice]:
    """Sequences of `lengths` tokens in order, each batch up to the first that fills `room`."""
    start = tokens = 0
    for number, length in enumerate(lengths, 1):
        tokens += length
        if tokens >= room or number == len(lengths):
            yield slice(start, number)
            start, tokens = number, 0


def without_images(
    token_ids: NDArray[np.int32], images: Sequence[PlacedImage]
) -> NDArray[np.int32]:
    """The tokens that an embedding of the model is read for: a placeholder's id may have none."""
    return np.delete(token_ids, np.concatenate([i.at for i in images])) if images else token_ids


def run_plain(
    decoder: Decoder,
    layout: Layout,
    device: torch.device,
    attention: AttentionContext | None = None,
    routers: Routers | None = None,
    tower: ImageTower | None = None,
    behind: BehindKept | None = None,
) -> tuple[Tensor, Recording]:
    """The hidden states [T, hidden] of a layout, and every layer's keys and values, or its state
    behind each sequence. attention: None for the fastest. routers: those whose experts are
    recorded. tower: encodes the layout's images. behind: the attention where some rows are kept,
    which are not computed again.
    """
    attention = attention or behind or attention_over(layout, device)
    recording = Recording(attention, decoder.latents)
    context: AttentionContext = recording
    if decoder.stateful:
        from postgrad.models.mixing import SegmentMixing
        from postgrad.models.states import StateContext

        continued = None if behind is None else behind.continued()
        mixing = SegmentMixing(layout, device, keep=True, continued=continued)
        context, recording.states = StateContext(recording, mixing), mixing.states
    arrays = (layout.token_ids, layout.rotary_positions)
    computed = arrays if behind is None else [array[..., behind.rows] for array in arrays]
    ids, positions = (to_device(array, device) for array in computed)
    if behind is not None:
        layout = replace(layout, images=behind.images(layout.images))
    # Which prompts start together depends on the other engines: an image is encoded alone.
    pictures = None if tower is None else tower.pictures(layout, at_once=0)
    with nullcontext() if routers is None else routers.recording() as routed:
        hidden = decoder.hidden_states(ids, positions, context, pictures)
    if routed is not None:
        recording.experts = chosen_of(routed).cpu().numpy()
    return hidden, recording


def scored(
    lm: nn.Module,
    decoder: Decoder,
    tower: ImageTower | None,
    sequences: Sequence[NDArray[np.int32]],
    images: Sequence[tuple[PlacedImage, ...]],
    temperature: float,
    room: int,
) -> list[NDArray[np.float32]]:
    """[T] nats for each sequence, 0 for its first token, by packed forwards of about `room` tokens.
    images: of each sequence; (): none has any. lm: the model of `decoder` and `tower`.
    """
    device = next(lm.parameters()).device
    logprobs: list[NDArray[np.float32]] = []
    for batch in batches_of([len(sequence) for sequence in sequences], room):
        layout, columns = lay_out_plain(
            [np.asarray(s, np.int32) for s in sequences[batch]], tuple(images[batch])
        )
        hidden, _ = run_plain(decoder, layout, device, tower=tower)
        rows, target = (to_device(array, device) for array in (layout.hidden_row, layout.target))
        token_logprobs, _ = target_logprobs(
            lm, hidden.index_select(0, rows), target, temperature=temperature
        )
        values = np.zeros(len(columns.values), np.float32)
        values[layout.column] = token_logprobs.cpu().numpy()
        logprobs += list(columns.like(values))
    return logprobs


def layer_shapes(lm: nn.Module, device: torch.device) -> tuple[LayerShape, ...]:
    """What each layer of the model stores for a token, seen from a forward of one token."""
    return _of_one_token(lm, device).shapes


def state_bytes(lm: nn.Module, device: torch.device) -> int:
    """Bytes of the states of one sequence, however long; 0 of a model that carries none."""
    if not carries_states(lm):
        return 0
    layers = _of_one_token(lm, device).states
    return sum(state.nbytes for states in layers for state in states.values())


def _of_one_token(lm: nn.Module, device: torch.device) -> Recording:
    layout, _ = lay_out_plain([np.zeros(1, np.int32)])
    with torch.no_grad():
        blocks = TreeAttention(plan_blocks(layout), device)  # for a token nothing is compiled
        return run_plain(ModuleDecoder(lm), layout, device, blocks)[1]


@dataclass(slots=True)
class Prefilled:
    """Packed keys and values of the P different prompts of some requests, T tokens together, whose
    samples wait for rows. What is kept of a prompt is not among them.
    """

    requests: list[Request]
    prompt_of: NDArray[np.int64]  # [requests] which of the P prompts each request has
    keys: list[Tensor]  # for each layer [KV, T, D]
    values: list[Tensor]  # for each layer [KV, T, Dv]
    states: list[dict[str, Tensor]]  # for each mixer its state behind each prompt, [P, ...]
    starts: NDArray[np.int64]  # [P + 1] where each prompt begins among the T tokens
    kept: Sequence[KeptPrefix | None]  # [P] what stands before the tokens of each prompt
    hidden: Tensor  # [P, hidden] the state that predicts the first token of a response
    experts: list[Experts] | None = None  # of each of the P prompts, where they are recorded
    number: int = field(default=0)  # the first request with waiting samples
    taken: int = field(default=0)  # how many of its samples have rows already

    @property
    def behind(self) -> NDArray[np.int64]:
        """[P] how many tokens of each prompt are kept."""
        return lengths_of(self.kept)

    @property
    def empty(self) -> bool:
        """Whether every sample has got its row."""
        return self.number == len(self.requests)

    def take(self, room: int) -> list[tuple[int, tuple[int, ...]]]:
        """Take up to `room` samples in order: [(number of the request, its samples), ...]."""
        batches: list[tuple[int, tuple[int, ...]]] = []
        while room and not self.empty:
            samples = self.requests[self.number].sample_ids[self.taken :][:room]
            batches.append((self.number, samples))
            room -= len(samples)
            self.taken += len(samples)
            if self.taken == len(self.requests[self.number].sample_ids):
                self.number, self.taken = self.number + 1, 0
        return batches

    def waiting(self) -> list[Request]:
        """The samples without rows, as requests."""
        left: list[Request] = []
        for number in range(self.number, len(self.requests)):
            r = self.requests[number]
            samples = r.sample_ids[self.taken if number == self.number else 0 :]
            left.append(replace(r, sample_ids=samples))
        return left

    def copy_to(
        self, stretches: Stretches, numbers: NDArray[np.int64], prompts: NDArray[np.int64]
    ) -> None:
        """Copy prompts into the cache: prompts[i], one of the P, into stretch numbers[i], behind
        what is kept of it.
        """
        lengths, behind = np.diff(self.starts)[prompts], self.behind[prompts]
        device = self.hidden.device
        if not self.keys:  # no layer attends
            return None
        if device.type != "cpu":
            from postgrad.rollout.local.paged import fill  # Triton is there with CUDA alone

            table = np.stack([self.starts[prompts], lengths, stretches.place[numbers], behind])
            layers = zip(self.keys, self.values, strict=True)
            return fill(stretches, layers, to_device(table, device), int(lengths.max()))
        for number in np.flatnonzero(behind).tolist():
            self._copy_behind(stretches, int(numbers[number]), int(prompts[number]))
        if not (behind == 0).any():
            return None
        numbers, prompts, lengths = (of[behind == 0] for of in (numbers, prompts, lengths))
        longest = int(lengths.max())
        # A shorter prompt is padded with its last token's keys; what lies there is masked.
        offset = np.minimum(np.arange(longest), lengths[:, None] - 1)
        index = torch.from_numpy((self.starts[prompts][:, None] + offset).ravel())
        to = torch.from_numpy(stretches.place[numbers])
        for store, packed in (
            *zip(stretches.keys, self.keys, strict=True),
            *zip(stretches.values, self.values, strict=True),
        ):
            heads, _, dim = packed.shape
            filled = packed.index_select(1, index).view(heads, len(prompts), longest, dim)
            store[to, :, :longest] = filled.transpose(0, 1)
        return None

    def _copy_behind(self, stretches: Stretches, number: int, prompt: int) -> None:
        start, end = self.starts[prompt : prompt + 2].tolist()
        first, to = int(self.behind[prompt]), int(stretches.place[number])
        for store, packed in (
            *zip(stretches.keys, self.keys, strict=True),
            *zip(stretches.values, self.values, strict=True),
        ):
            store[to, :, first : first + end - start] = packed[:, start:end]


def prefill(
    decoder: Decoder,
    requests: list[Request],
    device: torch.device,
    prefixes: KeptPrefixes,
    routers: Routers | None = None,
    tower: ImageTower | None = None,
) -> Prefilled:
    """Compute the prompts of `requests` in one packed forward, equal ones once. prefixes: what is
    kept of samples, and is not computed again; the rows of these requests have to begin before
    anything else is kept. routers: those whose experts are recorded. tower: encodes their images.
    """
    number: dict[tuple[bytes, ...], int] = {}
    prompts = [np.ascontiguousarray(r.prefix, np.int32) for r in requests]
    names = [
        (prompt.tobytes(), *(image.digest.encode() for image in request.images))
        for prompt, request in zip(prompts, requests, strict=True)
    ]
    prompt_of = np.array([number.setdefault(name, len(number)) for name in names], np.int64)
    _, first = np.unique(prompt_of, return_index=True)
    images = tuple(requests[i].images for i in first)
    layout, _ = lay_out_plain([prompts[i] for i in first], images if any(images) else ())
    kept: list[KeptPrefix | None] = [None] * len(first)
    for request, prompt in zip(requests, prompt_of.tolist(), strict=True):
        if (claim := prefixes.claim(request)) is not None:
            if kept[prompt] is None:
                kept[prompt] = claim
            else:
                prefixes.release(claim)
    behind, starts = None, layout.segment_start
    if any(kept):
        behind = BehindKept(layout, kept, prefixes, device)
        starts = behind.starts
    hidden, context = run_plain(
        decoder, layout, device, routers=routers, tower=tower, behind=behind
    )
    experts = None if context.experts is None else np.split(context.experts, starts[1:-1])
    last = to_device(starts[1:] - 1, device)
    return Prefilled(
        requests,
        prompt_of,
        context.keys,
        context.values,
        context.states,
        starts,
        kept,
        hidden.index_select(0, last),
        experts,
    )


@torch.no_grad()
def require_same_samples(engine: Engine, lm: Any, routers: Routers | None = None) -> None:
    """Samples a few tokens. Raises UsageError where their logprobs are not those of transformers
    with its own attention and without a cache. lm: the model that `engine` samples from. routers:
    those whose experts it records, which transformers uses again.
    """
    prompts = [sequence[:6] for sequence in probe_sequences(lm)]
    path = str(lm.config.name_or_path or "the model")
    done: list[Completion] = []
    try:
        for ticket, prompt in enumerate(prompts):
            engine.submit(Request(ticket, SAMPLES, prompt, SamplingSettings(max_new_tokens=NEW)))
        while len(done) < len(prompts) * len(SAMPLES):
            done += engine.completed()
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        problem = f"the built-in engine ends with {type(error).__name__}: {error}"
        raise unsupported(lm.config.model_type, path, "layers", problem) from error
    with own_attention(lm):
        logits = [_logits(lm, prompts[c.ticket], c, routers) for c in done]
    expected = [
        table.log_softmax(-1).gather(
            1, torch.from_numpy(completion.token_ids.astype(np.int64))[:, None]
        )
        for completion, table in zip(done, logits, strict=True)
    ]
    sampled = [torch.from_numpy(completion.logprobs)[:, None] for completion in done]
    if not same(sampled, expected, spread(logits), lm.dtype):
        problem = "the built-in engine's samples are not those that transformers gives"
        raise unsupported(lm.config.model_type, path, "layers", problem)


def _logits(lm: Any, prompt: Any, completion: Completion, routers: Routers | None) -> torch.Tensor:
    """[tokens, V] float32: transformers' logits for each token of a completion."""
    ids = np.concatenate([prompt, completion.token_ids]).astype(np.int64)
    device = next(lm.parameters()).device
    again = nullcontext()
    if routers is not None and completion.experts is not None:
        again = routers.replaying(torch.from_numpy(completion.experts).to(device))
    with again:
        logits = lm(input_ids=torch.from_numpy(ids)[None].to(device), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].float().cpu()
