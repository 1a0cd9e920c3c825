"""`postgrad doctor`: the hardware and packages of this machine, and a run's choices on it."""

import importlib.metadata
import os
import platform
import shutil
from pathlib import Path
from typing import Any

import psutil
import torch

from postgrad._version import __version__
from postgrad.parallel.device import choose, multiplies_bfloat16
from postgrad.rewards.sandbox import choice as sandbox
from postgrad.rewards.sandbox import enclosure

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "datasets", "pydantic", "numpy")
OPTIONAL = ("ray", "vllm", "wandb", "tensorboard")


def examine() -> dict[str, Any]:
    """Facts about the machine by name, as JSON values; sizes in bytes."""
    placement = choose(None, True)
    memory = psutil.virtual_memory()
    return {
        "postgrad": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "optional": {name: _version(name) for name in OPTIONAL},
        "cores": os.cpu_count(),
        "threads_chosen": placement.threads,
        "device_chosen": placement.device,
        "bfloat16_products": _bfloat16(),
        "sandbox": sandbox.describe(),
        "sandbox_of_verifiers": enclosure.describe(),
        "memory_bytes": memory.total,
        "memory_free_bytes": memory.available,
        "disk_free_bytes": shutil.disk_usage(Path.cwd()).free,
        "cuda_devices": [_cuda(i) for i in range(torch.cuda.device_count())],
    }


def rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """The facts as a table."""
    table: list[tuple[str, str]] = []
    for name, value in facts.items():
        if name.endswith("_bytes"):
            table.append(
                (name.removesuffix("_bytes").replace("_", " "), f"{value / 2**30:.1f} GiB")
            )
        elif isinstance(value, dict):
            package_versions: dict[str, str | None] = value  # pyright: ignore[reportUnknownVariableType]
            table += [
                (f"  {package}", version or "not installed")
                for package, version in package_versions.items()
            ]
        elif name == "cuda_devices":
            table.append(("CUDA devices", "; ".join(map(_cuda_text, value)) or "none"))
        else:
            table.append((name.replace("_", " "), str(value)))
    return table


def _cuda(number: int) -> dict[str, Any]:
    _, total = torch.cuda.mem_get_info(number)
    return {
        "name": torch.cuda.get_device_name(number),
        "memory_bytes": total,
        "bfloat16_products": multiplies_bfloat16(torch.device("cuda", number)),
    }


def _cuda_text(device: dict[str, Any]) -> str:
    text = f"{device['name']}, {device['memory_bytes'] / 2**30:.0f} GiB"
    if device["bfloat16_products"]:
        return text
    return f'{text}, without products of bfloat16: model.dtype = "auto" is float32'


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _bfloat16() -> str:
    """The processor's bfloat16 instructions: without any, bfloat16 is no faster than float32."""
    flags = torch.backends.cpu.get_cpu_capability()
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return f"instructions not listed by {platform.system()}: a run measures them ({flags})"
    words = set(path.read_text("utf-8", errors="replace").split())
    extensions = [name for name in ("amx_bf16", "avx512_bf16", "bf16") if name in words]  # of Arm
    return f"{', '.join(extensions) or 'no instructions of its own'} ({flags})"
