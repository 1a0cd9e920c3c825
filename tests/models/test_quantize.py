"""A base in four bits: its arguments, and what is said where it cannot be."""

import importlib.machinery
import importlib.util
import sys

import pytest
import torch

from postgrad.core.errors import UsageError
from postgrad.models.load import loading_arguments

BNB = "bitsandbytes"


def found(name: str, package: str | None = None) -> importlib.machinery.ModuleSpec | None:
    return importlib.machinery.ModuleSpec(name, None)


def test_nothing_is_asked_of_an_unquantised_load() -> None:
    assert loading_arguments("none", torch.device("cpu")) == {}


@pytest.mark.parametrize(
    ("device", "package", "what"),
    [
        ("cpu", True, "needs a CUDA device: not here"),
        ("cpu", False, "needs a CUDA device and the package bitsandbytes: not here"),
        ("cuda", False, "needs the package bitsandbytes: not here"),
    ],
)
def test_what_is_missing_is_named(
    device: str, package: bool, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", found if package else lambda *_: None)
    with pytest.raises(UsageError, match=f'model.quantize = "4bit" {what}; take "none"'):
        loading_arguments("4bit", torch.device(device))
    assert BNB not in sys.modules
