"""Programs that try to get out: each is a failed test of the program, and nothing stays behind."""

import json
import os
from pathlib import Path

import pytest

from helpers.forged import FORGED, QUICK
from helpers.hostile import MORE, PROGRAMS
from postgrad.rewards import code
from postgrad.rewards.code import Code
from postgrad.rewards.descendants import descendants
from postgrad.rewards.sandbox.layers import BUBBLEWRAP
from postgrad.rewards.verifier import PromptView, RolloutView

TESTS = '{"inputs": ["7"], "outputs": ["wanted 7f3a"]}'
LIMITS = {"whole_text": True, "memory_mb": 256, "output_bytes": 65536}
HOSTILE = Code(**LIMITS)
# For those that never end. The others need the time that they need, on a busy machine too.
ENDLESS = Code(**LIMITS, test_cpu_seconds=0.1, test_idle_seconds=0.1)
SET = [*PROGRAMS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]
FORGERIES = [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in FORGED]


THREADS_OF_ROOT = ("thread bomb", "spinning in as many threads as there may be")
# Where the programs try to write; a file there would be one that got out.
PLACES = ("/written", "/shared", "/tmp/written", "/tmp/link", "/tmp/zero", "/dev/shm/x")


def remains():
    files = [place for place in PLACES if Path(place).exists()]
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    return sorted(descendants(os.getpid())), descriptors, files


@pytest.mark.parametrize("name", SET)
def test_a_hostile_program_fails_with_its_cause_and_leaves_nothing(name, sandbox, monkeypatch):
    monkeypatch.setattr(code, "shared", lambda unsafe: sandbox)
    if name in THREADS_OF_ROOT and sandbox.layer is BUBBLEWRAP and os.geteuid() == 0:
        pytest.skip("the kernel limits no threads of root, so root gets the other layer")
    source, causes = (PROGRAMS | MORE)[name]
    ends = []
    monkeypatch.setattr(code, "_error_lines", lambda end: ends.append(end) or "")
    before = remains()
    verifier = HOSTILE if {"cpu_time", "idle"}.isdisjoint(causes) else ENDLESS
    score = verifier.score(PromptView("?", TESTS), RolloutView(source))
    assert score.value == 0.0
    assert b"ESCAPED" not in ends[0].output
    assert score.detail["cause"] in causes, ends[0].errors
    assert remains() == before


@pytest.mark.parametrize("name", FORGERIES)
def test_a_wrong_program_passes_no_assertion(name, sandbox, monkeypatch):
    monkeypatch.setattr(code, "shared", lambda unsafe: sandbox)
    tests, program = FORGED[name]
    before = remains()
    score = HOSTILE.score(PromptView("?", json.dumps([tests])), RolloutView(program))
    assert (score.value, score.detail["cause"]) == (0.0, "wrong_answer")
    assert remains() == before


# Looks for two texts at every address of its memory that can be read; write(2) tells which can, by
# an error where an access would end the process. It holds each with every byte one higher, and
# makes higher what it reads: so nothing that it does writes one of them anywhere.
SEARCH = """
import ctypes, gc
libc = ctypes.CDLL(None, use_errno=True)
libc.write.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
PAGE, PIECE, NEAR = 4096, 1 << 16, 1 << 24
HIGHER = bytes((i + 1) % 256 for i in range(256))
def search(*higher):
    counts, file = [0, 0], open("/tmp/memory", "w+b", buffering=0)
    near = {id(o) // NEAR for o in gc.get_objects()} | {id(libc) // NEAR, id(type) // NEAR}
    near |= {ctypes.cast(libc.write, ctypes.c_void_p).value // NEAR, id(ctypes.c_int(0)) // NEAR}
    for area in sorted(near | {n + 1 for n in near} | {n - 1 for n in near}):
        address = area * NEAR
        while address < (area + 1) * NEAR:
            file.seek(0)
            size = libc.write(file.fileno(), address, PIECE)
            if size > 0:
                file.seek(0)
                data = file.read(size).translate(HIGHER)
                counts = [count + data.count(text) for count, text in zip(counts, higher)]
            address += max(size // PAGE, 1) * PAGE
    return counts
"""
SECRET, GIVEN = "79b1e52c08f3", "51c0ffee7a6d"


@pytest.mark.slow
def test_no_expected_value_is_in_the_memory_of_a_program(sandbox, monkeypatch):
    """With the argument of the call as a control: that one is there."""
    monkeypatch.setattr(code, "shared", lambda unsafe: sandbox)
    higher = [bytes(byte + 1 for byte in text.encode()) for text in (SECRET, GIVEN)]
    looks = f"{SEARCH}\ndef f(given): return search(*{higher!r})\n"
    cases = {
        f"{looks}given = input()\nprint(f(given))": {"inputs": [GIVEN], "outputs": [SECRET]},
        f"{looks}look = f\ndef f(given):\n print(look(given))\n return 'no'": {
            "fn_name": "f", "inputs": [[GIVEN]], "outputs": [SECRET]},
        looks: [f"got = f({GIVEN!r})\nprint(got)\nassert got == {SECRET!r}"],
    }  # fmt: skip
    ends, run = [], sandbox.run
    monkeypatch.setattr(
        sandbox, "run", lambda *run_arguments: ends.append(run(*run_arguments)) or ends[-1]
    )
    verifier = Code(whole_text=True, cpu_seconds=60.0, test_cpu_seconds=20.0)
    for program, tests in cases.items():
        score = verifier.score(PromptView("?", json.dumps(tests)), RolloutView(program))
        assert score.detail["cause"] == "wrong_answer"
    counts = [json.loads(end.output) for end in ends]
    assert [secret for secret, _ in counts] == [0, 0, 0]
    assert all(expected_found > 0 for _, expected_found in counts)


def test_a_good_program_still_passes_after_all_of_them(sandbox, monkeypatch):
    monkeypatch.setattr(code, "shared", lambda unsafe: sandbox)
    score = HOSTILE.score(PromptView("?", TESTS), RolloutView("print('wanted', '7f3a')"))
    assert (score.value, score.detail) == (1.0, {"passed": 1, "tests": 1})
