"""A sample for a page: a short row for lists and filters, and a body that is shown when opened.

A row has what is filtered, sorted and searched. A body has token values as integers: logprobs in
thousandths of a nat, differences (learner - sampled) in hundred-thousandths, finer than a colour
shows. Compressed, 1 280 samples of 134 tokens take 0.99 MB that way, 1.82 MB as the floats of
samples.jsonl, and 0.80 MB as planes of bytes, which would need a decoder.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from postgrad.observe.report.tokens import Pieces

Json = dict[str, Any]
LOGPROB_UNIT = 1e-3
DIFFERENCE_UNIT = 1e-5
ADVANTAGE_DIGITS = 5  # significant
LARGEST = 1e150


def group_row(lines: Sequence[tuple[int, Json]]) -> Json:
    """The row of a group: what its samples share, and a row for each. lines: (number, line)."""
    first = lines[0][1]
    shared = ("step", "ticket", "dataset", "row", "question", "answer", "filtered")
    return {
        **{key: first[key] for key in shared if first.get(key) is not None},
        "samples": [_row(number, line) for number, line in lines],
    }


def _row(number: int, line: Json) -> Json:
    row: Json = {
        "id": number,
        "sample": line.get("sample"),
        "text": line.get("text"),
        "finish": line.get("finish_reason"),
        "rewards": line.get("rewards"),
        "total": line.get("total"),
        "kept": line.get("kept", True),
        "tokens": sum(len(_list(turn, "token_ids")) for turn in _turns(line)),
        "trained": "mask" in line,
    }
    if line.get("failures"):
        row["failures"] = line["failures"]
    weighed = zip(_list(line, "advantages"), _list(line, "mask"), strict=False)
    advantages = _numbers([value for value, bears_loss in weighed if bears_loss])
    if advantages:
        row["advantage"] = _short(math.fsum(advantages) / len(advantages))
    return row


def body(line: Json, pieces: Pieces | None) -> Json:
    """What a page shows of an opened sample beside its row.

    Token lists have one value for each response token; a list of equal values is that one value.
    pieces: None without a tokenizer; then turns have their text, not that of each token.
    """
    prompt = _list(line, "prompt_token_ids")
    fields: Json = {
        "prompt": prompt,
        "turns": [_turn(turn, pieces) for turn in _turns(line)],
        "advantages": _same([_short(value) for value in _list(line, "advantages")]),
        "mask": _same(_list(line, "mask")),
    }
    if pieces is not None and (changed := pieces.exceptions(_ids(prompt))):
        fields["prompt_texts"] = changed
    for key in ("details", "metadata", "counts", "columns", "policy_version", "last_text"):
        if line.get(key):
            fields[key] = line[key]
    return fields


def vocabulary(bodies: Sequence[Json], pieces: Pieces | None) -> dict[int, str]:
    """Token id -> text of all tokens in `bodies`; {} without a tokenizer."""
    if pieces is None:
        return {}
    used: set[int] = set()
    for sample_body in bodies:
        used.update(_ids(sample_body["prompt"]))
        for turn in sample_body["turns"]:
            used.update(_ids(turn["ids"]))
    return {token: pieces.text(token) for token in sorted(used)}


def _turn(turn: Json, pieces: Pieces | None) -> Json:
    ids = _list(turn, "token_ids")
    sampled = _list(turn, "logprobs")
    learned = _list(turn, "learner_logprobs")
    fields: Json = {"author": turn.get("author"), "ids": ids, "logprobs": _scaled(sampled)}
    if len(learned) == len(sampled):
        pairs = zip(learned, sampled, strict=True)
        fields["differences"] = [_units(_minus(a, b), DIFFERENCE_UNIT) for a, b in pairs]
    if pieces is None:
        fields["text"] = turn.get("text")
    elif changed := pieces.exceptions(_ids(ids)):
        fields["texts"] = changed
    return fields


def _turns(line: Json) -> list[Json]:
    # The line may come from elsewhere, so any value may be in it.
    return [cast(Json, turn) for turn in _list(line, "turns") if isinstance(turn, dict)]


def _list(line: Mapping[str, Any], key: str) -> list[Any]:
    value = line.get(key)
    return cast(list[Any], value) if isinstance(value, list) else []


def _ids(values: Sequence[Any]) -> list[int]:
    return [value for value in values if isinstance(value, int) and 0 <= value < 2**32]


def _numbers(values: Sequence[Any]) -> list[float]:
    """The values that are numbers below LARGEST, whose squares are finite."""
    return [value for value in values if isinstance(value, int | float) and abs(value) < LARGEST]


def _minus(a: Any, b: Any) -> float | None:
    numbers = _numbers([a, b])
    return numbers[0] - numbers[1] if len(numbers) == 2 else None


def _scaled(values: Sequence[Any]) -> list[int | None]:
    return [_units(value, LOGPROB_UNIT) for value in values]


def _units(value: Any, unit: float) -> int | None:
    return round(value / unit) if _numbers([value]) else None


def _short(value: Any) -> float | None:
    return float(f"{value:.{ADVANTAGE_DIGITS}g}") if _numbers([value]) else None


def _same(values: list[Any]) -> Any:
    return values[0] if values and all(value == values[0] for value in values) else values
