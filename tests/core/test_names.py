"""Finding what a recipe names, or the nearest to it."""

import sys
from pathlib import Path

import pytest

from postgrad.core.errors import UsageError
from postgrad.core.text import nearest, resolve

KNOWN = {"path": "pathlib:Path", "json": "json:dumps"}


def test_short_names_and_full_ones_are_found() -> None:
    assert resolve("path", KNOWN, "thing") is Path
    assert resolve("pathlib:Path", KNOWN, "thing") is Path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pathh", "no thing is called 'pathh': did you mean 'path'?"),
        ("zzz", "known: json, path"),
        ("no_such_module:x", "module 'no_such_module' cannot be imported"),
        ("pathlib:Pathh", "pathlib has no 'Pathh'; did you mean 'Path'?"),
    ],
)
def test_what_is_not_found_names_the_nearest(name: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        resolve(name, KNOWN, "thing")
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f() return 1\n", r"SyntaxError: expected ':' \(breaks.py, line 1\)$"),
        ("1\nPLACE = {}['x']\n", r"KeyError: 'x' \(breaks.py:2\)$"),
        ("import sys\nsys.exit(3)\n", r"SystemExit: 3 \(breaks.py:2\)$"),
        ("\nfrom json import no_such\n", r"ImportError: cannot .*no_such.* \(breaks.py:2\)$"),
    ],
)
def test_a_module_that_cannot_be_imported_is_told_with_its_line(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "breaks.py").write_text(text, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "breaks", raising=False)
    with pytest.raises(UsageError, match=f"^thing 'breaks:f': its module .* imported: {message}"):
        resolve("breaks:f", KNOWN, "thing")


def test_nothing_near_is_none() -> None:
    assert nearest("learning_rate", ["lr"]) is None
    assert nearest("warmup_update", ["warmup_updates", "lr"]) == "warmup_updates"
