"""Chat templates in a process of their own: the texts of transformers, and no harm from any."""

import os
import signal
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from helpers import hostile_templates as hostile
from helpers.chat_families import FAMILIES
from postgrad.core.errors import RunError
from postgrad.models import rendering
from postgrad.models.named_templates import names, template_text
from postgrad.models.rendering import RenderLimits, RenderProcess, Unrenderable, rendered

CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "you"}]
QUICK = {
    *("two loops", "a long string", "doubling", "a width of percent", "a macro that calls itself"),
    *("half a surrogate pair", "globals of lipsum", "a long error", "deep lists", "a power"),
    *("a loop over a wide range", "five million characters", "an error without words"),
}


class Names(SimpleNamespace):
    """What rendering reads of a tokenizer."""

    chat_template = None
    special_tokens_map = {"bos_token": "<s>", "eos_token": "</s>"}

    def get_chat_template(self, template: str | None, tools: Any = None) -> str | None:
        return template


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[RenderProcess]:
    """A process with small limits, in place of this one's."""
    process = RenderProcess(RenderLimits(seconds=0.3, memory=2**28))
    monkeypatch.setattr(rendering, "_process", process)
    yield process
    process.stop()


def text(template: str, messages: Any = CHAT, **variables: Any) -> str:
    wanted = [(messages, [(len(messages), True)])]
    (written_text,) = rendered(Names(), wanted, {"chat_template": template, **variables})
    if isinstance(written_text, Unrenderable):
        raise written_text
    return written_text[0]


TEXTS = st.text(max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(TEXTS, min_size=1, max_size=4),
    generation=st.booleans(),
    value=VALUES,
    template=st.sampled_from(
        [
            *(family.template for family in FAMILIES.values()),
            *map(template_text, names()),
            "{{ value | tojson }}{{ value }}{{ eos_token }}{{ tools }}{{ documents }}",
            "{% for m in messages %}\n    {% if loop.first %}\n  {{ m | tojson(indent=2) }}\n"
            "    {% continue %}\n  {% endif %}\n {% generation %} {{ m.content | trim }}"
            "{% endgeneration %}\n{% endfor %}",
            "{% set ns = namespace(n=1, d=dict(a=1)) %}{{ ns.n }}{{ ns.d.items() | list }}",
        ]
    ),
)
def test_a_text_is_that_of_transformers(
    texts: list[str], generation: bool, value: Any, template: str
) -> None:
    messages = [
        {"role": "assistant" if i % 2 else "user", "content": text} for i, text in enumerate(texts)
    ]
    wanted, _ = render_jinja_template(
        conversations=[messages],
        chat_template=template,
        add_generation_prompt=generation,
        value=value,
        **Names.special_tokens_map,
    )
    (written_text,) = rendered(
        Names(),
        [(messages, [(len(texts), generation)])],
        {"chat_template": template, "value": value},
    )
    assert written_text == wanted


def test_a_row_has_its_texts_in_the_order_in_which_they_were_asked_for() -> None:
    template = "{{ messages | length }}{{ add_generation_prompt }}"
    rows = [(CHAT[:1] * n, [(n, True), (1, False)]) for n in range(1, 1000)]
    texts = list(rendered(Names(), rows, {"chat_template": template}))
    assert texts == [[f"{n}True", "1False"] for n in range(1, 1000)]


def test_the_texts_end_behind_the_first_row_that_is_refused() -> None:
    template = "{{ 1 / (messages[0].content | int) }}"
    rows = [([{"role": "user", "content": str(n % 600)}], [(1, True)]) for n in range(1, 900)]
    texts = list(rendered(Names(), rows, {"chat_template": template}))
    assert len(texts) == 600
    assert str(texts[-1]) == "the chat template refuses it: division by zero"
    assert all(isinstance(row_texts, list) for row_texts in texts[:-1])


def harmless(process: RenderProcess, case: hostile.Hostile) -> None:
    """It is a text of bounded size or a refusal, and the next template is not concerned."""
    wanted = [(CHAT, [(2, True)])]
    (texts,) = rendered(Names(), wanted, {"chat_template": case.template})
    written_text = "" if isinstance(texts, Unrenderable) else texts[0]
    if isinstance(texts, Unrenderable):
        assert str(texts).startswith("the chat template refuses it: ")
        assert len(str(texts)) < 1200
    assert len(written_text) <= process._limits.characters + 4 * 21
    written_text.encode()
    assert "os.environ" not in written_text
    assert "root:" not in written_text
    assert text("{{ messages[0].content }}") == "hello"


@pytest.mark.parametrize("name", sorted(QUICK))
def test_a_hostile_template_is_refused_or_harmless(name: str, small: RenderProcess) -> None:
    harmless(small, {case.name: case for case in hostile.ALL}[name])


@pytest.mark.slow
def test_every_hostile_template_is_refused_or_harmless(small: RenderProcess) -> None:
    assert len({case.name for case in hostile.ALL}) == len(hostile.ALL) > 120
    for case in hostile.ALL:
        harmless(small, case)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
         "it is not done after 0.3 seconds of processor time"),
        ("{{ 'x' * 10**9 }}", "it needs more memory than it may have"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
         "it nests too deeply, or calls itself without end"),
        ("{{ '\\ud800' }}", "it writes half a surrogate pair, which is no character"),
        ("{{ 'x' * 5000000 }}", "it writes 5000000 characters, the limit is 4000084"),
    ],
    ids=["time", "memory", "recursion", "surrogate", "size"],
)  # fmt: skip
def test_a_refusal_says_which_limit_was_met(template: str, why: str, small: RenderProcess) -> None:
    with pytest.raises(Unrenderable, match=f"^the chat template refuses it: {why}$"):
        text(template)


def test_rows_before_the_hostile_one_have_their_texts(small: RenderProcess) -> None:
    template = (
        "{{ messages[0].content }}{% if messages[0].content == 'loop' %}"
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    )
    rows = [
        ([{"role": "user", "content": content}], [(1, True)]) for content in ("a", "b", "loop", "c")
    ]
    texts = list(rendered(Names(), rows, {"chat_template": template}))
    assert texts[:2] == [["a"], ["b"]]
    assert len(texts) == 3
    assert "processor time" in str(texts[2])


def test_memory_is_watched_where_the_system_does_not_limit_it(
    small: RenderProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "SYSTEM_LIMITS_MEMORY", False)
    monkeypatch.setattr(rendering, "LOOK_SECONDS", 0.01)
    small._limits = RenderLimits(seconds=20.0, memory=2**27)
    with pytest.raises(Unrenderable, match=r"it needs more memory than it may have \(128 MiB\)"):
        text("{% set ns = namespace(x=[]) %}{% for i in range(99999) %}"
             "{% set ns.x = [ns.x, 'x' * (10**5 + i)] %}{% endfor %}")  # fmt: skip
    assert text("{{ messages[0].content }}") == "hello"


def test_the_process_has_no_key_of_the_run(
    small: RenderProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("TZ", "UTC")
    text("x")
    assert small._child is not None
    names = set(psutil.Process(small._child.pid).environ())
    assert "TZ" in names
    assert names <= {*rendering.INHERITED, "PYTHONPATH", "LC_CTYPE"}


def test_a_process_that_was_killed_is_started_again(small: RenderProcess) -> None:
    assert text("{{ messages[0].content }}") == "hello"
    assert small._child is not None
    os.kill(small._child.pid, signal.SIGKILL)
    small._child.wait()
    assert text("{{ messages[0].content }}") == "hello"


def test_a_process_that_does_not_start_is_said(
    small: RenderProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(RunError, match=r"did not start: .*exit code 1\)\n(.|\n)*No module named"):
        text("x")


def test_nothing_is_left_in_the_pipe_for_the_next_template(
    small: RenderProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    assert text("{{ 'before' }}") == "before"
    with monkeypatch.context() as patched:
        patched.setattr(RenderProcess, "_row", interrupted)
        with pytest.raises(KeyboardInterrupt):
            text("{{ 'first' }}")
    assert text("{{ 'second' }}") == "second"


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        (
            {"add_generation_prompt": True},
            "'add_generation_prompt' is no variable of a chat template",
        ),
        ({"tokenize": True}, "'tokenize' is no variable of a chat template"),
        ({"value": {1, 2}}, "its variables have to be JSON values"),
        ({"value": "\ud800"}, None),
    ],
    ids=["generation", "tokenize", "set", "surrogate"],
)
def test_variables_are_json_values_of_their_own_names(
    variables: dict[str, Any], why: str | None
) -> None:
    if why is None:
        assert text("{{ value | length }}", **variables) == "1"
        return
    with pytest.raises(Unrenderable, match=why):
        text("x", **variables)


@pytest.mark.parametrize("content", ["\ud800", "a\x00b", "\u2028", "𝕏", "é" * 3])
def test_any_text_of_a_row_is_rendered_or_refused(content: str) -> None:
    message = [{"role": "user", "content": content}]
    if content == "\ud800":
        with pytest.raises(Unrenderable, match="a message is not text"):
            text("{{ messages[0].content }}", message)
    else:
        assert text("{{ messages[0].content }}", message) == content


def test_a_tokenizer_without_a_template_is_told_how_to_get_one() -> None:
    (written_text,) = rendered(Names(), [(CHAT, [(1, True)])], {})
    assert 'name one (data.chat_template = "chatml")' in str(written_text)
