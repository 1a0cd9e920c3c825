"""Recipes as files, for tests of commands."""

import os

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault-points", default="4", help="kills a job gets in tests/faults")
