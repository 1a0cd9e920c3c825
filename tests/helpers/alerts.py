"""What a build of torch refuses in deterministic mode: the names that its machine code hands to
Context::alertNotDeterministic. For x86-64.
"""

import re
import struct
import subprocess
from bisect import bisect_right
from pathlib import Path

import numpy as np

ALERT = "alertNotDeterministic"
BEFORE = 160  # bytes of code before a call in which its text is put in place
LEA = re.compile(rb"[\x48\x4c]\x8d[\x05\x0d\x15\x1d\x25\x2d\x35\x3d](....)", re.DOTALL)
JUMP = re.compile(rb"\xff\x25(....)", re.DOTALL)


def alerts(library: Path) -> set[str]:
    """The names in a shared library's calls of it. A call whose name is not seen is an
    AssertionError.
    """
    data = library.read_bytes()
    segments = sorted(
        (int(words[2], 16), int(words[1], 16), int(words[4], 16))
        for words in map(str.split, _readelf("-lW", library))
        if words[:1] == ["LOAD"]
    )
    starts = [start for start, _, _ in segments]

    def text_at(address: int) -> str:
        start, offset, size = segments[max(0, bisect_right(starts, address) - 1)]
        if not start <= address < start + size:
            return ""
        place = offset + address - start
        text = data[place : data.index(b"\0", place)]
        return text.decode("ascii", "replace")

    names: set[str] = set()
    for code, address in _calls(data, library):
        texts = {
            text_at(address + match.end() + struct.unpack("<i", match[1])[0])
            for match in LEA.finditer(code)
        }
        # Its length is a number in the code beside it.
        fitting = {text for text in texts if text and struct.pack("<I", len(text)) in code}
        assert fitting, f"{library.name} calls {ALERT} with a text that is not seen"
        names.add(max(fitting, key=len))
    return names


def _calls(data: bytes, library: Path) -> list[tuple[bytes, int]]:
    """The code before each call, and its address."""
    sections = _sections(library)
    slots = {int(line.split()[0], 16) for line in _readelf("-rW", library) if ALERT in line}
    targets: set[int] = set()
    for name, (start, offset, size) in sections.items():
        if not name.startswith(".plt"):
            continue
        for jump in JUMP.finditer(data[offset : offset + size]):
            address = start + jump.start()
            if start + jump.end() + struct.unpack("<i", jump[1])[0] in slots:
                targets |= {address, address - 4, address - 5}  # behind an endbr64, or a prefix
    start, offset, size = sections[".text"]
    text = np.frombuffer(data, np.uint8, size, offset)
    places = np.flatnonzero(text[:-5] == 0xE8)
    steps = text[places[:, None] + np.arange(1, 5)].copy().view("<i4")[:, 0].astype(np.int64)
    calls = places[np.isin(places + 5 + steps + start, list(targets))].tolist()
    return [(text[max(0, at - BEFORE) : at].tobytes(), start + max(0, at - BEFORE)) for at in calls]


def _sections(library: Path) -> dict[str, tuple[int, int, int]]:
    """Name: address, place in the file, bytes."""
    line = re.compile(r"\s*\[\s*\d+\]\s+(\S+)\s+\S+\s+([0-9a-f]+)\s+([0-9a-f]+)\s+([0-9a-f]+)")
    matches = filter(None, map(line.match, _readelf("-SW", library)))
    return {m[1]: (int(m[2], 16), int(m[3], 16), int(m[4], 16)) for m in matches}


def _readelf(option: str, library: Path) -> list[str]:
    command = ["readelf", option, str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
