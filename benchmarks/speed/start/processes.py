"""A process a round: started, watched until its first step is done, held while it is measured."""

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping

Command = Callable[[int], list[str]]  # of the round with this number

QUESTIONS, SAMPLES, NEW_TOKENS = 2, 2, 8
SIGN = "step "  # how the line begins that says that a step is done
LIMIT = 600.0  # seconds


class Starts:
    """A round is one start. Raises RuntimeError where no step comes."""

    def __init__(self, command: Command) -> None:
        self._command = command
        self._number = 0
        self._running: subprocess.Popen[str] | None = None

    def __call__(self) -> Mapping[str, int]:
        self._number += 1
        running = subprocess.Popen(
            self._command(self._number),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._running = running
        assert running.stdout is not None
        timer = threading.Timer(LIMIT, self.clear)
        timer.start()
        output: list[str] = []
        for line in running.stdout:
            output.append(line)
            if line.startswith(SIGN):
                os.killpg(running.pid, signal.SIGSTOP)  # alive, so that its CPU time can be read
                timer.cancel()
                return {"steps": 1}
        timer.cancel()
        raise RuntimeError(f"no step in {running.args}:\n{''.join(output[-20:])}")

    def clear(self) -> None:
        """End the process of the round."""
        if self._running is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._running.pid, signal.SIGKILL)
            self._running.wait()
            self._running = None
