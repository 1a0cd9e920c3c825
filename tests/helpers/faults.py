"""A machine whose disk fails at a chosen call, and whose processes die at a chosen one."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FOREVER = 2**31


class Kind(IntEnum):
    """What becomes of a call; the numbers of shim.c."""

    NONE = 0
    KILL = 1  # SIGKILL before it, a write half done
    IO_ERROR = 2
    FULL = 3
    SHORT = 4  # a write takes half of its bytes
    SLOW = 5  # 20 ms
    KILL_ALL = 6  # KILL, and every process of the call with it


@dataclass(frozen=True)
class Fault:
    """The calls first..last that change files (from 1) fail; or a kill after seconds."""

    kind: Kind = Kind.NONE
    first: int = 0
    last: int = 0
    seconds: float | None = None


@dataclass(frozen=True)
class Ended:
    """status: exit code, or minus a signal; names: one letter for each call; message: its text."""

    status: int
    names: str
    message: str


def command(words: list[str]) -> int:
    """postgrad's command line, whose last save on a full disk is tried again without a pause."""
    from postgrad.cli.main import main  # which only the machine's processes need
    from postgrad.training import saving

    saving.RETRY_SECONDS = 0.0
    return main(words)


class Machine:
    """Makes calls in processes of their own under a fault. Needs a C compiler and Linux."""

    def __init__(self, folder: Path) -> None:
        self._output, self._imported = folder / "told.txt", folder / "imported.txt"
        shim = folder / "shim.so"
        source = str(HERE / "shim.c")
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", shim, source, "-ldl"], check=True)
        paths = [str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, HERE / "zygote.py"],
            env={
                **os.environ,
                "LD_PRELOAD": str(shim),
                "OMP_NUM_THREADS": "1",
                "TOKENIZERS_PARALLELISM": "false",
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def process(self) -> int:
        """The process whose children make the calls."""
        return self._process.pid

    def call(
        self, call: str, arguments: Sequence[Any], root: Path, fault: Fault = Fault()
    ) -> Ended:
        """Calls "module:function" with `arguments`; what it changes below `root` is counted."""
        request = {
            "call": call,
            "arguments": list(arguments),
            "root": str(root.resolve()),
            "told": str(self._output),
            "imported": str(self._imported),
            "kind": int(fault.kind),
            "first": fault.first,
            "last": fault.last,
            "seconds": fault.seconds,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return Ended(answer["status"], answer["names"], self._output.read_text("utf-8"))

    def close(self) -> None:
        """Ends it."""
        self._process.communicate()
