"""A dry run's small run: every phase once, a checkpoint that is read back, an exported model."""

import gc
import hashlib
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from postgrad.checkpoint.state import RunState
from postgrad.core.errors import RunError
from postgrad.core.text import how_many
from postgrad.fleet.engines import require_startable
from postgrad.fleet.exported import own_role
from postgrad.observe.console import Console
from postgrad.observe.follow import read_lines
from postgrad.observe.run_dir import RunDirectory
from postgrad.recipe.recipe import Recipe
from postgrad.tools.dry_run.outcome import FAILURE, Check, Report
from postgrad.tools.export import export
from postgrad.training.loop import Job, loop
from postgrad.training.prepare import prepare
from postgrad.training.run import Run

EXPECTED = {
    "started", "resumed", "saved", "data", "placed", "size_chosen", "size_lowered", "no_plan",
    "answer_end",  # a check of its own has told it
}  # fmt: skip
FATAL = ("save_failed", "copy_failed")


@dataclass(slots=True)
class Trial:
    """What the small run left behind, as far as it came."""

    measured: set[str] = field(default_factory=set[str])  # metric names of its evaluation
    model: Path | None = None  # the exported directory; None where nothing was exported
    checkpoint_bytes: int = 0
    model_bytes: int = 0


def try_run(report: Report, recipe: Recipe, to: Path) -> Trial:
    """Runs `recipe`, a small one, in its run_dir, and exports to `to`. Failures are reported."""
    trial = Trial()
    directory = RunDirectory.create(Path(recipe.run_dir), recipe.dump(), overwrite=False)
    digests = _first_process(report, recipe, directory, trial)
    _free()
    if digests is None:
        return trial
    with report.check("load the checkpoint") as check, ExitStack() as stack:
        _, job, _, state = prepare(recipe, directory, _silent(), stack)
        again = digests_of(job)
        if again != digests or state.step != 1:
            names = [name for name in digests if again.get(name) != digests[name]]
            raise RunError(f"the checkpoint gives other bits than were saved: {', '.join(names)}")
        check.detail = f"the same bits in {len(digests)} tensors"
        del job
    _free()
    with report.check("export") as check:
        trial.model = export(directory.path, "latest", to)
        trial.model_bytes = _size(to)
        check.detail = f"{own_role(recipe)}: plain transformers gives the same logits"
    return trial


def _first_process(
    report: Report, recipe: Recipe, directory: RunDirectory, trial: Trial
) -> dict[str, str] | None:
    """Runs one step, evaluation and checkpoint; returns the digests of all tensors, None where one
    failed.
    """
    with ExitStack() as stack:
        started = _prepared(report, recipe, directory, stack)
        if started is None:
            return None
        run, job, state = started
        ended = _step(report, run, job, state)
        _report_events(report, directory)
        if ended is None:
            return None
        trial.measured = set(ended.evaluations)
        trial.checkpoint_bytes = _size(directory.checkpoints)
        return digests_of(job)


def _prepared(
    report: Report, recipe: Recipe, directory: RunDirectory, stack: ExitStack
) -> tuple[Run, Job, RunState] | None:
    with report.check("load"):
        require_startable(recipe)
        run, job, _, state = prepare(recipe, directory, _silent(), stack)
        return run, job, state
    return None


def _step(report: Report, run: Run, job: Job, state: RunState) -> RunState | None:
    """Runs the loop, with a check for each phase. The state afterwards, None where one failed."""
    ended: RunState | None = None
    with report.check("step") as check:
        try:
            ended = loop(run, job, state)
        except Exception as error:
            check.name = run.clock.open[0] if run.clock.open else check.name
            if isinstance(error.__cause__, type(error)):
                raise error.__cause__ from None  # nothing is kept of this run, as `error` would say
            raise
    _report_phases(report, run, check)
    return ended


def _report_phases(report: Report, run: Run, check: Check) -> None:
    """Replaces the check of the whole step by one for each phase that ended."""
    done = {name: seconds for name, seconds in run.clock.total.items() if "/" not in name}
    failed = [] if check.ok else [check]
    report.checks.remove(check)
    details = _details(run)
    for name, seconds in done.items():
        if name != "load":  # a check of its own
            report.checks.append(Check(name, seconds=seconds, detail=details.get(name, "")))
    report.checks += failed
    if not check.ok:
        return
    for line in read_lines(run.directory.path / "metrics.jsonl"):
        _judge(report, line)


def _details(run: Run) -> dict[str, str]:
    """A line for each phase about what it did, from the last line of metrics.jsonl."""
    lines = list(read_lines(run.directory.path / "metrics.jsonl"))
    line = lines[-1] if lines else {}
    details: dict[str, str] = {}
    if "response_tokens" in line:
        details["sample"] = ", ".join(
            (how_many(line["samples"], "sample"), how_many(line["response_tokens"], "token"))
        )
    if "loss" in line:
        details["train"] = f"{how_many(line['samples'], 'sample')}, loss {_number(line['loss'])}"
    if "sentinel/publish_difference" in line:
        details["publish"] = f"logprobs differ by {line['sentinel/publish_difference']:.2g}"
    if "peak_memory_bytes" in line:
        details["log"] = f"{line['peak_memory_bytes'] / 1e9:.2f} GB of memory at the peak"
    return details


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def _judge(report: Report, line: Mapping[str, Any]) -> None:
    """Reports losses and gradient norms that are not finite, and a step without any gradient."""
    train = next(check for check in reversed(report.checks) if check.name == "train")
    wrong = [
        name
        for name, value in line.items()
        if name.endswith(("loss", "grad_norm")) and not (value is not None and math.isfinite(value))
    ]
    skipped = [v for name, v in line.items() if name.endswith("/skipped_samples")]
    if line.get("updates/made") == 0:
        report.warn(train, _untrained(line))
    elif skipped and line.get("samples") in skipped:
        report.warn(train, "no sample had a gradient: the step that was tried taught nothing")
    elif wrong:
        report.problem(
            train,
            f"the first update gives no number for {', '.join(wrong)}: look at learner.lr, "
            "model.dtype and the weights",
            FAILURE,
        )


def _untrained(line: Mapping[str, Any]) -> str:
    """Why a step without an update had none."""
    nothing = "the step that was tried had no update"
    if line.get("masked_samples"):
        return (
            f"{nothing}: the token limit cut its samples off, and "
            "algorithm.mask_truncated_completions leaves such samples out; if that goes on, raise "
            "rollout.max_new_tokens or start from a model that ends its answers"
        )
    return f"{nothing}: none of its {line['samples']:.0f} samples was left to train on"


def _report_events(report: Report, directory: RunDirectory) -> None:
    """Reports unexpected events of the small run: sentinels, verifiers and saves that failed."""
    first_messages: dict[str, tuple[str, int]] = {}
    for line in read_lines(directory.path / "events.jsonl"):
        kind = str(line["event"])
        if kind == "publish_route" and not line.get("fallback"):
            continue  # the weights went as they should
        first, count = first_messages.get(kind, (str(line["message"]), 0))
        first_messages[kind] = first, count + 1
    for kind, (first, count) in first_messages.items():
        times = "" if count == 1 else f" ({count} times)"
        if kind in FATAL:
            report.problem(Check(kind), f"{first}{times}", FAILURE)
        elif kind not in EXPECTED:
            report.warn(Check(kind), f"{first}{times}")


def digests_of(job: Job) -> dict[str, str]:
    """SHA-256 of every tensor that a checkpoint holds, by "FILE_STEM/NAME"."""
    return {
        f"{stem}/{name}": _digest(tensor)
        for stem, named in job.tensors().items()
        for name, tensor in named.items()
    }


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
    digest.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    return digest.hexdigest()


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _free() -> None:
    """Frees the memory of the first process's job before the second one is built."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _silent() -> Console:
    """A console that prints nothing: the report says the same better."""
    return Console("quiet", StringIO())
