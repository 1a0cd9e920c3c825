"""Chat templates for a recipe's `data.chat_template`: a name, a Jinja file, a model's folder with
one, or the template's text.

The named templates lie in chat_templates/*.jinja: those of Open-Instruct's scripts and of
well-known model families. They end a turn with the tokenizer's eos_token where the family does;
their other marks are plain text where the tokenizer has no tokens for them.
"""

from functools import cache
from pathlib import Path
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.core.text import nearest

_FOLDER = Path(__file__).parent / "chat_templates"


@cache
def names() -> tuple[str, ...]:
    """The names of the templates in chat_templates/, sorted: ("chatml", ...)."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.jinja")))


def template_text(template: str) -> str:
    """The Jinja text that data.chat_template names. Raises UsageError where it is neither a name
    nor a readable file.
    """
    if "{{" in template or "{%" in template:
        return template
    if template in names():
        return (_FOLDER / f"{template}.jinja").read_text("utf-8")
    try:
        path = Path(template).expanduser()
        return (path / "chat_template.jinja" if path.is_dir() else path).read_text("utf-8")
    except (OSError, RuntimeError, ValueError) as error:
        close = nearest(template, names())
        hint = f"did you mean {close!r}?" if close else f"the names are {', '.join(names())}"
        raise UsageError(
            f"data.chat_template {template[:200]!r} cannot be read: {error}; it is a name, a Jinja "
            f"file, or a template's own text; {hint}"
        ) from error


def with_template(tokenizer: Any, template: str) -> Any:
    """The tokenizer, its chat template replaced by `template` unless that is ""."""
    if template:
        tokenizer.chat_template = template_text(template)
    return tokenizer
