"""Runs calls in forks of one process that has imported everything: a run then lasts a second.

Reads a JSON object a line, forks, lets the fork make the call with a fault armed (shim.c), and
writes how it ended. A call that ends well says which modules it had imported, and the next forks
have them from the start. Started by helpers.faults.Machine, with the shim preloaded.
"""

import ctypes
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import transformers.models.qwen3.modeling_qwen3  # noqa: F401  # what the runs would import

LEFT_SECONDS = 10.0
PREPARED = ("postgrad.", "datasets", "pyarrow", "peft", "tokenizers")
TOLD = 2  # where the forks' own words go is given by the request


def serve(shim: ctypes.CDLL) -> None:
    """Until standard input ends."""
    for line in sys.stdin:
        request = json.loads(line)
        _import(Path(request["imported"]))
        process = os.fork()
        if process == 0:
            os._exit(_call(shim, request))
        status = _wait(process, request["seconds"])
        _let_end(process)
        names = shim.fault_names().decode()
        print(json.dumps({"status": status, "names": names}), flush=True)


def _call(shim: ctypes.CDLL, request: dict[str, Any]) -> int:
    os.setsid()
    descriptor = os.open(request["told"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    module, _, name = request["call"].partition(":")
    function = getattr(importlib.import_module(module), name)
    shim.fault_arm(
        request["root"].encode(), request["first"], request["last"], int(request["kind"])
    )
    code = function(*request["arguments"])
    sys.stderr.flush()
    Path(request["imported"]).write_text("\n".join(sys.modules), "utf-8")
    return int(code or 0)


def _import(names: Path) -> None:
    """The modules that a call has imported before, if it is not done: a second of a run's time."""
    if not names.exists():
        return
    for name in names.read_text("utf-8").split():
        if name.startswith(PREPARED):
            importlib.import_module(name)
    names.unlink()
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"{threads} threads: a fork has one, and may wait for the others forever"


def _let_end(group: int) -> None:
    """What a killed call leaves running: until all of it has ended, or LEFT_SECONDS."""
    end = time.monotonic() + LEFT_SECONDS
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        running = [process for process in psutil.process_iter() if _runs_in(process, group)]
        if not running:  # ended, and nobody has asked how
            return
        time.sleep(0.005)


def _runs_in(process: psutil.Process, group: int) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and os.getpgid(process.pid) == group
    except (psutil.NoSuchProcess, ProcessLookupError):
        return False


def _wait(process: int, seconds: float | None) -> int:
    """The exit code, or minus the signal that ended it. After `seconds` all its group is killed."""
    if seconds is not None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
        try:
            os.killpg(process, signal.SIGKILL)
        except ProcessLookupError:  # it has no group yet, so it has no children either
            os.kill(process, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


if __name__ == "__main__":
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    library.fault_names.restype = ctypes.c_char_p
    library.fault_arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_long, ctypes.c_int]
    serve(library)
