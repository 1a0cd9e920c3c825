"""Algorithms by name."""

import subprocess
import sys

import pytest

from postgrad.algorithms.grpo import GRPO
from postgrad.algorithms.registry import ALGORITHMS, algorithm_class
from postgrad.core.errors import UsageError


def test_a_short_name_and_a_full_name_give_the_same_class():
    assert algorithm_class("grpo") is GRPO
    assert algorithm_class("postgrad.algorithms.grpo:GRPO") is GRPO


def test_a_misspelt_name_is_answered_with_the_nearest_one():
    with pytest.raises(UsageError, match="did you mean 'grpo'"):
        algorithm_class("gprpo")


def test_something_that_is_not_an_algorithm_is_refused_by_name():
    with pytest.raises(UsageError, match="'math:sqrt' is not a subclass"):
        algorithm_class("math:sqrt")


def test_an_algorithm_without_advantages_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    lines = "from postgrad.algorithms.policy_gradient import PolicyGradient as P\nclass A(P): ...\n"
    (tmp_path / "unfinished.py").write_text(lines, "utf-8")
    with pytest.raises(UsageError, match="'unfinished:A' has no method advantages"):
        algorithm_class("unfinished:A")


def test_reading_an_algorithm_s_settings_does_not_import_torch():
    code = (
        "import sys; from postgrad.algorithms.registry import ALGORITHMS, algorithm_class\n"
        "for name in ALGORITHMS: algorithm_class(name)()\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert len(ALGORITHMS) == 33
