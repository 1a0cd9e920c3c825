"""Part "checks": what has to hold before a figure is worth anything.

What has processes of its own (pytest, kill and resume) runs beside the others: nothing is timed
here.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.peers import require
from benchmarks.gpu.runner import ROOT
from benchmarks.gpu.session import Case, Result, Session, Skipped, Store
from benchmarks.gpu.training_runs import Watching, quicker
from helpers.jobs import write_recipe
from postgrad.core.ragged import Ragged
from postgrad.core.records import Sequences
from postgrad.layout.blocks import plan_blocks
from postgrad.layout.layout import Layout, lay_out
from postgrad.models.tree import FlexAttention, TreeAttention
from postgrad.parallel.device import Placement, apply
from postgrad.recipe.load import load_recipe
from postgrad.training.start import train

SPELLING = ROOT / "recipes" / "quickstart"
RL_STEPS, COMPARED = 20, 5  # steps; the first and the last so many are compared
# Of the quickstart. In a dry run steps are fewer and smaller, and need not bring the reward up.
SFT_STEPS = {False: "130", True: "12"}
PROMPTS = {False: "64", True: "4"}
CLOSING = 4.0  # seconds before the part's limit, in which a process beside the others is ended
TESTS, RESUMED = "tests/gpu", "kill and resume"
# Largest difference over the largest number; bfloat16 keeps 8 bits.
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 3e-2}
HEADS, KV_HEADS, DIM = 16, 8, 128  # of Qwen3-0.6B


@dataclass(frozen=True, slots=True)
class Beside:
    """A process that runs while other checks do. Its output goes to a file."""

    process: subprocess.Popen[bytes]
    output: Path

    @classmethod
    def start(cls, session: Session, *words: str) -> "Beside":
        """Python with these words, from the repository's root."""
        output = Path(tempfile.mkstemp(dir=session.scratch, suffix=".out")[1])
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, *words], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT
            )
        return cls(process, output)

    def result(self, session: Session) -> Result:
        """Its last line. Raises RuntimeError where it failed, Skipped where it takes too long."""
        try:
            status = self.process.wait(max(1.0, session.left - CLOSING))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise Skipped("it had not ended when the part's time was up") from None
        text = self.output.read_text("utf-8", "replace")
        if status != 0:
            raise RuntimeError(f"exit status {status}: {text[-1500:]}")
        return {"said": text.strip().splitlines()[-1][:300]}


def cases(session: Session) -> Iterator[Case]:
    """All checks; those with a process of their own are begun first and asked last."""
    done = Store(session.to).part("checks")["cases"]
    beside: dict[str, Beside] = {}
    if RESUMED not in done:
        beside[RESUMED] = kill_and_resume(session)
    if TESTS not in done and session.device == "cuda" and not missing("pytest"):
        words = ("-q", "-p", "no:cacheprovider", "-m", "gpu", "tests/gpu")
        beside[TESTS] = Beside.start(session, "-m", "pytest", *words)
    yield Case("SFT of the quickstart", 20, lambda: spelled(session))
    yield Case("reward rises in 20 steps", 20, lambda: rewarded(session))
    yield Case("flex attention is tree attention", 10, lambda: flex_is_tree(session))
    yield Case("graphs are eager decoding", 10, lambda: graphs_are_eager(session))
    yield Case(TESTS, 1, lambda: asked(session, beside, TESTS))
    yield Case(RESUMED, 1, lambda: asked(session, beside, RESUMED))


def missing(package: str) -> bool:
    """Whether the package is not here."""
    try:
        require(package)
    except Skipped:
        return True
    return False


def asked(session: Session, beside: dict[str, Beside], name: str) -> Result:
    """What the process of that name came to."""
    if name == TESTS and session.device == "cpu":
        raise Skipped("they need a GPU")
    if name not in beside:
        raise Skipped("pytest is not installed here; the check of flex attention does the same")
    return beside[name].result(session)


def kill_and_resume(session: Session) -> Beside:
    """GRPO in small, once left alone and once killed and resumed: the same bits, in deterministic
    mode.
    """
    folder = session.scratch / "verify"
    folder.mkdir(exist_ok=True)
    recipe = write_recipe("grpo with kl", folder)
    return Beside.start(
        session, "-m", "postgrad", "verify-resume", str(recipe), "--kills", "1", "--steps", "3",
    )  # fmt: skip


def spelled(session: Session) -> Result:
    """The quickstart's SFT, without its evaluation: the loss falls."""
    require("reasoning_gym")
    console = Watching(session, None)
    words = ["--run_dir", str(session.scratch / "quickstart-sft"), "--checkpoint.save_hf", "true"]
    words += ["--steps", SFT_STEPS[session.small], "--eval.at_end", "false", *quicker(session)]
    summary = train(load_recipe(SPELLING / "sft.toml", words), console, overwrite=True)
    losses = [line["loss"] for line in console.lines]
    first, last = ends(losses)
    return {
        "first_loss": first, "last_loss": last, "passed": last < first,
        "step_seconds": float(np.median(console.seconds)), "model": summary["model"],
    }  # fmt: skip


def rewarded(session: Session) -> Result:
    """RL_STEPS steps of the quickstart's RL from that model: the reward rises."""
    require("reasoning_gym")
    model = session.scratch / "quickstart-sft" / "model"
    if not model.is_dir():
        raise Skipped("the SFT before it left no model")
    console = Watching(session, None)
    words = ["--run_dir", str(session.scratch / "quickstart-rl"), "--model.path", str(model)]
    words += ["--steps", str(RL_STEPS), "--eval.at_start", "false", "--eval.at_end", "false"]
    words += ["--learner.warmup_updates", "2", "--checkpoint.save_steps", "0"]
    words += ["--batch.rollout_batch_size", PROMPTS[session.small], *quicker(session)]
    train(load_recipe(SPELLING / "rl.toml", words), console, overwrite=True)
    first, last = ends([line["reward"] for line in console.lines])
    return {
        "first_reward": first, "last_reward": last, "passed": last > first,
        "step_seconds": float(np.median(console.seconds)),
    }  # fmt: skip


def ends(values: list[float]) -> tuple[float, float]:
    """Means of the first and of the last COMPARED values."""
    return float(np.mean(values[:COMPARED])), float(np.mean(values[-COMPARED:]))


def layout_of(shared: int) -> Layout:
    """Four groups of eight sequences, `shared` prompt tokens in common."""
    rng = np.random.default_rng(0)
    tokens: list[Any] = []
    masks: list[Any] = []
    group: list[int] = []
    for number in range(4):
        prompt = rng.integers(0, 50, shared)
        for _ in range(8):
            response = rng.integers(0, 50, rng.integers(5, 300))
            tokens.append(np.concatenate([prompt, response]))
            masks.append([False] * shared + [True] * len(response))
            group.append(number)
    sequences = Sequences(Ragged.of(tokens, np.int32), Ragged.of(masks, bool), np.array(group))
    return lay_out(sequences, np.arange(len(sequences)))


def flex_is_tree(session: Session) -> Result:
    """Forward and backward of both on one tree, in float32 and bfloat16, to rounding."""
    if session.device == "cpu":
        raise Skipped("flex attention has no backward pass on a CPU")
    device = apply(Placement("cuda", 1, True))
    layout = layout_of(100)
    tree = TreeAttention(plan_blocks(layout), device)
    worst: dict[str, float] = {}
    for dtype, tolerance in TOLERANCE.items():
        values = [
            values_of(context, layout, device, dtype)
            for context in (tree, FlexAttention(layout, device))
        ]
        scale = max(float(values[0].abs().max()), 1e-30)  # all zeros on a device without kernels
        worst[str(dtype)] = float((values[1] - values[0]).abs().max()) / scale
        if not worst[str(dtype)] <= tolerance:
            raise AssertionError(f"they differ by {worst} of the largest number, over {tolerance}")
    return {"worst": worst, "passed": True}


def values_of(context: Any, layout: Layout, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Outputs and gradients of one attention, flat, in float32."""
    torch.manual_seed(0)
    shapes = [(HEADS, layout.n_tokens, DIM)] + [(KV_HEADS, layout.n_tokens, DIM)] * 2
    leaves = [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]
    weight = torch.randn(layout.n_tokens, HEADS, DIM, device=device)
    out = context.attend(0, *leaves, scale=DIM**-0.5, window=None, softcap=None)
    (out.float() * weight).sum().backward()
    gradients = [leaf.grad.flatten().float() for leaf in leaves if leaf.grad is not None]
    return torch.cat([out.detach().flatten().float(), *gradients])


def graphs_are_eager(session: Session) -> Result:
    """CUDA graphs sample what the same steps sample operation by operation."""
    if session.device == "cpu":
        raise Skipped("a CPU has no CUDA graphs")
    from benchmarks.gpu.decode import same_without_graphs

    return same_without_graphs(session)
