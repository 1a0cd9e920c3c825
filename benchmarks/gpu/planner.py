"""Part "planner": what plans estimated against what the runs of the other parts took.

Memory is compared as the runs themselves recorded it. Time is compared twice: with the table of
hardware alone, and with what `postgrad plan --calibrate` learned from one run of each job, on the
other runs. Rows for plan/hardware.toml and the calibration lie beside results.json.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu import step, training
from benchmarks.gpu.session import Case, Result, Session, Skipped, Store
from benchmarks.gpu.work import JOBS, step_name
from benchmarks.gpu.workload import sizes_of
from postgrad.models.known_shapes import shape_of_model
from postgrad.observe.console import Console
from postgrad.observe.run_dir import RunDirectory
from postgrad.plan.calibrate import calibrate
from postgrad.plan.calibration import chosen, read
from postgrad.plan.hardware import parse_hardware, this_cpu, this_machine, with_threads
from postgrad.plan.lengths import row_lengths
from postgrad.plan.plan import Facts, make_plan, phase_seconds
from postgrad.recipe.load import recipe_from_json

CATALOGUE = "hardware.toml"


def cases(session: Session) -> Iterator[Case]:
    """Tables of memory and time, then what a calibration makes of the latter."""
    yield Case("memory", 1, lambda: memory(session))
    yield Case("time by the table", 1, lambda: times(session))
    yield Case("calibrate", 5, lambda: calibrated(session))
    yield Case("time after --calibrate", 10, lambda: times_after(session))
    yield Case("row for the catalogue", 1, lambda: catalogue_row(session))


def results(session: Session) -> dict[str, Result]:
    """The results of all runs that trained, by the name of their run directory."""
    store, sizes = Store(session.to), sizes_of(session)
    trained, stepped = (store.part(part)["cases"] for part in ("training", "step"))
    named = {training.run_name(job): trained.get(job.name) for job in JOBS}
    for prompts in sizes.prompts:
        name = step.run_name(prompts, sizes.samples)
        named[name] = stepped.get(step_name(prompts, sizes.samples))
    return {name: result for name, result in named.items() if result and "phases" in result}


def compared(session: Session, quantity: str) -> list[Result]:
    """A row for each phase of each run with both numbers. what: "seconds" or "bytes"."""
    rows: list[Result] = []
    for run, result in results(session).items():
        for phase, figures in result["phases"].items():
            if f"estimated_{quantity}" in figures and quantity in figures:
                rows.append(row(run, phase, figures[f"estimated_{quantity}"], figures[quantity]))
    return rows


def row(run: str, phase: str, estimated: float, measured: float) -> Result:
    """miss: by how much of the measured number the estimated one is over it."""
    miss = estimated / measured - 1 if measured else None
    return {"run": run, "phase": phase, "estimated": estimated, "measured": measured, "miss": miss}


def summed(rows: list[Result]) -> Result:
    """The rows and their worst miss. Raises Skipped where there are none."""
    if not rows:
        raise Skipped("no run before it has both numbers")
    misses = [abs(planned_row["miss"]) for planned_row in rows if planned_row["miss"] is not None]
    return {"worst": max(misses, default=None), "rows": rows}


def memory(session: Session) -> Result:
    """Bytes above those before the run, by phase, and what the allocator held beside them."""
    summary = summed(compared(session, "bytes"))
    held = {name: result.get("reserved_bytes") for name, result in results(session).items()}
    return {**summary, "reserved_bytes": held}


def times(session: Session) -> Result:
    """Seconds of phases by the table alone."""
    return summed(compared(session, "seconds"))


def learned_from(session: Session) -> list[str]:
    """The runs that are learned from: the first of each job."""
    return [
        training.run_name(JOBS[0]),
        step.run_name(sizes_of(session).prompts[0], sizes_of(session).samples),
    ]


def calibrated(session: Session) -> Result:
    """`postgrad plan --calibrate` on them, into calibration.toml of the results."""
    there = [name for name in learned_from(session) if (session.runs / name).is_dir()]
    if not there:
        raise Skipped("no run before it is there to learn from")
    os.environ["POSTGRAD_CALIBRATION"] = str(calibration(session))
    calibrations = [calibrate(session.runs / name, Console("plain")) for name in there]
    return {
        "runs": there,
        "measured": [measurement for each in calibrations for measurement in each["measured"]],
    }


def calibration(session: Session) -> Path:
    """Where it is written."""
    return session.to / "calibration.toml"


def times_after(session: Session) -> Result:
    """Seconds of phases of the runs that were not learned from, planned anew."""
    if not calibration(session).exists():
        raise Skipped("nothing was calibrated")
    rows: list[Result] = []
    for name, result in results(session).items():
        if name in learned_from(session):
            continue
        for phase, estimated in replanned(session, name).items():
            seconds = result["phases"].get(phase, {}).get("seconds")
            if seconds is not None:
                rows.append(row(name, phase, estimated, seconds))
    return summed(rows)


def replanned(session: Session, name: str) -> dict[str, float]:
    """Seconds by phase of the run's plan, calibrated."""
    directory = RunDirectory.open(session.runs / name)
    machine = directory.plans()[-1]["machine"]
    recipe = recipe_from_json(directory.recipe())
    recipe = chosen(recipe, machine["dtype"], machine["threads"] or None)
    hardware = this_cpu() if session.device == "cpu" else this_machine()
    hardware = with_threads(hardware, machine["threads"] or None)
    lengths = row_lengths(recipe)
    rows = read(calibration(session))
    return phase_seconds(
        make_plan(recipe, Facts(shape_of_model, hardware, lengths, calibration=rows))
    )


def catalogue_row(session: Session) -> Result:
    """The card as plan/hardware.toml would say it: the table's row where it has one, with what was
    measured as comments.
    """
    card = Store(session.to).part("training")["cases"].get("card", {})
    if "copy_bandwidth" not in card:
        raise Skipped("the card's speed was not measured")
    text = "\n".join([
        f"[{json.dumps(card['name'])}]",
        f"memory_bytes = {card['memory_bytes']:_}",
        f"bandwidth = {card['copy_bandwidth']:.4g} # a copy on the device, read and written",
        f"bf16_flops = {card['flops']:.4g} # products; data sheet {card['peak_flops']:.4g}",
        f"float32_flops = {card['float32_flops']:.4g}",
        f'source = "measured by benchmarks.gpu, torch {versions(session)}"',
        "",
    ])  # fmt: skip
    (session.to / CATALOGUE).write_text(text, "utf-8")
    return {"file": CATALOGUE, "text": text, "in_table": in_table(card["name"])}


def versions(session: Session) -> str:
    """torch's, and the date."""
    about: dict[str, Any] = Store(session.to).read().get("about", {})
    return f"{about.get('versions', {}).get('torch', '')}, {str(about.get('date', ''))[:10]}"


def in_table(name: str) -> str | None:
    """What plans call this device; None where they do not have it."""
    from postgrad.core.errors import UsageError

    try:
        return parse_hardware(name).device.name
    except UsageError:
        return None
