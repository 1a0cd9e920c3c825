"""What the stub's device answers, case by case. `device.py capture`, `memory` and `waits` print
JSON; `device.py hold BYTES` allocates so much, says so, and waits for its end.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from helpers.stub_device import Event, counts, reset, traced

GB = 1 << 30


def _captured(work: Callable[[], Any]) -> str | None:
    """The error of a capture of `work`, or None. The first of a chain: that of the call in it."""
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            work()
    except RuntimeError as error:
        first = error.__context__ or error
        return str(first).splitlines()[0]
    return None


def _forked(stream: torch.cuda.Stream, numbers: torch.Tensor, back: bool) -> None:
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        numbers.add_(1)
    if back:
        torch.cuda.current_stream().wait_stream(stream)


def capture() -> dict[str, Any]:
    numbers = torch.ones(64, 64, device="cuda")
    (numbers @ numbers).relu()  # cuBLAS makes its handle
    pinned, plain = torch.ones(3, pin_memory=True), torch.ones(3)
    other = torch.cuda.Stream()
    outside = torch.cuda.Event()
    outside.record()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    reset()
    with torch.cuda.graph(graph):
        begun = counts()  # torch 2.11 has written its generator's seed and offset before
        (numbers @ numbers).relu().sum()
    of_capture = counts()
    of_capture["launches"] -= begun["launches"]
    reset()
    for _ in range(3):
        graph.replay()
    of_replays = counts()
    cases: dict[str, Callable[[], Any]] = {
        "item": numbers.sum().item,
        "synchronize": torch.cuda.synchronize,
        "nonzero": numbers.nonzero,
        "copy to pageable memory": lambda: numbers.cpu(),
        "copy from pageable memory": lambda: plain.to("cuda", non_blocking=True),
        "copy from pinned memory": lambda: pinned.to("cuda", non_blocking=True),
        "copy to pinned memory": lambda: pinned.copy_(numbers[0, :3], non_blocking=True),
        "wait for another stream": other.synchronize,
        "wait for an event from outside": outside.wait,
        "query of an event": outside.query,
        "allocation": lambda: torch.empty(GB, device="cuda"),
        "fork": lambda: _forked(other, numbers, True),
        "fork that stays away": lambda: _forked(other, numbers, False),
        "nothing refused before": lambda: numbers.add_(1),
    }
    errors = {name: _captured(work) for name, work in cases.items()}
    return {"capture": of_capture, "replays": of_replays, "errors": errors}


def memory() -> dict[str, Any]:
    """Eight GB in 32 parts, every second part freed, the cache emptied, then out of memory."""
    parts = [torch.empty(GB // 4, dtype=torch.uint8, device="cuda") for _ in range(32)]
    del parts[::2]
    torch.cuda.empty_cache()
    kept = [torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), counts()["held"]]
    free = torch.cuda.mem_get_info()[0]
    parts.append(torch.empty(3 * GB, dtype=torch.uint8, device="cuda"))
    with contextlib.suppress(torch.OutOfMemoryError):
        while True:
            parts.append(torch.empty(GB, dtype=torch.uint8, device="cuda"))
    full = torch.cuda.memory_allocated()
    parts.clear()
    torch.cuda.empty_cache()
    return {"kept": kept, "free": free, "full": full, "held": counts()["held"]}


def waits() -> dict[str, int]:
    """Where waits come from, of the forward and of autograd's thread."""

    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, numbers: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return numbers * numbers.sum().item()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return gradient * gradient.sum().item()

    with traced(Event.WAIT, depth=1, within=__file__) as waits_by_line:
        Waits.apply(torch.ones(3, device="cuda", requires_grad=True)).sum().backward()  # type: ignore[union-attr]
    return dict(waits_by_line)


if __name__ == "__main__":
    if sys.argv[1] == "hold":
        held = torch.empty(int(sys.argv[2]), dtype=torch.uint8, device="cuda")
        print("held", flush=True)
        sys.stdin.read()
    else:
        print(json.dumps({"capture": capture, "memory": memory, "waits": waits}[sys.argv[1]]()))
        sys.stdout.flush()
        os._exit(0)  # autograd's thread may still hold Python objects: Python's end would abort it
