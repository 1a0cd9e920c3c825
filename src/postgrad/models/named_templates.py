"""Chat templates for a recipe's `data.chat_template`: a name, a Jinja file, a model's folder with
one, or the template's text.

The named templates lie in chat_templates/*.jinja: those of Open-Instruct's scripts and of
well-known model families. They end a turn with the tokenizer's eos_token where the family does;
their other marks are plain text where the tokenizer has no tokens for them. A template's text may
include one of them, or the tokenizer's own: `{{ bos_token }}{% include "tokenizer" %}`.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.core.text import nearest

_FOLDER = Path(__file__).parent / "chat_templates"
_OWN = "tokenizer"  # what a template calls the tokenizer's own
_INCLUDE = re.compile(r"""\{%-?\s*include\s+(["'])(?P<name>[^"']*)\1\s*-?%\}""")


@cache
def names() -> tuple[str, ...]:
    """The names of the templates in chat_templates/, sorted: ("chatml", ...)."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.jinja")))


def template_text(template: str) -> str:
    """The Jinja text that data.chat_template names, with the named templates that it includes.
    Raises UsageError where it is neither a name nor a readable file, or includes what is no name.
    """
    if "{{" in template or "{%" in template:
        return _INCLUDE.sub(_included, template)
    if template in names():
        return _named(template)
    try:
        path = Path(template).expanduser()
        text = (path / "chat_template.jinja" if path.is_dir() else path).read_text("utf-8")
    except (OSError, RuntimeError, ValueError) as error:
        close = nearest(template, names())
        hint = f"did you mean {close!r}?" if close else f"the names are {', '.join(names())}"
        raise UsageError(
            f"data.chat_template {template[:200]!r} cannot be read: {error}; it is a name, a Jinja "
            f"file, or a template's own text; {hint}"
        ) from error

    return _INCLUDE.sub(_included, text)


def _named(name: str) -> str:
    return (_FOLDER / f"{name}.jinja").read_text("utf-8")


def _included(match: re.Match[str]) -> str:
    """The text of an included template; the tokenizer's own stays to be included."""
    name = match["name"]
    if name == _OWN:
        return match[0]
    if name not in names():
        close = nearest(name, (*names(), _OWN))
        hint = f"; did you mean {close!r}?" if close else ""
        raise UsageError(
            f"data.chat_template includes {name[:200]!r}: it may include {_OWN!r}, which is the "
            f"tokenizer's own template, or one of {', '.join(names())}{hint}"
        )
    return _named(name)


def includes_own(text: str) -> bool:
    """Whether a text of template_text takes in the tokenizer's own template."""
    return any(match["name"] == _OWN for match in _INCLUDE.finditer(text))


def chat_template_of(tokenizer: Any, stated: str | None, tools: Any = None) -> str:
    """The Jinja text that writes conversations: `stated`, of template_text, with the tokenizer's
    own where it includes that; without one the tokenizer's own. tools: what a conversation may
    call; some tokenizers have a template of its own for them. Raises UsageError where the
    text includes the tokenizer's own and it has none, ValueError where nothing is stated either.
    """
    text = str(tokenizer.get_chat_template(stated, tools))
    if stated is None or not includes_own(text):
        return text
    if not tokenizer.chat_template:
        raise UsageError(
            "data.chat_template includes the tokenizer's own template, and it has none: include "
            'one of the names, {% include "chatml" %}'
        )
    original = str(tokenizer.get_chat_template(None, tools))
    return _INCLUDE.sub(lambda match: original if match["name"] == _OWN else match[0], text)


def with_template(tokenizer: Any, template: str) -> Any:
    """The tokenizer, its chat template replaced by `template` unless that is ""."""
    if template:
        tokenizer.chat_template = chat_template_of(tokenizer, template_text(template))
    return tokenizer
