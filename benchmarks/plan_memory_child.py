"""What benchmarks.plan_memory does in processes of their own: make a model, run a recipe."""

import ctypes
import gc
import json
import resource
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

from benchmarks.plan_memory_cases import IMAGES, SIZES
from benchmarks.plan_memory_images import make_images

SMALL = "small"


def make(size: str, data: str, to: str) -> None:
    """The model of a size, and a tiny one with its tokenizer, made from `data`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from postgrad.models.fresh import make_fresh
    from postgrad.models.save import save_model
    from postgrad.models.settings import ModelInit

    if size == IMAGES:
        make_images(size, Path(to))
        return
    hidden, inner, layers, heads, kv_heads, vocabulary, kind = SIZES[size]
    lines = Path(data).read_text("utf-8").splitlines()[:2000]
    init = ModelInit.model_validate(
        {
            "type": kind, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1,
        }
    )  # fmt: skip
    small = Path(to) / f"{size}-{SMALL}"
    make_fresh(init, lines, 0, small)
    tokenizer = AutoTokenizer.from_pretrained(small)
    config: Any = AutoConfig.from_pretrained(small)
    config.update(
        {
            "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads,
            "head_dim": hidden // heads, "vocab_size": vocabulary,
            "layer_types": ["full_attention"] * layers,
        }
    )  # fmt: skip
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    save_model(lm, tokenizer, Path(to) / size)
    print(json.dumps(sum(p.numel() for p in lm.parameters())))


def run(value: Any) -> None:
    """Trains, and prints its peak less what it held before, by phase."""
    from postgrad.observe.console import Console
    from postgrad.recipe.load import parse_recipe
    from postgrad.training.start import train

    train(parse_recipe(value["warm"]), Console("quiet"))
    gc.collect()
    trim()
    peaks: dict[str, int] = {}
    with watching(peaks):
        held = psutil.Process().memory_info().rss
        before, faults = cpu_seconds(), page_faults()
        train(parse_recipe(value["recipe"]), Console("quiet"))
    phase_bytes = {name: peak - held for name, peak in peaks.items()}
    phase = max(phase_bytes, key=phase_bytes.__getitem__)
    print(
        json.dumps(
            {
                "bytes": phase_bytes[phase], "phase": phase, "phases": phase_bytes, "held": held,
                "cpu_seconds": round(cpu_seconds() - before, 2),
                "page_faults": page_faults() - faults,
            }
        )
    )  # fmt: skip


def trim() -> None:
    """What malloc keeps of freed memory goes back, where it is glibc's."""
    back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if back is not None:
        back(0)


@contextmanager
def watching(peaks: dict[str, int]) -> Generator[None]:
    """The peak resident size in each phase of a run, and between them."""
    from postgrad.training.run import Run

    original_phase = Run.phase

    def end(name: str) -> None:
        peaks[name] = max(peaks.get(name, 0), peak_bytes())
        forget()

    @contextmanager
    def phase(self: Run, name: str, *more: Any) -> Generator[None]:
        end("between")
        with original_phase(self, name, *more):
            yield
        end(name)

    with patch.object(Run, "phase", phase):
        forget()
        yield
        end("between")


def forget() -> None:
    """The kernel's peak begins anew, and what a run keeps of it: its phases begin it anew too."""
    from postgrad.training.peaks import Resident

    Path("/proc/self/clear_refs").write_text("5")
    Resident.most = 0


def peak_bytes() -> int:
    """Since then."""
    from postgrad.training.peaks import Resident

    status = Path("/proc/self/status").read_text("utf-8")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return max(int(line.split()[1]) * 1024, Resident.most)


def cpu_seconds() -> float:
    """Of all threads."""
    return time.process_time()


def page_faults() -> int:
    """Pages that the kernel had to give."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
