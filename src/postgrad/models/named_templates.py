"""Chat templates by name, for a recipe's `data.chat_template`: a name, a Jinja file or a model's
folder with one, or the text.

The names are those that Open-Instruct's scripts use (chat_templates/*.jinja, one each) and those of
well-known families. They write a turn's end with the tokenizer's own eos_token where the family
does; its other marks are plain text where the tokenizer has no tokens for them.
"""

from functools import cache
from pathlib import Path
from typing import Any

from postgrad.core.errors import UsageError
from postgrad.core.names import nearest

_FOLDER = Path(__file__).parent / "chat_templates"


@cache
def names() -> tuple[str, ...]:
    """The shipped templates."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.jinja")))


def template_text(template: str) -> str:
    """The text of what a recipe names. Raises UsageError where it is no name and no file that can
    be read.
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
    """A tokenizer that is written with another chat template; "": with its own."""
    if template:
        tokenizer.chat_template = template_text(template)
    return tokenizer
