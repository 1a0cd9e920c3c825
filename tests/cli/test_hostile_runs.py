"""Run directories of somebody else: every command that reads one ends with one message."""

import io
import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from helpers.hostile_runs import at_most, hostile
from helpers.jobs import write_recipe
from postgrad.cli.main import main
from postgrad.core.errors import PostgradError
from postgrad.tools.pages import Feed

CASES, EVERY_CHANGE = 80, 30  # of each genuine run; of one, so many run before every change
SECONDS = 20  # of one command
STEPS = 4  # of a genuine run
LOGS = ("plan", "summary", "tokenizer", "metrics", "eval", "samples", "events")
WEIGHTS = ("export", "export best", "chat")  # what reads no log
PAGES = ("report", "watch", "calibrate")  # what reads no checkpoint


@pytest.fixture(autouse=True)
def _own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTGRAD_CALIBRATION", str(tmp_path / "calibration.toml"))


@pytest.fixture(scope="session")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """genuine("ppo"): a run of that job that ended; copy it, change nothing in it."""
    run_dirs: dict[str, Path] = {}

    def run(job: str) -> Path:
        if job not in run_dirs:
            folder = tmp_path_factory.mktemp("genuine")
            path = folder / "run"
            words = ["--run_dir", str(path), "--checkpoint.max_ckpt_num", "2", "--quiet"]
            assert main(["train", str(write_recipe(job, folder)), *words]) == 0
            run_dirs[job] = path
        return run_dirs[job]

    return run


def _watched(run: Path) -> int:
    try:
        feed = Feed(run)
        feed.page()
        json.loads(feed.messages("", 0))
        json.loads(feed.body(0, 0))
    except (PostgradError, OSError):
        return 1
    return 0


def _main(words: Sequence[str]) -> int:
    with pytest.MonkeyPatch.context() as patch:  # chat asks once
        patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"hello\n")))
        return main(words)


def commands(run: Path, to: Path, steps: int = 0) -> dict[str, Callable[[], int]]:
    """Every command that reads a run directory. steps: to which a resume goes on; 0: as it was."""
    more = ("--steps", str(steps)) if steps else ()
    words: dict[str, Sequence[str]] = {
        "report": ("report", str(run), "--to", str(to / "report.html")),
        "checkpoints": ("checkpoints", str(run)),
        "verify": ("verify", str(run)),
        "export": ("export", str(run), "--to", str(to / "model")),
        "export best": ("export", str(run), "--to", str(to / "best"), "--checkpoint", "best"),
        "chat": ("chat", str(run), "--max-new-tokens", "2", "--max-len", "40"),
        "calibrate": ("plan", "--calibrate", str(run)),
        "fork": ("fork", str(run), "--to", str(to / "fork")),
        "fork best": ("fork", str(run), "--to", str(to / "other"), "--checkpoint", "best"),
        "resume": ("resume", str(run), "--quiet", *more),
    }
    return {
        **{name: lambda argv=command_words: _main(argv) for name, command_words in words.items()},
        "watch": lambda: _watched(run),
    }


def judge(name: str, call: Callable[[], int], capsys: pytest.CaptureFixture[str]) -> str:
    """What is wrong with how a command ended, "" where it is as it should be."""
    try:
        with at_most(SECONDS):
            code = call()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"{name}: {type(error).__name__}: {error}"[:300]
    stderr = capsys.readouterr().err
    if code not in (0, 1, 2):
        return f"{name}: exit code {code}"
    if "report it" in stderr or "Traceback" in stderr:
        return f"{name}: {stderr[-300:]}"
    if code and not stderr.startswith("postgrad: ") and name != "watch":
        lines = [line for line in stderr.splitlines() if line.startswith("postgrad: ")]
        return "" if len(lines) == 1 else f"{name}: not one message: {stderr[-300:]}"
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "cases"),
    [
        ("ppo", range(EVERY_CHANGE)),
        pytest.param("ppo", range(EVERY_CHANGE, CASES), marks=pytest.mark.long),
        pytest.param("dapo with a reference that follows", range(CASES), marks=pytest.mark.long),
        pytest.param("reward model", range(CASES), marks=pytest.mark.long),
    ],
)
def test_no_command_breaks_on_a_hostile_run_directory(
    job: str,
    cases: range,
    genuine: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = genuine(job)
    wrong: list[str] = []
    for number in cases:
        folder = tmp_path / str(number)
        folder.mkdir()
        drawn = random.Random(f"{job} {number}")
        damage = hostile(drawn, source, folder / "run")
        in_checkpoint = damage.startswith("checkpoints/step-")
        readers = commands(folder / "run", folder, STEPS + 1 if in_checkpoint else 0)
        unread = PAGES if in_checkpoint else WEIGHTS if damage.startswith(LOGS) else ()
        for name, call in readers.items():
            if name in unread:
                continue
            if problem := judge(name, call, capsys):
                wrong.append(f"case {number}, {damage}: {problem}")
        shutil.rmtree(folder)
    assert not wrong, "\n".join([f"{len(wrong)} wrong", *wrong])
