"""Commands where postgrad sees macOS as far as it can be shown on Linux (helpers/macos)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

MACOS = Path(__file__).parents[1] / "helpers" / "macos"


def postgrad(folder: Path, *words: str) -> str:
    """Standard output of a command that ended well."""
    return python(folder, "-m", "postgrad", *words)


def python(folder: Path, *words: str) -> str:
    path = os.pathsep.join([str(MACOS), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, *words]
    environment = os.environ | {"PYTHONPATH": path}
    ended = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.slow
@pytest.mark.parametrize("job", ["sft", "rl", "preference", "reward"])
def test_a_run_starts_trains_and_saves_without_what_only_linux_has(
    job: str, tmp_path: Path
) -> None:
    postgrad(tmp_path, "new", "mine", "--job", job)
    postgrad(tmp_path, "train", "mine/recipe.toml", "--steps", "1", "--quiet")
    assert "step" in postgrad(tmp_path, "checkpoints", "runs/mine")


@pytest.mark.slow
def test_the_doctor_says_why_there_is_no_sandbox_and_what_helps(tmp_path: Path) -> None:
    page = " ".join(postgrad(tmp_path, "doctor").split())
    assert "macOS-15.0" in page
    assert "Run it on Linux, such as in a virtual machine" in page
    assert "it needs Linux, this is darwin" in page
    assert "instructions not listed by Darwin: a run measures them (DEFAULT)" in page


def test_a_calibration_goes_by_the_name_of_apples_chip(tmp_path: Path) -> None:
    code = "from postgrad.plan import hardware as h; print(h.full_name(h.this_cpu().device))"
    assert python(tmp_path, "-c", code) == "CPU Apple M2 Pro\n"
