"""Versions that are written beside results."""

import importlib.metadata
import platform

import pytest

from postgrad import __version__
from postgrad.core.files import versions


def test_versions_are_those_of_postgrad_python_and_the_packages_in_order() -> None:
    found = versions(["torch", "numpy"])
    assert list(found) == ["postgrad", "python", "torch", "numpy"]
    assert found["postgrad"] == __version__
    assert found["python"] == platform.python_version()
    assert found["numpy"] == importlib.metadata.version("numpy")


def test_what_is_changed_in_one_answer_is_not_in_the_next() -> None:
    versions(["numpy"])["numpy"] = "0"
    assert versions(["numpy"])["numpy"] == importlib.metadata.version("numpy")


def test_a_package_that_is_not_installed_is_named() -> None:
    with pytest.raises(importlib.metadata.PackageNotFoundError, match="no-such-package"):
        versions(["no-such-package"])
