"""Devices: the table, a user's own rows, names as people write them, what this machine has."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from postgrad.core.errors import UsageError
from postgrad.models.known_shapes import shape_of_model
from postgrad.plan import hardware
from postgrad.plan.hardware import (
    FIGURES,
    catalogue,
    efficiency_of,
    parse_hardware,
    this_machine,
)
from postgrad.plan.page import Page
from postgrad.plan.plan import Facts, make_plan
from postgrad.recipe.load import parse_recipe

BUILTIN = catalogue({"POSTGRAD_HARDWARE": "/dev/null"})
ROW = """
[Mine-48G]
memory_bytes = 48_000_000_000
bandwidth = 1e12
bf16_flops = 2e14
float32_flops = 5e13
link = "nvlink"
link_bytes_per_second = 5e10
price_per_hour = 1.25
"""


def test_every_row_has_figures_of_the_size_that_devices_have() -> None:
    for device in BUILTIN.values():
        gpu = not device.is_cpu
        assert device.source, device.name
        assert (10e9 < device.memory_bytes < 300e9) == gpu
        assert device.bf16_flops >= device.float32_flops
        assert (device.link == "none") == (not device.link_bytes_per_second) == device.is_cpu
        assert device.price_per_hour is None  # prices go out of date
        named = [part for part in device.name.split("-") if part[:-1].isdigit() and part[-1] == "G"]
        for part in named:
            assert 0.9 < device.memory_bytes / (int(part[:-1]) * 2**30) < 1.0


def test_every_figure_of_a_gpu_has_a_source() -> None:
    assert {"RTX-4090", "RTX-5090", "A100-80G", "H100", "H200", "B200", "L40S", "MI300X"} <= set(
        BUILTIN
    )
    for device in BUILTIN.values():
        for figure in FIGURES:
            assert len(device.source_of(figure)) > 10, (device.name, figure)
        if not device.is_cpu:  # no datasheet says what torch finds
            assert device.source_of("memory_bytes") != device.source
    mi325x, mi300x = BUILTIN["MI325X"], BUILTIN["MI300X"]
    assert mi325x.bf16_flops == mi300x.bf16_flops  # the same dies with more memory
    assert mi325x.bandwidth > mi300x.bandwidth


def test_flops_are_the_dense_ones() -> None:
    """Half of what datasheets print with an asterisk."""
    sparse = {"A100-80G": 624e12, "H100": 1979e12, "H200": 1979e12, "B200": 4500e12, "L40S": 733e12}
    sparse |= {"RTX-4090": 330.4e12, "RTX-5090": 419e12, "MI300X": 2614.9e12, "MI325X": 2614.9e12}
    for name, figure in sparse.items():
        assert BUILTIN[name].bf16_flops == pytest.approx(figure / 2, rel=0.02)


def test_a_copy_to_or_from_the_host_is_as_fast_as_people_measured_it() -> None:
    """GB/s of pinned memory: NVIDIA/nvbandwidth issues 53, 15 and 24."""
    for name, measured in {"A100-80G": 24.8, "RTX-4090": 25.6, "H100": 52.8}.items():
        device = BUILTIN[name]
        planned = device.host_bytes_per_second * efficiency_of(device).host
        assert planned / 1e9 == pytest.approx(measured, rel=0.04), name
    newer = {"RTX-5090", "H100", "H100-PCIe", "H200", "B200", "MI300X", "MI325X"}
    older = {"T4", "V100-32G"}
    for name, device in BUILTIN.items():  # PCIe 5.0, 3.0 and 4.0
        if not device.is_cpu:
            wanted = 64e9 if name in newer else 16e9 if name in older else 32e9
            assert device.host_bytes_per_second == wanted


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [
        ("8xA100-80G", 8, "A100-80G"),
        ("8 x a100-80gb", 8, "A100-80G"),
        ("6 x RTX 4090", 6, "RTX-4090"),
        ("4x4090", 4, "RTX-4090"),
        ("H200", 1, "H200"),
        ("2*h100_pcie", 2, "H100-PCIe"),
        ("NVIDIA A100-SXM4-40GB", 1, "A100-40G"),
        ("NVIDIA A100-PCIE-40GB", 1, "A100-40G-PCIe"),
        ("NVIDIA A100 80GB PCIe", 1, "A100-80G-PCIe"),
        ("NVIDIA H100 80GB HBM3", 1, "H100"),
        ("AMD Instinct MI300X", 1, "MI300X"),
        ("NVIDIA GeForce RTX 5090", 1, "RTX-5090"),
        ("8xmi325x-256gb", 8, "MI325X"),
    ],
)
def test_a_device_is_found_as_people_and_drivers_write_it(text: str, count: int, name: str) -> None:
    parsed = parse_hardware(text, BUILTIN)
    assert (parsed.count, parsed.device) == (count, BUILTIN[name])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("8xV100", "which one: V100-32G"),
        ("RTX 3090", "did you mean RTX-[45]090"),
        ("A100", "which one: A100-40G, A100-40G-PCIe, A100-80G, A100-80G-PCIe"),
        ("toaster", "Known are T4, V100-32G, RTX-4090"),
        ("0xH100", "expected a count and a device"),
        ("", "expected a count and a device"),
    ],
)
def test_a_device_that_is_not_known_is_refused_with_the_nearest(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        parse_hardware(text, BUILTIN)


@pytest.mark.parametrize("folder", ["POSTGRAD_HARDWARE", "XDG_CONFIG_HOME", "HOME"])
def test_rows_of_a_users_own_file_are_added(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"XDG_CONFIG_HOME": "postgrad", "HOME": ".config/postgrad"}.get(folder, "")
    path = tmp_path / place / "hardware.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(ROW, "utf-8")
    value = str(path) if folder == "POSTGRAD_HARDWARE" else str(tmp_path)
    monkeypatch.setenv("HOME", value)
    devices = catalogue({folder: value})
    assert list(devices) == [*BUILTIN, "Mine-48G"]
    own_hardware = parse_hardware("2xmine-48gb", devices)
    assert (own_hardware.count, own_hardware.device.price_per_hour) == (2, 1.25)
    assert own_hardware.device.source == str(path)


def test_a_row_of_ones_own_stands_in_place_of_a_known_one(tmp_path: Path) -> None:
    path = tmp_path / "hardware.toml"
    path.write_text(ROW.replace("Mine-48G", "H200"), "utf-8")
    devices = catalogue({"POSTGRAD_HARDWARE": str(path)})
    assert parse_hardware("H200", devices).device.memory_bytes == 48_000_000_000


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (ROW.replace("bandwidth", "bandwith"), r"\[Mine-48G\] bandwith is no figure .*'bandwidth'"),
        (ROW.replace("bandwidth = 1e12", ""), r"\[Mine-48G\] lacks bandwidth"),
        (ROW.replace("1e12", "-1.0"), r"\[Mine-48G\] bandwidth = -1.0: input should be greater"),
        (ROW.replace("1e12", '"fast"'), r"\[Mine-48G\] bandwidth = 'fast'"),
        (ROW.replace("1e12", "inf"), r"\[Mine-48G\] bandwidth = "),
        (ROW.replace('"nvlink"', '"wire"'), r"\[Mine-48G\] link = 'wire'"),
        ("memory_bytes = 3", "memory_bytes = 3 is outside a device's table"),
        ("[A", "is not TOML"),
        (ROW + 'sources = { prize = "x" }', r"\[Mine-48G\] sources = .*prize: figures are memory"),
    ],
)
def test_a_row_that_says_what_it_may_not_is_named(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "hardware.toml"
    path.write_text(text, "utf-8")
    with pytest.raises(UsageError, match=reason) as refused:
        catalogue({"POSTGRAD_HARDWARE": str(path)})
    assert str(path) in str(refused.value)


def test_a_file_that_is_named_and_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        catalogue({"POSTGRAD_HARDWARE": str(tmp_path / "none.toml")})


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | Exception], None]:
    """driver(answer): what nvidia-smi says on this machine."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def put(answer: str | Exception) -> None:
        def run(command: list[str], **more: Any) -> Any:
            assert command[0] == "nvidia-smi"
            if isinstance(answer, Exception):
                raise answer
            return subprocess.CompletedProcess(command, 0, stdout=answer)

        monkeypatch.setattr(hardware.subprocess, "run", run)

    return put


def test_the_gpus_of_this_machine_are_found_in_the_table(
    driver: Callable[[str | Exception], None],
) -> None:
    driver("NVIDIA H200, 143771\nNVIDIA H200, 143771\n")
    machine = this_machine(BUILTIN)
    assert (machine.count, machine.device) == (2, BUILTIN["H200"])


@pytest.mark.parametrize(
    ("allowed", "count"),
    [("1", 1), ("0,2", 2), ("0,7,1", 1), ("GPU-1a,GPU-2b", 2), ("", 0), ("-1", 0)],
)
def test_only_visible_gpus_count(
    allowed: str,
    count: int,
    driver: Callable[[str | Exception], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver("NVIDIA L40S, 46068\n" * 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    machine = this_machine(BUILTIN)
    assert machine.device.is_cpu == (not count)
    assert machine.count == max(1, count)


def test_a_part_of_a_gpu_has_the_memory_that_its_driver_says(
    driver: Callable[[str | Exception], None],
) -> None:
    driver("NVIDIA H200, 143771\nNVIDIA H200, 20480\n")
    machine = this_machine(BUILTIN)
    assert (machine.count, machine.device.memory_bytes) == (2, 20480 * 2**20)


SLICED = """NVIDIA A100-SXM4-80GB, 81920
GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-5d5e)
  MIG 3g.40gb     Device  0: (UUID: MIG-aa11)
  MIG 1c.1g.10gb  Device  1: (UUID: MIG-bb22)
"""


@pytest.mark.parametrize(
    ("allowed", "sevenths", "gigabytes"),
    [
        (None, 3, 40),
        ("0", 3, 40),
        ("MIG-bb22", 1, 10),
        ("MIG-bb", 1, 10),
        ("MIG-bb22,MIG-aa11", 1, 10),
    ],
)
def test_a_slice_of_mig_is_planned_as_the_part_that_it_is(
    allowed: str | None,
    sevenths: int,
    gigabytes: int,
    driver: Callable[[str | Exception], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver(SLICED)
    if allowed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", allowed)
    hardware, card = this_machine(BUILTIN), BUILTIN["A100-80G"]
    assert (hardware.count, hardware.device.name) == (1, card.name)
    assert hardware.device.memory_bytes == gigabytes * 10**9
    assert hardware.device.bf16_flops == pytest.approx(sevenths / 7 * card.bf16_flops)
    assert hardware.device.bandwidth == pytest.approx(
        gigabytes * 1e9 / card.memory_bytes * card.bandwidth
    )


def test_a_driver_that_does_not_say_how_much_memory_leaves_the_tables(
    driver: Callable[[str | Exception], None],
) -> None:
    driver("NVIDIA B200, [N/A]\n")
    assert this_machine(BUILTIN).device == BUILTIN["B200"]


def test_a_gpu_that_the_table_lacks_is_refused_by_name(
    driver: Callable[[str | Exception], None],
) -> None:
    driver("NVIDIA GeForce RTX 3090, 24576\n")
    with pytest.raises(UsageError, match=r"RTX 3090.*did you mean RTX-[45]090.*a row of your own"):
        this_machine(BUILTIN)


def test_a_driver_that_hangs_is_not_taken_for_no_gpu(
    driver: Callable[[str | Exception], None],
) -> None:
    driver(subprocess.TimeoutExpired("nvidia-smi", 10))
    with pytest.raises(UsageError, match="say --hardware"):
        this_machine(BUILTIN)


@pytest.mark.parametrize("flags", ["fma avx2", "avx512f avx512_bf16", "amx_bf16 amx_tile"])
def test_a_machine_without_gpus_is_its_cpu_with_its_memory(
    flags: str,
    driver: Callable[[str | Exception], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    driver(FileNotFoundError("nvidia-smi"))
    monkeypatch.setattr(hardware, "CONTROL_GROUP", tmp_path)
    monkeypatch.setattr(hardware, "CPU_INFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(f"model name : x\nflags\t: {flags}\nbugs : none\n", "utf-8")
    device = this_machine(BUILTIN).device
    core = BUILTIN["CPU-BF16" if "bf16" in flags else "CPU"]
    cores = device.float32_flops / core.float32_flops
    assert cores == int(cores) >= 1
    assert device.bf16_flops == cores * core.bf16_flops
    assert device.memory_bytes == psutil.virtual_memory().total
    (tmp_path / "memory.max").write_text("1000000\n", "utf-8")
    assert parse_hardware("cpu", BUILTIN).device.memory_bytes == 1_000_000
    (tmp_path / "memory.max").write_text("max\n", "utf-8")
    assert parse_hardware("cpu", BUILTIN).device.memory_bytes == psutil.virtual_memory().total


def test_torch_is_not_imported() -> None:
    code = (
        "import sys; from postgrad.plan.hardware import parse_hardware, this_machine; "
        "parse_hardware('8xH100'); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("name", "hardware_name"), [("Tesla T4", "T4"), ("Tesla V100-SXM2-32GB", "V100-32G")]
)
def test_cards_without_products_of_bfloat16_plan_auto_as_float32(
    name: str, hardware_name: str, driver: Callable[[str | Exception], None]
) -> None:
    driver(f"{name}, 999999\n")
    machine = this_machine(BUILTIN)
    assert machine.device == BUILTIN[hardware_name]

    def plan(dtype: str, hardware: Any) -> Any:
        table = {
            "run_dir": "run", "job": "sft", "steps": 1,
            "data": {"path": "rows.jsonl", "max_len": 64},
            "model": {"path": "Qwen/Qwen3-0.6B", "dtype": dtype},
        }  # fmt: skip
        return make_plan(parse_recipe(table), Facts(shape_of_model, hardware))

    stated = {dtype: plan(dtype, machine) for dtype in ("auto", "float32", "float16", "bfloat16")}
    assert stated["auto"].memory == stated["float32"].memory
    assert stated["auto"].timing == stated["float32"].timing
    assert stated["auto"].timing.step_seconds > stated["float16"].timing.step_seconds
    assert stated["auto"].recipe.model.dtype == "float32"
    ours = {dtype: " ".join(Page(each, ()).notes()) for dtype, each in stated.items()}
    assert '"auto" is float32 there' in ours["auto"]
    assert "takes much longer than planned" in ours["bfloat16"]
    assert "products of bfloat16" not in ours["float16"]
    newer = plan("auto", parse_hardware("L40S", BUILTIN))
    assert newer.recipe.model.dtype == "auto"
    assert "products of bfloat16" not in " ".join(Page(newer, ()).notes())
