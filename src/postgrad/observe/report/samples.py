"""A sample for a page: a short row for lists and filters, and a body that is shown when opened.

A row has what is filtered, sorted and searched. A body has token values as integers: logprobs in
thousandths of a nat, differences (learner - sampled) in hundred-thousandths, finer than a colour
shows. Compressed, 1 280 samples of 134 tokens take 0.99 MB that way, 1.82 MB as the floats of
samples.jsonl, and 0.80 MB as planes of bytes, which would need a decoder.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from postgrad.core.hub import at_revision, local_file
from postgrad.core.media import data_url, kind_of
from postgrad.observe.run_dir import TOKENIZER

UNKNOWN = "�"  # what bytes that are not UTF-8 decode to

JsonObject = dict[str, Any]
LOGPROB_UNIT = 1e-3
DIFFERENCE_UNIT = 1e-5
ADVANTAGE_DIGITS = 5  # significant
LARGEST = 1e150
IMAGE_BYTES = 2**20  # of the largest image's file on a page


class Pieces:
    """The text of token ids, special tokens included."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        anchors = tokenizer.encode("a", add_special_tokens=False).ids
        self._anchor: list[int] = anchors[-1:]
        self._start = len(self._decode(self._anchor))

    def text(self, token: int) -> str:
        """The text that a token adds inside a longer text."""
        if token not in self._texts:
            self._texts[token] = self._decode([*self._anchor, token])[self._start :]
        return self._texts[token]

    def exceptions(self, tokens: Sequence[int]) -> dict[int, str]:
        """Index -> text where a token of the sequence has another text than `text(token)`.

        A character may be split over several tokens: the last of them gets it, the others "".
        """
        if not any(UNKNOWN in self.text(token) for token in tokens):
            return {}
        stream = DecodeStream(skip_special_tokens=False)
        changed: dict[int, str] = {}
        for place, token in enumerate(tokens):
            text = stream.step(self._tokenizer, token) or ""
            if text != self.text(token):
                changed[place] = text
        return changed

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)


def pieces_of(run_dir: Path, model: Any) -> Pieces | None:
    """The texts of a run's tokens; None where there is no readable tokenizer.json.

    The tokenizer is the run's copy, else that of its exported or fresh model, else that of the
    model that it started from. model: the recipe's [model].
    """
    kept = (run_dir / name for name in (TOKENIZER, f"model/{TOKENIZER}", f"init/{TOKENIZER}"))
    for path in (*(file for file in kept if file.is_file()), *tokenizer_files(model)):
        try:
            return Pieces(Tokenizer.from_file(str(path)))
        except Exception:  # noqa: BLE001  # the library raises no other; the page shows numbers
            continue
    return None


def tokenizer_files(model: Any) -> list[Path]:
    """The tokenizer.json of the model that a run started from, where this machine has it: in the
    directory that [model] names, or in the cache of the hub.
    """
    path = model.get("path") if isinstance(model, dict) else None
    if not isinstance(path, str) or not path:
        return []
    file = local_file(at_revision(path, model.get("revision")), TOKENIZER)
    return [] if file is None else [file]


def group_row(lines: Sequence[tuple[int, JsonObject]]) -> JsonObject:
    """The row of a group: what its samples share, and a row for each. lines: (number, line)."""
    first = lines[0][1]
    shared = ("step", "ticket", "dataset", "row", "question", "answer", "filtered", "set")
    return {
        **{key: first[key] for key in shared if first.get(key) is not None},
        "samples": [_row(number, line) for number, line in lines],
    }


def _row(number: int, line: JsonObject) -> JsonObject:
    row: JsonObject = {
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
    for key in ("greedy", "correct"):  # of evaluations
        if isinstance(line.get(key), bool):
            row[key] = line[key]
    if line.get("failures"):
        row["failures"] = line["failures"]
    weighed = zip(_list(line, "advantages"), _list(line, "mask"), strict=False)
    advantages = _numbers([value for value, bears_loss in weighed if bears_loss])
    if advantages:
        row["advantage"] = _short(math.fsum(advantages) / len(advantages))
    return row


def body(line: JsonObject, pieces: Pieces | None) -> JsonObject:
    """What a page shows of an opened sample beside its row.

    Token lists have one value for each response token; a list of equal values is that one value.
    pieces: None without a tokenizer; then turns have their text, not that of each token.
    """
    prompt = _list(line, "prompt_token_ids")
    fields: JsonObject = {
        "prompt": prompt,
        "turns": [_turn(turn, pieces) for turn in _turns(line)],
        "advantages": _same([_short(value) for value in _list(line, "advantages")]),
        "mask": _same(_list(line, "mask")),
    }
    if pieces is not None and (changed := pieces.exceptions(_ids(prompt))):
        fields["prompt_texts"] = changed
    if images := _digests(line):
        fields["images"] = images
    for key in ("details", "metadata", "counts", "columns", "policy_version", "last_text"):
        if line.get(key):
            fields[key] = line[key]
    return fields


def pictures(bodies: Iterable[JsonObject], folder: Path, room: int) -> dict[str, JsonObject]:
    """SHA-256 -> {"src": a data URL} of each image of `bodies`, or {"why": it is not shown}.
    folder: of the files. room: bytes of the files that are shown.
    """
    shown: dict[str, JsonObject] = {}
    parts = (part for each in bodies for part in (each, *each["turns"]))
    for digest in dict.fromkeys(digest for part in parts for digest in part.get("images", ())):
        content, why = _picture(folder / digest, digest, room)
        if content is None:
            shown[digest] = {"why": why}
            continue
        room -= len(content)
        shown[digest] = {"src": data_url(content)}
    return shown


def _picture(path: Path, digest: str, room: int) -> tuple[bytes | None, str]:
    """The file of an image; None, and why it is not shown."""
    try:
        size = path.stat().st_size
        if size > IMAGE_BYTES:
            return None, f"its file has {size} bytes, and a page shows at most {IMAGE_BYTES}"
        if size > room:
            return None, "the page has no room for more images"
        content = path.read_bytes()
    except OSError as error:
        return None, f"its file cannot be read: {error.strerror}"
    if hashlib.sha256(content).hexdigest() != digest:
        return None, "its file is damaged"
    if kind_of(content) is None:  # a browser runs no code of any of these
        return None, "its file is no image"
    return content, ""


def _digests(part: JsonObject) -> list[str]:
    """The hashes of the images of a sample's prompt, or of a turn."""
    named = [image.get("sha256") for image in _list(part, "images") if isinstance(image, dict)]
    return [text for text in named if isinstance(text, str) and re.fullmatch("[0-9a-f]{64}", text)]


def vocabulary(bodies: Sequence[JsonObject], pieces: Pieces | None) -> dict[int, str]:
    """Token id -> text of all tokens in `bodies`; {} without a tokenizer."""
    if pieces is None:
        return {}
    used: set[int] = set()
    for sample_body in bodies:
        used.update(_ids(sample_body["prompt"]))
        for turn in sample_body["turns"]:
            used.update(_ids(turn["ids"]))
    return {token: pieces.text(token) for token in sorted(used)}


def _turn(turn: JsonObject, pieces: Pieces | None) -> JsonObject:
    ids = _list(turn, "token_ids")
    sampled = _list(turn, "logprobs")
    learned = _list(turn, "learner_logprobs")
    fields: JsonObject = {"author": turn.get("author"), "ids": ids, "logprobs": _scaled(sampled)}
    if len(learned) == len(sampled):
        pairs = zip(learned, sampled, strict=True)
        fields["differences"] = [_units(_minus(a, b), DIFFERENCE_UNIT) for a, b in pairs]
    if images := _digests(turn):
        fields["images"] = images
    if turn.get("opens") is True:
        fields["opens"] = True
    if pieces is None:
        fields["text"] = turn.get("text")
    elif changed := pieces.exceptions(_ids(ids)):
        fields["texts"] = changed
    return fields


def _turns(line: JsonObject) -> list[JsonObject]:
    # The line may come from elsewhere, so any value may be in it.
    return [cast(JsonObject, turn) for turn in _list(line, "turns") if isinstance(turn, dict)]


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
