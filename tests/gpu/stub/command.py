"""Runs `postgrad ARGUMENTS` on the stub, for each list of arguments in the JSON file that is named,
one after the other in one process: imports and compilers are slow. Prints what each asked of the
device, as JSON by name, a line for each as it ends and a last line of all; `error` is what it said
where its exit status was not 0, `attention` are the kernels of flex attention that it loaded.
"""

import contextlib
import gc
import io
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

from helpers.stub_device import counts, kernels, reset
from postgrad.cli.main import main


def told_of(arguments: list[str]) -> dict[str, Any]:
    """What `postgrad ARGUMENTS` asked of the device."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    counters.clear()
    reset()
    loaded = len(kernels())
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            status = main(arguments)
        except SystemExit as end:
            status = end.code
    return counts() | {
        "graphs": counters["stats"].get("unique_graphs", 0),
        "allocated_peak": torch.cuda.max_memory_allocated(),
        "reserved_peak": torch.cuda.max_memory_reserved(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "attention": [each for each in kernels()[: -loaded or None] if "_tem_" in each["name"]],
        "error": output.getvalue()[-6000:] if status else None,
    }


if __name__ == "__main__":
    commands = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    reports = dict[str, Any]()
    for name, arguments in commands.items():
        reports[name] = told_of(arguments)
        print(json.dumps({name: reports[name]}), flush=True)
    print(json.dumps(reports))
