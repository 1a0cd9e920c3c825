"""Samples that a checkpoint finds under way: written so far, to be continued by the next process.

They are arrays by name, which a checkpoint holds as a safetensors file (docs/checkpoint-format.md).
Only the policy's turns are in them where the environment is deterministic: it is stepped again. One
that is not would go another way, so what it said is in them too, as "replies".
"""

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from postgrad.core.errors import RunError
from postgrad.core.ragged import Ragged
from postgrad.core.records import (
    Behind,
    EpisodeFailure,
    Experts,
    FinishReason,
    Prompt,
    SamplingMask,
    require_sampling_mask,
)
from postgrad.core.untrusted import parse_json
from postgrad.rollout.engine import Completion, Request, Written
from postgrad.rollout.environment import Observation, OpenSample, SamplingSpec, Step
from postgrad.rollout.records_json import images_from_json, images_to_json
from postgrad.rollout.sampling import OpenGroup

PendingArrays = Mapping[str, NDArray[Any]]
ENDS: tuple[FinishReason | None, ...] = (None, "stop", "length", "dead_end")  # None: it goes on
TYPES = {
    "tickets": (np.int64, 2),  # [G, 2] ticket, policy version at which it was begun
    # [T, 5] ticket, sample, index in ENDS, tokens, spans; a sample's turns in order
    "turns": (np.int64, 5),
    "spans": (np.int64, 2),  # [V, 2] policy version, tokens; of the turns end to end
    "tokens": (np.int32, None),  # [N] of the turns end to end
    "logprobs": (np.float32, None),  # [N] nats, as sampled
}
# Of environments that are not deterministic: UTF-8 text of a JSON list with an object for what each
# said (_observation_to_json), sample after sample: before the first turn, if it began, and to each
# turn that has ended.
REPLIES = "replies"
BEGINS = "begins"  # the key of an object that stands before the first turn
# Of engines that record experts: [M, layers, k] of the turns end to end, and how many of these M
# tokens are of each turn [T] (a turn has those of what it follows too, see Completion.experts).
EXPERTS, ROUTED = "experts", "routed"
# Where sampling masks are kept: int32 [K] ids and [N] how many of them are of each of the tokens.
MASK_IDS, MASK_SIZES = "mask_ids", "mask_sizes"


@dataclass(slots=True)
class _Turns:
    """The arrays while they are filled."""

    turns: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    spans: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    tokens: list[NDArray[np.int32]] = field(default_factory=list[NDArray[np.int32]])
    logprobs: list[NDArray[np.float32]] = field(default_factory=list[NDArray[np.float32]])
    replies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    experts: list[Experts] = field(default_factory=list[Experts])
    masks: list[SamplingMask] = field(default_factory=list[SamplingMask])

    def add(self, ticket: int, sample: int, end: int, turn: Written | Completion) -> None:
        self.turns.append((ticket, sample, end, len(turn.token_ids), len(turn.versions)))
        self.spans += turn.versions
        self.tokens.append(turn.token_ids)
        self.logprobs.append(turn.logprobs)
        if turn.experts is not None:
            self.experts.append(turn.experts)
        if turn.sampling_mask is not None:
            self.masks.append(turn.sampling_mask)

    def recorded(self) -> PendingArrays:
        """The arrays of experts and of sampling masks, where the engine records them."""
        arrays: dict[str, NDArray[Any]] = {}
        if self.experts:
            lengths = np.array([len(experts) for experts in self.experts], np.int64)
            arrays |= {EXPERTS: np.concatenate(self.experts), ROUTED: lengths}
        if self.masks and len(self.masks) == len(self.turns):  # fewer: the setting was changed
            masks = Ragged.joined(self.masks, np.int32)
            arrays |= {MASK_IDS: masks.values, MASK_SIZES: masks.lengths.astype(np.int32)}
        return arrays


def to_arrays(groups: Mapping[int, OpenGroup], begun: Mapping[int, int]) -> PendingArrays:
    """The groups, which no engine works on, with what environments said that are not deterministic.
    begun: the version at which each ticket was begun; {} where there are no groups.
    """
    if not groups:
        return {}
    rows = _Turns()
    for ticket, group in groups.items():
        for number, sample in enumerate(group.samples):
            if not group.deterministic:
                if sample.opening is not None:
                    rows.replies.append({**_observation_to_json(sample.opening), BEGINS: True})
                rows.replies += map(_observation_to_json, sample.observations)
            for turn in sample.completions:
                rows.add(ticket, number, ENDS.index(turn.finish_reason), turn)
            if (written := sample.written) is not None:
                rows.add(ticket, number, 0, written)
    tickets = [(ticket, begun[ticket]) for ticket in groups]
    recorded: dict[str, NDArray[Any]] = {}
    if not all(group.deterministic for group in groups.values()):
        text = json.dumps(rows.replies).encode()
        recorded[REPLIES] = np.frombuffer(text, np.uint8).copy()
    return {
        **recorded,
        **rows.recorded(),
        "tickets": np.array(tickets, np.int64).reshape(-1, 2),
        "turns": np.array(rows.turns, np.int64).reshape(-1, 5),
        "spans": np.array(rows.spans, np.int64).reshape(-1, 2),
        "tokens": np.concatenate([np.zeros(0, np.int32), *rows.tokens]),
        "logprobs": np.concatenate([np.zeros(0, np.float32), *rows.logprobs]),
    }


def begun_of(arrays: PendingArrays) -> dict[int, int]:
    """Ticket -> the policy version at which it was begun. Raises RunError as `to_groups` does."""
    if not arrays:
        return {}
    _check(arrays)
    return {int(ticket): int(version) for ticket, version in arrays["tickets"]}


def to_groups(
    arrays: PendingArrays, draw: Callable[[int], Prompt], spec: SamplingSpec, tokenizer: Any
) -> tuple[list[OpenGroup], int]:
    """The groups of `to_arrays`: prompts are drawn, and environments are stepped again, or go on
    behind what they said where they are not deterministic. Returns too how many samples are drawn
    from their start, because their environment can do neither.

    Raises RunError where the arrays are not those of such groups.
    """
    groups = {ticket: OpenGroup(draw(ticket), spec) for ticket in begun_of(arrays)}
    if not arrays:
        return [], 0
    _require_place(arrays, groups)
    if spec.keeps_mask and len(arrays["turns"]) and MASK_IDS not in arrays:
        raise RunError(
            "the checkpoint's samples under way were drawn without rollout.keep_sampling_mask: go "
            "on with the setting that it was written with"
        )
    recorded = {ticket for ticket, group in groups.items() if not group.deterministic}
    if recorded and REPLIES not in arrays:
        raise _unfit("it lacks what the environment said, which is not deterministic")
    turns: dict[tuple[int, int], deque[_Turn]] = {}
    for turn in _turns_of(arrays, tokenizer):
        turns.setdefault((turn.ticket, turn.sample), deque()).append(turn)
    replies = deque(_replies(arrays) if recorded else ())
    redrawn = sum(
        _recall_group(groups[ticket], turns, replies, spec)
        for ticket in groups
        if ticket in recorded
    )
    _step_again(turns, {t: group for t, group in groups.items() if t not in recorded})
    return list(groups.values()), redrawn


@dataclass(frozen=True, slots=True)
class _Turn:
    ticket: int
    sample: int
    finish: FinishReason | None
    written: Written
    text: str

    def completion(self, number: int) -> Completion:
        """The turn as the policy's turn `number` of its sample."""
        assert self.finish is not None
        written = self.written
        turn = (written.token_ids, written.logprobs, self.finish, written.versions, self.text)
        recorded = written.experts, written.sampling_mask
        return Completion(self.ticket, self.sample, number, *turn, *recorded)


@dataclass(frozen=True, slots=True)
class _RecordedReply:
    observation: Observation
    begins: bool  # whether it stands before the first turn of its sample


def _turns_of(arrays: PendingArrays, tokenizer: Any) -> Iterator[_Turn]:
    first_token = first_span = 0
    ends = np.cumsum(arrays.get(ROUTED, np.zeros(0, np.int64)))[:-1]
    experts = iter(np.split(arrays[EXPERTS], ends) if EXPERTS in arrays else ())
    masks = _masks_of(arrays)
    for ticket, number, end, tokens, spans in arrays["turns"].tolist():
        token, span = slice(first_token, first_token + tokens), slice(first_span, None)
        first_token, first_span = token.stop, first_span + spans
        written = Written(
            arrays["tokens"][token],
            arrays["logprobs"][token],
            tuple((int(v), int(n)) for v, n in arrays["spans"][span][:spans]),
            next(experts, None),
            None if masks is None else masks.take_many(np.arange(token.start, token.stop)),
        )
        if sum(n for _, n in written.versions) != tokens:
            raise _unfit(f"a turn with other spans, of ticket {ticket}")
        text = tokenizer.decode(written.token_ids.tolist(), skip_special_tokens=True)
        yield _Turn(ticket, number, ENDS[end], written, text)


def _masks_of(arrays: PendingArrays) -> SamplingMask | None:
    """Those of the tokens of all turns."""
    return Ragged.of_sizes(arrays[MASK_IDS], arrays[MASK_SIZES]) if MASK_IDS in arrays else None


def _step_again(
    turns: dict[tuple[int, int], deque[_Turn]], groups: Mapping[int, OpenGroup]
) -> None:
    """Steps the environments of all samples side by side, each through its turns in order, of which
    none are left.
    """
    begun: list[tuple[OpenGroup, OpenSample, Step]] = [
        (group, sample, sample.begin())
        for group in groups.values()
        for sample in group.samples
        if sample.begins
    ]
    while begun or turns:
        for group, sample, step in begun:
            group.left -= sample.observe(step.result()) is None
        begun = []
        for (ticket, number), later in list(turns.items()):
            turn, group = later.popleft(), groups[ticket]
            sample = group.samples[number]
            request = _open_request(sample, ticket)
            if turn.finish is None:
                sample.continue_turn(turn.written)
            else:
                begun.append((group, sample, sample.take(turn.completion(request.turn))))
            if not later:
                del turns[ticket, number]


def _recall_group(
    group: OpenGroup,
    turns: dict[tuple[int, int], deque[_Turn]],
    replies: deque[_RecordedReply],
    spec: SamplingSpec,
) -> int:
    """Gives samples their turns, of which none are left, and what their environment said, as
    recorded. Returns how many are drawn from their start, because it cannot go on.
    """
    ticket, redrawn = group.prompt.ticket, 0
    for number, sample in enumerate(group.samples):
        of_sample = turns.pop((ticket, number), ())
        try:
            _recall_sample(sample, of_sample, replies)
        except ValueError as error:
            raise _unfit(f"a reply of the environment to ticket {ticket}: {error}") from error
        if sample.begins:  # as no environment did in an earlier version
            redrawn += bool(of_sample)
        elif sample.request is None:
            group.left -= 1
        elif (sample.opening or sample.observations) and not sample.resume():
            group.samples[number] = OpenSample(group.prompt, number, spec)
            redrawn += 1
    return redrawn


def _recall_sample(
    sample: OpenSample, turns: Iterable[_Turn], replies: deque[_RecordedReply]
) -> None:
    if sample.begins and replies and replies[0].begins:
        sample.observe(replies.popleft().observation)
    for turn in turns:
        if turn.finish is not None and not replies:
            raise _unfit("fewer replies of the environment than turns")
        reply = None if turn.finish is None else replies.popleft().observation
        if sample.begins:
            continue
        request = _open_request(sample, turn.ticket)
        if reply is None:
            sample.continue_turn(turn.written)
        else:
            sample.recall(turn.completion(request.turn), reply)


def _open_request(sample: OpenSample, ticket: int) -> Request:
    if sample.request is None:
        raise _unfit(f"a turn too many of ticket {ticket}")
    return sample.request


def _observation_to_json(observation: Observation) -> dict[str, Any]:
    failure = observation.failure
    return {
        "token_ids": observation.token_ids.tolist(),
        "done": observation.done,
        "reward": observation.reward,
        "counts": dict(observation.counts),
        "failure": None if failure is None else [failure.cause, failure.message],
        **images_to_json(observation.images),
        **({} if observation.behind == "newest" else {"behind": observation.behind}),
        **({} if observation.tools is None else {"tools": list(observation.tools)}),
    }


def _replies(arrays: PendingArrays) -> list[_RecordedReply]:
    try:
        return [
            _RecordedReply(_observation_from_json(reply), bool(reply.get(BEGINS)))
            for reply in parse_json(arrays[REPLIES].tobytes())
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unfit(f"its replies of the environment cannot be read: {error!r}") from error


def _observation_from_json(reply: Any) -> Observation:
    return Observation(
        np.array(reply["token_ids"], np.int32),
        bool(reply["done"]),
        float(reply["reward"]),
        {str(name): float(count) for name, count in reply["counts"].items()},
        None if reply["failure"] is None else EpisodeFailure(*map(str, reply["failure"])),
        images_from_json(reply, len(reply["token_ids"])),
        _behind(reply.get("behind", "newest")),
        _tools(reply.get("tools")),
    )


def _behind(value: Any) -> Behind:
    if value in ("newest", "nothing") or type(value) is int:
        return value
    raise ValueError(f"it stands behind {value!r}")


def _tools(value: Any) -> tuple[Mapping[str, Any], ...] | None:
    if value is None:
        return None
    if isinstance(value, list) and all(isinstance(tool, dict) for tool in value):
        return tuple(value)
    raise ValueError(f"its tools are {value!r}")


def _require_place(arrays: PendingArrays, groups: Mapping[int, OpenGroup]) -> None:
    for ticket, number, *_ in arrays["turns"].tolist():
        if ticket not in groups or number >= len(groups[ticket].samples):
            raise _unfit(f"a turn of sample {number} of ticket {ticket}, which is not under way")


def _check(arrays: PendingArrays) -> None:
    """Names, types and sizes: the file may come from anywhere."""
    types = TYPES | ({REPLIES: (np.uint8, None)} if REPLIES in arrays else {})
    types |= {ROUTED: (np.int64, None)} if ROUTED in arrays else {}
    if {MASK_IDS, MASK_SIZES} & arrays.keys():
        types |= {MASK_IDS: (np.int32, None), MASK_SIZES: (np.int32, None)}
    if arrays.keys() - {EXPERTS} != types.keys():
        raise _unfit(f"it has {sorted(arrays)} and not {sorted(TYPES)}")
    for name, (dtype, columns) in types.items():
        array = arrays[name]
        if array.dtype != dtype or array.shape[1:] != (() if columns is None else (columns,)):
            raise _unfit(f"{name} is {array.dtype} {list(array.shape)}")
    _check_experts(arrays)
    turns = arrays["turns"]
    counts = (len(arrays["tokens"]), len(arrays["logprobs"]), len(arrays["spans"]))
    sums = (turns[:, 3].sum(), turns[:, 3].sum(), turns[:, 4].sum())
    if counts != sums or (turns < 0).any() or (turns[:, 2] >= len(ENDS)).any():
        raise _unfit("turns do not add up to the tokens and spans that are there")
    try:
        if (masks := _masks_of(arrays)) is not None:
            require_sampling_mask(masks, arrays["tokens"])
    except ValueError as error:
        raise _unfit(str(error)) from error


def _check_experts(arrays: PendingArrays) -> None:
    """Every turn has experts, of its own tokens at least, or none has."""
    if (EXPERTS in arrays) != (ROUTED in arrays):
        raise _unfit(f"it has one of {EXPERTS} and {ROUTED} without the other")
    if EXPERTS not in arrays:
        return
    experts, routed = arrays[EXPERTS], arrays[ROUTED]
    if experts.dtype != np.int16 or experts.ndim != 3 or len(routed) != len(arrays["turns"]):
        raise _unfit(f"{EXPERTS} is {experts.dtype} {list(experts.shape)} for {len(routed)} turns")
    if routed.sum() != len(experts) or (routed < arrays["turns"][:, 3]).any():
        raise _unfit(f"{EXPERTS} and {ROUTED} do not add up")


def _unfit(why: str) -> RunError:
    return RunError(f"the checkpoint's samples under way (pending.safetensors) do not fit: {why}")
