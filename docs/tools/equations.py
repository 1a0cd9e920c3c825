"""Equations of the pages as MathML, which browsers draw without a script and without a network.

A page has LaTeX in a block of the language "math". mkdocs calls `on_config`.
"""

from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig

SUPERFENCES = "pymdownx.superfences"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """mkdocs' hook: blocks of the language "math" become equations."""
    settings = config.mdx_configs.setdefault(SUPERFENCES, {})
    settings["custom_fences"] = [{"name": "math", "class": "equation", "format": equation}]
    return config


def equation(source: str, language: str, css_class: str, *rest: Any, **more: Any) -> str:
    """The markup of a block, as superfences asks for it. Settings have \\_ in LaTeX, _ on the
    page.
    """
    markup = convert(source.replace(r"\_", "_"), display="block")
    return f'<div class="{css_class}">{markup}</div>'
