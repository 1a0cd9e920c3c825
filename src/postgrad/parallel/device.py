"""Device, threads and determinism of a process: chosen once, recorded, used again at a resume.
Dtype and number of threads of a CPU may be measured. How torch keeps the memory of a GPU, and gives
it back.
"""

import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from postgrad.core.errors import RunError
from postgrad.core.process import default_threads

ROWS = 512  # tokens of a small micro-batch
ROUNDS, LEAST = 7, 3  # of all candidates in turn, so that other load hits them alike
MOST_SECONDS = 0.2  # wall-clock time of one measurement, but at least LEAST rounds
WIDEST = 1024  # columns that are measured; a larger matrix has the same ratio
NARROWEST = 256  # below this hidden size most of the time is not products
CLEARLY = 1.5  # least speed-up of products; the other half of a step gets no faster
WORTH = 0.9  # more threads are used where they take at most this share of the time

# Variables with the settings of torch's allocator on a GPU, the one that it prefers first.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# Segments that grow and shrink by pages: `empty_cache` can then return a segment of which a part is
# in use, and pieces of other sizes leave no holes.
EXPANDABLE = "expandable_segments"

_collected = {"graphs": 0}  # how many were compiled in this process before the last collection

Multiply = Callable[[Tensor, Tensor], Tensor]  # states [N, K] and a weight [M, K]: [N, M]


@dataclass(frozen=True, slots=True)
class Placement:
    """The choices that decide rounding: the same placement gives the same bits."""

    device: str  # "cpu" or "cuda"
    threads: int  # CPU threads of torch
    deterministic: bool  # torch's deterministic algorithms

    def here(self) -> "Placement":
        """The same for a process that computes nothing on the device, and may lack it: the loop of
        a run whose ranks are elsewhere.
        """
        return self if torch.cuda.is_available() else replace(self, device="cpu")

    def to_json(self) -> dict[str, object]:
        """JSON values for the run state."""
        return {
            "device": self.device,
            "threads": self.threads,
            "deterministic": self.deterministic,
        }


def choose(threads: int | None, deterministic: bool) -> Placement:
    """CUDA where there is a device; threads: as given, else core.process.default_threads."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return Placement(device, threads or default_threads(), deterministic)


def apply(placement: Placement) -> torch.device:
    """Sets torch up in this process as `placement` says. Raises RunError without the device."""
    if placement.device == "cuda" and not torch.cuda.is_available():
        raise RunError(
            "this run was started on a CUDA device and none is here; "
            "other hardware gives other bits: allow it with --allow-change device"
        )
    torch.set_num_threads(placement.threads)
    if placement.device == "cuda" and not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = f"{EXPANDABLE}:True"  # read at the first allocation
    if placement.deterministic:  # before the first product: cuBLAS reads it with its first handle
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(placement.deterministic)
    # That mode also fills every new tensor with NaN, for debugging: one more pass over memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    return torch.device(placement.device)


def make_current(device: torch.device) -> None:
    """Makes a CUDA device this thread's. torch's own call refuses "cuda" without an index, which is
    the one that is current already.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.set_device(index)


def empty_cache(device: torch.device) -> None:
    """Returns the memory of a GPU that torch keeps beside its tensors, for whoever works there
    next: another process, or this one with tensors of other sizes. To be called where a phase ends.
    Does nothing for a CPU, whose heap `core.process.trim_heap` trims.
    """
    if device.type == "cuda":
        _collect_after_compiling()
        torch.cuda.empty_cache()


def _collect_after_compiling() -> None:
    """Frees the tensors that torch's compiler was given: it leaves them in circles of references,
    tens of MB for each graph. A collection takes seconds in a large process, so there is one only
    where graphs were compiled since the last.
    """
    compiler = sys.modules.get("torch._dynamo.utils")
    graphs = compiler.counters["stats"]["unique_graphs"] if compiler else 0
    if graphs != _collected["graphs"]:
        _collected["graphs"] = graphs
        gc.collect()


def without_expandable(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables without expandable segments, for programs that refuse them: memory
    pools of their own (vLLM's sleep) cannot be made of such segments.
    """
    kept = dict(environment)
    for name in ALLOCATOR:
        parts = kept.pop(name, "").split(",")
        if left := ",".join(part for part in parts if EXPANDABLE not in part):
            kept[name] = left
    return kept


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype that a recipe's "auto", "float32", "bfloat16" or "float16" means on `device`."""
    if name == "auto":
        has = device.type == "cuda" and multiplies_bfloat16(device)
        name = "bfloat16" if has else "float32"
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return dtypes[name]


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether a GPU has products of bfloat16: NVIDIA's have them from compute capability 8.0 on. A
    T4 or V100 converts each number and is slower than in float32. True where this process sees no
    GPU: those of its cluster are taken to have them.
    """
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= (8, 0)


def bfloat16_pays(hidden: int, intermediate: int, multiply: Multiply) -> bool:
    """True where a layer of this size is clearly faster in bfloat16 than in float32, by CPU time of
    one thread. multiply: the run's function for products.
    """
    if hidden < NARROWEST:
        return False
    products = [
        _product(hidden, intermediate, dtype, multiply) for dtype in (torch.float32, torch.bfloat16)
    ]
    plain, narrow = cpu_seconds(products)
    return plain >= CLEARLY * narrow


def cpu_seconds(works: list[Callable[[], object]]) -> list[float]:
    """Median CPU seconds of each of `works` on one thread, in alternating rounds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _medians(works, time.process_time)
    finally:
        torch.set_num_threads(before)


def useful_threads(most: int) -> int:
    """`most`, or 1 where one thread multiplies about as fast by the clock, since other processes
    use the machine's cores.
    """
    if most == 1:
        return 1
    product = _product(WIDEST, WIDEST, torch.float32, nn.functional.linear)

    def with_threads(threads: int) -> Callable[[], object]:
        def run() -> object:
            torch.set_num_threads(threads)
            return product()

        return run

    before = torch.get_num_threads()
    try:
        single, several = _medians([with_threads(1), with_threads(most)], time.perf_counter)
    finally:
        torch.set_num_threads(before)
    return most if several <= WORTH * single else 1


def _product(
    hidden: int, intermediate: int, dtype: torch.dtype, multiply: Multiply
) -> Callable[[], object]:
    """A product of constant matrices, to be timed; nothing is drawn from a generator."""
    narrow, wide = min(hidden, WIDEST), min(intermediate, WIDEST)
    states = torch.full((ROWS, narrow), 0.5, dtype=dtype)
    weight = torch.full((wide, narrow), 0.25, dtype=dtype)
    return lambda: multiply(states, weight)


def _medians(works: list[Callable[[], object]], clock: Callable[[], float]) -> list[float]:
    """Median seconds of each of `works`, in alternating rounds after one to warm up."""
    for work in works:
        work()
    took: list[list[float]] = [[] for _ in works]
    began = time.perf_counter()
    for number in range(ROUNDS):
        if number >= LEAST and time.perf_counter() - began > MOST_SECONDS:
            break
        for work, seconds in zip(works, took, strict=True):
            start = clock()
            work()
            seconds.append(clock() - start)
    return [statistics.median(seconds) for seconds in took]
