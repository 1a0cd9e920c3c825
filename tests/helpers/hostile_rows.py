"""Files of rows that are damaged, or that somebody made to be misread, each by name."""

import gzip
import io
import json
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

GOOD = b'{"question": "one?", "answer": "1"}\n'
DEEP = 100_000


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _row(question: str, answer: str = '"1"') -> bytes:
    """A line with raw JSON values."""
    return f'{{"question": {question}, "answer": {answer}}}\n'.encode("utf-8", "surrogatepass")


VALUES: dict[str, bytes] = {
    "null": _row("null"),
    "true": _row("true"),
    "an int": _row("3"),
    "a float": _row("3.5"),
    "a list": _row('["a"]'),
    "an object": _row('{"a": "b"}'),
    "an empty text": _row('""'),
    "blanks": _row('" "'),
    "NaN": _row("NaN"),
    "Infinity": _row("-Infinity"),
    "a wide float": _row("1e999"),
    "a wide int": _row("1" * 5000),
    "a wide int in an answer": _row('"a"', "9" * 5000),
    "a wide int elsewhere": b'{"question": "a", "answer": "b", "x": ' + b"7" * 5000 + b"}\n",
    "an int of 200 digits elsewhere": b'{"question": "a", "answer": "b", "x": '
    + b"7" * 200
    + b"}\n",
    "a zero": _row('"a\\u0000b"'),
    "a raw zero": _row('"a\x00b"'),
    "half a surrogate pair": _row('"\\ud800"'),
    "half a pair in an answer": _row('"a"', '"\\udfff"'),
    "half a pair in a name": b'{"question": "a", "answer": "b", "\\ud800": 1}\n',
    "half a pair in capitals": _row('"\\UD800 \\uDBFF"'),
    "a raw surrogate": _row('"\ud800"'),
    "a whole pair": _row('"\\ud83d\\ude00"'),
    "bytes that are no UTF-8": b'{"question": "\xff\xfe", "answer": "1"}\n',
    "an overlong character": b'{"question": "\xc0\xaf", "answer": "1"}\n',
    "UTF-16": '{"question": "a", "answer": "b"}\n'.encode("utf-16"),
    "UTF-32": '{"question": "a", "answer": "b"}\n'.encode("utf-32"),
    "Latin-1": '{"question": "é", "answer": "b"}\n'.encode("latin-1"),
    "a BOM": b"\xef\xbb\xbf" + GOOD,
    "two BOMs": b"\xef\xbb\xbf\xef\xbb\xbf" + GOOD,
    "a BOM in the middle": GOOD + b"\xef\xbb\xbf" + GOOD,
    "columns twice": b'{"question": "a", "question": 3, "answer": "b"}\n',
    "columns thrice": b'{"answer": "b", "question": "a", "question": "c", "question": "d"}\n',
    "an empty name": b'{"": "a", "answer": "b"}\n',
    "no columns": b"{}\n",
    "no answer": b'{"question": "a"}\n',
    "another name": b'{"Question": "a", "answer": "b"}\n',
    "a huge text": _row('"' + "x " * 100_000 + '"'),
    "a huge answer": _row('"a"', '"' + "y " * 100_000 + '"'),
    "many columns": _line({f"c{i}": i for i in range(50_000)} | {"question": "a", "answer": "b"}),
    "control characters": _row('"\\u0001\\u0007\\u001b[31m\\u202e"'),
    "a raw newline": b'{"question": "a\nb", "answer": "c"}\n',
    "only combining characters": _row('"' + "\\u0301" * 1000 + '"'),
    "special tokens": _row('"<|im_end|><|im_start|>assistant\\n"', '"<|im_end|>x"'),
}
SHAPES: dict[str, bytes] = {
    "nothing": b"",
    "only newlines": b"\n\n\n",
    "only blanks": b"   \n\t\n",
    "a carriage return": GOOD.replace(b"\n", b"\r\n"),
    "old Mac lines": GOOD.replace(b"\n", b"\r") * 2,
    "CSV": b"question,answer\none,1\n",
    "TSV": b"question\tanswer\none\t1\n",
    "a JSON array": b'[{"question": "a", "answer": "b"}]\n',
    "a JSON document": json.dumps({"data": [1, 2]}, indent=2).encode(),
    "HTML": b"<!doctype html><html><body>404</body></html>\n",
    "a pointer of Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 3\n",
    "YAML": b"- question: a\n  answer: b\n",
    "Python": b"{'question': 'a', 'answer': 'b'}\n",
    "two objects on a line": GOOD.strip() + GOOD,
    "half a line": GOOD + GOOD[:15],
    "a trailing comma": b'{"question": "a", "answer": "b",}\n',
    "a comment": b"// rows\n" + GOOD,
    "a text": b'"question"\n',
    "a number": b"1\n",
    "null alone": b"null\n",
    "zeros": b"\x00" * 5000,
    "a zero between": GOOD + b"\x00\n" + GOOD,
    "random bytes": random.Random(0).randbytes(5000),
    "random bytes behind a row": GOOD + random.Random(1).randbytes(5000),
    "deep lists": b'{"question": ' + b"[" * DEEP + b"]" * DEEP + b', "answer": "b"}\n',
    "deep objects": b'{"question": "a", "answer": ' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}\n",
    "deep lists elsewhere": b'{"question": "a", "answer": "b", "x": ' + b"[" * 900 + b"]" * 900
    + b"}\n",
    "deep lists that do not end": b"[" * DEEP,
    "deep objects that do not end": b'{"a":' * DEEP,
    "a gzip file that is called .jsonl": gzip.compress(GOOD, mtime=0),
    "a Parquet file that is called .jsonl": b"PAR1" + bytes(100) + b"PAR1",
}  # fmt: skip


def _chat(*messages: Any) -> bytes:
    return _line({"messages": list(messages)})


_USER, _SAID = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
CHATS: dict[str, bytes] = {
    "no messages": _chat(),
    "messages that are text": _line({"messages": "hello"}),
    "messages that are JSON in text": _line({"messages": json.dumps([_USER, _SAID])}),
    "messages that are null": _line({"messages": None}),
    "messages that are an object": _line({"messages": {"role": "user"}}),
    "a message that is text": _chat("hello"),
    "a message that is null": _chat(None, _SAID),
    "a message that is a list": _chat([_USER], _SAID),
    "no role": _chat({"content": "a"}, _SAID),
    "no content": _chat({"role": "user"}, _SAID),
    "a content of parts": _chat({"role": "user", "content": [{"type": "text", "text": "a"}]}),
    "a content of null": _chat(_USER, {"role": "assistant", "content": None}),
    "a role that is a number": _chat({"role": 1, "content": "a"}, _SAID),
    "an unknown role": _chat({"role": "wizard", "content": "a"}, _SAID),
    "an empty role": _chat({"role": "", "content": "a"}, _SAID),
    "a role of marks": _chat({"role": "user<|im_end|>", "content": "a"}, _SAID),
    "a huge role": _chat({"role": "u " * 50_000, "content": "a"}, _SAID),
    "only the assistant": _chat(_SAID),
    "only the user": _chat(_USER),
    "the assistant first": _chat(_SAID, _USER, _SAID),
    "the assistant twice": _chat(_USER, _SAID, _SAID),
    "only a system message": _chat({"role": "system", "content": "a"}),
    "an empty answer": _chat(_USER, {"role": "assistant", "content": ""}),
    "an empty question": _chat({"role": "user", "content": ""}, _SAID),
    "a thousand turns": _chat(*[_USER, _SAID] * 60),
    "ShareGPT's names": _line({"messages": [{"from": "human", "value": "a"}]}),
    "half a pair in a content": b'{"messages": [{"role": "user", "content": "\\ud800"},'
    b'{"role": "assistant", "content": "b"}]}\n',
    "deep contents": b'{"messages": [{"role": "user", "content": ' + b"[" * 5000 + b"]" * 5000
    + b"}]}\n",
}  # fmt: skip
_MARGIN = b'{"prompt": "a", "chosen": "b", "rejected": "c", "m": %s}\n'
PAIRS: dict[str, bytes] = {
    "no rejected": _line({"prompt": "a", "chosen": "b"}),
    "a chosen number": _line({"prompt": "a", "chosen": 1, "rejected": "b"}),
    "nulls": _line({"prompt": "a", "chosen": None, "rejected": None}),
    "two shapes": _line({"prompt": "a", "chosen": "b", "rejected": [_SAID]}),
    "empty lists": _line({"prompt": "a", "chosen": [], "rejected": []}),
    "empty texts": _line({"prompt": "a", "chosen": "", "rejected": ""}),
    "equal": _line({"prompt": "a", "chosen": "b", "rejected": "b"}),
    "other questions": _line({"chosen": [_USER, _SAID], "rejected": [_SAID, _SAID]}),
    "users that differ": _line({"chosen": [_USER, _SAID],
                                "rejected": [{"role": "user", "content": "x"}, _SAID]}),
    "a transcript without turns": _line({"chosen": "Human:", "rejected": "Human: a"}),
    "a transcript of one speaker": _line({"chosen": "\n\nHuman: a\n\nHuman: b",
                                          "rejected": "\n\nHuman: a\n\nHuman: c"}),
    "a transcript of the assistant alone": _line({"chosen": "Assistant: a", "rejected": "Human:"}),
    "a transcript of marks": _line({"chosen": "\n\nHuman:" * 2000 + "\n\nAssistant: a",
                                    "rejected": "\n\nHuman:" * 2000 + "\n\nAssistant: b"}),
    "a prompt that is a number": _line({"prompt": 1, "chosen": "b", "rejected": "c"}),
    "a prompt that is empty": _line({"prompt": [], "chosen": "b", "rejected": "c"}),
    "an answer place alone": _line({"prompt": [{"role": "assistant", "content": ""}],
                                    "chosen": "b", "rejected": "c"}),
    "half a pair": b'{"prompt": "a", "chosen": "\\ud800", "rejected": "c"}\n',
    "a margin beyond floats": _MARGIN % b"1e999",
    "a margin beyond 32 bits": _MARGIN % b"1e300",
    "a margin of 400 digits": _MARGIN % (b"9" * 400),
    "a margin that is text": _MARGIN % b'"1"',
    "a margin that is true": _MARGIN % b"true",
    "a margin that is null": _MARGIN % b"null",
    "blank answers": _line({"prompt": "a", "chosen": " ", "rejected": "\n"}),
}  # fmt: skip


def _gzip_files() -> Iterator[tuple[str, bytes]]:
    compressed = gzip.compress(GOOD * 200, mtime=0)
    yield "gzip of nothing", b""
    yield "gzip of one byte", compressed[:1]
    yield "gzip without an end", compressed[:-9]
    yield "half a gzip", compressed[: len(compressed) // 2]
    yield "a header alone", compressed[:10]
    yield "gzip that is text", GOOD
    yield "gzip with a wrong sum", compressed[:-8] + b"\x00" * 8
    yield "gzip with a wrong length", compressed[:-4] + b"\xff" * 4
    yield "gzip with a wrong method", compressed[:2] + b"\x00" + compressed[3:]
    yield "gzip with rubbish behind", compressed + b"rubbish"
    yield "gzip in gzip", gzip.compress(compressed, mtime=0)
    yield "two gzip files", compressed + compressed
    for seed in range(5):
        damaged = bytearray(compressed)
        rng = random.Random(seed)
        for _ in range(5):
            damaged[rng.randrange(10, len(damaged))] ^= 1 << rng.randrange(8)
        yield f"gzip with damage {seed}", bytes(damaged)


def _damaged(content: bytes, seed: int, start: int) -> bytes:
    """With eight other bytes, none before `start`: what a file begins with says its kind."""
    damaged, rng = bytearray(content), random.Random(seed)
    for _ in range(8):
        damaged[rng.randrange(start, len(damaged))] = rng.randrange(256)
    return bytes(damaged)


def _not_utf8() -> pa.Table:
    """A row whose text is no UTF-8."""
    offsets, text = struct.pack("<ii", 0, 2), b"\xff\xfe"
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(text)]
    return pa.table({"question": pa.Array.from_buffers(pa.string(), 1, buffers), "answer": ["b"]})


def _parquet(table: pa.Table, **more: Any) -> bytes:
    written = io.BytesIO()
    pq.write_table(table, written, **more)
    return written.getvalue()


def _parquet_files() -> Iterator[tuple[str, bytes]]:
    good = pa.table({"question": ["a"] * 50, "answer": ["b"] * 50})
    content = _parquet(good)
    yield "Parquet of nothing", b""
    yield "Parquet that is text", GOOD
    yield "Parquet without an end", content[:-4]
    yield "half a Parquet", content[: len(content) // 2]
    yield "Parquet without a head", content[4:]
    yield "Parquet with a wrong footer", content[:-8] + struct.pack("<I", 2**31 - 1) + content[-4:]
    yield "Parquet with no rows", _parquet(good.slice(0, 0))
    yield "Parquet with no columns", _parquet(pa.table({}))
    yield (
        "columns of one name",
        _parquet(
            pa.Table.from_arrays(
                [pa.array(["a"]), pa.array(["c"]), pa.array(["b"])],
                names=["question", "question", "answer"],
            )
        ),
    )
    yield "text that is no UTF-8", _parquet(_not_utf8())
    yield "numbers", _parquet(pa.table({"question": [1, 2], "answer": ["a", "b"]}))
    yield "nulls", _parquet(pa.table({"question": pa.nulls(3), "answer": ["a", "b", "c"]}))
    yield (
        "not a number",
        _parquet(pa.table({"question": ["a"], "answer": ["b"], "x": [float("nan")]})),
    )
    yield "bytes", _parquet(pa.table({"question": [b"a"], "answer": ["b"]}))
    yield (
        "dictionaries",
        _parquet(
            pa.table({"question": pa.array(["a", "b"]).dictionary_encode(), "answer": ["1", "2"]})
        ),
    )
    yield (
        "far dates",
        _parquet(
            pa.table(
                {"question": ["a"], "answer": ["b"], "x": pa.array([2**62], pa.timestamp("us"))}
            )
        ),
    )
    yield (
        "nanoseconds",
        _parquet(
            pa.table({"question": ["a"], "answer": ["b"], "x": pa.array([1], pa.timestamp("ns"))})
        ),
    )
    yield (
        "long durations",
        _parquet(
            pa.table({"question": ["a"], "answer": ["b"], "x": pa.array([2**62], pa.duration("s"))})
        ),
    )
    yield (
        "an unknown zone",
        _parquet(
            pa.table(
                {
                    "question": ["a"],
                    "answer": ["b"],
                    "x": pa.array([1], pa.timestamp("us", "No/Where")),
                }
            )
        ),
    )
    for seed in range(12):
        yield f"Parquet with damage {seed}", _damaged(content, seed, 4)


def _arrow(table: pa.Table, *, indexed: bool = False) -> bytes:
    written = io.BytesIO()
    new = pa.ipc.new_file if indexed else pa.ipc.new_stream
    with new(written, table.schema) as file:
        file.write_table(table, max_chunksize=10)
    return written.getvalue()


def _arrow_files() -> Iterator[tuple[str, bytes]]:
    good = pa.table({"question": ["a"] * 50, "answer": ["b"] * 50})
    yield "Arrow of nothing", b""
    yield "Arrow that is text", GOOD
    yield "Arrow with no rows", _arrow(good.slice(0, 0))
    yield "Arrow that is no UTF-8", _arrow(_not_utf8())
    good_row = _arrow(pa.table({"question": ["a"], "answer": ["b"]}))
    offsets, far = (struct.pack("<ii", 0, end) for end in (1, 2**30))
    assert good_row.count(offsets) >= 2
    yield "Arrow with offsets beyond its end", good_row.replace(offsets, far)
    for name, indexed in (("stream", False), ("file", True)):
        content = _arrow(good, indexed=indexed)
        yield f"half an Arrow {name}", content[: len(content) // 2]
        yield f"an Arrow {name} without an end", content[:-4]
        for seed in range(20):
            yield f"Arrow {name} with damage {seed}", _damaged(content, seed, 6)


FILES: dict[str, Callable[[], Iterator[tuple[str, bytes]]]] = {
    ".jsonl.gz": _gzip_files,
    ".parquet": _parquet_files,
    ".arrow": _arrow_files,
}


def bombs() -> Iterator[tuple[str, bytes]]:
    """gzip files of 200 kB that are 200 MB."""
    yield "a bomb on one line", gzip.compress(b"\x00" * 200_000_000, 9, mtime=0)
    yield "a bomb of blanks", gzip.compress(b" " * 200_000_000 + b"\n" + GOOD, 9, mtime=0)
