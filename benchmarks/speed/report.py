"""What a comparison leaves: a table for people and a JSON object for later."""

import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.speed.harness import Results, fastest, ratio

# Instruction sets that decide how fast products are, by their names in /proc/cpuinfo.
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile", "bf16", "sve")
MEASURES = ("seconds", "cpu_seconds", "peak_bytes")


def machine() -> dict[str, Any]:
    """What the figures depend on and the code does not."""
    return {
        "cpu": cpu_model(),
        "instructions": [name for name in INSTRUCTIONS if name in _of_cpu("flags", "Features")],
        "cores": os.cpu_count(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def write_result(result: Mapping[str, Any], to: Path | None) -> None:
    """Prints a result as JSON, and writes it to the file that was asked for."""
    text = json.dumps(result, indent=1)
    print(text)
    if to:
        to.write_text(text + "\n", encoding="utf-8")


def cpu_model() -> str:
    """The processor's name, where Linux says it."""
    return " ".join(_of_cpu("model name")) or platform.processor() or platform.machine()


def _of_cpu(*names: str) -> list[str]:
    """The words of the first line of /proc/cpuinfo that has one of `names`; [] where none does."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text("utf-8").splitlines() if info.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() in names:
            return value.split()
    return []


def measured_on(machine: Mapping[str, Any], threads: int) -> str:
    """The processor and what else ran there, for the line above a table."""
    instructions = ", ".join(machine["instructions"]) or "no wide instructions"
    load = machine["load_average"][0]
    return f"{machine['cpu']} ({instructions}); {threads} threads; load {load:g}"


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def report(results: Sequence[Results], ours: str, theirs: str) -> dict[str, Any]:
    """Every round, the spreads, and the ratios of the best of `theirs` over the best of `ours`."""
    our_results, their_results = fastest(results, ours), fastest(results, theirs)
    return {
        "sides": {
            side_result.contestant.name: {
                "versions": dict(side_result.versions),
                "options": asdict(side_result.contestant.options),
                "counts": dict(side_result.rounds[0].counts),
                **{m: spread([getattr(r, m) for r in side_result.rounds]) for m in MEASURES},
                "rounds": [asdict(r) for r in side_result.rounds],
            }
            for side_result in results
        },
        "compared": [our_results.contestant.name, their_results.contestant.name],
        "ratio": {m: ratio(our_results, their_results, m) for m in MEASURES},
    }


def table(summary: dict[str, Any]) -> str:
    """The report in a few lines of text."""
    head = f"{'':24}{'wall s':>22}{'CPU s':>22}{'peak MiB':>12}  {'work'}"
    lines = [head]
    for name, side in summary["sides"].items():
        mib = side["peak_bytes"]["median"] / 2**20
        counts = ", ".join(f"{v} {k.replace('_', ' ')}" for k, v in side["counts"].items())
        times = "".join(f"{_span(side[m]):>22}" for m in ("seconds", "cpu_seconds"))
        lines.append(f"{name:24}{times}{mib:>12.0f}  {counts}")
    our_name, their_name = summary["compared"]
    for measure, name in (("seconds", "wall"), ("cpu_seconds", "CPU"), ("peak_bytes", "memory")):
        of = summary["ratio"][measure]
        lines.append(
            f"{name:>8}: {their_name} / {our_name} = {of['of_medians']:.2f} "
            f"({of['min']:.2f} to {of['max']:.2f})"
        )
    return "\n".join(lines)


def _span(of: dict[str, float]) -> str:
    return f"{of['median']:.2f} ({of['min']:.2f}-{of['max']:.2f})"
