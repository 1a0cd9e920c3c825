"""Programs that try to get out: each is a failed test of the program, and nothing stays behind."""

import os
from pathlib import Path

import pytest

from helpers.hostile import PROGRAMS
from postgrad.rewards import code, cpu
from postgrad.rewards.code import Code
from postgrad.rewards.sandbox.layers import BUBBLEWRAP
from postgrad.rewards.verifier import PromptView, RolloutView

TESTS = '{"inputs": ["7"], "outputs": ["wanted 7f3a"]}'
HOSTILE = Code(
    whole_text=True, test_cpu_seconds=0.1, test_idle_seconds=0.1, memory_mb=256, output_bytes=65536
)


# Where the programs try to write; a file there would be one that got out.
PLACES = ("/written", "/shared", "/tmp/written", "/tmp/link", "/tmp/zero", "/dev/shm/x")


def remains():
    files = [place for place in PLACES if Path(place).exists()]
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    return sorted(cpu.descendants(os.getpid())), descriptors, files


def test_there_are_enough_of_them():
    assert len(PROGRAMS) >= 40


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_hostile_program_fails_with_its_cause_and_leaves_nothing(name, sandbox, monkeypatch):
    monkeypatch.setattr(code, "shared", lambda unsafe: sandbox)
    if name == "thread bomb" and sandbox.layer is BUBBLEWRAP and os.geteuid() == 0:
        pytest.skip("the kernel limits no threads of root, so root gets the other layer")
    source, causes = PROGRAMS[name]
    ends = []
    monkeypatch.setattr(code, "_told", lambda end: ends.append(end) or "")
    before = remains()
    score = HOSTILE.score(PromptView("?", TESTS), RolloutView(source))
    assert score.value == 0.0
    assert b"ESCAPED" not in ends[0].output
    assert score.detail["cause"] in causes, ends[0].errors
    assert remains() == before


def test_a_good_program_still_passes_after_all_of_them(sandbox, monkeypatch):
    monkeypatch.setattr(code, "shared", lambda unsafe: sandbox)
    score = HOSTILE.score(PromptView("?", TESTS), RolloutView("print('wanted', '7f3a')"))
    assert (score.value, score.detail) == (1.0, {"passed": 1, "tests": 1})
