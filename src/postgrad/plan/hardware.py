"""Devices as data: memory, speeds and links from a table that users add their own rows to, and the
share of these speeds that a run reaches."""

import json
import os
import platform
import re
import subprocess
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, cast

import psutil
from pydantic import Field, ValidationError, field_validator

from postgrad.core.errors import UsageError
from postgrad.core.files import user_file
from postgrad.core.process import default_threads, macos_value
from postgrad.core.settings import Settings
from postgrad.core.text import nearest

PER_CORE = ("CPU", "CPU-BF16")  # rows with the figures of one core, whose memory is the machine's
CONTROL_GROUP = Path("/sys/fs/cgroup")
CPU_INFO = Path("/proc/cpuinfo")
Link = Literal["nvlink", "xgmi", "pcie", "none"]
FIGURES = (
    "memory_bytes", "bandwidth", "bf16_flops", "float32_flops", "link_bytes_per_second",
    "host_bytes_per_second",
)  # fmt: skip


class Device(Settings):
    """One row of the table of hardware: the figures of one device."""

    name: str
    kind: Literal["gpu", "cpu"] = "gpu"  # "cpu": models compute in float32, ranks share its memory
    memory_bytes: int = Field(gt=0)  # that a process can use
    bandwidth: float = Field(gt=0.0)  # of its memory, in bytes a second
    bf16_flops: float = Field(gt=0.0)  # of dense matrix products, a second; of float16 too
    float32_flops: float = Field(gt=0.0)  # the same
    # Whether bfloat16 has products of its own: without them `model.dtype = "auto"` is float32.
    bfloat16: bool = True
    link: Link = "none"  # to other devices
    link_bytes_per_second: float = Field(default=0.0, ge=0.0)  # in one direction
    # To or from the host's memory, in one direction; PCIe 4.0 x16, where a row does not say.
    host_bytes_per_second: float = Field(default=32e9, gt=0.0)
    price_per_hour: float | None = Field(default=None, ge=0.0)  # in any currency
    source: str  # where the figures are from that `sources` does not name
    sources: dict[str, str] = {}  # by figure: {"memory_bytes": "..."}
    also: tuple[str, ...] = ()  # other names of the device

    @field_validator("sources")
    @classmethod
    def _are_of_figures(cls, sources: dict[str, str]) -> dict[str, str]:
        if unknown := sources.keys() - set(FIGURES):
            raise ValueError(f"{', '.join(sorted(unknown))}: figures are {', '.join(FIGURES)}")
        return sources

    def source_of(self, figure: str) -> str:
        """Where a figure is from: one of FIGURES."""
        return self.sources.get(figure, self.source)

    @property
    def is_cpu(self) -> bool:
        """Whether the device is a CPU, and not a GPU."""
        return self.kind == "cpu"


class Hardware(Settings):
    """The devices that a run may use, all of one kind."""

    count: int = Field(ge=1)
    device: Device

    def __str__(self) -> str:
        """ "8xA100-80G": parse_hardware reads it."""
        return f"{self.count}x{self.device.name}"


def catalogue(environment: Mapping[str, str] | None = None) -> dict[str, Device]:
    """All devices by name: those of the package, then those of the user's file, which may replace
    the package's.

    The file is $POSTGRAD_HARDWARE, else postgrad/hardware.toml in $XDG_CONFIG_HOME or ~/.config.
    environment: those variables; where left out, the process's own. Raises UsageError with file and
    row for a row that is wrong.
    """
    builtin = files("postgrad.plan").joinpath("hardware.toml").read_text("utf-8")
    devices = _devices(builtin, "hardware.toml")
    path = _users_file(os.environ if environment is None else environment)
    return devices if path is None else devices | _devices(_read(path), str(path))


def parse_hardware(text: str, devices: Mapping[str, Device] | None = None) -> Hardware:
    """Reads "8xA100-80G", "H200", "2 x RTX 4090": a count and a device, whose capitals, blanks and
    dashes do not matter. devices: by name; where left out, the catalogue.

    A CPU has the cores and the memory of this machine. Raises UsageError with the nearest names
    where no device has that name.
    """
    devices = catalogue() if devices is None else devices
    parts = re.fullmatch(r"\s*(?:(\d+)\s*[x×*]\s*)?(.+?)\s*", text, re.IGNORECASE)
    if parts is None or parts[1] == "0":
        raise UsageError(f"--hardware {text!r}: expected a count and a device, such as 8xA100-80G")
    device = find_device(parts[2], devices)
    if device is None:
        raise UsageError(f"--hardware {text!r}: {_unknown(parts[2], devices)}")
    if device.name in PER_CORE:
        device = _cpu(device)
    return Hardware(count=int(parts[1] or 1), device=device)


def this_machine(devices: Mapping[str, Device] | None = None) -> Hardware:
    """The devices of this machine that a run would use: NVIDIA's GPUs, else the CPU. Without torch.

    The GPU with the least memory stands for all of them. devices: as in parse_hardware. Raises
    UsageError for a GPU that is not among them, and where nvidia-smi does not answer.
    """
    devices = catalogue() if devices is None else devices
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = _visible(_nvidia(), allowed)
    if not gpus:
        return this_cpu(devices)
    part = _visible_slice(allowed)
    if part is not None:
        gpus = [(part.gpu, None)]
    name, memory = min(gpus, key=lambda gpu: gpu[1] or 0)
    device = find_device(name, devices)
    if device is None:
        raise UsageError(f"this machine's GPU: {_unknown(name, devices)}")
    if memory:  # may be a part of the device: what the driver gives to a virtual machine
        device = device.model_copy(update={"memory_bytes": min(memory, device.memory_bytes)})
    return Hardware(count=len(gpus), device=device if part is None else part.of(device))


def this_cpu(devices: Mapping[str, Device] | None = None) -> Hardware:
    """This machine's CPU, with all of its cores and its memory. devices: as in parse_hardware."""
    devices = catalogue() if devices is None else devices
    return Hardware(count=1, device=_cpu(devices["CPU-BF16" if _multiplies_bfloat16() else "CPU"]))


def with_threads(hardware: Hardware, threads: int | None) -> Hardware:
    """A CPU of which a run uses `threads` cores. Other hardware, and None, change nothing."""
    if threads is None or hardware.device.name not in PER_CORE:
        return hardware
    core = catalogue()[hardware.device.name]
    return Hardware(count=hardware.count, device=_cpu(core, threads))


def full_name(device: Device) -> str:
    """The name that calibrations go by: of a CPU with the processor's model, since cores differ."""
    if device.name not in PER_CORE:
        return device.name
    chip = macos_value("machdep.cpu.brand_string").rstrip(b"\0").decode(errors="replace")
    with suppress(OSError):
        line = re.search(r"^model name\s*:\s*(.+?)\s*$", CPU_INFO.read_text("utf-8"), re.MULTILINE)
        chip = line[1] if line else chip
    return f"{device.name} {chip or platform.processor() or platform.machine()}"


def find_device(name: str, devices: Mapping[str, Device]) -> Device | None:
    """The device that has that name, or has it among its other names."""
    plain = _plain(name)
    for device in reversed(list(devices.values())):  # the user's rows before ours
        if plain in map(_plain, (device.name, *device.also)):
            return device
    return None


def _plain(name: str) -> str:
    """The name in small letters, without makers, blanks and dashes: A100-SXM4-80GB gives
    a100sxm480g.
    """
    words = re.split(r"[\s\-_]+", name.lower())
    joined = "".join(word for word in words if word not in ("nvidia", "geforce", "amd", "instinct"))
    return re.sub(r"(\d)gi?b", r"\1g", joined)


def _unknown(name: str, devices: Mapping[str, Device]) -> str:
    plain = {_plain(device.name): device.name for device in devices.values()}
    longer = [device for key, device in plain.items() if key.startswith(_plain(name))]
    if longer:
        return f"which one: {', '.join(longer)}?"
    near = nearest(_plain(name), plain)
    hint = f"did you mean {plain[near]}? " if near else ""
    return (
        f"no device is called {name!r}. {hint}Known are {', '.join(devices)}; a row of your own "
        "goes into ~/.config/postgrad/hardware.toml"
    )


def _nvidia_smi(*words: str) -> str:
    """What the driver's program answers; "" without a driver, or a device that it can reach."""
    query = ["nvidia-smi", *words]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    except subprocess.TimeoutExpired as error:
        raise UsageError("nvidia-smi does not answer: say --hardware, such as 8xH100") from error
    return done.stdout


def _nvidia() -> list[tuple[str, int | None]]:
    """(name, bytes of memory) of each GPU in the driver's order; None where it does not say."""
    answer = _nvidia_smi("--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
    rows = [line.rsplit(",", 1) for line in answer.splitlines() if "," in line]
    return [
        (name.strip(), int(mebibytes) * 2**20 if mebibytes.strip().isdigit() else None)
        for name, mebibytes in rows
    ]


@dataclass(frozen=True, slots=True)
class _Slice:
    """A part of a GPU that MIG made a device of its own."""

    gpu: str  # the name of the whole GPU
    uuid: str
    sevenths: int  # of its multiprocessors
    memory_bytes: int

    def of(self, device: Device) -> Device:
        """The figures of the part, whose bandwidth is shared as the memory is."""
        share = min(1.0, self.memory_bytes / device.memory_bytes)
        return device.model_copy(
            update={
                "memory_bytes": min(self.memory_bytes, device.memory_bytes),
                "bandwidth": share * device.bandwidth,
                "bf16_flops": self.sevenths / 7 * device.bf16_flops,
                "float32_flops": self.sevenths / 7 * device.float32_flops,
            }
        )


def _visible_slice(allowed: str | None) -> _Slice | None:
    """The MIG slice that CUDA gives a process, which is a single one: the first that
    $CUDA_VISIBLE_DEVICES names, else the first of all; None where the GPUs have none.

    A name such as "3g.40gb" has the size in gigabytes: the driver keeps a few hundredths of it.
    """
    slices, gpu = list[_Slice](), ""
    for line in _nvidia_smi("-L").splitlines():
        if card := re.match(r"GPU \d+: (.+) \(UUID", line):
            gpu = card[1]
        elif part := re.match(r"\s+MIG (?:\d+c\.)?(\d+)g\.(\d+)gb.*\(UUID: (MIG-[^)]+)\)", line):
            slices.append(_Slice(gpu, part[3], int(part[1]), int(part[2]) * 10**9))
    first = (allowed or "").partition(",")[0].strip()
    if first.startswith("MIG-"):
        slices = [part for part in slices if part.uuid.startswith(first)]
    return next(iter(slices), None)


def _visible(
    gpus: list[tuple[str, int | None]], allowed: str | None
) -> list[tuple[str, int | None]]:
    """The GPUs that $CUDA_VISIBLE_DEVICES leaves. As in CUDA, what it lists after an unknown device
    is not seen.
    """
    if allowed is None:
        return gpus
    visible: list[tuple[str, int | None]] = []
    for number, name in enumerate(part.strip() for part in allowed.split(",")):
        index = number if name.startswith(("GPU-", "MIG-")) else int(name) if name.isdigit() else -1
        if not 0 <= index < len(gpus):
            break
        visible.append(gpus[index])
    return visible


def _cpu(core: Device, cores: int | None = None) -> Device:
    """This machine's CPU. core: the row with the figures of one core. cores: how many a run uses;
    None: as many as a run takes threads by default.
    """
    cores = cores or default_threads()
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
    size = psutil.virtual_memory().total
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):  # control groups, version 2 and 1
        try:
            size = min(size, int((CONTROL_GROUP / limit).read_text("utf-8")))
        except (OSError, ValueError):
            continue  # no container, or "max"
    return size


def _multiplies_bfloat16() -> bool:
    try:
        flags = CPU_INFO.read_text("utf-8").partition("flags")[2].partition("\n")[0]
    except OSError:
        return False
    return bool({"avx512_bf16", "amx_bf16"} & set(flags.split()))


def _users_file(environment: Mapping[str, str]) -> Path | None:
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
        raise UsageError(
            f"{source}: {name} = {row!r} is outside a device's table: move it below [NAME]"
        )
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


class Efficiency(Settings):
    """Shares between 0 and 1 of a device's peak figures, and an overhead."""

    products: float  # of the peak of matrix products
    attention: float  # of the rate that matrix products reach
    between: float  # of the memory's bandwidth, in what layers do between products
    decoding: float  # of the memory's bandwidth, where one token a sequence is computed
    link: float  # of the bandwidth of the link between ranks, which all use at once
    pair: float  # of the same, where one device sends to one other
    host: float  # of the bandwidth between a device and its host's memory
    overhead: float  # seconds of one layer of a forward pass, whatever its size


# Matrix products of GPUs: with what layers do between them, 0.55 makes 0.4 of the peak of an 8B
# model and a quarter of a 0.6B one; large models get 0.4 to 0.5, prime-rl publishes 0.11 to 0.27
# for 0.6B. PCIe without peer access goes through the host's memory, and all ranks share that way. A
# layer starts some forty kernels. All of a CPU: benchmarks.growth.
#
# host: copies between a GPU and pinned memory get 24.8 GB/s of an A100's 32 (NVIDIA/nvbandwidth
# issue 53), 25.6 up and 26.8 down of an RTX 4090's (issue 15), 52.8 of an H100's 64 (issue 24).
# pair over PCIe: a broadcast to one GPU through the host's memory, up and down at once, got 10.31
# GB/s of PCIe 3.0's 16 (NVIDIA/nccl issue 384). Over xGMI two GPUs have one of seven links.
GUESSES = {
    "nvlink": Efficiency(
        products=0.55, attention=0.6, between=0.6, decoding=0.5, link=0.7, pair=0.7, host=0.8,
        overhead=4e-4,
    ),
    "xgmi": Efficiency(
        products=0.45, attention=0.5, between=0.5, decoding=0.5, link=0.6, pair=0.086, host=0.8,
        overhead=4e-4,
    ),
    "pcie": Efficiency(
        products=0.55, attention=0.6, between=0.6, decoding=0.5, link=0.15, pair=0.65, host=0.8,
        overhead=4e-4,
    ),
    "none": Efficiency(
        products=0.9, attention=0.25, between=0.5, decoding=0.7, link=0.5, pair=0.5, host=0.8,
        overhead=5e-4,
    ),
}  # fmt: skip


def efficiency_of(device: Device) -> Efficiency:
    """The guess for a device, by its kind of link."""
    return GUESSES[device.link]
