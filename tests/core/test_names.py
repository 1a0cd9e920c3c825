"""Finding what a recipe names, or the nearest to it."""

import pytest

from postgrad.core.errors import UsageError
from postgrad.core.text import nearest, resolve

KNOWN = {"path": "pathlib:Path", "json": "json:dumps"}


def test_short_names_and_full_ones_are_found() -> None:
    from pathlib import Path

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


def test_nothing_near_is_none() -> None:
    assert nearest("learning_rate", ["lr"]) is None
    assert nearest("warmup_update", ["warmup_updates", "lr"]) == "warmup_updates"
