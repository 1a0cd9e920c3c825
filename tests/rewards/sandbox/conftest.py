"""Sandboxes in every layer that this machine has, of root and of an ordinary user."""

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from helpers.hostile import SECRET
from postgrad.rewards.sandbox import layers
from postgrad.rewards.sandbox.choice import _weakness
from postgrad.rewards.sandbox.client import Sandbox

SYSTEM_PYTHON = "/usr/bin/python3"


@dataclass(frozen=True)
class OfNobody(layers.Layer):
    """A layer as an ordinary user starts it, where these tests are root's.

    Where the interpreter is in a folder of root alone, the system's takes its place.
    """

    def command(self, descriptor: int) -> list[str]:
        words = super().command(descriptor)
        interpreter = layers._interpreter()
        if not _is_public(interpreter):
            bound = {sys.base_prefix, str(Path(interpreter).parent)}
            hidden = [i for i, word in enumerate(words) if word == "--ro-bind-try"]
            dropped = {i + k for i in hidden for k in range(3) if words[i + 1] in bound}
            words = [word for i, word in enumerate(words) if i not in dropped]
            words = [SYSTEM_PYTHON if word == interpreter else word for word in words]
        return ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--", *words]


def _is_public(path: str) -> bool:
    return all(folder.stat().st_mode & 0o001 for folder in Path(path).parents)


def _of_nobody(layer: layers.Layer) -> OfNobody:
    def missing() -> str | None:
        if os.geteuid() != 0:
            return "these tests are an ordinary user's already"
        if not shutil.which("setpriv"):
            return "setpriv is not installed"
        if not _is_public(layers._interpreter()) and not Path(SYSTEM_PYTHON).exists():
            return "no interpreter that an ordinary user can start"
        return layer.missing()

    return OfNobody(layer.name, missing, layer.prefix)


LAYERS = [
    pytest.param(layers.NAMESPACES, id="namespaces"),
    pytest.param(layers.BUBBLEWRAP, id="bubblewrap", marks=pytest.mark.slow),
    pytest.param(
        _of_nobody(layers.NAMESPACES), id="namespaces of nobody", marks=pytest.mark.slow
    ),
    pytest.param(
        _of_nobody(layers.BUBBLEWRAP), id="bubblewrap of nobody", marks=pytest.mark.slow
    ),
]  # fmt: skip


@pytest.fixture(scope="session", params=LAYERS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """A running sandbox; the tests' own environment has a secret meanwhile."""
    missing = request.param.missing()
    if missing is not None:
        pytest.skip(missing)
    os.environ[SECRET] = "7f3a"
    with Sandbox(request.param) as opened_sandbox:
        weakness = _weakness(opened_sandbox)
        if weakness is not None:
            pytest.skip(weakness)
        yield opened_sandbox
    del os.environ[SECRET]
