"""Samples that a checkpoint finds under way: written so far, to be continued by the next process.

They are arrays by name, which a checkpoint holds as a safetensors file (docs/checkpoint-format.md).
Only the policy's turns are in them: environments are deterministic and are stepped again.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from postgrad.core.errors import RunError
from postgrad.core.records import FinishReason, Prompt
from postgrad.rollout.engine import Completion, Written
from postgrad.rollout.sampling import Drawing, OpenGroup

PendingArrays = Mapping[str, NDArray[Any]]
ENDS: tuple[FinishReason | None, ...] = (None, "stop", "length")  # None: the turn goes on
TYPES = {
    "tickets": (np.int64, 2),  # [G, 2] ticket, policy version at which it was begun
    # [T, 5] ticket, sample, index in ENDS, tokens, spans; a sample's turns in order
    "turns": (np.int64, 5),
    "spans": (np.int64, 2),  # [V, 2] policy version, tokens; of the turns end to end
    "tokens": (np.int32, None),  # [N] of the turns end to end
    "logprobs": (np.float32, None),  # [N] nats, as sampled
}


@dataclass(slots=True)
class _Turns:
    """The arrays while they are filled."""

    turns: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    spans: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    tokens: list[NDArray[np.int32]] = field(default_factory=list[NDArray[np.int32]])
    logprobs: list[NDArray[np.float32]] = field(default_factory=list[NDArray[np.float32]])

    def add(self, ticket: int, sample: int, end: int, turn: Written | Completion) -> None:
        self.turns.append((ticket, sample, end, len(turn.token_ids), len(turn.versions)))
        self.spans += turn.versions
        self.tokens.append(turn.token_ids)
        self.logprobs.append(turn.logprobs)


def to_arrays(groups: Mapping[int, OpenGroup], begun: Mapping[int, int]) -> PendingArrays:
    """The groups, which no engine works on. begun: the version at which each ticket was begun; {}
    where there are no groups.
    """
    if not groups:
        return {}
    rows = _Turns()
    for ticket, group in groups.items():
        for number, sample in enumerate(group.samples):
            for turn in sample.completions:
                rows.add(ticket, number, ENDS.index(turn.finish_reason), turn)
            if sample.request is not None and sample.request.written is not None:
                rows.add(ticket, number, 0, sample.request.written)
    tickets = [(ticket, begun[ticket]) for ticket in groups]
    return {
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
    arrays: PendingArrays, draw: Callable[[int], Prompt], drawing: Drawing, tokenizer: Any
) -> list[OpenGroup]:
    """The groups of `to_arrays`: prompts are drawn and environments are stepped again.

    Raises RunError where the arrays are not those of such groups.
    """
    groups = {ticket: OpenGroup(draw(ticket), drawing) for ticket in begun_of(arrays)}
    first_token = first_span = 0
    for ticket, number, end, tokens, spans in arrays["turns"].tolist() if arrays else ():
        token, span = slice(first_token, first_token + tokens), slice(first_span, None)
        first_token, first_span = token.stop, first_span + spans
        written = Written(
            arrays["tokens"][token],
            arrays["logprobs"][token],
            tuple((int(v), int(n)) for v, n in arrays["spans"][span][:spans]),
        )
        group = groups.get(ticket)
        if group is None or number >= len(group.samples):
            raise _unfit(f"a turn of sample {number} of ticket {ticket}, which is not under way")
        request = group.samples[number].request
        if request is None or sum(n for _, n in written.versions) != tokens:
            raise _unfit(f"a turn too many, or with other spans, of ticket {ticket}")
        finish = ENDS[end]
        if finish is None:
            group.samples[number].go_on(written)
            continue
        text = tokenizer.decode(written.token_ids.tolist(), skip_special_tokens=True)
        turn = (written.token_ids, written.logprobs, finish, written.versions, text)
        if group.samples[number].take(Completion(ticket, number, request.turn, *turn)) is None:
            group.left -= 1
    return list(groups.values())


def _check(arrays: PendingArrays) -> None:
    """Names, types and sizes: the file may come from anywhere."""
    if arrays.keys() != TYPES.keys():
        raise _unfit(f"it has {sorted(arrays)} and not {sorted(TYPES)}")
    for name, (dtype, columns) in TYPES.items():
        array = arrays[name]
        if array.dtype != dtype or array.shape[1:] != (() if columns is None else (columns,)):
            raise _unfit(f"{name} is {array.dtype} {list(array.shape)}")
    turns = arrays["turns"]
    counts = (len(arrays["tokens"]), len(arrays["logprobs"]), len(arrays["spans"]))
    sums = (turns[:, 3].sum(), turns[:, 3].sum(), turns[:, 4].sum())
    if counts != sums or (turns < 0).any() or (turns[:, 2] >= len(ENDS)).any():
        raise _unfit("turns do not add up to the tokens and spans that are there")


def _unfit(why: str) -> RunError:
    return RunError(f"the checkpoint's samples under way (pending.safetensors) do not fit: {why}")
