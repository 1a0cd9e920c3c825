"""The section of docs/performance.md with a GPU's figures, written from the file of results."""

from collections.abc import Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

from benchmarks.gpu.goals import heading, outcomes

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
HEADING = "## On a GPU"
WIDTH = 118  # of a line of the page
TEXT = (
    """
    `python -m benchmarks.gpu --minutes 9 --to DIR` checks and measures on one card, without a
    network: checks first, then training, decoding, GRPO steps, plans against measurements, and with
    the minutes that are left a learning run. `--needs` lists the packages that a machine lacks.
    Each part is a process with a time limit of its own; `DIR/results.json` has each result as soon
    as it is there. `--page DIR` writes this section, and `--device cpu --small` is a dry run.
    """,
    """
    Models have the shapes of Qwen3-0.6B, Qwen2.5-1.5B and Qwen3-8B and random weights, in bfloat16
    over float32 masters, with deterministic mode on, and compiled layers (`model.compile = "auto"`)
    but where a row says eager. SFT packs rows of 64 tokens up to a whole pack
    (4 096 or 16 384 tokens), about 65 536 per update. MFU counts the model's own FLOPs, without
    what checkpointing computes again, against the dense bfloat16 peak of the data sheet.
    Decoding is held to the bytes of weights and cache that a step has to read, at the measured rate
    of a copy. GRPO steps have GSM8K's shape: prompts of 44 to 156 tokens, 100 on average, answers
    of at most 300, 146 on average; beside TRL all answers have 300. Weights of 2 GB are sent to
    another process as they are to an engine, with their checksums and the copy into its own; NCCL
    needs two cards.
    """,
)


def section(results: Mapping[str, Any]) -> str:
    """Markdown, from its heading to its last line. results: {} before the first session."""
    rows = [
        f"| {outcome.figure.label} | {outcome.figure.goal.replace('>=', '≥').replace('<=', '≤')} | "
        f"{outcome.shown}{' (missed)' if outcome.verdict == 'missed' else ''} |"
        for outcome in outcomes(results)
    ]
    run = heading(results) if results else "hardware, versions, date: not run yet"
    table = ["| figure | goal | measured |", "|---|---|---|", *rows]
    text = [fill(" ".join(paragraph.split()), WIDTH, break_on_hyphens=False) for paragraph in TEXT]
    run_sentence = f"{run[:1].upper()}{run[1:]}."
    return "\n\n".join([HEADING, *text, run_sentence, "\n".join(table)]) + "\n"


def write(results: Mapping[str, Any], page: Path = PAGE) -> None:
    """Puts the section in place of the page's. Raises ValueError where the page has none, and for
    the results of a dry run.
    """
    if results.get("about", {}).get("small"):
        raise ValueError("these are results of a dry run: they stand for no GPU")
    text = page.read_text("utf-8")
    before, page_heading, rest = text.partition(f"{HEADING}\n")
    if not page_heading:
        raise ValueError(f"{page} has no heading {HEADING!r}")
    _, next_heading, after = rest.partition("\n## ")
    page.write_text(f"{before}{section(results)}{next_heading}{after}", "utf-8")
