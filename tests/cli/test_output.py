"""Standard output that is full, closed, or read by nobody any more."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.jobs import write_recipe

COMMAND = (sys.executable, "-m", "postgrad")


@pytest.mark.parametrize("words", [("recipes", "--json"), ("completion", "bash"), ("--help",)])
def test_output_that_nobody_reads_ends_a_command_as_sigpipe_does(words: tuple[str, ...]) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    ended = subprocess.run(
        [*COMMAND, *words], stdout=writes, stderr=subprocess.PIPE, text=True, check=False,
        env=os.environ | {"PYTHONUNBUFFERED": ""},
    )  # fmt: skip
    os.close(writes)
    messages = [line for line in ended.stderr.splitlines() if line.startswith("postgrad")]
    assert (ended.returncode, messages) == (141, [])
    assert "Traceback" not in ended.stderr
    assert "Exception ignored" not in ended.stderr


def test_messages_that_nobody_reads_end_a_command_as_sigpipe_does() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    ended = subprocess.run([*COMMAND, "config", "no.toml"], stderr=writes, check=False)
    os.close(writes)
    assert ended.returncode == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "words",
    [("recipes",), ("recipes", "--json"), ("config", "gsm8k_sft"), ("completion", "bash")],
    ids=" ".join,
)
def test_a_full_disk_under_standard_output_is_one_message(
    words: tuple[str, ...], unbuffered: str
) -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [*COMMAND, *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        )  # fmt: skip
    messages = [line for line in ended.stderr.splitlines() if line.startswith("postgrad")]
    assert (ended.returncode, messages) == (
        1,
        [
            "postgrad: standard output: No space left on device; the command ended, its output is "
            "not whole"
        ],
    )
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("full", "code", "unbuffered"),
    [
        pytest.param(False, 141, "", id="pager"),
        pytest.param(True, 1, "1", id="full disk, unbuffered"),
        pytest.param(False, 141, "1", id="pager, unbuffered", marks=pytest.mark.long),
        pytest.param(True, 1, "", id="full disk", marks=pytest.mark.long),
    ],
)
def test_a_run_outlives_the_reader_of_its_output(
    full: bool, code: int, unbuffered: str, tmp_path: Path
) -> None:
    """`postgrad train RECIPE | head -1` trains to its end: a pager that closes ends no run."""
    recipe = write_recipe("sft", tmp_path)
    reads, writes = os.pipe()
    os.close(reads)
    output = os.open("/dev/full", os.O_WRONLY) if full else writes
    ended = subprocess.run(
        [*COMMAND, "train", str(recipe)], stdout=output, stderr=subprocess.PIPE, text=True,
        check=False, cwd=tmp_path, env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
    )  # fmt: skip
    assert ended.returncode == code
    assert "Traceback" not in ended.stderr
    assert len((tmp_path / "run" / "metrics.jsonl").read_text("utf-8").splitlines()) == 4
    assert (tmp_path / "run" / "summary.json").exists()


def test_a_closed_standard_output_is_no_mistake() -> None:
    closed = ["sh", "-c", '"$@" >&-', "sh", *COMMAND, "recipes"]
    ended = subprocess.run(closed, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


LEAVES = """
import threading, time
from postgrad.cli import main

def forever():
    time.sleep({seconds})

def recipes(*words):
    threading.Thread(target=forever, name="pump").start()
    return 3

main._run = recipes
main.THREADS_TOLD, main.THREADS_WAIT = 0.2, 0.4
import atexit, sys
atexit.register(print, "tidied")
sys.exit(main.main())
"""


@pytest.mark.parametrize(("seconds", "ended_without"), [(60, True), (0.4, False), (0, False)])
def test_a_thread_that_others_leave_is_named_and_does_not_keep_the_process(
    tmp_path: Path, seconds: float, ended_without: bool
) -> None:
    program = tmp_path / "leaves.py"
    program.write_text(LEAVES.format(seconds=seconds))
    ended = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=False, timeout=30.0
    )
    assert (ended.returncode, ended.stdout) == (3, "tidied\n")
    place = f"the thread 'pump' ({program}:6)"
    messages = [f"postgrad: the command has ended; its process waits 0 s for {place}"]
    if ended_without:
        messages.append(
            f"postgrad: the process ends without {place}: make it a daemon, or let it end with the "
            "run"
        )
    assert ended.stderr.splitlines() == (messages if seconds else [])
