"""Calls that a template writes are seen whatever other messages say; dropped ones are named."""

from typing import Any

import pytest

from postgrad.data.dropped import dropped_from

SILENT = "<think>\n\n</think>"  # empty thoughts, as answers of models that may think begin
LINES = 'a "b"\nc'


def called(name: str, content: str = "") -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": {}}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def chat(*turns: str | dict[str, Any]) -> list[dict[str, Any]]:
    """Texts are of the user."""
    return [{"role": "user", "content": m} if isinstance(m, str) else m for m in turns]


def result(content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content}


THOUGHTS = chat(
    "one", called("first", SILENT), result("1"), called("second", SILENT), result("2"),
    {"role": "assistant", "content": f"{SILENT}\n\nthree"}, "four",
    {"role": "assistant", "content": f"{SILENT}\n\nfive"}, "six", called("first", SILENT),
)  # fmt: skip
QUOTED = chat(
    "one", called("first"), result(LINES), called("second"), result("2"),
    {"role": "assistant", "content": LINES},
)  # fmt: skip


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        # thoughts of earlier answers are not written, as by Qwen3, and the last one has the same
        (THOUGHTS, f"one[first]1[second]2 three four five six {SILENT}[first]"),
        (THOUGHTS, f"one{SILENT}[first]1{SILENT}[second]2{SILENT}\n\nthree four five six[first]"),
        # a result is written as JSON, as by Llama 3, and the answer quotes it as it was
        (QUOTED, f'one[first]"a \\"b\\"\\nc"[second]2 {LINES}'),
        (QUOTED, f"one[first]{LINES}[second]2 {LINES}"),
    ],
)
def test_a_call_is_seen_although_a_later_message_repeats_what_stood_before_it(
    messages: list[dict[str, Any]], text: str
) -> None:
    assert dropped_from(messages, text) is None
    without = text.replace("[second]", "")
    assert 'drops a call of message 3: {"name": "second"' in str(dropped_from(messages, without))
    schemas = f"<tools>first second</tools>{without}"  # which name it too
    assert "drops a call of message 3" in str(dropped_from(messages, schemas))
