"""The report: one HTML file with style, program and data, which loads nothing from a network.

The program is the ES modules of assets/, joined into one script with a function for each. A
Content-Security-Policy allows that script and style by their hashes and nothing else, and no string
may become markup (trusted types), so a model's text stays text even if the program has a bug.
"""

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from typing import Any

from postgrad.core.files import finite
from postgrad.observe.report.run import IMAGES_BYTES, RunReader

LEVEL = 6  # of gzip: 9 takes three times as long for 2% less

MODULES = (  # each imports from earlier ones only
    "dom.js",
    "format.js",
    "unpack.js",
    "view.js",
    "store.js",
    "series.js",
    "plot.js",
    "chart.js",
    "curves.js",
    "strips.js",
    "leader.js",
    "overview.js",
    "timeline.js",
    "phases.js",
    "tables.js",
    "query.js",
    "tokens.js",
    "related.js",
    "detail.js",
    "list.js",
    "samples.js",
    "runs.js",
    "shell.js",
    "main.js",
)
STYLES = ("base.css", "sections.css", "samples.css")
IMPORT = re.compile(r'^import (\{[^;]*?\}) from "\./([a-z]+\.js)";$', re.MULTILINE)
EXPORT = re.compile(r"^export ((?:async )?(?:function|const|class) (\w+))", re.MULTILINE)
BODIES_A_BLOCK = 64


def to_json(value: Any) -> str:
    """ASCII JSON without `<`, `>` and `&`. Half a surrogate pair is kept, and numbers that are not
    finite become null.
    """
    text = _dumps(value)
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def packed(value: Any) -> str:
    """`value` as JSON, gzipped, in base64. Equal values give equal text."""
    return base64.b64encode(gzip.compress(_dumps(value).encode(), LEVEL, mtime=0)).decode()


def _dumps(value: Any) -> str:
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(finite(value), separators=(",", ":"), allow_nan=False)


def asset(name: str) -> str:
    """The text of a file in assets/."""
    return (resources.files("postgrad.observe.report") / "assets" / name).read_text("utf-8")


def program() -> str:
    """All modules as one script, in which a module's function returns the module's exports."""
    parts = ['"use strict";\nconst modules = {};\n']
    for name in MODULES:
        text = asset(name)
        exported = ", ".join(match[2] for match in EXPORT.finditer(text))
        text = EXPORT.sub(r"\1", IMPORT.sub(r'const \1 = modules["\2"];', text))
        parts.append(f'modules["{name}"] = (() => {{\n{text}return {{ {exported} }};\n}})();\n')
    return "".join(parts)


def document(
    title: str, contents: dict[str, Any], blocks: Iterable[tuple[str, str]]
) -> Iterator[str]:
    """The page in pieces.

    contents: data that the program reads at the start. blocks: (element id, packed data) each.
    """
    style, script = "".join(asset(name) for name in STYLES), program()
    yield (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy(style, script)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n<link rel="icon" href="data:,">\n'
        f"<title>{_escaped(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        "<noscript>This page shows a run with a program of its own: allow JavaScript for it."
        "</noscript>\n"
        f'<script type="application/json" id="contents">{to_json(contents)}</script>\n'
    )
    for name, data in blocks:
        yield f'<script type="text/plain" id="{name}">{data}</script>\n'
    yield f'<script type="module">{script}</script>\n</body>\n</html>\n'


def policy(style: str, script: str) -> str:
    """The Content-Security-Policy of a page with this style and script.

    connect-src 'self' is for the watch page; for a file it allows nothing.
    """
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_hash(script)}'",
            f"style-src '{_hash(style)}'",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


def report(readers: Sequence[RunReader], more: dict[str, Any]) -> Iterator[str]:
    """The page of runs as far as they have come. more: further keys of `contents`."""
    messages = [(number, reader.poll()) for number, reader in enumerate(readers)]
    first = [message for _, batch in messages for message in batch if message["kind"] != "groups"]
    rows = [message for _, batch in messages for message in batch if message["kind"] == "groups"]
    bodies = [
        (number, start, min(start + BODIES_A_BLOCK, reader.samples))
        for number, reader in enumerate(readers)
        for start in range(0, reader.samples, BODIES_A_BLOCK)
    ]
    contents = {
        **more,
        "live": False,
        "rows": [f"rows-{n}" for n in range(len(rows))],
        "bodies": [[f"bodies-{run}-{start}", run, start, end] for run, start, end in bodies],
    }

    def blocks() -> Iterator[tuple[str, str]]:
        yield "runs", packed(first)
        for n, message in enumerate(rows):
            yield f"rows-{n}", packed([message])
        for run, start, end in bodies:
            shown = readers[run].bodies(range(start, end), IMAGES_BYTES // len(bodies))
            yield f"bodies-{run}-{start}", packed(shown)

    yield from document(_title(readers), contents, blocks())


def live(readers: Sequence[RunReader], more: dict[str, Any]) -> str:
    """The page of `postgrad watch`, which fetches its data from the server again and again."""
    return "".join(document(_title(readers), {**more, "live": True}, ()))


def _title(readers: Sequence[RunReader]) -> str:
    return ", ".join(reader.path.resolve().name for reader in readers) + " · postgrad"


def _escaped(text: str) -> str:
    for letter, name in (("&", "amp"), ("<", "lt"), (">", "gt")):
        text = text.replace(letter, f"&{name};")
    return text.encode(errors="replace").decode()


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
