"""Versions that are written beside results."""

import importlib.metadata
import platform

import pytest

from postgrad import __version__
from postgrad.core.files import versions


def test_versions_are_those_of_postgrad_python_and_the_packages_in_order() -> None:
    named_versions = versions(["torch", "numpy"])
    assert list(named_versions) == ["postgrad", "python", "torch", "numpy"]
    assert named_versions["postgrad"] == __version__
    assert named_versions["python"] == platform.python_version()
    assert named_versions["numpy"] == importlib.metadata.version("numpy")


def test_what_is_changed_in_one_answer_is_not_in_the_next() -> None:
    versions(["numpy"])["numpy"] = "0"
    assert versions(["numpy"])["numpy"] == importlib.metadata.version("numpy")


def test_a_package_that_is_not_installed_is_named() -> None:
    with pytest.raises(importlib.metadata.PackageNotFoundError, match="no-such-package"):
        versions(["no-such-package"])
