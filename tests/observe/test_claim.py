"""Two processes never write into one run directory."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from postgrad.core.errors import UsageError
from postgrad.observe.run_dir import claimed, require_unclaimed

HOLD = """
import sys, time
from pathlib import Path
from postgrad.observe.run_dir import claimed
with claimed(Path(sys.argv[1])):
    print("mine", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "mine\n"
    return process


def test_a_directory_that_a_process_runs_in_is_refused_until_it_is_killed(
    holder: subprocess.Popen[str], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="another process is running in"):
        require_unclaimed(tmp_path)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with claimed(tmp_path):
        assert not list(tmp_path.iterdir())  # nothing lies there for it
    require_unclaimed(tmp_path)


def test_what_is_not_there_is_nobodys(tmp_path: Path) -> None:
    require_unclaimed(tmp_path / "new")
    assert not (tmp_path / "new").exists()
