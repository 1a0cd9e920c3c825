"""Devices as data: memory, speeds and links from a table that users add their own rows to."""

import json
import os
import platform
import re
import subprocess
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, cast

import psutil
from pydantic import Field, ValidationError

from postgrad.core.errors import UsageError
from postgrad.core.names import nearest
from postgrad.core.settings import Settings
from postgrad.core.user_files import user_file

PER_CORE = ("CPU", "CPU-BF16")  # rows with the figures of one core, whose memory is the machine's
CONTROL_GROUP = Path("/sys/fs/cgroup")
CPU_INFO = Path("/proc/cpuinfo")
Link = Literal["nvlink", "xgmi", "pcie", "none"]


class Device(Settings):
    """One row of the table: what one device has.

    kind: models compute in float32 on a "cpu", and all ranks share its memory.
    memory_bytes: that a process can use. bandwidth: of its memory, bytes a second. bf16_flops,
    float32_flops: of dense matrix products, a second. link_bytes_per_second: to other devices, in
    one direction. price_per_hour: in whatever money the row's owner pays. source: where the figures
    are from. also: other ways to write the name.
    """

    name: str
    kind: Literal["gpu", "cpu"] = "gpu"
    memory_bytes: int = Field(gt=0)
    bandwidth: float = Field(gt=0.0)
    bf16_flops: float = Field(gt=0.0)
    float32_flops: float = Field(gt=0.0)
    link: Link = "none"
    link_bytes_per_second: float = Field(default=0.0, ge=0.0)
    price_per_hour: float | None = Field(default=None, ge=0.0)
    source: str
    also: tuple[str, ...] = ()

    @property
    def is_cpu(self) -> bool:
        """Whether it is no GPU."""
        return self.kind == "cpu"


class Hardware(Settings):
    """As many devices of one kind as a run may use."""

    count: int = Field(ge=1)
    device: Device

    def __str__(self) -> str:
        """As parse_hardware reads it."""
        return f"{self.count}x{self.device.name}"


def catalogue(environment: Mapping[str, str] | None = None) -> dict[str, Device]:
    """Every known device by its name; rows of the user's own file last, in place of known ones.

    The file is $POSTGRAD_HARDWARE, else postgrad/hardware.toml in $XDG_CONFIG_HOME or ~/.config.
    environment: those variables; the process's own when not given. Raises UsageError naming file
    and row for what a row may not say.
    """
    builtin = files("postgrad.plan").joinpath("hardware.toml").read_text("utf-8")
    found = _devices(builtin, "hardware.toml")
    own = _own_file(os.environ if environment is None else environment)
    return found if own is None else found | _devices(_read(own), str(own))


def parse_hardware(text: str, known: Mapping[str, Device] | None = None) -> Hardware:
    """ "8xA100-80G", "H200", "2 x RTX 4090": how many of which device; capitals, blanks and dashes
    do not matter. known: the catalogue when not given.

    A CPU has as many cores and as much memory as this machine has. Raises UsageError, with the
    nearest names, where no such device is known.
    """
    known = catalogue() if known is None else known
    parts = re.fullmatch(r"\s*(?:(\d+)\s*[x×*]\s*)?(.+?)\s*", text, re.IGNORECASE)
    if parts is None or parts[1] == "0":
        raise UsageError(f"--hardware {text!r}: wanted is a count and a device, 8xA100-80G")
    device = find_device(parts[2], known)
    if device is None:
        raise UsageError(f"--hardware {text!r}: {_unknown(parts[2], known)}")
    if device.name in PER_CORE:
        device = _cpu(device)
    return Hardware(count=int(parts[1] or 1), device=device)


def this_machine(known: Mapping[str, Device] | None = None) -> Hardware:
    """The devices of this machine that a run would use: NVIDIA's, else its CPU. Without torch.

    The GPU with the least memory stands for all of them. Raises UsageError for a GPU that the
    catalogue lacks, and where nvidia-smi does not answer.
    """
    known = catalogue() if known is None else known
    gpus = _visible(_nvidia(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if not gpus:
        return this_cpu(known)
    name, found = min(gpus, key=lambda gpu: gpu[1] or 0)
    device = find_device(name, known)
    if device is None:
        raise UsageError(f"this machine's GPU: {_unknown(name, known)}")
    if found:  # part of one: what the driver gives to a virtual machine
        device = device.model_copy(update={"memory_bytes": min(found, device.memory_bytes)})
    return Hardware(count=len(gpus), device=device)


def this_cpu(known: Mapping[str, Device] | None = None) -> Hardware:
    """This machine without its GPUs."""
    known = catalogue() if known is None else known
    return Hardware(count=1, device=_cpu(known["CPU-BF16" if _multiplies_bfloat16() else "CPU"]))


def with_threads(hardware: Hardware, threads: int | None) -> Hardware:
    """A CPU of which a run uses so many cores; other hardware, and None, as it is."""
    if threads is None or hardware.device.name not in PER_CORE:
        return hardware
    core = catalogue()[hardware.device.name]
    return Hardware(count=hardware.count, device=_cpu(core, threads))


def full_name(device: Device) -> str:
    """What tells its figures from those of another machine: a CPU with its processor."""
    if device.name not in PER_CORE:
        return device.name
    try:
        line = re.search(r"^model name\s*:\s*(.+?)\s*$", CPU_INFO.read_text("utf-8"), re.MULTILINE)
    except OSError:
        line = None
    return f"{device.name} {line[1] if line else platform.processor() or platform.machine()}"


def find_device(name: str, known: Mapping[str, Device]) -> Device | None:
    """The device of that name or other name."""
    plain = _plain(name)
    for device in reversed(list(known.values())):  # the user's own before ours
        if plain in map(_plain, (device.name, *device.also)):
            return device
    return None


def _plain(name: str) -> str:
    """A name in small letters, without makers, blanks and dashes: A100-SXM4-80GB, a100sxm480g."""
    words = re.split(r"[\s\-_]+", name.lower())
    joined = "".join(word for word in words if word not in ("nvidia", "geforce", "amd", "instinct"))
    return re.sub(r"(\d)gi?b", r"\1g", joined)


def _unknown(name: str, known: Mapping[str, Device]) -> str:
    plain = {_plain(device.name): device.name for device in known.values()}
    begun = [device for key, device in plain.items() if key.startswith(_plain(name))]
    if begun:
        return f"which one: {', '.join(begun)}?"
    near = nearest(_plain(name), plain)
    hint = f"did you mean {plain[near]}? " if near else ""
    return (
        f"no device is called {name!r}. {hint}Known are {', '.join(known)}; a row of your own goes "
        "into ~/.config/postgrad/hardware.toml"
    )


def _nvidia() -> list[tuple[str, int | None]]:
    """(name, bytes or None where it does not say) of each GPU, in the driver's order."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []  # no driver, or no device that it can reach
    except subprocess.TimeoutExpired as error:
        raise UsageError("nvidia-smi does not answer: say --hardware, 8xH100") from error
    rows = [line.rsplit(",", 1) for line in done.stdout.splitlines() if "," in line]
    return [
        (name.strip(), int(mebibytes) * 2**20 if mebibytes.strip().isdigit() else None)
        for name, mebibytes in rows
    ]


def _visible(
    gpus: list[tuple[str, int | None]], allowed: str | None
) -> list[tuple[str, int | None]]:
    """Those that $CUDA_VISIBLE_DEVICES leaves; what stands behind an unknown one is not seen."""
    if allowed is None:
        return gpus
    found: list[tuple[str, int | None]] = []
    for number, name in enumerate(part.strip() for part in allowed.split(",")):
        index = number if name.startswith(("GPU-", "MIG-")) else int(name) if name.isdigit() else -1
        if not 0 <= index < len(gpus):
            break
        found.append(gpus[index])
    return found


def _cpu(core: Device, cores: int | None = None) -> Device:
    """This machine's CPU: as many times one core as training takes, and the memory that is here."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = cores or max(1, min(affinity or 1, psutil.cpu_count(logical=False) or 1))
    return core.model_copy(
        update={
            "memory_bytes": _memory(),
            "bandwidth": cores * core.bandwidth,
            "bf16_flops": cores * core.bf16_flops,
            "float32_flops": cores * core.float32_flops,
        }
    )


def _memory() -> int:
    """Bytes that this process may use: the machine's, or its container's."""
    found = psutil.virtual_memory().total
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):  # control groups, version 2 and 1
        try:
            found = min(found, int((CONTROL_GROUP / limit).read_text("utf-8")))
        except (OSError, ValueError):
            continue  # no container, or "max"
    return found


def _multiplies_bfloat16() -> bool:
    try:
        flags = CPU_INFO.read_text("utf-8").partition("flags")[2].partition("\n")[0]
    except OSError:
        return False
    return bool({"avx512_bf16", "amx_bf16"} & set(flags.split()))


def _own_file(environment: Mapping[str, str]) -> Path | None:
    path = user_file("hardware.toml", "POSTGRAD_HARDWARE", environment)
    named = bool(environment.get("POSTGRAD_HARDWARE"))
    return path if path is not None and (named or path.is_file()) else None


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the hardware table {path} cannot be read: {error}") from error


def _devices(text: str, source: str) -> dict[str, Device]:
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{source} is not TOML: {error}") from error
    return {name: _device(name, row, source) for name, row in table.items()}


def _device(name: str, row: Any, source: str) -> Device:
    if not isinstance(row, dict):
        raise UsageError(f"{source}: {name} = {row!r} stands outside a device's table, [NAME]")
    values = {"source": source, **cast("dict[str, Any]", row), "name": name}
    try:
        return Device.model_validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        lines = [_line(name, dict(problem)) for problem in error.errors(include_url=False)]
        raise UsageError("\n".join(f"{source}: {line}" for line in lines)) from error


def _line(name: str, problem: Mapping[str, Any]) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "missing":
        return f"[{name}] lacks {key}"
    if problem["type"] == "extra_forbidden":
        close = nearest(key, Device.model_fields)
        hint = f"did you mean {close!r}?" if close else f"known: {', '.join(Device.model_fields)}"
        return f"[{name}] {key} is no figure of a device; {hint}"
    message = str(problem["msg"])
    return f"[{name}] {key} = {problem['input']!r}: {message[:1].lower()}{message[1:]}"
