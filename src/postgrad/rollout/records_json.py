"""A sample as one JSON object, and back: the lines of samples.jsonl.

Keys: step, ticket, sample, dataset, row, question, answer, metadata, prompt_token_ids, turns
[{author, token_ids, logprobs, text, learner_logprobs}], policy_version [[version, tokens], ...],
finish_reason, text, rewards {component: number, null where it failed}, total (null where not kept),
kept, failures [{component, cause, message}], and, where the run has them, details {component: what
its verifier noted}, last_text (what verifiers read of several turns), counts {name: number},
images of the prompt, and of a turn of the environment, [{sha256, runs [[first token, tokens], ...],
grid [rows, columns] or null, mutual}], prompt_experts and experts of each turn (base64 of
little-endian int16 [tokens, layers, k] with "experts_shape" [layers, k]), sampling_mask of a turn
(base64 of little-endian int32: {sizes of each token, ids of all}), columns {name: values},
turn_weight (of the column turn_rewards in the total), and advantages and mask, one value a response
token. A turn with "opens": true is another conversation, whose tokens nothing before it is read
with. Float32 values are written with nine digits, which name them exactly.
"""

import base64
import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from postgrad.core.ragged import Ragged
from postgrad.core.records import (
    Experts,
    Failure,
    PlacedImage,
    Prompt,
    Rollout,
    SamplingMask,
    ScoredGroup,
    Turn,
    require_sampling_mask,
)

Json = dict[str, Any]
Decode = Callable[[list[int]], str]
Columns = Mapping[str, Sequence[Any]]


def group_to_json(
    group: ScoredGroup, *, step: int, decode: Decode, columns: Sequence[Columns] = ()
) -> list[Json]:
    """A line for each sample of a group.

    `decode` gives the text of token ids; it is called only for samples of several turns. columns:
    for each sample the values of its response tokens by name, which are "learner_logprobs",
    "advantages", "mask" and "logprobs", the rollout's own; as JSON has them. What is the same for
    a group, and numpy's numbers, are made JSON once: of samples there are hundreds a step.
    """
    prompt = group.prompt
    of_prompt: Json = {
        "dataset": prompt.dataset,
        "row": prompt.row,
        "question": prompt.question,
        "answer": prompt.answer,
        "metadata": dict(prompt.metadata),
        "prompt_token_ids": prompt.token_ids.tolist(),
        **images_to_json(prompt.images),
        **({"environment": prompt.environment} if prompt.environment is not None else {}),
    }
    rewards = {name: _numbers(values) for name, values in group.rewards.items()}
    totals, kept = _numbers(group.total), group.kept.tolist()
    lines: list[Json] = []
    for i, rollout in enumerate(group.rollouts):
        sample_columns = columns[i] if columns else {}
        line: Json = {
            "step": step,
            "ticket": prompt.ticket,
            "sample": rollout.sample,
            **of_prompt,
            "turns": _turns_to_json(rollout, decode, sample_columns),
            "policy_version": rollout.versions,
            "finish_reason": rollout.finish_reason,
            "text": rollout.text,
            "rewards": {name: values[i] for name, values in rewards.items()},
            "total": totals[i],
            "kept": kept[i],
            "failures": _failures(group, rollout.sample) if group.failures else [],
        }
        if details := {name: d[i] for name, d in group.details.items() if d[i] is not None}:
            line["details"] = details
        line |= _of_environment(rollout, group.turn_weight)
        for name in ("advantages", "mask"):
            if name in sample_columns:
                line[name] = sample_columns[name]
        lines.append(line)
    return lines


def _failures(group: ScoredGroup, sample: int) -> list[Json]:
    return [
        {"component": f.component, "cause": f.cause, "message": f.message}
        for f in group.failures
        if f.sample == sample
    ]


def _of_environment(rollout: Rollout, turn_weight: float) -> Json:
    """The keys that samples of a single turn seldom have."""
    fields: Json = {}
    if rollout.prompt_experts is not None:
        fields["experts_shape"] = list(rollout.prompt_experts.shape[1:])
        fields["prompt_experts"] = _packed(rollout.prompt_experts, "<i2")
    if rollout.answer is not None:
        fields["last_text"] = rollout.answer
    if rollout.columns:
        fields["columns"] = {name: _floats(values) for name, values in rollout.columns.items()}
    if rollout.counts:
        fields["counts"] = dict(rollout.counts)
    if turn_weight:
        fields["turn_weight"] = turn_weight
    return fields


def images_to_json(images: Sequence[PlacedImage]) -> Json:
    """{"images": [...]} of those of a prompt or a turn: files by hash, tokens as runs; {} without
    any.
    """
    shown = [
        {"sha256": i.digest, "runs": i.runs, "grid": i.grid, "mutual": i.mutual} for i in images
    ]
    return {"images": shown} if shown else {}


def images_from_json(line: Mapping[str, Any], tokens: int) -> tuple[PlacedImage, ...]:
    """The images that `images_to_json` wrote, among `tokens`. A KeyError, ValueError or TypeError
    for something else.
    """
    images = tuple(_image(fields, tokens) for fields in line.get("images", ()))
    ends = [(int(image.at[0]), int(image.at[-1])) for image in images]
    if any(begin <= last for (_, last), (begin, _) in pairwise(ends)):
        raise ValueError("images stand one behind the other")
    return images


def _image(fields: Mapping[str, Any], tokens: int) -> PlacedImage:
    digest, grid = fields["sha256"], fields["grid"]
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise ValueError(f"{digest!r} is no SHA-256")
    if sum(length for _, length in fields["runs"]) > tokens:
        raise ValueError(f"an image has more tokens than its text, {tokens}")
    runs = [start + np.arange(length) for start, length in fields["runs"]]
    at = np.concatenate(runs).astype(np.int64)
    if not 0 <= at[0] <= at[-1] < tokens or (np.diff(at) < 1).any():
        raise ValueError("the tokens of an image are tokens of its text, in rising order")
    rows_columns = None if grid is None else (int(grid[0]), int(grid[1]))
    return PlacedImage(digest, at, rows_columns, bool(fields["mutual"]))


def _turns_to_json(rollout: Rollout, decode: Decode, columns: Columns) -> list[Json]:
    if len(rollout.turns) == 1:
        return [_turn_to_json(rollout.turns[0], rollout.text, columns, None)]
    turns: list[Json] = []
    start = 0
    for turn in rollout.turns:
        cut = slice(start, start + len(turn.token_ids))
        turns.append(_turn_to_json(turn, decode(turn.token_ids.tolist()), columns, cut))
        start = cut.stop
    return turns


def _turn_to_json(turn: Turn, text: str, columns: Columns, cut: slice | None) -> Json:
    """columns: values of all response tokens; cut: those of this turn among them; None: all."""
    sampled, learned = columns.get("logprobs"), columns.get("learner_logprobs")
    fields: Json = {
        "author": turn.author,
        "token_ids": turn.token_ids.tolist(),
        "logprobs": _floats(turn.logprobs) if sampled is None else sampled[cut or slice(None)],
        "text": text,
    }
    if learned is not None:
        fields["learner_logprobs"] = learned[cut or slice(None)]
    if turn.opens:
        fields["opens"] = True
    if turn.experts is not None:
        fields["experts"] = _packed(turn.experts, "<i2")
    if (mask := turn.sampling_mask) is not None:
        fields["sampling_mask"] = {
            "sizes": _packed(mask.lengths, "<i4"), "ids": _packed(mask.values, "<i4")
        }  # fmt: skip
    return fields | images_to_json(turn.images)


def _packed(numbers: NDArray[Any], dtype: str) -> str:
    """Numbers as text: as lists they would be most of the file."""
    return base64.b64encode(numbers.astype(dtype).tobytes()).decode("ascii")


def _mask(turn: Mapping[str, Any]) -> SamplingMask | None:
    """The sampling mask of a turn; None where the line has none."""
    if (packed := turn.get("sampling_mask")) is None:
        return None
    sizes, ids = (
        np.frombuffer(base64.b64decode(packed[key], validate=True), "<i4").astype(np.int32)
        for key in ("sizes", "ids")
    )
    mask = Ragged.of_sizes(ids, sizes)
    require_sampling_mask(mask, np.array(turn["token_ids"], np.int32))
    return mask


def _unpacked(text: str | None, line: Mapping[str, Any]) -> Experts | None:
    """The experts that `_packed` wrote; None where a line has none. A ValueError for other text."""
    if text is None:
        return None
    layers, each = line["experts_shape"]
    values = np.frombuffer(base64.b64decode(text, validate=True), "<i2")
    return values.reshape(-1, layers, each).astype(np.int16)


def group_from_lines(lines: Sequence[Mapping[str, Any]]) -> ScoredGroup:
    """The group whose samples the lines are, in sample order.

    Raises KeyError, TypeError or ValueError when they are not samples of one ticket.
    """
    if len({line["ticket"] for line in lines}) != 1:
        raise ValueError("the samples of a group have one ticket")
    lines = sorted(lines, key=lambda line: line["sample"])
    if len({line["sample"] for line in lines}) != len(lines):
        raise ValueError(f"ticket {lines[0]['ticket']}: two lines have the same sample number")
    first = lines[0]
    prompt = Prompt(
        ticket=first["ticket"],
        token_ids=np.array(first["prompt_token_ids"], np.int32),
        question=first["question"],
        answer=first["answer"],
        dataset=first["dataset"],
        row=first["row"],
        metadata=first["metadata"],
        images=images_from_json(first, len(first["prompt_token_ids"])),
        environment=first.get("environment"),
    )
    return ScoredGroup(
        prompt=prompt,
        rollouts=tuple(_rollout(line) for line in lines),
        rewards={
            name: np.array([_value(line["rewards"][name]) for line in lines])
            for name in first["rewards"]
        },
        total=np.array([_value(line["total"]) for line in lines]),
        kept=np.array([line["kept"] for line in lines], np.bool_),
        failures=tuple(
            Failure(line["sample"], f["component"], f["cause"], f["message"])
            for line in lines
            for f in line["failures"]
        ),
        details=_details(lines),
        turn_weight=first.get("turn_weight", 0.0),
    )


def _details(lines: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    details: list[Mapping[str, Any]] = [line.get("details", {}) for line in lines]
    names = [name for name in lines[0]["rewards"] if any(name in notes for notes in details)]
    return {name: tuple(notes.get(name) for notes in details) for name in names}


def _rollout(line: Mapping[str, Any]) -> Rollout:
    return Rollout(
        ticket=line["ticket"],
        sample=line["sample"],
        turns=tuple(_turn(turn, line) for turn in line["turns"]),
        finish_reason=line["finish_reason"],
        versions=tuple((version, tokens) for version, tokens in line["policy_version"]),
        text=line["text"],
        columns={
            name: np.array(values, np.float32) for name, values in line.get("columns", {}).items()
        },
        answer=line.get("last_text"),
        counts=line.get("counts", {}),
        prompt_experts=_unpacked(line.get("prompt_experts"), line),
    )


def _turn(turn: Mapping[str, Any], line: Mapping[str, Any]) -> Turn:
    opens = turn.get("opens", False)
    if opens and (opens is not True or turn["author"] != "environment" or not turn["token_ids"]):
        raise ValueError("a turn that opens a conversation has tokens of the environment")
    return Turn(
        turn["author"],
        np.array(turn["token_ids"], np.int32),
        np.array(turn["logprobs"], np.float32),
        _unpacked(turn.get("experts"), line),
        images_from_json(turn, len(turn["token_ids"])),
        opens,
        _mask(turn),
    )


def nine_digits(values: NDArray[Any]) -> NDArray[np.float64]:
    """Float32 values rounded to nine significant digits, which identify them exactly; 0, infinities
    and NaN stay. (One in ten may print with more: where the power of ten is no exact double.)
    """
    exact = values.astype(np.float64)
    with np.errstate(divide="ignore"):
        digits = 8 - np.floor(np.log10(np.abs(exact)))
    scale = 10.0 ** np.where(np.isfinite(digits), digits, 0.0)
    return np.round(exact * scale) / scale


def _floats(values: NDArray[Any]) -> list[float]:
    return nine_digits(values).tolist()


def _numbers(values: NDArray[Any]) -> list[float | None]:
    """Values for JSON, with None for NaN and infinities."""
    return [
        number if math.isfinite(number) else None for number in values.astype(np.float64).tolist()
    ]


def _value(number: float | None) -> float:
    return math.nan if number is None else number
