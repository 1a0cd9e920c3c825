"""Run directories as somebody who means harm would leave them: a genuine one with one thing wrong.

Every mutation is drawn from a counter, so that a case can be made again from its number.
"""

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

DEEP = "[" * 100_000 + "]" * 100_000
RAW = (  # JSON texts that no writer of JSON writes
    "Infinity",
    "-Infinity",
    "NaN",
    "1e999",
    "9" * 5000,
    "-" + "9" * 400,
    DEEP,
    '{"a":' * 50_000 + "1" + "}" * 50_000,
    '"\\ud800"',
    "[" * 70 + "]" * 70,
)
VALUES = (
    None, True, False, 0, 1, -1, 3, 10**15, 2**53, 2**63, 10**18, 0.5, 1.5, -0.5, 1e308, "", "x",
    "../../x", "/dev/zero", "a\0b", "1", "\n", "a" * 5000, [], {}, [[]], [None], [1, 2], ["x"],
    {"a": None}, {"": []}, {"a": {"b": [1.5]}},
)  # fmt: skip
_MARK = "@raw@"


class TooSlow(Exception):
    """A command that did not end."""


@contextlib.contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Raises TooSlow in the middle of what takes longer; on a busy machine too: CPU seconds, and
    ten times as many of the clock for what waits.
    """

    def strike(number: int, frame: FrameType | None) -> None:
        raise TooSlow(f"signal {number}")

    before = {number: signal.signal(number, strike) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, 10 * seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def reseal(checkpoint: Path) -> None:
    """The manifest says of every file what it now is, as whoever changed one would see to."""
    path = checkpoint / "manifest.json"
    manifest = json.loads(path.read_text("utf-8"))
    for name in manifest["files"]:
        file = checkpoint / name
        if file.is_file() and not file.is_symlink():
            content = file.read_bytes()
            sha256 = hashlib.sha256(content).hexdigest()
            manifest["files"][name] = {"size": len(content), "sha256": sha256}
    path.write_text(json.dumps(manifest), "utf-8")


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a JSON value, those inside of long lists only at their ends."""
    if place:
        yield place
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _places(inner, (*place, key))
    elif isinstance(value, list):
        for index in sorted({0, len(value) - 1} if value else ()):
            yield from _places(value[index], (*place, index))


def change_value(drawn: random.Random, text: str) -> tuple[str, str]:
    """A JSON text with one value replaced, taken out or put in; and what was done."""
    data = json.loads(text)
    place = drawn.choice(list(_places(data)))
    # each level is as likely as another: most keys of a recipe are far down
    place = place[: drawn.randint(1, len(place))] if drawn.random() < 0.3 else place
    node = data
    for part in place[:-1]:
        node = node[part]
    dotted_place = ".".join(map(str, place))
    kind = drawn.random()
    if kind < 0.08:
        del node[place[-1]]
        return json.dumps(data), f"{dotted_place} taken out"
    if kind < 0.14 and isinstance(node, dict):
        node[drawn.choice(["", "x", "step", "\0", "é" * 300])] = drawn.choice(VALUES)
        return json.dumps(data), f"a key beside {dotted_place}"
    if kind < 0.4:
        raw = drawn.choice(RAW)
        node[place[-1]] = _MARK
        return json.dumps(data).replace(f'"{_MARK}"', raw), f"{dotted_place} = {raw[:20]}"
    value = drawn.choice(VALUES)
    node[place[-1]] = value
    return json.dumps(data), f"{dotted_place} = {str(value)[:20]!r}"


def change_json(drawn: random.Random, path: Path) -> str:
    """A value of a JSON file, or of one of a log's lines."""
    text = path.read_text("utf-8")
    if path.suffix != ".jsonl":
        changed, change = change_value(drawn, text)
        path.write_text(changed, "utf-8")
        return change
    lines = text.splitlines()
    number = drawn.randrange(len(lines))
    lines[number], change = change_value(drawn, lines[number])
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return f"line {number + 1}: {change}"


def change_header(drawn: random.Random, path: Path) -> str:
    """A value of the header of a tensor file, whose bytes stay."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    if drawn.random() < 0.2:
        size = drawn.choice([0, 1, 10**12, 2**63, end * 2])
        path.write_bytes(size.to_bytes(8, "little") + content[8:])
        return f"a header of {size} bytes"
    changed, change = change_value(drawn, content[8:end].decode())
    header = changed.encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
    return f"header: {change}"


def _replaced(content: bytes) -> Callable[[random.Random, Path], str]:
    def replace(drawn: random.Random, path: Path) -> str:
        path.write_bytes(content)
        return f"contents {content[:20]!r}"

    return replace


def _cut(drawn: random.Random, path: Path) -> str:
    content = path.read_bytes()
    path.write_bytes(content[: drawn.randrange(len(content) + 1)])
    return "cut off"


def _flipped(drawn: random.Random, path: Path) -> str:
    content = bytearray(path.read_bytes())
    for _ in range(8):
        if content:
            content[drawn.randrange(len(content))] = drawn.randrange(256)
    path.write_bytes(bytes(content))
    return "eight bytes changed"


def _instead(
    make: Callable[[Path], None], description: str
) -> Callable[[random.Random, Path], str]:
    def instead(drawn: random.Random, path: Path) -> str:
        path.unlink()
        make(path)
        return description

    return instead


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


FILES: tuple[Callable[[random.Random, Path], str], ...] = (
    _replaced(b""),
    _replaced(b"\n"),
    _replaced(b"[]"),
    _replaced(b"null\n"),
    _replaced(b"{}\n"),
    _replaced(b'{"recipe": {}, "versions": {}}'),
    _replaced(DEEP.encode() + b"\n"),
    _replaced(b'{"step": ' + DEEP.encode() + b"}\n"),
    _replaced(b"9" * 5000 + b"\n"),
    _replaced(b"\xef\xbb\xbf{}"),
    _replaced('{"step": 1}'.encode("utf-16")),
    _replaced(bytes(range(256)) * 20),
    _cut,
    _cut,
    _flipped,
    _flipped,
    _instead(lambda path: None, "taken away"),
    _instead(Path.mkdir, "a directory"),
    _instead(lambda path: os.mkfifo(path), "a pipe"),
    _instead(lambda path: path.symlink_to("/dev/zero"), "a link to a device"),
    _instead(lambda path: path.symlink_to(path.name), "a link to itself"),
    _instead(lambda path: path.symlink_to("/nowhere"), "a link to nothing"),
    _instead(lambda path: path.symlink_to("/etc/passwd"), "a link out of the run"),
    _instead(_sparse, "2^40 bytes of nothing"),
)
TARGETS = (  # patterns, and how often each is drawn
    ("recipe.json", 5),
    ("plan.json", 3),
    ("summary.json", 1),
    ("tokenizer.json", 1),
    ("metrics.jsonl", 3),
    ("eval.jsonl", 3),
    ("samples.jsonl", 3),
    ("events.jsonl", 2),
    ("checkpoints/latest", 1),
    ("checkpoints/best", 1),
    ("checkpoints/step-*/manifest.json", 3),
    ("checkpoints/step-*/state.json", 8),
    ("checkpoints/step-*/*.safetensors", 3),
)


def hostile(drawn: random.Random, genuine: Path, to: Path) -> str:
    """A copy of a run with one thing wrong; returns which."""
    shutil.copytree(genuine, to, symlinks=True)
    pattern = drawn.choices([target for target, _ in TARGETS], [weight for _, weight in TARGETS])[0]
    files = sorted(to.glob(pattern))
    path = drawn.choice(files or [to / "recipe.json"])
    if path.suffix in (".json", ".jsonl") and drawn.random() < 0.7:
        change = change_json(drawn, path)
    elif path.suffix == ".safetensors" and drawn.random() < 0.7:
        change = change_header(drawn, path)
    elif drawn.random() < 0.05:
        other = drawn.choice([path for path in sorted(to.rglob("*")) if path.is_file()])
        shutil.copyfile(other, path) if other != path else path.write_bytes(b"")
        change = f"the contents of {other.name}"
    else:
        change = drawn.choice(FILES)(drawn, path)
    checkpoint = path.parent
    sealed = path.name != "manifest.json" and checkpoint.name.startswith("step-")
    if sealed and drawn.random() < 0.85:
        reseal(checkpoint)
    return f"{path.relative_to(to)}: {change}"
